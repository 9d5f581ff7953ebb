"""Cholesky factors of damped positive-definite matrices, and inverses from them.

Conventions.  ``L`` is lower triangular with positive diagonal, ``L L^T = M``.  A
failure does not raise: the factor is then NaN on and below the diagonal.
"""

from __future__ import annotations

from kfac_core.array import Array, Namespace, Scalar
from kfac_core.array import namespaces as ns
from kfac_core.array.dispatch import dispatched, is_factorization_failure
from kfac_core.linalg.symmetric import SymmetricMatrix, for_matrices
from kfac_core.linalg.triangular import triangular_inverse


@dispatched
def damped_cholesky(
    matrix: SymmetricMatrix, shift: Scalar, /, *, factor: Scalar = 1.0, xp: Namespace
) -> Array:
    """Return the lower Cholesky factor of ``c B + shift I``.

    Equal to ``np.linalg.cholesky(c * B + shift * np.eye(n))`` where that succeeds.

    Parameters
    ----------
    matrix : SymmetricMatrix
        B, finite; not modified.
    shift : float or array, shape () or (...)
        What is added to the diagonal.
    factor : float or array, shape () or (...)
        Factor c.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, shape (..., n, n)
        L, zero above the diagonal; NaN on and below it if M is not definite.
        ``n^3 / 3`` flops.
    """
    scaled = matrix.full()
    if not isinstance(factor, float) or factor != 1.0:
        scaled = scaled * for_matrices(factor)
    damped = add_to_diagonal(scaled, shift, xp=xp)
    try:
        lower = xp.linalg.cholesky(damped)
        # After a failure some libraries return finite garbage.
        positive = xp.all(xp.linalg.diagonal(lower) > 0, axis=-1)[..., None, None]
        return xp.where(positive, lower, xp.full_like(lower, xp.nan))
    except Exception as error:
        if not is_factorization_failure(error):
            raise
    if damped.ndim == 2:
        return xp.full_like(damped, xp.nan)
    # The library raised for a stack with one bad matrix, so factorize one by one.
    definition = damped_cholesky.__wrapped__  # type: ignore[attr-defined]
    parts = [
        definition(SymmetricMatrix(damped[i, ...], full_storage=True), 0.0, xp=xp)
        for i in range(damped.shape[0])
    ]
    return xp.stack(parts)


@dispatched
def cholesky_in_place(
    matrix: SymmetricMatrix, shift: Scalar, /, *, xp: Namespace
) -> Array:
    """Return the lower Cholesky factor of ``B + shift I``, in the memory of B if possible.

    Natively the strict lower triangle and the diagonal become the factor's, and B stands
    above the diagonal, from where `restored_matrix` brings it back.

    Parameters
    ----------
    matrix : SymmetricMatrix
        B, finite; not to be read before it is restored.
    shift : float or array, shape ()
        What is added to the diagonal.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, shape (n, n)
        L, to be read on and below the diagonal; with NaN on it if M is not definite.
    """
    return damped_cholesky(matrix, shift, xp=xp)


@dispatched
def certified_cholesky(
    matrix: SymmetricMatrix, z: Array, shift: Scalar, /, *, limit: float, xp: Namespace
) -> tuple[Array, Array] | None:
    """Return the lower Cholesky factor of ``B + shift I``, and its residual.

    The residual is the larger one of `kfac_core.linalg.certificate.cholesky_residual`, of
    a probe vector z, and `pivot_error`.  None where a backend does not know at once that it
    is below the limit; B is not written to.
    """
    return None


@dispatched
def restored_matrix(
    matrix: SymmetricMatrix, diagonal: Array, /, *, xp: Namespace
) -> SymmetricMatrix:
    """Return B as it was before `cholesky_in_place`.

    Parameters
    ----------
    matrix : SymmetricMatrix
        What that function was given.
    diagonal : array, shape (n,)
        A copy of the diagonal of B.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    SymmetricMatrix
        B, in the same memory.
    """
    return matrix


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
        Array API namespace of the arrays.

    Returns
    -------
    array : array, shape (..., n, n)
        The inverse.
    full_storage : bool
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
        Factor as returned by `damped_cholesky`.
    xp : namespace
        Array API namespace of the arrays.

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
    eye = xp.eye(n, dtype=array.dtype, device=ns.device_of(array))
    return array + for_matrices(shift) * eye
