"""Whether products with a Jacobian are what something else computed of them."""

from __future__ import annotations

from typing import Any

from kfac_core.array import Array, Namespace, replaced
from kfac_core.array import namespaces as ns
from kfac_core.layers.example_gradients import ExampleGradients
from kfac_core.layers.rows import Rows
from kfac_core.samples.gram import widest_dtype
from kfac_core.samples.jacobian import Jacobian, Parameters


def unlike(
    J: Jacobian, coefficients: Array, expected: Parameters, /
) -> dict[str, dict[str, Array]]:
    """Return for each parameter whether ``J^T c`` differs by more than roundoff.

    Parameters
    ----------
    J : Jacobian
        The Jacobian.
    coefficients : array, shape (N,) or (N, C)
        The coefficients c.
    expected : mapping of str to mapping of str to array
        What ``J^T c`` is compared with, by layer and parameter.

    Returns
    -------
    dict of str to dict of str to array of bool, 0-d
        Whether the norm of the difference is above the root of roundoff times the norms of
        the sums and of the terms ``c_r x_rs g_rs`` in them: terms that cancel, as for the
        bias of attention's keys, leave roundoff, which is no difference.
    """
    xp, sums = ns.own_namespace(J.like), J.multiply_transposed(coefficients)
    differs: dict[str, dict[str, Array]] = {}
    for name, jacobian in J.layers.items():
        rows, layer, differs[name] = jacobian.rows, jacobian.layer, {}
        c = ns.reshaped(coefficients, (rows.examples, rows.sources), xp=xp)
        squares = xp.reshape(_squared_terms(rows, c, xp), layer.matrix_shape)
        # Roundoff is near eps, and rows of other examples differ by about one.
        limit = ns.roundoff_of(rows.like.dtype, xp=xp) ** 0.5
        for role, terms in layer.matrix_to_parameters(squares).items():
            x, y = sums[name][role], expected[name][role]
            x, y = (ns.cast(xp, part, terms.dtype) for part in (x, y))
            size = _norm(x, xp) + _norm(y, xp) + xp.sum(terms) ** 0.5
            differs[name][role] = _norm(x - y, xp) > limit * size
    return differs


def _squared_terms(rows: Any, c: Array, xp: Namespace) -> Array:
    """Return ``sum_rs (c_r x_rs g_rs^T)^2``, in the widest dtype."""
    dtype, by_source = widest_dtype(rows.like, xp=xp), xp.matrix_transpose(c)
    if isinstance(rows, ExampleGradients):
        D = rows.gradients * ns.reshaped(by_source, (-1, 1), xp=xp)
        return ExampleGradients(D, rows.examples, rows.sources).squares(dtype, xp=xp)
    g = rows.output_grads * by_source[..., None, None]
    weighted = replaced(rows, output_grads=g)
    if isinstance(rows, Rows):
        weighted = weighted.per_position()
    squares: Array = weighted.squares(dtype, xp=xp)
    return squares


def _norm(x: Array, xp: Namespace) -> Array:
    return ns.summed(x * x, xp=xp) ** 0.5
