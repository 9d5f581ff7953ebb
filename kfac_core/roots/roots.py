"""Inverse p-th roots of a damped symmetric matrix, as dense matrices.

Conventions.  ``M = A + lam I`` with A positive semidefinite up to rounding; what is
wanted is the symmetric positive ``X = M^(-1/p)``, so that ``M X^p = I``.  Leading axes
are a stack.  The residual check of X is the true residual on the fixed probe vector z of
`kfac_core.linalg.certificate`, ``|M X^p z - z| / |z|``: p + 1 products with a vector,
against the matrix itself.

A root is made from an eigendecomposition, by the chain of `kfac_core.linalg.fallback`: the
working dtype, float64, and then an eigendecomposition in the widest dtype whose negative
eigenvalues are set to zero and reported as the clipped mass.  With ``check="status"``
only the first attempt is made and no value is read.

A dense root is worth making where it is applied several times; one product with a
power costs less by ``kronecker_operator(None, A, damping=...)**p @ v``, which needs no
dense root.
"""

from __future__ import annotations

from kfac_core import constraints, errors
from kfac_core.array import Array, Check, Namespace, Scalar, Status, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import structure
from kfac_core.linalg.certificate import RESIDUAL_LIMIT, probe_of, relative_norm
from kfac_core.linalg.factorizations import Eigendecomposition
from kfac_core.linalg.factorize import (
    eigendecomposition,
    from_eigenbasis,
    problem_flags,
)
from kfac_core.linalg.fallback import Fallback, first_flag, with_fallbacks
from kfac_core.linalg.symmetric import ScaledMatrix, SymmetricMatrix, multiply_symmetric
from kfac_core.roots.arguments import damping_array, symmetric_argument

_DEGREE = constraints.Constraint(
    "an integer from 1 to 10,000",
    lambda degree: constraints.COUNT.accepts(degree) and degree <= 10_000,
)


@structure(static=("degree",))
class InverseRoot:
    """An inverse p-th root, with its residual check.

    Attributes
    ----------
    matrix : SymmetricMatrix
        ``X = (A + lam I)^(-1/p)``, both triangles.
    status : array of int32, shape (...)
        `Status` flags.
    residual : array, shape (...)
        ``|M X^p z - z| / |z|``.
    clipped : array, shape (...)
        The sum of the negative eigenvalues that were set to zero, in magnitude; zero on
        every other step of the chain.
    fallback : array of int32, shape (...)
        `kfac_core.linalg.fallback.Fallback` that was used.
    degree : int
        Degree ``p`` of the root.
    """

    matrix: SymmetricMatrix
    status: Array
    residual: Array
    clipped: Array
    fallback: Array
    degree: int


def inverse_root(
    matrix: SymmetricMatrix | Array,
    /,
    *,
    damping: Scalar,
    degree: int,
    check: Check = "raise",
    name: str = "matrix",
) -> InverseRoot:
    r"""Return ``(A + lam I)^(-1/p)`` by an eigendecomposition.

    .. math:: X = (A + \lambda I)^{-1/p}

    Equal to ``(Q * (w + lam) ** (-1 / p)) @ Q.T`` with ``w, Q = np.linalg.eigh(A)``.

    Parameters
    ----------
    matrix : SymmetricMatrix, or array of shape (..., n, n)
        Matrix A; not modified.
    damping : float, or array of shape () or (...)
        Damping ``lam``, finite and >= 0.
    degree : int
        Degree ``p`` of the root, from 1 to 10,000: the check takes p products.
    check : {"raise", "status"}
        Whether to use the fallback chain and raise, or to report.
    name : str
        Name of the matrix in error messages.

    Returns
    -------
    InverseRoot
        Result in the dtype of A, or float32 where that is narrower.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError, ConventionError
        For incompatible arguments.
    NotFiniteError, DampingError
        For values that do not fit (``check="raise"``).
    FactorizationError
        If every step of the chain fails (``check="raise"``).

    Notes
    -----
    About ``11 n^3`` flops.  A float32 eigendecomposition has an absolute error of about
    ``1e-7 |A|`` in every eigenvalue, so that the residual check fails, and the chain goes
    on to float64, where lam is below about ``1e-5 |A|``.

    Derivatives of it are those of an eigendecomposition, which do not exist where two
    eigenvalues are equal: ``jax.grad`` gives NaN there, as at a multiple of the identity.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.roots import inverse_root
    >>> root = inverse_root(np.diag([16.0, 81.0]), damping=0.0, degree=4)
    >>> np.round(root.matrix.diagonal(), 6)
    array([0.5     , 0.333333])
    """
    constraints.require_range("degree", degree, _DEGREE)
    constraints.require_check(check)
    A, xp = symmetric_argument(matrix, name)
    shift = damping_array(damping, A, xp=xp)
    # Broadcast one shift to every matrix of the stack.
    shift = shift + xp.zeros(
        A.array.shape[:-2], dtype=shift.dtype, device=ns.device_of(shift)
    )

    def attempt(problem: ScaledMatrix, xp: Namespace) -> InverseRoot:
        basis = eigendecomposition(problem, check="status", name=name)
        return _root(problem, basis, degree, xp)

    def last(
        problem: ScaledMatrix, root: InverseRoot, name: str, xp: Namespace
    ) -> InverseRoot:
        return _clipped_root(problem, degree, name, xp)

    problem = ScaledMatrix(A, xp.ones_like(shift), shift)
    return with_fallbacks(attempt, problem, last, check=check, name=name, xp=xp)


def root_residual(
    problem: ScaledMatrix,
    root: SymmetricMatrix,
    z: Array,
    /,
    *,
    degree: int,
    xp: Namespace,
) -> Array:
    """Return ``|M X^p z - z| / |z|``, shape (...); ``2 (p + 1) n^2`` flops.

    Parameters
    ----------
    problem : ScaledMatrix
        Matrix M.
    root : SymmetricMatrix
        Root X.
    z : array, shape (n, 1)
        The vector of `kfac_core.linalg.certificate.probe`.
    degree : int
        Degree ``p`` of the root.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, shape (...)
        Infinity in place of NaN.
    """
    y = z
    # X^p M z = z, by p products with a vector.
    for _ in range(degree):
        y = multiply_symmetric(root, y, xp=xp)
    return relative_norm(problem.multiply(y, xp=xp) - z, z, xp=xp)


def _root(
    problem: ScaledMatrix, basis: Eigendecomposition, degree: int, xp: Namespace
) -> InverseRoot:
    """Return the root from an eigendecomposition of ``c B``, checked against M."""
    damped = basis.eigenvalues + problem.shift[..., None]
    positive = xp.all(damped > 0, axis=-1)
    # A root of a negative number is NaN, with a warning; it is flagged below.
    safe = xp.where(damped > 0, damped, xp.ones_like(damped))
    X = from_eigenbasis(basis.eigenvectors, safe ** (-1.0 / degree), xp)
    z = probe_of(problem.matrix.array, xp)
    residual = root_residual(problem, X, z, degree=degree, xp=xp)
    finite = (basis.status & int(Status.MATRIX_NOT_FINITE)) == 0
    valid = (*problem_flags(problem.shift, finite), (positive, Status.NOT_POSITIVE))
    usable = first_flag(*valid, xp=xp) == 0
    status = first_flag(*valid, (residual <= RESIDUAL_LIMIT, Status.INACCURATE), xp=xp)
    marked = xp.where(usable[..., None, None], X.array, xp.full_like(X.array, xp.nan))
    return InverseRoot(
        SymmetricMatrix(marked, full_storage=True),
        status,
        residual,
        xp.zeros_like(residual),
        xp.zeros_like(status),
        degree,
    )


def _clipped_root(
    problem: ScaledMatrix, degree: int, name: str, xp: Namespace
) -> InverseRoot:
    """Return the root with A clipped, checked against the clipped matrix, or raise."""
    eigen = eigendecomposition(problem, check="status", name=name)
    zeros = xp.zeros_like(eigen.eigenvalues)
    w = xp.where(eigen.eigenvalues < 0, zeros, eigen.eigenvalues)
    basis = replaced(eigen, eigenvalues=w)
    A = from_eigenbasis(basis.eigenvectors, w, xp)
    damped = basis.eigenvalues + problem.shift[..., None]
    # The residual is then that of the clipped matrix, which is the one whose root is
    # returned.
    clipped = ScaledMatrix(A, xp.ones_like(problem.factor), problem.shift)
    root = _root(clipped, basis, degree, xp)
    if bool(xp.any(root.status != 0)):
        raise errors.FactorizationError(
            f"a {problem.size} x {problem.size} matrix has no certified inverse root of "
            f"degree {degree}: with damping {float(xp.max(problem.shift)):.1e} its "
            f"eigenvalues run from {float(xp.min(damped)):.1e} to "
            f"{float(xp.max(damped)):.1e}, and the residual is "
            f"{float(xp.max(root.residual)):.1e} (limit {RESIDUAL_LIMIT}). Increase "
            "`damping`.",
            factor=name,
        )
    fallback = xp.full_like(root.fallback, int(Fallback.EIGENDECOMPOSITION))
    return replaced(root, clipped=basis.clipped, fallback=fallback)
