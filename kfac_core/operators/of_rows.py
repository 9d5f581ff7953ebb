"""Preconditioning a gradient by its rows, before it is a matrix.

Conventions.  A gradient is ``V = X^T diag(w) G``, of the rows x with their homogeneous
coordinate and g, k of each; the operator is ``S (A + a I) (x) (G + b I)``.  Its inverse
acts on the rows alone,

    F^-1 V = ( (A + a I)^-1 X^T ) diag(w) ( (G + b I)^-1 G^T )^T / S,

which for few rows is cheaper than acting on V.
"""

from __future__ import annotations

from kfac_core.array.backend import Array
from kfac_core.array.namespaces import (
    cast,
    namespace_of,
    require_floating,
    require_matrix,
)
from kfac_core.errors import ShapeError, UnsupportedError
from kfac_core.operators.kronecker import FactoredKronecker

__all__ = ["multiply_inverse_of_rows"]


def multiply_inverse_of_rows(
    operator: FactoredKronecker,
    inputs: Array,
    output_grads: Array,
    /,
    *,
    weights: Array,
) -> Array:
    """Return ``F^-1 sum_i w_i x_i g_i^T``.

    Equal to ``operator.multiply_inverse(x.T @ (w[:, None] * g))``.

    Parameters
    ----------
    operator : FactoredKronecker
        Of a layer without groups; its inverse prepared, or made here.
    inputs : array, shape (k, in(+1))
        The x, a 1 appended to each where there is a bias.
    output_grads : array, shape (k, out)
        The g.
    weights : array, shape (k,)
        The w: 1/N each for a mean over N examples.

    Returns
    -------
    array, shape (in(+1), out)
        In the dtype of `inputs`.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError
        For rows or weights that do not fit.
    UnsupportedError
        For an operator of groups, or of exact damping.
    FactorizationError
        Where the inverse was not prepared and cannot be made.

    Notes
    -----
    ``2 k (n^2 + m^2 + n m)`` flops, against ``2 n m (n + m + k)``: for square layers the
    fewer, where k is below the width.
    """
    if not isinstance(operator, FactoredKronecker):
        raise UnsupportedError(
            f"Expected an operator of factored damping, got {type(operator).__name__}: "
            "another inverse does not act on the rows alone. Take a factored rule."
        )
    if operator.input.lead:
        raise UnsupportedError(
            "The rows of a grouped layer are several products. Give `multiply_inverse` "
            "their gradient."
        )
    xp = namespace_of(
        inputs=inputs,
        output_grads=output_grads,
        weights=weights,
        operator=operator.scale,
    )
    for name, array in (("inputs", inputs), ("output_grads", output_grads)):
        require_floating(xp, array, name)
        if array.ndim != 2:
            raise ShapeError(
                f"Expected `{name}` to be a matrix of rows, got {tuple(array.shape)}."
            )
    require_floating(xp, weights, "weights")
    n, m = operator.shape
    k = int(inputs.shape[0])
    require_matrix(inputs, (k, n), "inputs")
    require_matrix(output_grads, (k, m), "output_grads")
    require_matrix(weights, (k,), "weights")
    S = operator.scale
    x = operator.input.solve(xp.matrix_transpose(cast(xp, inputs, S.dtype))) / S
    g = operator.output.solve(xp.matrix_transpose(cast(xp, output_grads, S.dtype)))
    weighted = xp.matrix_transpose(g) * cast(xp, weights, S.dtype)[:, None]
    return cast(xp, xp.matmul(x, weighted), inputs.dtype)
