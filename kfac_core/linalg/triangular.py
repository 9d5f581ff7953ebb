"""Products, solves and inverses of lower triangular matrices.

The standard has neither of the last two; both are written as recursions over halves, so
that nearly all of their work is in matrix products.  The leaves are small general solves.
"""

from __future__ import annotations

from kfac_core.array import Array, Namespace
from kfac_core.array.dispatch import dispatched, is_factorization_failure

_LEAF = 64
"""Below this size a general solve of the standard is as fast as further halving."""


@dispatched
def solve_triangular(
    lower: Array,
    b: Array,
    /,
    *,
    transpose: bool,
    overwrite: bool = False,
    xp: Namespace,
) -> Array:
    """Solve ``L x = b``, or ``L^T x = b``.

    Equal to ``scipy.linalg.solve_triangular(lower, b, lower=True, trans=transpose)``.

    Parameters
    ----------
    lower : array, shape (..., n, n)
        Lower triangular, zero above the diagonal, nonzero on it.
    b : array, shape (..., n, k)
        The right-hand sides.
    transpose : bool
        Whether to solve with the transpose.
    overwrite : bool
        Whether the memory of b may become the solution's; it is then not to be used
        again.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, shape (..., n, k)
        The solution, in about ``n^2 k`` flops.
    """
    n = lower.shape[-1]
    if n <= _LEAF:
        return xp.linalg.solve(xp.matrix_transpose(lower) if transpose else lower, b)
    h = n // 2
    first, second = lower[..., :h, :h], lower[..., h:, h:]
    # The standard has only a general solve; by halves most of the work becomes
    # products.
    coupling = lower[..., h:, :h]
    definition = solve_triangular.__wrapped__  # type: ignore[attr-defined]
    if transpose:
        bottom = definition(second, b[..., h:, :], transpose=True, xp=xp)
        residual = b[..., :h, :] - xp.matmul(xp.matrix_transpose(coupling), bottom)
        top = definition(first, residual, transpose=True, xp=xp)
    else:
        top = definition(first, b[..., :h, :], transpose=False, xp=xp)
        residual = b[..., h:, :] - xp.matmul(coupling, top)
        bottom = definition(second, residual, transpose=False, xp=xp)
    return xp.concat([top, bottom], axis=-2)


@dispatched
def solve_cholesky(lower: Array, b: Array, /, *, xp: Namespace) -> Array:
    """Solve ``L L^T x = b``; see `solve_triangular`."""
    half = solve_triangular(lower, b, transpose=False, xp=xp)
    return solve_triangular(lower, half, transpose=True, overwrite=True, xp=xp)


@dispatched
def multiply_triangular(
    lower: Array, v: Array, /, *, transpose: bool, xp: Namespace
) -> Array:
    """Return ``L v``, or ``L^T v``.

    Parameters
    ----------
    lower : array, shape (..., n, n)
        Lower triangular, zero above the diagonal.
    v : array, shape (..., n, k)
        Array of the same dtype.
    transpose : bool
        Whether to multiply with the transpose.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, shape (..., n, k)
        The product; ``n^2 k`` flops where the backend has a triangular kernel, else
        twice that.
    """
    return xp.matmul(xp.matrix_transpose(lower) if transpose else lower, v)


def triangular_inverse(lower: Array, /, *, xp: Namespace) -> Array:
    """Return the inverse of a lower triangular matrix.

    Parameters
    ----------
    lower : array, shape (..., n, n)
        Zero above the diagonal, nonzero on it.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, shape (..., n, n)
        Lower triangular.

    Notes
    -----
    With halves ``[[P, 0], [C, R]]`` the inverse is
    ``[[P^-1, 0], [-R^-1 C P^-1, R^-1]]``.
    """
    n = lower.shape[-1]
    if n <= _LEAF:
        try:
            return xp.tril(xp.linalg.inv(lower))
        except Exception as error:
            if not is_factorization_failure(error):
                raise
            return xp.full_like(lower, xp.nan)
    h = n // 2
    first = triangular_inverse(lower[..., :h, :h], xp=xp)
    second = triangular_inverse(lower[..., h:, h:], xp=xp)
    # [[L, 0], [C, M]]^-1 = [[L^-1, 0], [-M^-1 C L^-1, M^-1]].
    coupling = -xp.matmul(xp.matmul(second, lower[..., h:, :h]), first)
    zeros = xp.zeros_like(xp.matrix_transpose(coupling))
    top = xp.concat([first, zeros], axis=-1)
    return xp.concat([top, xp.concat([coupling, second], axis=-1)], axis=-2)
