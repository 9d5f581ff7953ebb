"""Products that need a factorization of ``M = A + shift I`` alone, and M without A.

Conventions.  Those of `kfac_core.linalg.shifted`: leading axes are a stack, products are
from the left, and each belongs to one factorization.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, NoReturn

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.namespaces import any_status, cast, device_of, own_namespace
from kfac_core.array.status import Check
from kfac_core.array.structure import structure
from kfac_core.errors import NotReadyError
from kfac_core.linalg.cholesky import inverse_from_cholesky
from kfac_core.linalg.factorizations import (
    CholeskyFactor,
    Eigendecomposition,
    Factorization,
    Inverse,
    Solving,
)
from kfac_core.linalg.groups import side_by_side
from kfac_core.linalg.symmetric import (
    multiply_symmetric,
    one_norm,
)
from kfac_core.linalg.triangular import multiply_triangular, solve_triangular

__all__ = ["GONE", "FactorizedMatrix", "FactorizedProducts"]

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
        return multiply_symmetric(inverse, v, xp=own_namespace(v))

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
        status = xp.zeros((), dtype=xp.int32, device=device_of(self._like()))
        for made in self._made():
            status = status | any_status(made.status, xp=xp)
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
        return own_namespace(self._like())


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
        return self.norm * cast(xp, one_norm(inverse, xp=xp), self.norm.dtype)

    def multiply(self, v: Array, /, *, shifted: bool) -> NoReturn:
        """Raise: A is gone."""
        self._raise("Products with the matrix")

    def power(self, v: Array, exponent: float, /) -> NoReturn:
        """Raise: A is gone."""
        self._raise("Other powers than -1")

    def trace(self, *, shifted: bool) -> NoReturn:
        """Raise: A is gone."""
        self._raise("The trace")

    def eigenvalues(self, *, shifted: bool) -> NoReturn:
        """Raise: A is gone."""
        self._raise("Eigenvalues")

    def dense(self, *, shifted: bool) -> NoReturn:
        """Raise: A is gone."""
        self._raise("The matrix itself")

    def spectrum(self, basis: Eigendecomposition | None, /) -> NoReturn:
        """Raise: A is gone."""
        self._raise("Eigenvalues")

    def in_wide_basis(self, *, name: str) -> NoReturn:
        """Raise: A is gone."""
        self._raise("An eigenbasis")

    def _like(self) -> Array:
        return self.shift

    def _having(self, factorization: Factorization) -> NoReturn:
        self._raise(f"The factorization {factorization!r}")

    def _raise(self, what: str) -> NoReturn:
        raise NotReadyError(f"{what} cannot be had: {GONE}.")
