"""The exact curvature on the span of a few directions, from given products.

Conventions.  F is the Fisher or Gauss-Newton matrix of one batch, averaged over its N
examples: the curvature that belongs to the gradient of the mean loss.  It is never
formed; only the small matrix ``d_i . F d_j`` is computed, from one
of two inputs:

* the products ``F d_j``, as vectors of parameters;
* the changes ``J d_j`` of the network's outputs, one forward derivative each, and
  those multiplied by the loss's own curvature, ``H J d_j``; or ``B^T J d_j`` with
  ``B B^T = H``, which stands for both (``fisher_factor_transpose_multiply`` of the
  losses).

The second costs half of the first, since no derivative goes back.
"""

from __future__ import annotations

from collections.abc import Sequence

from kfac_core import constraints, errors
from kfac_core.array import Array, Scalar
from kfac_core.array import namespaces as ns
from kfac_core.layers.feeding import detached_array
from kfac_core.steps.vectors import (
    Vector,
    dots,
    entered,
    scalar_of,
    sums_of_products,
    widest,
)


def curvature_of_products(
    directions: Sequence[Vector], products: Sequence[Vector], /
) -> Array:
    """Return ``C_ij = d_i . (F d_j)`` from the products of F with each direction.

    Parameters
    ----------
    directions : sequence of mapping of str to mapping of str to array
        Directions d_i, k of them.
    products : sequence of mapping of str to mapping of str to array
        The ``F d_i``, in the same order.

    Returns
    -------
    array, shape (k, k)
        Result in the widest dtype among the arrays, float32 at least.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError, UnsupportedError
        For vectors of different structures, naming the array.

    Notes
    -----
    ``2 k^2 p`` flops for p parameters.
    """
    k = _same_number(directions, products, "directions", "products")
    named = {f"directions[{i}]": d for i, d in enumerate(directions)}
    named |= {f"products[{i}]": d for i, d in enumerate(products)}
    xp, vectors = entered(**named)
    dtype = widest(*vectors, xp=xp)
    pairs = [(d, product) for d in vectors[:k] for product in vectors[k:]]
    return xp.reshape(dots(pairs, dtype=dtype, xp=xp), (k, k))


def curvature_of_outputs(
    changes: Sequence[Array], multiplied: Sequence[Array], /, *, examples: Scalar
) -> Array:
    """Return ``C_ij = (J d_i) . (H J d_j) / N`` from changes of the outputs.

    Parameters
    ----------
    changes : sequence of array, shape (N, ...)
        Changes ``J d_i``, k of them.
    multiplied : sequence of array, shape (N, ...)
        The ``H J d_i``.  Of ``B^T J d_i`` with ``B B^T = H``, give the same sequence
        twice.
    examples : int or 0-d array
        N, over which the loss is averaged.

    Returns
    -------
    array, shape (k, k)
        Result in the widest dtype among the arrays, float32 at least.  The matrices of
        several losses of one network are to be added.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError
        For arrays of different shapes, naming them, or no examples.

    References
    ----------
    Martens and Grosse (2015), arXiv:1503.05671, appendix C: the factored Fisher matrix.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> J = np.random.default_rng(0).normal(size=(4, 8, 3))  # of four directions
    >>> C = kc.steps.curvature_of_outputs([*J], [*J], examples=8)
    >>> np.allclose(C, np.einsum("ank,bnk->ab", J, J) / 8)
    True
    """
    k = _same_number(changes, multiplied, "changes", "multiplied")
    number = constraints.POSITIVE_SCALAR._replace(error=errors.ShapeError)
    constraints.require_range("examples", examples, number)
    named = {f"changes[{i}]": x for i, x in enumerate(changes)}
    named |= {f"multiplied[{i}]": x for i, x in enumerate(multiplied)}
    xp = ns.namespace_of(**named)
    for name, x in named.items():
        ns.require_floating(xp, x, name)
        constraints.require_shape(name, x, tuple(changes[0].shape))
    arrays = list(named.values())
    dtype = ns.wide_dtype(xp, xp.result_type(*arrays))
    arrays = [ns.cast(xp, detached_array(x), dtype) for x in arrays]
    left, right = arrays[:k], arrays[k:]
    sums = sums_of_products([(a, b) for a in left for b in right], xp=xp)
    # Curvature of the mean loss: the sum over examples, divided by their number.
    return xp.reshape(sums, (k, k)) / scalar_of(xp, examples, dtype, "examples")


def _same_number(
    left: Sequence[object], right: Sequence[object], name: str, other: str
) -> int:
    constraints.require_any(name, left)
    constraints.require_same("number of vectors", {name: len(left), other: len(right)})
    return len(left)
