"""An eigenbasis that follows a drifting matrix: warm-started orthogonal iteration.

Conventions.  A is symmetric, positive semidefinite up to rounding; leading axes are a
stack.  For a basis Q (orthonormal columns) let ``B = Q^T A Q``.  Its *Rayleigh
quotients* are ``w = diag B``, and its *off-diagonal ratio* is

    r = |B - diag B|_F / |B|_F,

zero for an eigenbasis.  r is summed over the entries off the diagonal themselves:
``sqrt(|B|^2 - |w|^2)`` is a difference of nearly equal numbers, which in float32 reads
zero below ``r = 3e-4``.

The columns always stand in descending order of their quotients.  That is no matter of
taste: one step ``Q <- qr(A Q)`` orders the columns by dominance, so that it converges
from a basis in descending order, and destroys one in ascending order (which is what
eigensolvers return).

References
----------
Golub and Van Loan (2013), "Matrix Computations", section 8.2.4 (orthogonal iteration);
Vyas et al. (2024), "SOAP", arXiv:2409.11321, algorithm 4, for its use here.
"""

from __future__ import annotations

import array_api_compat

from kfac_core import constraints
from kfac_core.array import Array, Check, Namespace, Status, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import structure
from kfac_core.linalg.certificate import RESIDUAL_LIMIT, probe, relative_norm
from kfac_core.linalg.factorize import eigendecomposition
from kfac_core.linalg.fallback import first_flag, guarded, raise_invalid
from kfac_core.linalg.symmetric import ScaledMatrix, SymmetricMatrix, multiply_symmetric
from kfac_core.roots.arguments import symmetric_argument


@structure()
class OrderedBasis:
    """An approximate eigenbasis of a symmetric matrix, with its residual check.

    Attributes
    ----------
    eigenvalues : array, shape (..., n)
        The Rayleigh quotients, descending; negative ones set to zero.
    eigenvectors : array, shape (..., n, n)
        Q, in the columns.
    off_diagonal : array, shape (...)
        r, for the matrix that the basis was last made or refreshed for.
    refused : array of bool, shape (...)
        Whether the last refresh was rejected, and the columns are unchanged.
    status : array of int32, shape (...)
        `Status` flags.
    order : array of integers, shape (..., n)
        The place that each column had before the last refresh; 0 to n - 1 of a basis that
        was not refreshed.  What goes with the columns,
        such as the squares of SOAP, is taken in this order: ``squares[order, :]``.
    """

    eigenvalues: Array
    eigenvectors: Array
    off_diagonal: Array
    refused: Array
    status: Array
    order: Array

    def multiply_matpower(
        self, v: Array, exponent: float, /, *, damping: Array
    ) -> Array:
        """Return ``Q (w + lam)^p Q^T v``; ``4 n^2 k`` flops.

        Parameters
        ----------
        v : array, shape (..., n, k)
            Array in the dtype of the basis.
        exponent : float
            Exponent ``p``.
        damping : float or array of shape () or (...)
            Damping ``lam``; where it is zero, no quotient may be for a negative p.

        Returns
        -------
        array, shape (..., n, k)
            The power of A itself where r is zero.
        """
        xp = array_api_compat.array_namespace(self.eigenvectors)
        shift = damping[..., None] if hasattr(damping, "shape") else damping
        powers = (self.eigenvalues + shift) ** exponent
        in_basis = xp.matmul(xp.matrix_transpose(self.eigenvectors), v)
        return xp.matmul(self.eigenvectors, powers[..., None] * in_basis)


def ordered_basis(
    matrix: SymmetricMatrix | Array, /, *, check: Check = "raise", name: str = "matrix"
) -> OrderedBasis:
    """Return an eigenbasis by an eigendecomposition, in descending order.

    Parameters
    ----------
    matrix : SymmetricMatrix, or array of shape (..., n, n)
        Matrix A; not modified.
    check : {"raise", "status"}
        See `kfac_core.linalg.factorize.eigendecomposition`.
    name : str
        Name of the matrix in error messages.

    Returns
    -------
    OrderedBasis
        Result in the dtype of A, or float32 where that is narrower.

    Raises
    ------
    ShapeError, DtypeError
        For anything but square matrices of a real floating dtype.
    NotFiniteError, FactorizationError
        If A has no certified basis (``check="raise"``).

    Notes
    -----
    About ``13 n^3`` flops.
    """
    constraints.require_check(check)
    A, xp = symmetric_argument(matrix, name)
    one = ns.full_of(xp, 1.0, A.array)
    problem = ScaledMatrix(A, one, xp.zeros_like(one))
    basis = eigendecomposition(problem, check=check, name=name)
    Q = basis.eigenvectors
    w, off_diagonal = _quotients(Q, multiply_symmetric(A, Q, xp=xp), xp)
    # A decomposition is never rejected; this has the form of a refreshed basis.
    never = xp.zeros_like(basis.status) > 0
    places = _places(w, xp)
    ordered = _descending(w, Q, off_diagonal, never, basis.status, places, xp)
    return replaced(ordered, order=places)


def refreshed_basis(
    basis: OrderedBasis,
    matrix: SymmetricMatrix | Array,
    /,
    *,
    steps: int = 1,
    check: Check = "raise",
    name: str = "matrix",
) -> OrderedBasis:
    """Return the basis after a few steps ``Q <- qr(A Q)`` for the current matrix.

    Before each step the columns are brought into descending order of their quotients
    for this A.  A refresh that would raise the off-diagonal ratio, or that lost
    orthogonality, is refused: the columns of before stay, with their quotients and
    their ratio for this A, and ``refused`` says so.

    Parameters
    ----------
    basis : OrderedBasis
        Old basis; not modified.
    matrix : SymmetricMatrix, or array of shape (..., n, n)
        A, of the shape and library of the basis; not modified.
    steps : int
        Number of iterations, at least 1; each multiplies the angle between two
        eigenvectors by about ``w_j / w_i``, for ``w_j < w_i``.
    check : {"raise", "status"}
        Whether a matrix that is not finite raises, which synchronizes with the device, or
        leaves the basis as it was, with a flag.
    name : str
        Name of the matrix in error messages.

    Returns
    -------
    OrderedBasis
        Result in the dtype of the basis.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError, ConventionError
        For a matrix or a number of steps that does not fit.
    NotFiniteError
        For a matrix that is not finite (``check="raise"``).

    Notes
    -----
    A step takes two products and a QR decomposition with its Q, about ``7 n^3`` flops,
    and the ratio of before two products more.  On a CPU that is no less time than an
    eigendecomposition.  At roundoff a refresh may be refused for nothing but rounding; a
    basis that is refused with a ratio that matters wants `ordered_basis`.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.roots import ordered_basis, refreshed_basis
    >>> A = np.asarray([[2.0, 1.0], [1.0, 5.0]])
    >>> moved = A + 0.01 * np.eye(2)[::-1]
    >>> basis = refreshed_basis(ordered_basis(A), moved, steps=3)
    >>> Q = basis.eigenvectors
    >>> D = Q.T @ moved @ Q
    >>> bool(abs(D[0, 1]) < 1e-3)
    True
    """
    constraints.require_kind("basis", basis, OrderedBasis, "an OrderedBasis")
    constraints.require_range("steps", steps, constraints.COUNT)
    constraints.require_check(check)
    A, xp = symmetric_argument(matrix, name)
    ns.namespace_of(basis=basis.eigenvectors, matrix=A.array)
    constraints.require_shape(name, A.array, tuple(basis.eigenvectors.shape))
    A = SymmetricMatrix(ns.cast(xp, A.array, basis.eigenvectors.dtype), A.full_storage)
    finite = xp.all(xp.isfinite(A.array), axis=(-2, -1))
    invalid = first_flag((finite, Status.MATRIX_NOT_FINITE), xp=xp)
    if check == "raise" and not bool(xp.all(finite)):
        raise_invalid(Status.MATRIX_NOT_FINITE, name)
    A = SymmetricMatrix(guarded(finite, A.array, 1.0, xp=xp), A.full_storage)
    Q = old = basis.eigenvectors
    AQ = multiply_symmetric(A, Q, xp=xp)
    w, ratio = old_w, old_ratio = _quotients(Q, AQ, xp)
    places = unchanged = _places(w, xp)
    for _ in range(steps):
        # QR keeps the span of leading columns, so the largest quotients must come first.
        order = xp.argsort(w, axis=-1, descending=True)
        places = xp.take_along_axis(places, order, axis=-1)
        Q = xp.linalg.qr(_columns(AQ, order, xp)).Q
        AQ = multiply_symmetric(A, Q, xp=xp)
        w, ratio = _quotients(Q, AQ, xp)
    # Reject a step that does not diagonalize A better, as at roundoff.
    good = (ratio <= old_ratio) & (_orthogonality(Q, xp) <= RESIDUAL_LIMIT)
    good = good & finite
    # Keep the order if a quotient is not finite.
    old_w = xp.where(finite[..., None], old_w, basis.eigenvalues)
    old_ratio = xp.where(finite, old_ratio, basis.off_diagonal)
    w = xp.where(good[..., None], w, old_w)
    Q = xp.where(good[..., None, None], Q, old)
    ratio = xp.where(good, ratio, old_ratio)
    lost = xp.isfinite(ratio) & xp.all(xp.isfinite(Q), axis=(-2, -1))
    status = invalid | ns.status_unless(xp, lost, Status.INACCURATE)
    places = xp.where(good[..., None], places, unchanged)
    return _descending(w, Q, ratio, xp.logical_not(good), status, places, xp)


def _quotients(Q: Array, AQ: Array, xp: Namespace) -> tuple[Array, Array]:
    """Return the diagonal of ``Q^T A Q`` and its off-diagonal ratio."""
    B = xp.matmul(xp.matrix_transpose(Q), AQ)
    largest = xp.max(xp.abs(B), axis=(-2, -1), keepdims=True)
    scaled = B / xp.where(largest > 0, largest, xp.ones_like(largest))
    # Without the diagonal exactly: a difference of norms would cancel.
    outside = xp.tril(scaled, k=-1) + xp.triu(scaled, k=1)
    top = xp.linalg.vector_norm(outside, axis=(-2, -1))
    bottom = xp.linalg.vector_norm(scaled, axis=(-2, -1))
    ratio = top / xp.where(bottom > 0, bottom, xp.ones_like(bottom))
    return xp.linalg.diagonal(B), ratio


def _places(w: Array, xp: Namespace) -> Array:
    """Return 0, 1, ..., n - 1 for each of a stack, of the dtype of an order."""
    n = w.shape[-1]
    order = xp.argsort(w, axis=-1, descending=True)
    return xp.zeros_like(order) + xp.arange(
        n, dtype=order.dtype, device=ns.device_of(w)
    )


def _descending(
    w: Array,
    Q: Array,
    ratio: Array,
    refused: Array,
    status: Array,
    places: Array,
    xp: Namespace,
) -> OrderedBasis:
    """Return the basis in descending order of its quotients."""
    order = xp.argsort(w, axis=-1, descending=True)
    places = xp.take_along_axis(places, order, axis=-1)
    w = xp.take_along_axis(w, order, axis=-1)
    # Quotients of a second moment are negative only by roundoff.
    w = xp.where(w < 0, xp.zeros_like(w), w)
    return OrderedBasis(w, _columns(Q, order, xp), ratio, refused, status, places)


def _columns(Q: Array, order: Array, xp: Namespace) -> Array:
    """Return the columns of each matrix of a stack in its own order."""
    indices = xp.broadcast_to(order[..., None, :], Q.shape)
    return xp.take_along_axis(Q, indices, axis=-1)


def _orthogonality(Q: Array, xp: Namespace) -> Array:
    """Return ``|Q Q^T z - z| / |z|``: infinity for NaN."""
    z = probe(Q.shape[-1], dtype=Q.dtype, device=ns.device_of(Q), xp=xp)
    error = xp.matmul(Q, xp.matmul(xp.matrix_transpose(Q), z)) - z
    return relative_norm(error, z, xp=xp)
