"""Which curvature an integration measures, by the names that its users see."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

from kfac_core.conventions import require_one_of
from kfac_core.losses.modes import EstimationMode

__all__ = ["Fisher", "estimation_mode"]

Fisher: TypeAlias = Literal["sampled", "exact", "empirical"]
"""Labels drawn from the model, all of its labels, or the gradients of the data's labels."""

_MODES: dict[str, EstimationMode] = {
    "sampled": "gradients",
    "exact": "exact",
    "empirical": "empirical",
}


def estimation_mode(fisher: Any, /) -> EstimationMode:
    """Return the estimation mode of an integration's option ``fisher``.

    Parameters
    ----------
    fisher : {"sampled", "exact", "empirical"}
        ``"sampled"``: one backward pass from labels drawn from the model.  ``"exact"``: a
        backward pass for each of its outputs, without noise.  ``"empirical"``: the
        gradients of the training loss itself, without a further backward pass; not the
        Fisher matrix, see Kunstner, Balles and Hennig (2019), arXiv:1905.12558.

    Returns
    -------
    EstimationMode
        ``"gradients"``, ``"exact"`` or ``"empirical"``.

    Raises
    ------
    ConventionError
        For anything else.
    """
    require_one_of("fisher", fisher, get_args(Fisher))
    return _MODES[fisher]
