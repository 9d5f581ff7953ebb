"""Gradients of an embedding as the rows of some ids, zero elsewhere.

Conventions.  Where the input factor is diagonal, a block does not mix rows of the vector:
``F v`` at a row needs v at that row alone.  So every product of a sparse gradient is that
of a small block, which has the rows of those ids only, and stays sparse.
"""

from __future__ import annotations

from typing import Any

from kfac_core.array.backend import Array
from kfac_core.array.structure import structure
from kfac_core.errors import UnsupportedError
from kfac_core.linalg.shifted_diagonal import ShiftedDiagonal

__all__ = ["SparseRows", "diagonal_at"]


@structure()
class SparseRows:
    """The rows of some ids of an embedding's weight, whatever its layout.

    Attributes
    ----------
    indices : array of int, shape (k,)
        Different ids.
    rows : array, shape (k, features)
        The weight's (or its gradient's) row of each.
    """

    indices: Array
    rows: Array


def diagonal_at(factor: Any, indices: Array, /) -> ShiftedDiagonal:
    """Return a diagonal factor at some coordinates.

    Parameters
    ----------
    factor : ShiftedDiagonal
        Any other kind of factor mixes coordinates.
    indices : array of int, shape (k,)
        The coordinates.

    Returns
    -------
    ShiftedDiagonal
        Of size k.

    Raises
    ------
    UnsupportedError
        For a factor that is not diagonal.
    """
    if not isinstance(factor, ShiftedDiagonal):
        raise UnsupportedError(
            "A sparse gradient needs a block that does not mix rows: an embedding with a "
            "diagonal input factor, or a diagonal block. Give the whole gradient."
        )
    return factor.at(indices)
