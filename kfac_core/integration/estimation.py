"""Options that all integrations have: which curvature is estimated, and how."""

from __future__ import annotations

from typing import TypedDict, get_args

from kfac_core import constraints, options
from kfac_core.array.precision import Precision
from kfac_core.losses.drawn import Positions
from kfac_core.losses.joint import refuse_squared_weights
from kfac_core.losses.modes import EstimationMode


class EstimatorOptions(TypedDict, total=False):
    """Options of `kfac_core.Estimator` that integrations pass on.

    Attributes
    ----------
    averaging, refreshing, coupling, precision
        See `kfac_core.Estimator`.
    """

    averaging: options.Averaging | None
    refreshing: options.Refreshing | None
    coupling: options.Coupling | None
    precision: Precision | None


def require_estimation(
    *,
    fisher: str,
    samples: int = 1,
    positions: str = "signs",
    likelihood: object = None,
) -> None:
    """Raise for an estimation option that has no effect, or not the one it says.

    Parameters
    ----------
    fisher : str
        Estimation mode; see `kfac_core.losses.EstimationMode`.
    samples : int
        Vectors of a sampled mode.
    positions : str
        See `kfac_core.losses.drawn_vectors`.
    likelihood : object
        The likelihood, whose weights ``fisher="empirical"`` would square.

    Raises
    ------
    ConventionError, ShapeError, UnsupportedError
        Naming the option.
    """
    constraints.require_one_of("fisher", fisher, get_args(EstimationMode))
    constraints.require_range("samples", samples, constraints.SIZE)
    constraints.require_one_of("positions", positions, get_args(Positions))
    if fisher == "empirical":
        refuse_squared_weights(getattr(likelihood, "likelihood", likelihood))
