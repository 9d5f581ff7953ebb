"""An inverse p-th root with its certificate.

Conventions: those of `kfac_core.roots.roots`.
"""

from __future__ import annotations

from typing import Any

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.namespaces import Scalar, device_of, status_unless
from kfac_core.array.status import Status
from kfac_core.array.structure import structure
from kfac_core.errors import ConventionError
from kfac_core.linalg.certificate import RESIDUAL_LIMIT, probe, relative_norm
from kfac_core.linalg.factorizations import Fallback
from kfac_core.linalg.fitness import damping_array, symmetric_argument, unfit_flags
from kfac_core.linalg.symmetric import SymmetricMatrix, multiply_symmetric

__all__ = [
    "InverseRoot",
    "judged_root",
    "root_holds",
    "root_problem",
    "root_residual",
]


@structure(static=("degree",))
class InverseRoot:
    """An inverse p-th root, with its certificate.

    Attributes
    ----------
    matrix : SymmetricMatrix
        ``X = (A + lam I)^(-1/p)``, both triangles.
    status : array of int32, shape (...)
        Of `Status` flags.
    residual : array, shape (...)
        ``|M X^p z - z| / |z|``.
    clipped : array, shape (...)
        The sum of the negative eigenvalues that were set to zero, in magnitude; zero on
        every rung but the last.
    fallback : array of int32, shape (...)
        Of `kfac_core.linalg.factorizations.Fallback`.
    degree : int
        p.
    """

    matrix: SymmetricMatrix
    status: Array
    residual: Array
    clipped: Array
    fallback: Array
    degree: int


def root_residual(
    matrix: SymmetricMatrix,
    shift: Array,
    root: SymmetricMatrix,
    /,
    *,
    degree: int,
    xp: Namespace,
) -> Array:
    """Return ``|(A + shift I) X^p z - z| / |z|``, shape (...); ``2 (p + 1) n^2`` flops.

    Infinity where it is no number.
    """
    array = matrix.array
    z = probe(matrix.size, dtype=array.dtype, device=device_of(array), xp=xp)
    y = z
    for _ in range(degree):
        y = multiply_symmetric(root, y, xp=xp)
    error = multiply_symmetric(matrix, y, xp=xp) + shift[..., None, None] * y - z
    return relative_norm(error, z, xp=xp)


def root_problem(
    matrix: SymmetricMatrix | Array, damping: Scalar, degree: Any, name: str, /
) -> tuple[SymmetricMatrix, Array, Array, Namespace]:
    """Return A, the shift of the shape of its stack, what is unfit, and the namespace."""
    if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
        raise ConventionError(
            f"Expected `degree` to be an integer >= 1, got {degree!r}."
        )
    A, xp = symmetric_argument(matrix, name)
    shift = damping_array(damping, A, xp=xp)
    unfit = unfit_flags(A, shift, xp=xp)
    # One shift for a whole stack becomes one for each matrix of it.
    return A, shift + xp.zeros_like(A.array[..., 0, 0]), unfit, xp


def judged_root(
    matrix: SymmetricMatrix,
    shift: Array,
    root: Array,
    status: Array,
    /,
    *,
    degree: int,
    fallback: Fallback,
    xp: Namespace,
) -> InverseRoot:
    """Return a root with its certificate; NaN throughout where there is none.

    Parameters
    ----------
    matrix, shift : SymmetricMatrix, array
        The problem, fit.
    root : array, shape (..., n, n)
        X, finite or not, symmetric up to rounding.
    status : array of int32, shape (...)
        The flags so far; where any is set X becomes NaN.
    degree, fallback
        As in `InverseRoot`.
    xp : namespace
        Of the arrays.

    Returns
    -------
    InverseRoot
        Flagged ``INACCURATE`` where the residual is above the limit.
    """
    X = SymmetricMatrix(0.5 * (root + xp.matrix_transpose(root)), whole=True)
    residual = root_residual(matrix, shift, X, degree=degree, xp=xp)
    good = (status == 0) & xp.all(xp.isfinite(X.array), axis=(-2, -1))
    accurate = (residual <= RESIDUAL_LIMIT) | (status != 0)
    status = status | status_unless(xp, accurate, Status.INACCURATE)
    marked = xp.where(good[..., None, None], X.array, xp.full_like(X.array, xp.nan))
    return InverseRoot(
        SymmetricMatrix(marked, whole=True),
        status,
        residual,
        xp.zeros_like(residual),
        xp.full_like(status, int(fallback)),
        degree,
    )


def root_holds(made: InverseRoot, xp: Namespace, /) -> bool:
    """Whether no flag is set anywhere in a stack; waits for the device."""
    return not bool(xp.any(made.status != 0))
