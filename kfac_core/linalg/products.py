"""Products of matrices of which a library has more than one way."""

from __future__ import annotations

from kfac_core.array import Array, Namespace
from kfac_core.array import namespaces as ns
from kfac_core.array.dispatch import dispatched


@dispatched
def multiply_matrices(a: Array, b: Array, /, *, xp: Namespace) -> Array:
    """Return the product of two matrices, or of each pair of two stacks.

    Parameters
    ----------
    a, b : array, shapes (..., m, k) and (..., k, n)
        Arrays of one dtype.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, shape (..., m, n)
        ``a b``, in ``2 m k n`` flops.
    """
    return xp.matmul(a, b)


@dispatched
def sum_of_products(x: Array, y: Array, /, *, xp: Namespace) -> Array:
    """Return the sum of ``x * y``, 0-d, of arrays of one shape and dtype."""
    return ns.summed(x * y, xp=xp)
