"""``M = A + shift I`` with ``A = c B`` symmetric, with solves, powers and factorizations.

Conventions.  Leading axes of all arrays are a stack of independent matrices.  Products
are from the left, on a matrix V of shape ``(..., n, k)``, or on many, with further axes
in front of those of the stack; from the right they are the
same of the transpose, since M is symmetric.  Each product belongs to one factorization,
whatever else has been prepared: solves to the inverse, triangular products to the
Cholesky factor, other powers to the eigenbasis.  A factorization that was not prepared
is made at the call, and raises where it fails; while a program is traced no failure could
be seen, and it must have been prepared.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, NoReturn, TypedDict, TypeVar

from kfac_core import errors
from kfac_core.array import Array, Check, Namespace, Scalar, finite, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import structure
from kfac_core.linalg.certificate import (
    Spectrum,
    positive_eigenvalues,
    undetermined,
)
from kfac_core.linalg.cholesky import add_to_diagonal, inverse_from_cholesky
from kfac_core.linalg.factorizations import (
    CholeskyFactor,
    Eigendecomposition,
    Factorization,
    Inverse,
    Solving,
)
from kfac_core.linalg.factorize import (
    FactorizationProblem,
    cholesky_factor,
    damped_inverse,
    eigendecomposition,
)
from kfac_core.linalg.fallback import in_narrow_dtype
from kfac_core.linalg.groups import side_by_side
from kfac_core.linalg.symmetric import (
    ScaledMatrix,
    SymmetricMatrix,
    for_matrices,
    multiply_symmetric,
    one_norm,
)
from kfac_core.linalg.triangular import multiply_triangular, solve_triangular

__all__ = [
    "GONE",
    "FactorizedMatrix",
    "FactorizedProducts",
    "Reporting",
    "DampedMatrix",
    "real_exponent",
    "require_readable",
    "damped_matrix",
]

T = TypeVar("T")


class Reporting(TypedDict):
    """How failures of a factorization are reported, as keyword arguments.

    Attributes
    ----------
    check : {"raise", "status"}
        Whether it raises, or is in the status.
    name : str
        Name of the matrix in error messages.
    """

    check: Check
    name: str


GONE = (
    "of this operator only the factorizations that were prepared are kept, and not the "
    "matrices; take Refreshing(keep_matrices=True), and refresh"
)
"""Why a product is missing, and what to do."""


class FactorizedProducts(abc.ABC):
    """Solves, triangular products and the log-determinant of a factorized matrix.

    Attributes
    ----------
    cholesky : CholeskyFactor or None
        Factor L.
    inverse : Inverse or None
        Inverse ``M^-1``.
    solving : {"inverse", "triangular"}
        Whether `solve` multiplies by the inverse, or solves with L twice.
    """

    cholesky: CholeskyFactor | None
    inverse: Inverse | None
    solving: Solving

    @property
    @abc.abstractmethod
    def stack_shape(self) -> tuple[int, ...]:
        """The shape ``(*lead, n)`` of a vector for each matrix of the stack."""

    @abc.abstractmethod
    def _like(self) -> Array:
        """Return a small array of the matrix's library and device."""

    @abc.abstractmethod
    def _having(self, factorization: Factorization) -> FactorizedProducts:
        """Return the same with a missing factorization, or raise `NotReadyError`."""

    @property
    def lead(self) -> tuple[int, ...]:
        """The shape of the stack; empty for a single matrix."""
        return self.stack_shape[:-1]

    @property
    def factorizations(self) -> frozenset[Factorization]:
        """Factorizations that have been prepared."""
        made: dict[Factorization, Any] = {
            "inverse": self.inverse if self.solving == "inverse" else self.cholesky,
            "cholesky": self.cholesky,
        }
        return frozenset(name for name, part in made.items() if part is not None)

    def solve(self, v: Array, /, *, overwrite: bool = False) -> Array:
        """Return ``M^-1 v``, as `solving` says; ``2 n^2 k`` flops either way.

        With `overwrite` the memory of v may become the solution's.
        """
        if self.solving == "triangular":
            half = self._lower_solve(v, transpose=False, overwrite=overwrite)
            return self._lower_solve(half, transpose=True, overwrite=True)
        made = self.inverse or self._having("inverse").inverse
        assert made is not None
        inverse = made.matrix
        if v.ndim > inverse.array.ndim:
            return self._of_many(self.solve, v)
        return multiply_symmetric(inverse, v, xp=ns.own_namespace(v))

    def lower_multiply(self, v: Array, /, *, transpose: bool) -> Array:
        """Return ``L v`` or ``L^T v``."""
        if v.ndim > len(self.stack_shape) + 1:
            return self._of_many(
                lambda x: self.lower_multiply(x, transpose=transpose), v
            )
        L = self._lower()
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
        """Return the flags of all factorizations made, 0-d int32."""
        xp = self._xp()
        status = xp.zeros((), dtype=xp.int32, device=ns.device_of(self._like()))
        for made in self._made():
            status = status | ns.any_status(made.status, xp=xp)
        return status

    def _made(self) -> list[CholeskyFactor | Inverse | Eigendecomposition]:
        """Return all factorizations that were made."""
        return [part for part in (self.cholesky, self.inverse) if part is not None]

    def _lower(self) -> Array:
        made = self.cholesky or self._having("cholesky").cholesky
        assert made is not None
        return made.lower

    def _lower_solve(self, v: Array, /, *, transpose: bool, overwrite: bool) -> Array:
        if v.ndim > len(self.stack_shape) + 1:
            return self._of_many(lambda x: self.lower_solve(x, transpose=transpose), v)
        options: dict[str, Any] = {"transpose": transpose, "overwrite": overwrite}
        return solve_triangular(self._lower(), v, **options, xp=self._xp())

    def _of_many(self, function: Callable[[Array], Array], v: Array) -> Array:
        """Apply a function of columns to many matrices at once."""
        return side_by_side(function, v, len(self.stack_shape) + 1, xp=self._xp())

    def _xp(self) -> Namespace:
        return ns.own_namespace(self._like())


@structure(static=("size", "solving"))
class FactorizedMatrix(FactorizedProducts):
    """``M = A + shift I`` of which a factorization is kept, and not A.

    Attributes
    ----------
    shift : array, shape (...)
        What was added to the diagonal.
    norm : array, shape (...)
        Largest column sum ``|M|_1``.
    cholesky, inverse, solving
        See `FactorizedProducts`.
    size : int
        Number n of rows.
    """

    shift: Array
    norm: Array
    cholesky: CholeskyFactor | None = None
    inverse: Inverse | None = None
    size: int = 0
    solving: Solving = "inverse"

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """The shape ``(*lead, n)`` of a vector for each matrix of the stack."""
        return (*self.norm.shape, self.size)

    @property
    def like(self) -> Array:
        """An array in the dtype of applying."""
        if self.inverse is not None:
            return self.inverse.matrix.array
        return self.shift if self.cholesky is None else self.cholesky.lower

    @property
    def dtype(self) -> Any:
        """The dtype of applying."""
        return self.like.dtype

    @property
    def basis(self) -> None:
        """None: an eigenbasis would be that of A."""
        return None

    def prepared(
        self,
        *factorizations: Factorization,
        check: Check = "raise",
        name: str = "matrix",
    ) -> FactorizedMatrix:
        """Return this matrix; raise `NotReadyError` for a factorization that it lacks."""
        for wanted in factorizations:
            if wanted not in self.factorizations:
                self._having(wanted)
        return self

    def condition(self) -> Array:
        """Return ``|M|_1 |M^-1|_1``, shape (...)."""
        xp = self._xp()
        if self.inverse is not None:
            inverse = self.inverse.matrix
        else:
            inverse = inverse_from_cholesky(self._lower(), overwrite=False, xp=xp)
        return self.norm * ns.cast(xp, one_norm(inverse, xp=xp), self.norm.dtype)

    def _like(self) -> Array:
        return self.shift

    def _having(self, factorization: Factorization) -> NoReturn:
        self._gone(factorization)

    def _gone(self, *_: object, **__: object) -> NoReturn:
        """Raise: A is gone."""
        raise errors.NotReadyError(f"This needs more than was kept: {GONE}.")

    multiply = power = trace = eigenvalues = dense = spectrum = in_wide_basis = _gone


@structure(static=("solving",))
class DampedMatrix(FactorizedProducts):
    """A symmetric matrix, a multiple of the identity, and factorizations of their sum.

    Attributes
    ----------
    problem : FactorizationProblem
        B, c and the shift, in the dtype of computing.
    narrowed : SymmetricMatrix or None
        B in the dtype of applying, as all that follow; None where that is the same.
    cholesky : CholeskyFactor or None
        Factor L.
    inverse : Inverse or None
        Inverse ``M^-1``.
    basis : Eigendecomposition or None
        The eigendecomposition of A.
    solving : {"inverse", "triangular"}
        Whether `solve` multiplies by the inverse, or solves with L twice.
    """

    problem: FactorizationProblem
    narrowed: SymmetricMatrix | None = None
    cholesky: CholeskyFactor | None = None
    inverse: Inverse | None = None
    basis: Eigendecomposition | None = None
    solving: Solving = "inverse"

    @property
    def applied(self) -> SymmetricMatrix:
        """B, in the dtype of applying."""
        return self.problem.matrix if self.narrowed is None else self.narrowed

    @property
    def size(self) -> int:
        """The number n of rows."""
        return int(self.problem.matrix.array.shape[-1])

    @property
    def shift(self) -> Array:
        """What is added to the diagonal, in the dtype of computing."""
        return self.problem.shift

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """The shape ``(*lead, n)`` of a vector for each matrix of the stack."""
        return tuple(self.problem.matrix.array.shape[:-1])

    @property
    def like(self) -> Array:
        """An array in the dtype of applying."""
        return self.applied.array

    @property
    def dtype(self) -> Any:
        """The dtype of applying."""
        return self.like.dtype

    @property
    def factorizations(self) -> frozenset[Factorization]:
        """Factorizations that have been prepared."""
        made = super().factorizations
        return made if self.basis is None else made | {"eigenbasis"}

    def factorized(self) -> FactorizedMatrix:
        """Return what solves and triangular products need, without A.

        Without an eigenbasis too, which is of A.
        """
        return FactorizedMatrix(
            self.shift,
            self.norm(),
            cholesky=self.cholesky,
            inverse=self.inverse,
            size=self.size,
            solving=self.solving,
        )

    def norm(self) -> Array:
        """Return the 1-norm of M, in the computing dtype, shape (...)."""
        M = self.problem
        # Nothing on the diagonal of a second moment is negative.
        return M.factor * one_norm(M.matrix, xp=self._xp()) + M.shift

    def condition(self) -> Array:
        """Return ``|M|_1 |M^-1|_1``, or that of the eigenvalues if they are known."""
        xp = self._xp()
        if self.basis is None:
            inverse = replaced(self, solving="inverse").prepared("inverse").inverse
            assert inverse is not None
            return self.norm() * one_norm(inverse.matrix, xp=xp)
        w = self.eigenvalues(shifted=True)
        smallest, largest = xp.min(w, axis=-1), xp.max(w, axis=-1)
        positive = smallest > 0
        ratio = largest / xp.where(positive, smallest, xp.ones_like(smallest))
        return xp.where(positive, ratio, xp.full_like(ratio, xp.inf))

    def prepared(
        self,
        *factorizations: Factorization,
        check: Check = "raise",
        name: str = "matrix",
    ) -> DampedMatrix:
        """Return the same with factorizations made that were not there yet.

        Each depends on A and the shift alone, not on which others were made before.  An
        inverse keeps no Cholesky factor beside it, unless that is asked for as well.

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
            New matrix, or this one if nothing was missing.

        Raises
        ------
        NotFiniteError, DampingError, FactorizationError
            As `kfac_core.linalg.factorize.cholesky_factor` (``check="raise"``).
        """
        if self.solving == "triangular":
            factorizations = tuple(
                "cholesky" if f == "inverse" else f for f in factorizations
            )
        options: Reporting = {"check": check, "name": name}
        made: dict[str, Any] = {}
        factor = None
        if "cholesky" in factorizations and self.cholesky is None:
            made["cholesky"] = factor = cholesky_factor(self.problem, **options)
        if "inverse" in factorizations and self.inverse is None:
            made["inverse"] = damped_inverse(self.problem, factor, **options)
        if "eigenbasis" in factorizations and self.basis is None:
            made["basis"] = eigendecomposition(self.problem, **options)
        if not made:
            return self
        if self.narrowed is not None:
            made = {
                key: self._in_applied_dtype(part, **options)
                for key, part in made.items()
            }
        found = replaced(self, **made)
        return found._with_known_basis(**options) if "basis" in made else found

    def _with_known_basis(self, *, check: Check, name: str) -> DampedMatrix:
        """Return the same with an eigenbasis that determines M, where there is a shift."""
        xp, basis = self._xp(), self.basis
        assert basis is not None
        shifted = self.shift > 0
        if finite.known_true(xp.logical_not(shifted), xp=xp):
            return self
        flags = self._undetermined(check="status", name=name)
        flags = xp.where(xp.any(shifted), flags, xp.zeros_like(flags))
        if check == "status":
            return replaced(self, basis=replaced(basis, status=basis.status | flags))
        return self.in_wide_basis(name=name) if int(flags) else self

    def _undetermined(self, *, check: Check, name: str) -> Array:
        """Return a flag where roundoff decides on an eigenvalue of M, or raise."""
        shift = self._shift()
        one = self._xp().ones_like(shift)
        spectra = [self.spectrum(self.basis)]
        return undetermined(spectra, scale=one, damping=shift, check=check, name=name)

    def in_wide_basis(self, *, name: str) -> DampedMatrix:
        """Return the same with its eigendecomposition computed in float64, or raise."""
        options = Reporting(check="raise", name=name)
        basis = eigendecomposition(self.problem, wide=True, **options)
        return replaced(self, basis=self._in_applied_dtype(basis, **options))

    def spectrum(self, basis: Eigendecomposition | None, /) -> Spectrum:
        """Return the eigenvalues of a basis of A, and how well they are known."""
        assert basis is not None
        return Spectrum(basis.eigenvalues, basis.error)

    def wide(self) -> DampedMatrix:
        """Return the same in the computing dtype, without factorizations."""
        return DampedMatrix(self.problem)

    def multiply(self, v: Array, /, *, shifted: bool) -> Array:
        """Return ``M v``, or ``A v`` where `shifted` is false; ``2 n^2 k`` flops."""
        if v.ndim > self.applied.array.ndim:
            return self._of_many(lambda x: self.multiply(x, shifted=shifted), v)
        return self._applied().multiply(v, shifted=shifted, xp=self._xp())

    def power(self, v: Array, exponent: float, /) -> Array:
        """Return ``M^p v`` in the eigenbasis; ``4 n^2 k`` flops.

        For a negative power of a matrix that was not found definite before, its
        eigenvalues are checked, which synchronizes with the device.
        """
        xp = self._xp()
        basis = self._eigenbasis()
        shift = self._shift()[..., None]
        damped = positive_eigenvalues(basis.eigenvalues, shift, xp=xp)
        # What was inverted was found definite then; only free looks are taken twice.
        known = self.inverse is not None or self.cholesky is not None
        looks = exponent < 0 and (not known or finite.is_plain(damped, xp=xp))
        if looks and finite.truth_of(xp.all(damped > 0), xp=xp) is False:
            raise errors.FactorizationError(
                f"a {self.size} x {self.size} matrix with eigenvalues down to zero and no "
                f"damping has no power {exponent}. Increase `damping`.",
                factor="matrix",
            )
        if looks and finite.is_readable(damped, xp=xp):
            self._having("eigenbasis")._undetermined(check="raise", name="matrix")
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
        return positive_eigenvalues(w, self._shift()[..., None], xp=self._xp())

    def eigenvectors(self) -> Array:
        """Return Q, whose columns go with the eigenvalues, shape (..., n, n)."""
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
        full = for_matrices(A.factor) * self.applied.full()
        return add_to_diagonal(full, A.shift, xp=xp) if shifted else full

    def _made(self) -> list[CholeskyFactor | Inverse | Eigendecomposition]:
        made = super()._made()
        return made if self.basis is None else [*made, self.basis]

    def _like(self) -> Array:
        return self.shift

    def _having(self, factorization: Factorization) -> DampedMatrix:
        """Return the same with a missing factorization, made now where that can raise."""
        require_readable(self.shift, factorization)
        return self.prepared(factorization)

    def _eigenbasis(self) -> Eigendecomposition:
        made = self.basis or self._having("eigenbasis").basis
        assert made is not None
        return made

    def _shift(self) -> Array:
        return self._applied().shift

    def _applied(self) -> FactorizationProblem:
        """Return M in the dtype of applying."""
        M, xp, dtype = self.problem, self._xp(), self.dtype
        if dtype == M.shift.dtype:
            return M
        factor, shift = ns.cast(xp, M.factor, dtype), ns.cast(xp, M.shift, dtype)
        return FactorizationProblem(self.applied, factor, shift, M.roundoff, M.rank)

    def _in_applied_dtype(self, made: T, *, check: Check, name: str) -> T:
        """Return a factorization in the dtype of applying."""
        return in_narrow_dtype(made, self.dtype, check=check, name=name, xp=self._xp())


def real_exponent(exponent: object, /) -> float:
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
    DtypeError
        If it is no real number.
    ConventionError
        If it is not finite.
    """
    if isinstance(exponent, bool) or not isinstance(exponent, ns.NUMBER):
        raise errors.DtypeError(
            f"Expected `exponent` to be a real number, got {exponent!r}. An array of one "
            "number becomes one with float(...)."
        )
    if not ns.is_finite_number(exponent):
        raise errors.ConventionError(
            f"Expected `exponent` to be finite, got {exponent}."
        )
    return float(exponent)


def require_readable(like: Array, factorization: str, /) -> None:
    """Raise `NotReadyError` if a factorization is missing and none can be made.

    Parameters
    ----------
    like : array
        A small array of the matrix.
    factorization : str
        What is missing.
    """
    if not finite.is_readable(like, xp=ns.own_namespace(like)):
        raise errors.NotReadyError(
            f"{factorization!r} was not prepared, and none is made while a program is "
            "traced, since a failure could not be reported. Add "
            f"{factorization!r} to `factorizations`."
        )


def damped_matrix(
    matrix: SymmetricMatrix | ScaledMatrix,
    shift: Scalar,
    /,
    *,
    factorizations: tuple[Factorization, ...] = (),
    check: Check = "raise",
    name: str = "matrix",
    apply_dtype: Any = None,
) -> DampedMatrix:
    """Make ``A + shift I`` with the requested factorizations.

    Parameters
    ----------
    matrix : SymmetricMatrix or ScaledMatrix
        A; of the latter no copy is made.
    shift : float or array, shape (...)
        Finite and >= 0.
    factorizations : tuple of str
        Any of ``"inverse"``, ``"cholesky"``, ``"eigenbasis"``.
    check : {"raise", "status"}
        See `kfac_core.linalg.factorize.cholesky_factor`.
    name : str
        Name used in error messages.
    apply_dtype : dtype, optional
        Dtype of the stored arrays; that of A by default.

    Returns
    -------
    DampedMatrix
        An immutable snapshot.

    Raises
    ------
    NotFiniteError, DampingError, FactorizationError
        See `kfac_core.linalg.factorize.cholesky_factor`.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.linalg import SymmetricMatrix, damped_matrix
    >>> A = SymmetricMatrix(np.diag([3.0, 8.0]), full_storage=True)
    >>> damped = damped_matrix(A, 1.0, factorizations=("cholesky",))
    >>> bool(np.allclose(damped.solve(np.eye(2)), np.diag([1 / 4, 1 / 9])))
    True
    """
    if isinstance(matrix, SymmetricMatrix):
        xp = ns.own_namespace(matrix.array)
        matrix = ScaledMatrix(matrix, ns.full_of(xp, 1.0, matrix.array))
    B, narrowed = matrix.matrix, None
    xp = ns.own_namespace(B.array)
    if apply_dtype is not None and apply_dtype != B.array.dtype:
        narrowed = SymmetricMatrix(ns.cast(xp, B.array, apply_dtype), B.full_storage)
    # NumPy makes scalars of its own of 0-d arrays.
    shift = ns.full_of(xp, shift, B.array)
    # As it was stored.
    roundoff = max(matrix.roundoff, ns.roundoff_of(B.array.dtype, xp=xp))
    damped = FactorizationProblem(B, matrix.factor, shift, roundoff, matrix.rank)
    made = DampedMatrix(damped, narrowed)
    if not factorizations:
        return made
    return made.prepared(*factorizations, check=check, name=name)
