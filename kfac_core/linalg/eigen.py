"""Symmetric eigendecompositions.

Conventions.  ``A = Q diag(w) Q^T`` with w ascending, as LAPACK returns it.  Signs of
eigenvectors and bases of repeated eigenvalues differ between libraries; only products of
the decomposition are defined.
"""

from __future__ import annotations

from kfac_core.array import Array, Namespace
from kfac_core.array.dispatch import dispatched, is_factorization_failure
from kfac_core.linalg.symmetric import SymmetricMatrix


@dispatched
def eigh(matrix: SymmetricMatrix, /, *, xp: Namespace) -> tuple[Array, Array]:
    """Return the eigenvalues and eigenvectors of a symmetric matrix.

    Equal to ``np.linalg.eigh`` up to the choice of eigenvectors.

    Parameters
    ----------
    matrix : SymmetricMatrix
        Matrix A, finite.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    eigenvalues : array, shape (..., n)
        Ascending; NaN where the library gave up.
    eigenvectors : array, shape (..., n, n)
        Eigenvectors in the columns, in the same order.

    Notes
    -----
    About ``9 n^3`` flops.
    """
    array = matrix.full()
    try:
        eigenvalues, eigenvectors = xp.linalg.eigh(array)
    except Exception as error:
        if not is_factorization_failure(error):
            raise
        # NaN fails the residual check, so that this failure takes the fallbacks of all
        # others.
        return xp.full_like(array[..., 0], xp.nan), xp.full_like(array, xp.nan)
    return eigenvalues, eigenvectors


@dispatched
def eigh_in_place(matrix: SymmetricMatrix, /, *, xp: Namespace) -> tuple[Array, Array]:
    """Return the eigenvalues and eigenvectors of a symmetric matrix, in its own memory.

    Its memory is worked in, and holds the matrix again afterwards: of large matrices
    nothing else of their size is needed but the eigenvectors, where `eigh` takes two or
    three times that.

    Parameters
    ----------
    matrix : SymmetricMatrix
        Matrix A, finite, that nothing else reads in the meantime.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    eigenvalues : array, shape (..., n)
        Descending; NaN where the library gave up.
    eigenvectors : array, shape (..., n, n)
        Eigenvectors in the columns, in the same order.
    """
    eigenvalues, eigenvectors = eigh(matrix, xp=xp)
    # Copied, since a loaded checkpoint could not reproduce a view's negative strides.
    reverse = xp.asarray(xp.flip(eigenvectors, axis=-1), copy=True)
    return xp.flip(eigenvalues, axis=-1), reverse
