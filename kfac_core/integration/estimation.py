"""The options of an integration that say which curvature is estimated."""

from __future__ import annotations

from typing import get_args

from kfac_core import constraints
from kfac_core.losses.drawn import Positions
from kfac_core.losses.modes import EstimationMode

__all__ = ["require_estimation"]


def require_estimation(
    *, fisher: str, samples: int = 1, positions: str = "signs"
) -> None:
    """Raise for an estimation option that has no effect.

    Parameters
    ----------
    fisher : str
        Estimation mode; see `kfac_core.losses.EstimationMode`.
    samples : int
        Vectors of a sampled mode.
    positions : str
        See `kfac_core.losses.drawn_vectors`.

    Raises
    ------
    ConventionError, ShapeError
        Naming the option.
    """
    constraints.require_one_of("fisher", fisher, get_args(EstimationMode))
    constraints.require_range("samples", samples, constraints.SIZE)
    constraints.require_one_of("positions", positions, get_args(Positions))
