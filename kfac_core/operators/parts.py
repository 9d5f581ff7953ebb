"""The interface of damped factors that operators use."""

from __future__ import annotations

from kfac_core.factors.factor import Shifted
from kfac_core.linalg.factorizations import Eigendecomposition
from kfac_core.linalg.rank_one import ShiftedRankOne
from kfac_core.linalg.shifted_diagonal import ShiftedDiagonal

__all__ = ["eigenbasis_of"]


def eigenbasis_of(part: Shifted, /) -> Eigendecomposition | None:
    """Return the eigendecomposition of a factor; None for a diagonal, which needs none.

    Parameters
    ----------
    part : ShiftedMatrix, ShiftedDiagonal or ShiftedRankOne
        With its eigenbasis prepared.

    Returns
    -------
    Eigendecomposition or None
        Eigendecomposition of the factor without its shift.
    """
    if isinstance(part, ShiftedDiagonal):
        return None
    matrix = part.whole if isinstance(part, ShiftedRankOne) else part
    assert matrix is not None
    return matrix.basis
