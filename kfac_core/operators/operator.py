"""The interface of curvature operators, and the conversion of their vectors.

Conventions.  An operator is one block's matrix at one moment with one damping,
``F_damped``; ``damped=False`` leaves the damping out.  Vectors are matrices V
of shape ``(in(+1), out)``.  `CurvatureOperator.to_dense` flattens row-major, so that the
input factor is on the left in ``kron(A, G)``.  A product is computed in the operator's
dtype and returned in the vector's; vectors are not modified.

An operator may be a stack: of a layer's Q independent groups of columns, or of equal
blocks that are computed together.  Its arrays then have leading axes ``lead``.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn, get_args

from kfac_core import errors
from kfac_core.array import Array, Check, DType, Namespace, Status, finite
from kfac_core.array import namespaces as ns
from kfac_core.array.status import raise_flagged
from kfac_core.linalg.certificate import RESIDUAL_LIMIT
from kfac_core.linalg.damped import GONE, DampedMatrix, real_exponent
from kfac_core.linalg.factorizations import Factorization, Solving
from kfac_core.linalg.groups import join_groups, split_groups
from kfac_core.linalg.products import sum_of_products
from kfac_core.operators.linear_map import LinearMap

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
"""The factorization that each product needs."""

_TINY = 1e-30
"""An entry above this is far from the range where float32 loses digits."""

EVERY_PRODUCT: Mapping[str, str] = MappingProxyType({})
"""The `unsupported_products` of an operator that has every product."""


def products_without(*parts: object) -> Mapping[str, str]:
    """Return the `unsupported_products` of an operator with some damped factors.

    Parameters
    ----------
    *parts : object
        Damped factors, of any class.

    Returns
    -------
    mapping of str to str
        Products that need a matrix that was not kept, with the reason.
    """
    available: frozenset[Factorization] | None = None
    for part in parts:
        if isinstance(part, DampedMatrix) and part.kept_norm is not None:
            prepared = part.factorizations
            available = prepared if available is None else available & prepared
    return EVERY_PRODUCT if available is None else _products_lacking(available)


@functools.cache
def _products_lacking(available: frozenset[Factorization]) -> Mapping[str, str]:
    """Return the products that need a matrix and none of these factorizations."""
    gone = {
        product: GONE
        for product in VECTOR_PRODUCTS
        if FACTORIZATION_OF.get(product) not in available
    }
    return MappingProxyType(gone)


class CurvatureOperator(LinearMap):
    """An immutable damped curvature block, with its inverse and matrix functions.

    The public functions check a vector, cast it to the operator's dtype, and call the
    formula of the subclass, such as ``_multiply``, which takes a vector V of shape
    `inner_shape` and its namespace.

    Notes
    -----
    A vector has the shape `vector_shape`, or `stack_shape` if the operator is a stack, or
    further axes in front for many vectors, which every product takes at once.  The result
    has the same shape and dtype.  ``operator @ v`` is ``F_damped v`` of flat vectors and
    ``operator**p @ v`` that of a power; see `kfac_core.operators.LinearMap`.

    Every product raises `ShapeError`, `DtypeError` or `MixedArraysError` for an
    incompatible vector, `UnsupportedError` for a product that the operator does not have,
    `FactorizationError` if a factorization that was not prepared fails, and
    `NotReadyError` if it would have to be computed while a program is traced.

    A product that is not finite raises `NotFiniteError` for NumPy arrays and for PyTorch
    tensors on the CPU without gradients.  On a device, under a tracer and on JAX this check
    would synchronize, and is left out: check the result with
    ``xp.all(xp.isfinite(result))`` where you synchronize anyway.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> rng = np.random.default_rng(0)
    >>> batch = kc.Batch(rng.normal(size=(16, 3)), rng.normal(size=(16, 2)))
    >>> layer = kc.Dense(in_features=3, out_features=2, bias=True, weight_layout="io")
    >>> block = kc.Block(layer, kc.Kronecker())
    >>> conventions = kc.Conventions(reduction="sum", sources="mean")
    >>> statistics = kc.batch_moments(block, batch, conventions=conventions)
    >>> options = kc.RefreshOptions(damping=0.1, rule="exact")
    >>> F = kc.operator_of(block, statistics, options)
    >>> V = np.ones((4, 2))
    >>> np.allclose(F.multiply(F.multiply_inverse(V)), V)
    True
    >>> bool(np.isclose(F.logdet(), np.linalg.slogdet(F.to_dense())[1]))
    True
    """

    @property
    def unsupported_products(self) -> Mapping[str, str]:
        """Unsupported products, each with the reason."""
        return EVERY_PRODUCT

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        # Set on each subclass, since its dataclass decorator would define another
        # `__repr__`.
        cls.__repr__ = CurvatureOperator.__repr__  # type: ignore[method-assign]

    @property
    def dtype(self) -> DType:
        """The dtype in which products are computed."""
        return self.like.dtype

    @property
    @abc.abstractmethod
    def like(self) -> Array:
        """An array of the operator's library, device and dtype."""

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """The shape ``(*lead, n, m)`` of one vector for each part of a stack."""
        return self.vector_shape

    @property
    def inner_shape(self) -> tuple[int, ...] | None:
        """The shape of a vector inside the formulas; None where it is `stack_shape`.

        Axes in front of it are over many vectors.
        """
        return None

    @property
    @abc.abstractmethod
    def factorizations(self) -> frozenset[Factorization]:
        """Factorizations that have been prepared."""

    @abc.abstractmethod
    def prepared(
        self,
        *factorizations: Factorization,
        check: Check = "raise",
        name: str = "block",
    ) -> CurvatureOperator:
        """Return the operator with missing factorizations computed.

        Parameters
        ----------
        *factorizations : {"inverse", "cholesky", "eigenbasis"}
            ``"inverse"`` serves `multiply_inverse`, ``"cholesky"`` the triangular
            products, ``"eigenbasis"`` all other powers.
        check : {"raise", "status"}
            Whether failures raise, which synchronizes with the device, or are in
            `status`.
        name : str
            Name of the block in error messages.

        Returns
        -------
        CurvatureOperator
            This operator, or a copy with more factorizations.

        Raises
        ------
        NotFiniteError, DampingError, FactorizationError
            If a factorization fails (``check="raise"``).
        """

    def multiply(self, vector: Array, /, *, damped: bool = True) -> Array:
        """Return ``F_damped v``, or ``F v``."""
        V, xp = self._enter(vector, "multiply")
        return self._leave(self._multiply(V, xp, damped), vector, xp)

    def multiply_inverse(self, vector: Array, /) -> Array:
        """Return ``F_damped^-1 v``."""
        V, xp = self._enter(vector, "multiply_inverse")
        return self._leave(self._multiply_inverse(V, xp), vector, xp, divides=True)

    def bound_inverse(self) -> Callable[[Array], tuple[Array, Array]]:
        """Return the function ``v -> (u, u . v)``, ``u = F_damped^-1 v``, of one vector.

        As `multiply_inverse`, but what all vectors have in common is asked once.  Of a
        stack there is an inner product for each vector.
        """
        like, shape = self.like, self.vector_shape
        xp = ns.own_namespace(like)
        is_plain = "multiply_inverse" not in self.unsupported_products and (
            self.stack_shape == shape and self.inner_shape in (None, shape)
        )

        def product(v: Array) -> tuple[Array, Array]:
            fits = v.shape == shape and v.dtype == like.dtype
            if not (is_plain and fits and ns.common_namespace(v, like)):
                u = self.multiply_inverse(v)
                return u, xp.sum(u * v, axis=(-2, -1))
            u = self._multiply_inverse(v, xp)
            size = sum_of_products(v, u, xp=xp)
            # A finite sum shows that all numbers are, and one entry nearly always that
            # there is no underflow.
            if not (math.isfinite(size) and abs(float(u[-1, -1])) > _TINY):
                u = self._leave(u, v, xp, divides=True)
            return u, size

        return product

    def multiply_matpower(self, vector: Array, exponent: float, /) -> Array:
        """Return ``F_damped^p v`` for any real p; 1 and -1 are the two products above.

        An exponent that is not a finite number raises `ConventionError`.
        """
        exponent = real_exponent(exponent)
        if exponent == 1:
            return self.multiply(vector)
        if exponent == -1:
            return self.multiply_inverse(vector)
        V, xp = self._enter(vector, "multiply_matpower")
        result = self._power(V, xp, exponent)
        return self._leave(result, vector, xp, divides=exponent < 0)

    def multiply_cholesky(self, vector: Array, /, *, transpose: bool = False) -> Array:
        """Return ``L v`` or ``L^T v``, with ``L L^T = F_damped`` and L lower."""
        V, xp = self._enter(vector, "multiply_cholesky")
        return self._leave(self._lower_multiply(V, xp, transpose), vector, xp)

    def multiply_cholesky_inverse(
        self, vector: Array, /, *, transpose: bool = False
    ) -> Array:
        """Return ``L^-1 v`` or ``L^-T v``."""
        V, xp = self._enter(vector, "multiply_cholesky_inverse")
        result = self._lower_solve(V, xp, transpose)
        return self._leave(result, vector, xp, divides=True)

    def sample(self, noise: Array, /) -> Array:
        """Turn white noise into noise of covariance ``F_damped^-1``."""
        Z, xp = self._enter(noise, "sample", name="noise")
        return self._leave(self._sample(Z, xp), noise, xp, divides=True)

    @abc.abstractmethod
    def trace(self, *, damped: bool = True) -> Array:
        """Return the trace of F_damped, or of F, 0-d."""

    def logdet(self, *, damped: bool = True) -> Array:
        """Return the log-determinant of F_damped, or of F, 0-d.

        That of F is minus infinity where an eigenvalue is zero, up to roundoff.
        """
        return self._logdet() if damped else self._undamped_logdet()

    def det(self, *, damped: bool = True) -> Array:
        """Return the determinant of F_damped, or of F, 0-d.

        It leaves the range of numbers early, since it is a product of p eigenvalues: it
        is then infinite or zero, and `logdet` is to be used.
        """
        logdet = self.logdet(damped=damped)
        xp = ns.own_namespace(logdet)
        # exp overflows with a warning; infinity is the determinant.
        largest = math.log(float(xp.finfo(logdet.dtype).max))
        return xp.where(
            logdet > largest,
            xp.full_like(logdet, math.inf),
            xp.exp(xp.where(logdet > largest, xp.zeros_like(logdet), logdet)),
        )

    def frobenius_norm(self, *, damped: bool = True) -> Array:
        """Return the Frobenius norm ``sqrt(sum_ij F_ij^2)`` of F_damped, or of F, 0-d."""
        dense = self.to_dense(damped=damped)
        return ns.own_namespace(dense).linalg.vector_norm(dense)

    @abc.abstractmethod
    def eigenvalues(self, *, damped: bool = True) -> Array:
        """Return the eigenvalues of F_damped, or of F, ascending, shape (n m,)."""

    @abc.abstractmethod
    def to_dense(self, *, damped: bool = True) -> Array:
        """Return F_damped, or F, as one matrix of shape (n m, n m), for tests."""

    @abc.abstractmethod
    def status(self) -> Array:
        """Return the `Status` flags, 0-d int32; zero without failures."""

    def solved_by(self, solving: Solving, /) -> CurvatureOperator:
        """Return the operator with another method of solving with its full factors.

        Parameters
        ----------
        solving : {"inverse", "triangular"}
            Products with explicit inverses, or triangular solves.

        Returns
        -------
        CurvatureOperator
            Operator with the same factorizations.

        Raises
        ------
        UnsupportedError
            For an operator with a single method of solving.
        """
        raise errors.UnsupportedError(
            f"{type(self).__name__} has one way of solving. Leave out `solving`."
        )

    def spectral(self, *, check: Check = "raise", name: str = "block") -> Any:
        """Return the block in its eigenbasis, as a `SpectralOperator`.

        Parameters
        ----------
        check, name
            See `prepared`; used if the eigenbasis was not prepared.

        Returns
        -------
        SpectralOperator
            ``F = (Q_A (x) Q_G) diag(s) (Q_A (x) Q_G)^T`` with its `spectrum` s.

        Raises
        ------
        UnsupportedError
            For an operator without an eigenbasis of this form.
        NotFiniteError, FactorizationError
            If the eigendecomposition fails (``check="raise"``).
        """
        raise errors.UnsupportedError(
            f"{type(self).__name__} has no eigenbasis of the form Q_A (x) Q_G. Make the "
            "block with Kronecker, EKFAC, Diagonal or Full."
        )

    def parts(self) -> dict[str, Any]:
        """Return the damped factors or bases of the operator, by name."""
        return {}

    def _prepared_if_readable(self, factorization: Factorization, small: Array) -> Any:
        """Return the operator prepared for a product, or unchanged under a tracer.

        A traced program cannot report a failure, so that the factor without the
        factorization raises instead.  ``small`` is any small array of the operator.
        """
        if finite.is_readable(small, xp=ns.own_namespace(small)):
            return self.prepared(factorization)
        return self

    def __pow__(self, exponent: float, /) -> MatrixPower:
        """Return ``F_damped^p``, to multiply with: ``operator**-1 @ v``."""
        return MatrixPower(self, real_exponent(exponent))

    def _of_vectors(self, vectors: Array) -> Array:
        return self.multiply(vectors)

    @abc.abstractmethod
    def _logdet(self) -> Array:
        """Return the log-determinant of ``F_damped``, 0-d."""

    def _undamped_logdet(self) -> Array:
        """Return the log-determinant of F, 0-d."""
        w = self.eigenvalues(damped=False)
        roundoff = ns.roundoff_of(w.dtype, xp=ns.own_namespace(w))
        return log_sum(w, roundoff=self.shape[0] * roundoff)

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

    def _enter(
        self, vector: Array, product: str, /, *, name: str = "vector"
    ) -> tuple[Array, Namespace]:
        """Return a vector in the form that the formulas take, and its namespace."""
        if product in self.unsupported_products:
            raise errors.UnsupportedError(
                f"{type(self).__name__} has no {product}: "
                f"{self.unsupported_products[product]}."
            )
        stack: tuple[int, ...] = self.stack_shape
        expected, shape = stack, tuple(getattr(vector, "shape", ()))
        many: tuple[int, ...] = ()
        if shape != stack:
            if shape[-len(stack) :] != stack:
                expected = self.vector_shape
            many = (
                shape[: -len(expected)] if shape[-len(expected) :] == expected else ()
            )
        V, xp = entering(vector, (*many, *expected), self.like, name=name)
        if expected != stack:
            # The columns of a layer's groups stand side by side in its vector.
            V = split_groups(V, stack[:-2], xp=xp)
        inner = self.inner_shape
        return V if inner is None else xp.reshape(V, (*many, *inner)), xp

    def _leave(
        self, result: Array, vector: Array, xp: Namespace, /, *, divides: bool = False
    ) -> Array:
        """Return a formula's result in the form and dtype of the vector.

        `divides` marks inverses, whose result is zero only for a vector of zeros.
        """
        if result.shape != vector.shape:
            inner = self.inner_shape
            if inner is not None:
                many = result.shape[: -len(inner)]
                result = xp.reshape(result, (*many, *self.stack_shape))
            if tuple(result.shape) != tuple(vector.shape):
                result = join_groups(result, xp=xp)
        product = result
        if result.dtype != vector.dtype:
            result = xp.astype(result, vector.dtype)
        # Check plain arrays only: for others, reading would synchronize with a device.
        if not finite.known_finite(result, xp=xp):
            if finite.is_plain(result, xp=xp):
                _raise_for_product(vector, xp)
        elif (
            0 not in product.shape
            # One entry nearly always shows that the product has not underflowed; only if
            # it is tiny are all of them read.
            and abs(float(product[(-1,) * product.ndim])) <= _TINY
            and _has_underflowed(product, vector, divides, xp)
        ):
            raise errors.NotFiniteError(
                "the product with a vector that is not zero is below the range of "
                f"{product.dtype}. Scale the vector, or take float64."
            )
        return result

    def __repr__(self) -> str:
        """Return a short description, without reading values from a device."""
        fields = {"vector_shape": str(self.vector_shape), "dtype": str(self.like.dtype)}
        if len(self.stack_shape) > 2:
            fields["stack"] = str(self.stack_shape[:-2])
        for label, value in self._dampings().items():
            fields[label] = _shown(value)
        factorizations = [
            f for f in get_args(Factorization) if f in self.factorizations
        ]
        fields["prepared"] = ", ".join(factorizations) or "nothing"
        flags = finite.plain_number(self.status(), xp=ns.own_namespace(self.like))
        if flags is not None:
            fields["status"] = Status(int(flags)).name or str(int(flags))
        body = ", ".join(f"{label}={value}" for label, value in fields.items())
        return f"{type(self).__name__}({body})"

    def _dampings(self) -> dict[str, Array]:
        """Return the dampings by the names that `repr` should use."""
        return {}


class MatrixPower(LinearMap):
    """A real power ``F_damped^p`` of an operator, to multiply with; see `LinearMap`.

    Parameters
    ----------
    operator : CurvatureOperator
        The operator, whose factorizations are used.
    exponent : float
        p.

    Raises
    ------
    KFACError
        As `CurvatureOperator.multiply_matpower`, by each product.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.operators import kronecker_operator
    >>> A, G = np.diag([1.0, 3.0]), np.diag([2.0])
    >>> operator = kronecker_operator(A, G, damping=2.0, rule="exact")
    >>> root = operator**0.5
    >>> root @ (root @ np.ones(2))
    array([4., 8.])
    """

    def __init__(self, operator: CurvatureOperator, exponent: float) -> None:
        self.operator, self.exponent = operator, exponent

    @property
    def vector_shape(self) -> tuple[int, int]:
        """The shape ``(in(+1), out)`` of a vector as a matrix."""
        return self.operator.vector_shape

    @property
    def dtype(self) -> DType:
        """The dtype in which products are computed."""
        return self.operator.dtype

    def _of_vectors(self, vectors: Array) -> Array:
        return self.operator.multiply_matpower(vectors, self.exponent)


def log_sum(w: Array, /, *, roundoff: float = 0.0) -> Array:
    """Return the sum of logarithms of eigenvalues; minus infinity where one is zero.

    Parameters
    ----------
    w : array
        Eigenvalues, nonnegative up to rounding.
    roundoff : float
        Eigenvalues below this fraction of the largest one count as zero.

    Returns
    -------
    array, 0-d
        ``sum log w``.
    """
    xp = ns.own_namespace(w)
    positive = w > roundoff * xp.max(w)
    logs = xp.log(xp.where(positive, w, xp.ones_like(w)))
    return xp.sum(xp.where(positive, logs, xp.full_like(logs, -math.inf)))


def entering(
    vector: Array, shape: tuple[int, ...], like: Array, /, *, name: str
) -> tuple[Array, Namespace]:
    """Check a vector and cast it to an operator's dtype.

    Parameters
    ----------
    vector : array
        Given vector.
    shape : tuple of int
        Expected shape.
    like : array
        Array of the operator, for its library, device and dtype.
    name : str
        Name of the vector in error messages.

    Returns
    -------
    array and namespace
        The vector, and the namespace of both.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError
        For a vector of incompatible shape, dtype, library or device.
    """
    xp = ns.common_namespace(vector, like)
    if xp is not None and vector.dtype == like.dtype and tuple(vector.shape) == shape:
        return vector, xp
    xp = ns.namespace_of(**{name: vector, "operator": like})
    ns.require_floating(xp, vector, name)
    ns.require_matrix(vector, shape, name)
    return ns.cast(xp, vector, like.dtype), xp


def raise_for(flags: Array, name: str, /) -> None:
    """Raise for the flags of a damped block; this synchronizes with the device.

    Parameters
    ----------
    flags : array of int32, 0-d
        `Status` flags.
    name : str
        Name of the block in error messages.

    Raises
    ------
    NotFiniteError, DampingError, FactorizationError
        For flags that are set.
    """
    reasons = {
        Status.MATRIX_NOT_FINITE: "the block holds NaN or infinity.",
        Status.NOT_POSITIVE: "the damped block has an eigenvalue that is not positive. "
        "Increase `damping`.",
        Status.INACCURATE: "the damping is so small beside the block that roundoff changes "
        f"a damped eigenvalue by more than {RESIDUAL_LIMIT} of it. Increase `damping`.",
    }
    raise_flagged(int(flags), name, reasons)


def _has_underflowed(
    result: Array, vector: Array, divides: bool, xp: Namespace
) -> bool:
    """Whether a product has lost its digits below the smallest normal number."""
    smallest = ns.smallest_normal_of(result.dtype, xp=xp)
    largest = float(xp.max(xp.abs(result)))
    if not largest < smallest or (largest == 0 and not divides):
        return False
    return float(xp.max(xp.abs(vector))) > largest


def _raise_for_product(vector: Array, xp: Namespace) -> NoReturn:
    """Raise for a product that is not finite, with the cause."""
    if not finite.known_finite(vector, xp=xp):
        raise errors.NotFiniteError(
            "the vector holds NaN or infinity. Expected finite numbers; skip this step."
        )
    raise errors.NotFiniteError(
        f"the product with a finite vector is beyond the range of {vector.dtype}, or the "
        "operator is flagged (`status()`). Scale the vector, increase `damping`, or take "
        "float64."
    )


def _shown(value: Array) -> str:
    """Return a number as text; only its shape if reading it would synchronize."""
    number = finite.plain_number(value, xp=ns.own_namespace(value))
    return f"array of shape {tuple(value.shape)}" if number is None else f"{number:.3g}"
