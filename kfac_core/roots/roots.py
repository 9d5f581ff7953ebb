"""Inverse p-th roots of a damped symmetric matrix, as dense matrices.

Conventions.  ``M = A + lam I`` with A positive semidefinite up to rounding; what is
wanted is the symmetric positive ``X = M^(-1/p)``, so that ``M X^p = I``.  Leading axes
are a stack.  The certificate of X is the true residual on the fixed probe vector z of
`kfac_core.linalg.certificate`, ``|M X^p z - z| / |z|``: p + 1 products with a vector,
against the matrix itself.

A root is made from an eigendecomposition, by the rungs of `kfac_core.linalg.ladder`: the
working dtype, float64, and then an eigendecomposition in the widest dtype whose negative
eigenvalues are set to zero and reported as the clipped mass.  With ``check="status"``
only the first rung is tried and no value is looked at.

A dense root is worth making where it is applied several times; one product with a
power costs less by ``DampedFactor.multiply_left``, which needs no dense root.
"""

from __future__ import annotations

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.namespaces import Scalar, cast, status_unless
from kfac_core.array.status import Check, Status
from kfac_core.array.structure import replaced
from kfac_core.errors import FactorizationError
from kfac_core.linalg.certificate import RESIDUAL_LIMIT
from kfac_core.linalg.factorizations import Fallback
from kfac_core.linalg.fitness import fit_problem, narrowed, require_fit, widened
from kfac_core.linalg.ladder import symmetric_basis
from kfac_core.linalg.symmetric import SymmetricMatrix
from kfac_core.roots.certified_root import (
    InverseRoot,
    judged_root,
    root_holds,
    root_problem,
)

__all__ = ["inverse_root"]


def inverse_root(
    matrix: SymmetricMatrix | Array,
    /,
    *,
    damping: Scalar,
    degree: int,
    check: Check = "raise",
    name: str = "matrix",
) -> InverseRoot:
    """Return ``(A + lam I)^(-1/p)`` by an eigendecomposition.

    Equal to ``(Q * (w + lam) ** (-1 / p)) @ Q.T`` with ``w, Q = np.linalg.eigh(A)``.

    Parameters
    ----------
    matrix : SymmetricMatrix, or array of shape (..., n, n)
        A; never modified.
    damping : float, or array of shape () or (...)
        lam, finite and >= 0.
    degree : int
        p >= 1.
    check : {"raise", "status"}
        Whether to climb the ladder and raise, or to report.
    name : str
        What a message should call the matrix.

    Returns
    -------
    InverseRoot
        In the dtype of A, or float32 where that is narrower.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError, ConventionError
        For arguments that do not fit.
    NotFiniteError, DampingError
        For values that do not fit (``check="raise"``).
    FactorizationError
        Where no rung holds (``check="raise"``).

    Notes
    -----
    About ``11 n^3`` flops.  A float32 eigendecomposition has an absolute error of about
    ``1e-7 |A|`` in every eigenvalue, so that the certificate fails, and the ladder goes
    on to float64, where lam is below about ``1e-5 |A|``.
    """
    A, shift, unfit, xp = root_problem(matrix, damping, degree, name)
    if check == "status":
        return _spectral(A, shift, unfit, degree, xp=xp)
    require_fit(unfit, name, xp=xp)
    made = _spectral(A, shift, unfit, degree, xp=xp)
    if root_holds(made, xp):
        return made
    wide = widened(A, xp=xp)
    if wide is not None:
        wide_shift = cast(xp, shift, xp.float64)
        made = _spectral(
            wide, wide_shift, unfit, degree, fallback=Fallback.FLOAT64, xp=xp
        )
        if root_holds(made, xp):
            return narrowed(made, A, xp=xp)
    return _clipped_root(A, shift, degree, name=name, xp=xp)


def _clipped_root(
    matrix: SymmetricMatrix,
    shift: Array,
    degree: int,
    /,
    *,
    name: str,
    xp: Namespace,
) -> InverseRoot:
    """Return the root on the last rung, in the widest dtype, or raise.

    The certificate is then against the clipped matrix.
    """
    wide = widened(matrix, xp=xp)
    wide = matrix if wide is None else wide
    wide_shift = cast(xp, shift, wide.array.dtype)
    basis = symmetric_basis(wide, check="status", name=name, xp=xp)
    w, Q = basis.eigenvalues, basis.eigenvectors
    damped = w + wide_shift[..., None]
    safe = xp.where(damped > 0, damped, xp.ones_like(damped))
    clipped = SymmetricMatrix(_from_basis(Q, w, xp), whole=True)
    made = judged_root(
        clipped,
        wide_shift,
        _from_basis(Q, safe ** (-1.0 / degree), xp),
        status_unless(xp, xp.all(damped > 0, axis=-1), Status.NOT_POSITIVE),
        degree=degree,
        fallback=Fallback.EIGENDECOMPOSITION,
        xp=xp,
    )
    if not root_holds(made, xp):
        raise FactorizationError(
            f"a {matrix.size} x {matrix.size} matrix has no certified inverse root of "
            f"degree {degree}: with damping {float(xp.max(shift)):.1e} its eigenvalues run "
            f"from {float(xp.min(damped)):.1e} to {float(xp.max(damped)):.1e}, and the "
            f"residual is {float(xp.max(made.residual)):.1e} (limit {RESIDUAL_LIMIT}). "
            "Increase `damping`.",
            factor=name,
        )
    return narrowed(replaced(made, clipped=basis.clipped), matrix, xp=xp)


def _spectral(
    matrix: SymmetricMatrix,
    shift: Array,
    unfit: Array,
    degree: int,
    /,
    *,
    fallback: Fallback = Fallback.WORKING,
    xp: Namespace,
) -> InverseRoot:
    """Return the root on one rung, certified against the matrix as it is."""
    fit, fit_shift = fit_problem(matrix, shift, unfit, xp=xp)
    basis = symmetric_basis(fit, check="status", name="", xp=xp)
    damped = basis.eigenvalues + fit_shift[..., None]
    positive = xp.all(damped > 0, axis=-1)
    safe = xp.where(damped > 0, damped, xp.ones_like(damped))
    return judged_root(
        fit,
        fit_shift,
        _from_basis(basis.eigenvectors, safe ** (-1.0 / degree), xp),
        unfit | status_unless(xp, positive, Status.NOT_POSITIVE),
        degree=degree,
        fallback=fallback,
        xp=xp,
    )


def _from_basis(Q: Array, eigenvalues: Array, xp: Namespace) -> Array:
    return xp.matmul(Q * eigenvalues[..., None, :], xp.matrix_transpose(Q))
