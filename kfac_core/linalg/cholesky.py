"""Cholesky factors of damped positive-definite matrices, and inverses from them.

Conventions.  ``L`` is lower triangular with positive diagonal, ``L L^T = M``.  A
failure is never an exception here: the factor is then NaN, or has a diagonal entry
that is not positive (LAPACK and some libraries leave finite garbage), and
`is_positive_factor` is the one test that catches every case.
"""

from __future__ import annotations

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.dispatch import dispatched, is_factorization_failure
from kfac_core.array.namespaces import Scalar, device_of
from kfac_core.linalg.symmetric import SymmetricMatrix
from kfac_core.linalg.triangular import triangular_inverse

__all__ = [
    "add_to_diagonal",
    "cholesky_inverse",
    "damped_cholesky",
    "inverse_from_cholesky",
    "is_positive_factor",
]


@dispatched
def damped_cholesky(
    matrix: SymmetricMatrix, shift: Scalar, /, *, xp: Namespace
) -> Array:
    """Return the lower Cholesky factor of ``A + shift I``.

    Equal to ``np.linalg.cholesky(A + shift * np.eye(n))`` where that succeeds.

    Parameters
    ----------
    matrix : SymmetricMatrix
        A, finite.
    shift : float or array, shape (...)
        What is added to the diagonal.
    xp : namespace
        Of the arrays.

    Returns
    -------
    array, shape (..., n, n)
        L, zero above the diagonal; see the module's conventions for a failure.
        ``n^3 / 3`` flops.
    """
    damped = add_to_diagonal(matrix.full(), shift, xp=xp)
    try:
        return xp.linalg.cholesky(damped)
    except Exception as error:
        if not is_factorization_failure(error):
            raise
    if damped.ndim == 2:
        return xp.full_like(damped, xp.nan)
    # Some library gave up on the whole stack; its good matrices are factorized alone.
    definition = damped_cholesky.__wrapped__  # type: ignore[attr-defined]
    parts = [
        definition(SymmetricMatrix(damped[i, ...], whole=True), 0.0, xp=xp)
        for i in range(damped.shape[0])
    ]
    return xp.stack(parts)


def inverse_from_cholesky(
    lower: Array, /, *, overwrite: bool = False, xp: Namespace
) -> SymmetricMatrix:
    """Return `cholesky_inverse` as a `SymmetricMatrix`."""
    array, whole = cholesky_inverse(lower, overwrite=overwrite, xp=xp)
    return SymmetricMatrix(array, whole)


@dispatched
def cholesky_inverse(
    lower: Array, /, *, overwrite: bool = False, xp: Namespace
) -> tuple[Array, bool]:
    """Return ``(L L^T)^-1``, as LAPACK's POTRI does.

    Parameters
    ----------
    lower : array, shape (..., n, n)
        The factor, zero above the diagonal and nonzero on it.
    overwrite : bool
        Whether its memory may become the inverse's; it is then not to be used again.
    xp : namespace
        Of the array.

    Returns
    -------
    array : array, shape (..., n, n)
        The inverse.
    whole : bool
        Whether both triangles of it hold the matrix.

    Notes
    -----
    ``2 n^3 / 3`` flops natively.
    """
    inverse = triangular_inverse(lower, xp=xp)
    product = xp.matmul(xp.matrix_transpose(inverse), inverse)
    return 0.5 * (product + xp.matrix_transpose(product)), True


def is_positive_factor(lower: Array, /, *, xp: Namespace) -> Array:
    """Return, for each matrix of a stack, whether L is a Cholesky factor.

    Parameters
    ----------
    lower : array, shape (..., n, n)
        As `damped_cholesky` left it.
    xp : namespace
        Of the array.

    Returns
    -------
    array of bool, shape (...)
        True where the diagonal is positive and everything is finite.
    """
    finite = xp.all(xp.isfinite(lower), axis=(-2, -1))
    return finite & xp.all(xp.linalg.diagonal(lower) > 0, axis=-1)


def add_to_diagonal(array: Array, shift: Scalar, /, *, xp: Namespace) -> Array:
    """Return ``array + shift I``, shape (..., n, n); never modifies the array."""
    n = array.shape[-1]
    eye = xp.eye(n, dtype=array.dtype, device=device_of(array))
    if isinstance(shift, int | float):
        return array + shift * eye
    return array + shift[..., None, None] * eye
