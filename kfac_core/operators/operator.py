"""What every curvature operator offers, and how vectors come in and go out.

Conventions.  An operator stands for one block's matrix at one moment with one damping,
``F_damped``; ``damped=False`` is the same without the damping.  Vectors are matrices V
of shape ``(in(+1), out)``.  `CurvatureOperator.to_dense` flattens row-major, so that the
input factor stands left in ``kron(A, G)``.  A product is computed in the operator's
dtype and returned in the vector's; vectors are never modified.

An operator may be a stack: of a layer's Q independent groups of columns, or of equal
blocks that are computed together.  Its arrays then have leading axes ``lead``.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.finite import is_plain, is_readable
from kfac_core.array.namespaces import (
    cast,
    namespace_of,
    own_namespace,
    require_floating,
    require_matrix,
    same_place,
)
from kfac_core.array.status import Check, Status
from kfac_core.errors import (
    DampingError,
    FactorizationError,
    NotFiniteError,
    UnsupportedError,
)
from kfac_core.linalg.groups import join_groups, split_groups
from kfac_core.linalg.shifted import Factorization

__all__ = [
    "EVERY_PRODUCT",
    "FACTORIZATION_OF",
    "VECTOR_PRODUCTS",
    "CurvatureOperator",
    "entering",
    "leaving",
    "raise_for",
]

VECTOR_PRODUCTS = (
    "multiply",
    "multiply_inverse",
    "multiply_matpower",
    "multiply_cholesky",
    "multiply_cholesky_inverse",
    "sample",
)
"""The methods of `CurvatureOperator` that take and return a vector."""

FACTORIZATION_OF: dict[str, Factorization] = {
    "multiply_inverse": "inverse",
    "multiply_cholesky": "cholesky",
    "multiply_cholesky_inverse": "cholesky",
    "sample": "cholesky",
}
"""What each product needs to be prepared."""

EVERY_PRODUCT: Mapping[str, str] = MappingProxyType({})
"""The `unsupported_products` of an operator that has every product."""


class CurvatureOperator(abc.ABC):
    """A damped curvature block at one moment: an immutable snapshot.

    The public functions here check a vector, bring it into the operator's dtype, and
    call the operator's own formula.  A subclass gives the formulas: ``_multiply`` and
    the like, which take a vector V of shape `inner_shape` and its namespace.

    Notes
    -----
    A vector has the shape `shape`, or, where the operator is a stack, `stack_shape`;
    the result has the same shape and dtype.  Every product raises `ShapeError`,
    `DtypeError` or `MixedArraysError` for a vector that does not fit, `UnsupportedError`
    where the operator does not have it, and `FactorizationError` where a factorization
    that was not prepared cannot be made; `NotReadyError`, where it would have to be made
    while a program is traced.
    """

    @property
    def unsupported_products(self) -> Mapping[str, str]:
        """The products that the operator does not have, each with the reason."""
        return EVERY_PRODUCT

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # In the class itself, or the one that dataclasses make would take its place.
        cls.__repr__ = CurvatureOperator.__repr__  # type: ignore[method-assign]

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, int]:
        """The shape ``(in(+1), out)`` of the vectors."""

    @property
    @abc.abstractmethod
    def like(self) -> Array:
        """An array of the operator's library, device and dtype."""

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """The shape ``(*lead, n, m)`` of one vector for each part of a stack."""
        return self.shape

    @property
    def inner_shape(self) -> tuple[int, ...]:
        """The shape of a vector inside the formulas."""
        return self.stack_shape

    @abc.abstractmethod
    def prepared(
        self,
        *factorizations: Factorization,
        check: Check = "raise",
        name: str = "block",
    ) -> CurvatureOperator:
        """Return the same operator with factorizations made that were missing.

        Parameters
        ----------
        *factorizations : {"inverse", "cholesky", "eigenbasis"}
            ``"inverse"`` serves `multiply_inverse`, ``"cholesky"`` the triangular
            products, ``"eigenbasis"`` all other powers.
        check : {"raise", "status"}
            Whether trouble raises, which synchronizes with the device, or is in
            `status`.
        name : str
            What a message should call the block.

        Returns
        -------
        CurvatureOperator
            Itself where nothing is missing.

        Raises
        ------
        NotFiniteError, DampingError, FactorizationError
            Where one cannot be made (``check="raise"``).
        """

    def multiply(self, vector: Array, /, *, damped: bool = True) -> Array:
        """Return ``F_damped v``, or ``F v``."""
        return self._applied("multiply", self._multiply, vector, damped)

    def multiply_inverse(self, vector: Array, /) -> Array:
        """Return ``F_damped^-1 v``."""
        return self._applied("multiply_inverse", self._multiply_inverse, vector)

    def multiply_matpower(self, vector: Array, exponent: float, /) -> Array:
        """Return ``F_damped^p v`` for any real p; 1 and -1 are the two products above."""
        if exponent == 1:
            return self.multiply(vector)
        if exponent == -1:
            return self.multiply_inverse(vector)
        return self._applied("multiply_matpower", self._power, vector, exponent)

    def multiply_cholesky(self, vector: Array, /, *, transpose: bool = False) -> Array:
        """Return ``L v`` or ``L^T v``, with ``L L^T = F_damped`` and L lower."""
        return self._applied(
            "multiply_cholesky", self._lower_multiply, vector, transpose
        )

    def multiply_cholesky_inverse(
        self, vector: Array, /, *, transpose: bool = False
    ) -> Array:
        """Return ``L^-1 v`` or ``L^-T v``."""
        return self._applied(
            "multiply_cholesky_inverse", self._lower_solve, vector, transpose
        )

    def sample(self, noise: Array, /) -> Array:
        """Turn white noise into noise of covariance ``F_damped^-1``."""
        return self._applied("sample", self._sample, noise, name="noise")

    @abc.abstractmethod
    def trace(self, *, damped: bool = True) -> Array:
        """Return the trace of F_damped, or of F, 0-d."""

    @abc.abstractmethod
    def logdet(self) -> Array:
        """Return the log-determinant of ``F_damped``, 0-d."""

    @abc.abstractmethod
    def eigenvalues(self, *, damped: bool = True) -> Array:
        """Return the eigenvalues of F_damped, or of F, ascending, shape (n m,)."""

    @abc.abstractmethod
    def to_dense(self, *, damped: bool = True) -> Array:
        """Return F_damped, or F, as one matrix of shape (n m, n m), for tests."""

    @abc.abstractmethod
    def status(self) -> Array:
        """Return the `Status` flags, 0-d int32; zero where all is well."""

    def spectral(self, *, check: Check = "raise", name: str = "block") -> Any:
        """Return the block in its eigenbasis, as a `SpectralOperator`.

        Parameters
        ----------
        check, name
            As for `prepared`, for an eigenbasis that was not prepared.

        Returns
        -------
        SpectralOperator
            ``F = (Q_A (x) Q_G) diag(s) (Q_A (x) Q_G)^T`` with its `spectrum` s.

        Raises
        ------
        UnsupportedError
            For an operator without an eigenbasis of this form.
        NotFiniteError, FactorizationError
            Where the eigenbasis cannot be made (``check="raise"``).
        """
        raise UnsupportedError(
            f"{type(self).__name__} has no eigenbasis of the form Q_A (x) Q_G. Make the "
            "block with Kronecker, Eigen, Diagonal or Full."
        )

    def at_rows(self, indices: Array, /) -> CurvatureOperator:
        """Return the operator on the rows of some ids alone; see `SparseRows`.

        Parameters
        ----------
        indices : array of int, shape (k,)
            Different ids.

        Returns
        -------
        CurvatureOperator
            Of shape ``(k, out)``.

        Raises
        ------
        UnsupportedError
            Where the block mixes rows, so that they do not stand alone.
        """
        raise UnsupportedError(
            "A sparse gradient needs a block that does not mix rows: an embedding with a "
            "diagonal input factor, or a diagonal block. Give the whole gradient."
        )

    def parts(self) -> dict[str, Any]:
        """Return the damped factors or bases that the operator is made of, by name."""
        return {}

    def _looked_at(self, factorization: Factorization, small: Array) -> Any:
        """Return itself prepared for a product; as it is while a program is traced.

        A tracer could not see a failure.  What is missing then is refused by the factor
        that lacks it.  ``small`` is any small array of the operator.
        """
        if is_readable(small, xp=own_namespace(small)):
            return self.prepared(factorization)
        return self

    @abc.abstractmethod
    def _multiply(self, V: Array, xp: Namespace, damped: bool) -> Array:
        """Return ``F_damped V``, or ``F V``."""

    @abc.abstractmethod
    def _multiply_inverse(self, V: Array, xp: Namespace) -> Array:
        """Return ``F_damped^-1 V``."""

    @abc.abstractmethod
    def _power(self, V: Array, xp: Namespace, exponent: float) -> Array:
        """Return ``F_damped^p V``, where p is neither 1 nor -1."""

    @abc.abstractmethod
    def _sample(self, Z: Array, xp: Namespace) -> Array:
        """Return a root of ``F_damped^-1`` times Z."""

    def _lower_multiply(self, V: Array, xp: Namespace, transpose: bool) -> Array:
        """Return ``L V`` or ``L^T V``."""
        raise NotImplementedError

    def _lower_solve(self, V: Array, xp: Namespace, transpose: bool) -> Array:
        """Return ``L^-1 V`` or ``L^-T V``."""
        raise NotImplementedError

    def _applied(
        self,
        product: str,
        formula: Any,
        vector: Array,
        /,
        *arguments: Any,
        name: str = "vector",
    ) -> Array:
        """Return a formula of a vector, which is checked and cast on both ways."""
        if product in self.unsupported_products:
            raise UnsupportedError(
                f"{type(self).__name__} has no {product}: "
                f"{self.unsupported_products[product]}."
            )
        stack, inner = self.stack_shape, self.inner_shape
        # The columns of a layer's groups stand side by side in a vector of the layer.
        joined = len(stack) > 2 and getattr(vector, "ndim", None) == 2
        shape = self.shape if joined else stack
        V, xp = entering(vector, shape, self.like, name=name)
        if joined:
            V = split_groups(V, stack[:-2], xp=xp)
        if inner != stack:
            V = xp.reshape(V, inner)
        result = formula(V, xp, *arguments)
        if inner != stack:
            result = xp.reshape(result, stack)
        if joined:
            result = join_groups(result, xp=xp)
        return cast(xp, result, vector.dtype)

    def __repr__(self) -> str:
        """Say what it is in a few lines; nothing is read from a device for it."""
        told = {"shape": str(self.shape), "dtype": str(self.like.dtype)}
        if len(self.stack_shape) > 2:
            told["stack"] = str(self.stack_shape[:-2])
        for label, value in self._dampings().items():
            told[label] = _told(value)
        told["prepared"] = ", ".join(self._prepared_names()) or "nothing"
        flags = self.status()
        if is_plain(flags, xp=own_namespace(flags)):
            told["status"] = repr(Status(int(flags)))
        body = ", ".join(f"{label}={value}" for label, value in told.items())
        return f"{type(self).__name__}({body})"

    def _dampings(self) -> dict[str, Array]:
        """Return the dampings by the names that `repr` should use."""
        return {}

    def _prepared_names(self) -> list[str]:
        """Return the names of the factorizations that were made."""
        return []


def entering(
    vector: Array, shape: tuple[int, ...], like: Array, /, *, name: str
) -> tuple[Array, Namespace]:
    """Check a vector and bring it into an operator's dtype.

    Parameters
    ----------
    vector : array
        What was given.
    shape : tuple of int
        What is expected.
    like : array
        Any array of the operator, for its library, device and dtype.
    name : str
        What a message should call the vector.

    Returns
    -------
    array and namespace
        The vector, and the namespace of both.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError
        For a vector that does not fit.
    """
    if type(vector) is type(like) and vector.dtype == like.dtype:
        # One dtype of one library: floating, and nothing to be cast.
        xp = own_namespace(like)
        same_place(**{name: vector, "operator": like})
    else:
        xp = namespace_of(**{name: vector, "operator": like})
        require_floating(xp, vector, name)
    if tuple(vector.shape) != shape:
        require_matrix(vector, shape, name)
    return cast(xp, vector, like.dtype), xp


def leaving(result: Array, vector: Array, /) -> Array:
    """Return a result in the dtype of the vector that it was computed from."""
    return cast(own_namespace(result), result, vector.dtype)


def raise_for(
    flags: Array, name: str, /, *, remedy: str = "Increase `damping`."
) -> None:
    """Raise for the flags of a damped block; this synchronizes with the device.

    Parameters
    ----------
    flags : array of int32, 0-d
        Of `Status`.
    name : str
        What a message should call the block.
    remedy : str
        What to do about an eigenvalue that is not positive.

    Raises
    ------
    NotFiniteError, DampingError, FactorizationError
        For flags that are set.
    """
    found = Status(int(flags))
    if Status.MATRIX_NOT_FINITE in found:
        raise NotFiniteError(f"{name}: the block holds NaN or infinity.")
    if Status.BAD_DAMPING in found:
        raise DampingError(
            f"{name}: `damping` is negative or not finite. Expected a finite number >= 0."
        )
    if Status.NOT_POSITIVE in found:
        raise FactorizationError(
            f"the damped block has an eigenvalue that is not positive. {remedy}",
            factor=name,
        )


def _told(value: Array) -> str:
    """Return a number for people, where it is at hand."""
    if value.ndim == 0 and is_plain(value, xp=own_namespace(value)):
        return f"{float(value):.3g}"
    return f"array of shape {tuple(value.shape)}"
