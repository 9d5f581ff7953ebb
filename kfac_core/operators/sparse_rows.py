"""Gradients of an embedding as the rows of some ids, zero elsewhere.

Conventions.  Where the input factor is diagonal, a block does not mix rows of the vector:
``F v`` at a row needs v at that row alone.  So every product of a sparse gradient is that
of a small block, `kfac_core.CurvatureOperator.at_rows`, and stays sparse.
"""

from __future__ import annotations

from kfac_core.array import Array
from kfac_core.array.structure import structure

__all__ = ["SparseRows"]


@structure()
class SparseRows:
    """The rows of some ids of an embedding's weight, whatever its layout.

    Attributes
    ----------
    indices : array of int, shape (k,)
        Distinct ids.
    rows : array, shape (k, features)
        The weight's (or its gradient's) row of each.
    """

    indices: Array
    rows: Array
