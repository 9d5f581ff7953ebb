"""``M = A + shift I`` with ``A = c B`` symmetric, with solves, powers and factorizations.

Conventions.  Leading axes of all arrays are a stack of independent matrices.  Products
are from the left, on a matrix V of shape ``(..., n, k)``, or on many with axes in front of
the stack; M is symmetric, so that ``V M = (M V^T)^T``.  Each product uses one
factorization, whatever else has been prepared: solves the inverse, triangular products
the Cholesky factor, other powers the eigenbasis.  A missing factorization is computed at
the call and raises if it fails; in a traced program it must have been prepared, since a
failure could not be reported.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar, get_args

from kfac_core import constraints, errors
from kfac_core.array import Array, Check, DType, Namespace, Scalar, finite, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import structure
from kfac_core.linalg import certificate, symmetric
from kfac_core.linalg.cholesky import add_to_diagonal, cholesky_inverse
from kfac_core.linalg.factorizations import (
    CholeskyFactor,
    Eigendecomposition,
    Factorization,
    Inverse,
    Solving,
)
from kfac_core.linalg.factorize import (
    cholesky_factor,
    damped_inverse,
    eigendecomposition,
)
from kfac_core.linalg.fallback import in_narrow_dtype
from kfac_core.linalg.groups import side_by_side
from kfac_core.linalg.triangular import multiply_triangular, solve_triangular

T = TypeVar("T")

_PREPARED: dict[tuple[bool, ...], frozenset[Factorization]] = {
    there: frozenset(itertools.compress(get_args(Factorization), there))
    for there in itertools.product((False, True), repeat=3)
}
"""Sets of factorizations, by whether each is there."""

GONE = (
    "of this operator only the factorizations that were prepared are kept, and not the "
    "matrices; take Refreshing(keep_matrices=True), and refresh"
)
"""The message for a product whose matrix was not kept."""


@structure(static=("solving",))
class DampedMatrix:
    """``M = A + shift I`` with ``A = c B`` symmetric, and factorizations of it.

    Attributes
    ----------
    problem : ScaledMatrix
        B, c and the shift, in the dtype of computing.  Where only factorizations are kept,
        B is None, and products that need it raise `NotReadyError`.
    narrowed : SymmetricMatrix or None
        B in the dtype of applying, as all following fields; None where the dtypes agree.
    cholesky : CholeskyFactor or None
        Factor L.
    inverse : Inverse or None
        Inverse ``M^-1``.
    basis : Eigendecomposition or None
        The eigendecomposition of A.
    kept_norm : array, shape (...), or None
        Largest column sum ``|M|_1``, where B is not kept.
    solving : {"inverse", "triangular"}
        Whether `solve` multiplies by the inverse, or solves with L twice.
    """

    problem: symmetric.ScaledMatrix
    narrowed: symmetric.SymmetricMatrix | None = None
    cholesky: CholeskyFactor | None = None
    inverse: Inverse | None = None
    basis: Eigendecomposition | None = None
    kept_norm: Array | None = None
    solving: Solving = "inverse"

    @property
    def keeps_matrix(self) -> bool:
        """Whether A is kept, and not factorizations of M alone."""
        return self.problem.matrix is not None

    @property
    def applied(self) -> symmetric.SymmetricMatrix:
        """B, in the dtype of applying."""
        return self._whole().matrix if self.narrowed is None else self.narrowed

    @property
    def like(self) -> Array:
        """An array of n columns in the dtype of applying."""
        B: Any = self.problem.matrix if self.narrowed is None else self.narrowed
        if B is None and self.inverse is not None:
            B = self.inverse.matrix
        return self._lower() if B is None else B.array

    @property
    def dtype(self) -> DType:
        """The dtype of applying."""
        return self.like.dtype

    @property
    def size(self) -> int:
        """The number n of rows."""
        return int(self.like.shape[-1])

    @property
    def shift(self) -> Array:
        """The shift of the diagonal, in the dtype of computing."""
        return self.problem.shift

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """The shape ``(*lead, n)`` of a vector for each matrix of the stack."""
        B: Any = self.problem.matrix
        shape: tuple[int, ...] = (self.like if B is None else B.array).shape
        return shape[:-1]

    @property
    def lead(self) -> tuple[int, ...]:
        """The shape of the stack; empty for a single matrix."""
        return tuple(self.like.shape[:-2])

    @property
    def factorizations(self) -> frozenset[Factorization]:
        """Factorizations that have been prepared."""
        inverse = self.inverse if self.solving == "inverse" else self.cholesky
        # Without a loop: each product asks.
        there = inverse is not None, self.cholesky is not None, self.basis is not None
        return _PREPARED[there]

    def factorized(self) -> DampedMatrix:
        """Return the inverse and the Cholesky factor alone, without A and its basis."""
        return replaced(
            self,
            problem=replaced(self.problem, matrix=None, rank=None),
            narrowed=None,
            basis=None,
            kept_norm=self.norm(),
        )

    def norm(self) -> Array:
        """Return the 1-norm of M, in the computing dtype, shape (...)."""
        M = self.problem
        if not self.keeps_matrix:
            return self.kept_norm
        # The diagonal of a second moment is not negative, so a shift adds to the norm.
        return M.factor * symmetric.one_norm(M.matrix, xp=self._xp()) + M.shift

    def condition(self) -> Array:
        """Return ``|M|_1 |M^-1|_1``, or the ratio of the eigenvalues if they are known."""
        xp = self._xp()
        if self.basis is None:
            # In the 1-norm, which needs the inverse and no eigenvalues.
            if self.inverse is not None:
                inverse = self.inverse.matrix
            elif self.keeps_matrix:
                # Triangular solves keep no inverse, whose norm is needed once here.
                computed = replaced(self, solving="inverse").prepared("inverse").inverse
                assert computed is not None
                inverse = computed.matrix
            else:
                inverse = symmetric.SymmetricMatrix(
                    *cholesky_inverse(self._lower(), xp=xp)
                )
            norm = self.norm()
            return norm * ns.cast(xp, symmetric.one_norm(inverse, xp=xp), norm.dtype)
        w = self.eigenvalues(shifted=True)
        smallest, largest = xp.min(w, axis=-1), xp.max(w, axis=-1)
        positive = smallest > 0
        ratio = largest / xp.where(positive, smallest, xp.ones_like(smallest))
        return xp.where(positive, ratio, xp.full_like(ratio, xp.inf))

    def solve(self, v: Array, /, *, overwrite: bool = False) -> Array:
        """Return ``M^-1 v``, as `solving` says; ``2 n^2 k`` flops either way.

        With `overwrite` the memory of v may become the solution's.
        """
        if self.solving == "triangular":
            half = self._lower_solve(v, transpose=False, overwrite=overwrite)
            return self._lower_solve(half, transpose=True, overwrite=True)
        prepared = self.inverse or self._having("inverse").inverse
        assert prepared is not None
        inverse = prepared.matrix
        if v.ndim > inverse.array.ndim:
            return self._of_many(self.solve, v)
        return symmetric.multiply_symmetric(inverse, v, xp=ns.own_namespace(v))

    def lower_multiply(self, v: Array, /, *, transpose: bool) -> Array:
        """Return ``L v`` or ``L^T v``."""
        L = self._lower()
        if v.ndim > L.ndim:
            return self._of_many(
                lambda x: self.lower_multiply(x, transpose=transpose), v
            )
        return multiply_triangular(L, v, transpose=transpose, xp=self._xp())

    def lower_solve(self, v: Array, /, *, transpose: bool) -> Array:
        """Return ``L^-1 v`` or ``L^-T v``."""
        return self._lower_solve(v, transpose=transpose, overwrite=False)

    def logdet(self) -> Array:
        """Return ``log det M``, shape (...), from the Cholesky factor."""
        xp = self._xp()
        diagonal = xp.linalg.diagonal(self._lower())
        return 2.0 * xp.sum(xp.log(diagonal), axis=-1)

    def status(self) -> Array:
        """Return the flags of all factorizations, 0-d int32."""
        xp = self._xp()
        status = xp.zeros((), dtype=xp.int32, device=ns.device_of(self.shift))
        for part in (self.cholesky, self.inverse, self.basis):
            if part is not None:
                status = status | ns.any_status(part.status, xp=xp)
        return status

    def prepared(
        self,
        *factorizations: Factorization,
        check: Check = "raise",
        name: str = "matrix",
    ) -> DampedMatrix:
        """Return the matrix with missing factorizations computed.

        Each depends on A and the shift alone, not on the others.  An inverse keeps its
        Cholesky factor only if that is requested as well.

        Parameters
        ----------
        *factorizations : {"inverse", "cholesky", "eigenbasis"}
            Factorizations to prepare.
        check : {"raise", "status"}
            Whether a failure raises, or is in the status.
        name : str
            Name of the matrix in error messages.

        Returns
        -------
        DampedMatrix
            New matrix, or this one if it has all of them.

        Raises
        ------
        NotFiniteError, DampingError, FactorizationError
            As `kfac_core.linalg.factorize.cholesky_factor` (``check="raise"``).
        """
        triangular = self.solving == "triangular" and "inverse" in factorizations
        parts: dict[str, Any] = {}
        if self.cholesky is None and (triangular or "cholesky" in factorizations):
            parts["cholesky"] = cholesky_factor(self._whole(), check=check, name=name)
        if self.inverse is None and not triangular and "inverse" in factorizations:
            M, L = self._whole(), parts.get("cholesky")
            parts["inverse"] = damped_inverse(M, L, check=check, name=name)
        if self.basis is None and "eigenbasis" in factorizations:
            parts["basis"] = eigendecomposition(self._whole(), check=check, name=name)
        if not parts:
            return self
        if self.narrowed is not None:
            for field, part in parts.items():
                parts[field] = self._in_applied_dtype(part, check=check, name=name)
        matrix = replaced(self, **parts)
        return matrix._with_known_basis(check, name) if "basis" in parts else matrix

    def _with_known_basis(self, check: Check, name: str) -> DampedMatrix:
        """Return the matrix with its basis in float64 if roundoff decides on M's powers."""
        xp, basis = self._xp(), self.basis
        assert basis is not None
        shifted = self.shift > 0
        if finite.known_true(xp.logical_not(shifted), xp=xp):
            return self
        flags = self._damped_spectrum().flag()
        flags = xp.where(xp.any(shifted), flags, xp.zeros_like(flags))
        if check == "status":
            return replaced(self, basis=replaced(basis, status=basis.status | flags))
        return self.in_wide_basis(name=name) if int(flags) else self

    def _damped_spectrum(self) -> certificate.DampedSpectrum:
        shift = self._shift()
        one = self._xp().ones_like(shift)
        return certificate.DampedSpectrum([self.spectrum(self.basis)], one, shift)

    def in_wide_basis(self, *, name: str) -> DampedMatrix:
        """Return the matrix with its eigendecomposition computed in float64, or raise."""
        basis = eigendecomposition(self._whole(), check="raise", wide=True, name=name)
        basis = self._in_applied_dtype(basis, check="raise", name=name)
        return replaced(self, basis=basis)

    def spectrum(self, basis: Eigendecomposition | None, /) -> certificate.Spectrum:
        """Return the eigenvalues of a basis of A, and how well they are known."""
        assert basis is not None
        return certificate.Spectrum(basis.eigenvalues, basis.error)

    def multiply(self, v: Array, /, *, shifted: bool) -> Array:
        """Return ``M v``, or ``A v`` where `shifted` is false; ``2 n^2 k`` flops."""
        if v.ndim > self.applied.array.ndim:
            return self._of_many(lambda x: self.multiply(x, shifted=shifted), v)
        return self._applied().multiply(v, shifted=shifted, xp=self._xp())

    def power(self, v: Array, exponent: float, /) -> Array:
        """Return ``M^p v`` in the eigenbasis; ``4 n^2 k`` flops.

        A negative power checks the eigenvalues, which synchronizes with the device, unless
        a Cholesky factorization has shown before that M is definite.
        """
        xp = self._xp()
        basis = self._eigenbasis()
        shift = self._shift()[..., None]
        damped = certificate.positive_eigenvalues(basis.eigenvalues, shift, xp=xp)
        # A factorization has shown that M is definite; look again only if that is free.
        known = self.inverse is not None or self.cholesky is not None
        looks = exponent < 0 and (not known or finite.is_plain(damped, xp=xp))
        if looks and finite.truth_of(xp.all(damped > 0), xp=xp) is False:
            raise errors.FactorizationError(
                f"a {self.size} x {self.size} matrix with eigenvalues down to zero and no "
                f"damping has no power {exponent}. Increase `damping`.",
                factor="matrix",
            )
        if looks and finite.is_readable(damped, xp=xp):
            spectrum = self._having("eigenbasis")._damped_spectrum()
            spectrum.require_determined("matrix")
        scaled = damped**exponent
        Q = basis.eigenvectors
        return xp.matmul(Q, scaled[..., None] * xp.matmul(xp.matrix_transpose(Q), v))

    def trace(self, *, shifted: bool) -> Array:
        """Return the trace of M, or of A, shape (...)."""
        trace = self._applied().factor * self.applied.trace()
        return trace + self.size * self._shift() if shifted else trace

    def eigenvalues(self, *, shifted: bool) -> Array:
        """Return the eigenvalues of M, or of A, ascending, shape (..., n)."""
        w = self._eigenbasis().eigenvalues
        if not shifted:
            return w
        return certificate.positive_eigenvalues(
            w, self._shift()[..., None], xp=self._xp()
        )

    def eigenvectors(self) -> Array:
        """Return Q with the eigenvectors in its columns, shape (..., n, n)."""
        return self._eigenbasis().eigenvectors

    def to_basis(self, v: Array, /) -> Array:
        """Return ``Q^T v``."""
        xp = self._xp()
        return xp.matmul(xp.matrix_transpose(self._eigenbasis().eigenvectors), v)

    def from_basis(self, v: Array, /) -> Array:
        """Return ``Q v``."""
        return self._xp().matmul(self._eigenbasis().eigenvectors, v)

    def dense(self, *, shifted: bool) -> Array:
        """Return M, or A, with both triangles, shape (..., n, n)."""
        xp, A = self._xp(), self._applied()
        full = symmetric.for_matrices(A.factor) * self.applied.full()
        return add_to_diagonal(full, A.shift, xp=xp) if shifted else full

    def _whole(self) -> symmetric.ScaledMatrix:
        """Return the problem with B, or raise."""
        if self.problem.matrix is None:
            raise errors.NotReadyError(f"This needs more than was kept: {GONE}.")
        return self.problem

    def _xp(self) -> Namespace:
        return ns.own_namespace(self.shift)

    def _lower(self) -> Array:
        cholesky = self.cholesky or self._having("cholesky").cholesky
        assert cholesky is not None
        return cholesky.lower

    def _lower_solve(self, v: Array, /, *, transpose: bool, overwrite: bool) -> Array:
        L = self._lower()
        if v.ndim > L.ndim:
            return self._of_many(lambda x: self.lower_solve(x, transpose=transpose), v)
        options: dict[str, Any] = {"transpose": transpose, "overwrite": overwrite}
        return solve_triangular(L, v, **options, xp=self._xp())

    def _of_many(self, function: Callable[[Array], Array], v: Array) -> Array:
        """Apply a function of columns to many matrices at once."""
        return side_by_side(function, v, len(self.stack_shape) + 1, xp=self._xp())

    def _having(self, factorization: Factorization) -> DampedMatrix:
        """Return the matrix with a missing factorization, computed where it can raise."""
        self._whole()
        require_readable(self.shift, factorization)
        return self.prepared(factorization)

    def _eigenbasis(self) -> Eigendecomposition:
        basis = self.basis or self._having("eigenbasis").basis
        assert basis is not None
        return basis

    def _shift(self) -> Array:
        return self._applied().shift

    def _applied(self) -> symmetric.ScaledMatrix:
        """Return M in the dtype of applying."""
        M, xp, dtype = self.problem, self._xp(), self.dtype
        if dtype == M.shift.dtype:
            return M
        # Products run in the dtype of application, and everything that they touch was
        # rounded once to it.
        factor, shift = ns.cast(xp, M.factor, dtype), ns.cast(xp, M.shift, dtype)
        return replaced(M, matrix=self.applied, factor=factor, shift=shift)

    def _in_applied_dtype(self, factorization: T, *, check: Check, name: str) -> T:
        """Return a factorization in the dtype of applying."""
        return in_narrow_dtype(
            factorization, self.dtype, check=check, name=name, xp=self._xp()
        )


def real_exponent(exponent: Scalar, /) -> float:
    """Return the exponent of a matrix power as a float.

    Parameters
    ----------
    exponent : float
        Real number; NumPy's scalars are real numbers.

    Returns
    -------
    float
        Exponent.

    Raises
    ------
    ConventionError
        If it is not a finite real number.
    """
    constraints.require_range("exponent", exponent, constraints.FINITE)
    return float(exponent)


def require_readable(like: Array, factorization: str, /) -> None:
    """Raise `NotReadyError` for a missing factorization in a traced program.

    Parameters
    ----------
    like : array
        A small array of the matrix.
    factorization : str
        What is missing.
    """
    if not finite.is_readable(like, xp=ns.own_namespace(like)):
        raise errors.NotReadyError(
            f"{factorization!r} was not prepared, and cannot be computed inside a "
            f"traced program, which could not report a failure. Add {factorization!r} "
            "to `factorizations`."
        )


def damped_matrix(
    matrix: symmetric.SymmetricMatrix | symmetric.ScaledMatrix,
    shift: Scalar,
    /,
    *,
    apply_dtype: object = None,
) -> DampedMatrix:
    """Return ``A + shift I``, which `DampedMatrix.prepared` checks and factorizes.

    Parameters
    ----------
    matrix : SymmetricMatrix or ScaledMatrix
        A; a `ScaledMatrix` is not copied.
    shift : float or array, shape (...)
        Finite and >= 0.
    apply_dtype : dtype, optional
        Dtype of the stored arrays; by default the dtype of A.

    Returns
    -------
    DampedMatrix
        An immutable snapshot.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.linalg import SymmetricMatrix, damped_matrix
    >>> A = SymmetricMatrix(np.diag([3.0, 8.0]), full_storage=True)
    >>> damped = damped_matrix(A, 1.0).prepared("cholesky")
    >>> bool(np.allclose(damped.solve(np.eye(2)), np.diag([1 / 4, 1 / 9])))
    True
    """
    if isinstance(matrix, symmetric.SymmetricMatrix):
        one = ns.full_of(ns.own_namespace(matrix.array), 1.0, matrix.array)
        matrix = symmetric.ScaledMatrix(matrix, one)
    B, narrowed = matrix.matrix, None
    xp = ns.own_namespace(B.array)
    if apply_dtype is not None and apply_dtype != B.array.dtype:
        narrowed = symmetric.SymmetricMatrix(
            ns.cast(xp, B.array, apply_dtype), B.full_storage
        )
    # NumPy returns scalars in place of 0-d arrays.
    shift = ns.full_of(xp, shift, B.array)
    # The dtype of B is at least as fine as the dtype that it was stored in.
    roundoff = max(matrix.roundoff, ns.roundoff_of(B.array.dtype, xp=xp))
    return DampedMatrix(replaced(matrix, shift=shift, roundoff=roundoff), narrowed)
