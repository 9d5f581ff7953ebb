"""What operators ask of the damped factors that they are made of."""

from __future__ import annotations

from kfac_core.factors.factor import Shifted
from kfac_core.linalg.factorizations import Eigendecomposition
from kfac_core.linalg.rank_one import ShiftedRankOne
from kfac_core.linalg.shifted import ShiftedMatrix
from kfac_core.linalg.shifted_diagonal import ShiftedDiagonal

__all__ = ["eigenbasis_of", "prepared_of"]


def eigenbasis_of(part: Shifted, /) -> Eigendecomposition | None:
    """Return the eigendecomposition of a factor; None for a diagonal, which needs none.

    Parameters
    ----------
    part : ShiftedMatrix, ShiftedDiagonal or ShiftedRankOne
        With its eigenbasis prepared.

    Returns
    -------
    Eigendecomposition or None
        Of the factor without its shift.
    """
    if isinstance(part, ShiftedDiagonal):
        return None
    matrix = part.whole if isinstance(part, ShiftedRankOne) else part
    assert matrix is not None
    return matrix.basis


def prepared_of(part: Shifted, /) -> list[str]:
    """Return the names of the factorizations that a factor holds.

    Parameters
    ----------
    part : ShiftedMatrix, ShiftedDiagonal or ShiftedRankOne
        Any; a diagonal has all of them.

    Returns
    -------
    list of str
        In the order in which `prepared` makes them.
    """
    if isinstance(part, ShiftedDiagonal):
        return ["inverse", "cholesky", "eigenbasis"]
    matrix = part.block if isinstance(part, ShiftedRankOne) else part
    assert isinstance(matrix, ShiftedMatrix)
    held = {
        "inverse": matrix.inverse,
        "cholesky": matrix.cholesky,
        "eigenbasis": matrix.basis,
    }
    return [name for name, made in held.items() if made is not None]
