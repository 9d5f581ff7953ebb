"""The operator of ``sum_k D_k D_k^T + lam I``, by the Gram matrix of the D_k.

Conventions.  Those of `kfac_core.linalg.example_gram`, with the weights of the gradients
in the D_k: on a flattened vector v the block is ``F + lam I`` with ``F = Y^T Y``, and for
any function f

    f(F + lam I) v = f(lam) v + Y^T (f(H + lam) - f(lam)) H^-1 Y v,

where H is the K x K Gram matrix ``Y Y^T``; for the inverse that is Woodbury's formula,

    (F + lam I)^-1 v = (v - Y^T (H + lam I)^-1 Y v) / lam.
"""

from __future__ import annotations

from typing import NoReturn

import array_api_compat

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.finite import truth_of
from kfac_core.array.namespaces import (
    Scalar,
    any_status,
    as_scalar,
    cast,
    device_of,
    namespace_of,
    require_floating,
    require_matrix,
    status_unless,
    wide_dtype,
)
from kfac_core.array.status import Check, Status
from kfac_core.array.structure import replaced, structure
from kfac_core.damping import require_damping
from kfac_core.errors import FactorizationError, ShapeError, UnsupportedError
from kfac_core.linalg.example_gram import (
    combined_gradients,
    divided_difference,
    gradient_gram,
    gradient_products,
)
from kfac_core.linalg.gram import updated_gram
from kfac_core.linalg.shifted import Factorization, ShiftedMatrix, shifted_matrix
from kfac_core.operators.operator import entering, leaving

__all__ = ["NO_TRIANGLE", "ExampleGramOperator", "example_gram_operator"]

NO_TRIANGLE = (
    "a Cholesky factor of few gradients plus identity is dense; multiply_matpower with 0.5 "
    "and -0.5 is a root of the block, and sample draws from its inverse"
)
"""Why such an operator has no triangular products."""


@structure()
class ExampleGramOperator:
    """A snapshot of the block of the module's text; see `CurvatureOperator`.

    Attributes
    ----------
    inputs : array, shape (K, S, n)
        The x, each times the square root of its gradient's weight.
    output_grads : array, shape (K, S, m)
        The g.
    gram : ShiftedMatrix
        ``H + lam I``.
    lost : array, 0-d
        The trace of the gradients that were left out; see `kfac_core.factors.window`.
    """

    inputs: Array
    output_grads: Array
    gram: ShiftedMatrix
    lost: Array

    @property
    def shape(self) -> tuple[int, int]:
        """The shape ``(in(+1), out)`` of the vectors."""
        return int(self.inputs.shape[-1]), int(self.output_grads.shape[-1])

    @property
    def gradients(self) -> int:
        """K."""
        return int(self.inputs.shape[0])

    @property
    def factorizations(self) -> frozenset[Factorization]:
        """What has been prepared."""
        return self.gram.factorizations

    def prepared(
        self,
        *factorizations: Factorization,
        check: Check = "raise",
        name: str = "block",
    ) -> ExampleGramOperator:
        """Return the same operator with factorizations of ``H + lam I`` made."""
        gram = self.gram.prepared(*factorizations, check=check, name=name)
        if gram is self.gram:
            return self
        made = replaced(self, gram=gram)
        if factorizations and check == "raise":
            made._require_damping(name)
        return made

    def multiply(self, vector: Array, /, *, damped: bool = True) -> Array:
        """Return ``(F + lam I) v``, or ``F v``; ``4 K S n m`` flops."""
        V, xp = self._enter(vector, "vector")
        product = self._combined(self._products(V, xp), xp)
        return leaving(product + self._lam() * V if damped else product, vector)

    def multiply_inverse(self, vector: Array, /) -> Array:
        """Return ``(F + lam I)^-1 v``; ``4 K S n m`` flops, and the damping positive."""
        V, xp = self._enter(vector, "vector")
        self._require_damping_unless_prepared()
        inner = self.gram.solve(self._products(V, xp)[:, None])[:, 0]
        return leaving((V - self._combined(inner, xp)) / self._lam(), vector)

    def multiply_matpower(self, vector: Array, exponent: float, /) -> Array:
        """Return ``(F + lam I)^p v``; the damping positive unless p is 1."""
        if exponent == 1:
            return self.multiply(vector)
        if exponent == -1:
            return self.multiply_inverse(vector)
        V, xp = self._enter(vector, "vector")
        self._require_damping_unless_prepared()
        lam = self._lam()
        h = self.gram.eigenvalues(shifted=False)
        inner = self.gram.to_basis(self._products(V, xp)[:, None])[:, 0]
        scaled = inner * divided_difference(h, lam, exponent, xp=xp)
        change = self._combined(self.gram.from_basis(scaled[:, None])[:, 0], xp)
        return leaving(lam**exponent * V + change, vector)

    def multiply_cholesky(
        self, vector: Array, /, *, transpose: bool = False
    ) -> NoReturn:
        """Raise `UnsupportedError`."""
        raise UnsupportedError(f"{type(self).__name__}: {NO_TRIANGLE}.")

    def multiply_cholesky_inverse(
        self, vector: Array, /, *, transpose: bool = False
    ) -> NoReturn:
        """Raise `UnsupportedError`."""
        raise UnsupportedError(f"{type(self).__name__}: {NO_TRIANGLE}.")

    def sample(self, noise: Array, /) -> Array:
        """Turn white noise z into ``(F + lam I)^-1/2 z``."""
        return self.multiply_matpower(noise, -0.5)

    def trace(self, *, damped: bool = True) -> Array:
        """Return ``tr F + n m lam``, or ``tr F``, 0-d."""
        trace = self.gram.trace(shifted=False)
        return trace + self._numbers() * self._lam() if damped else trace

    def logdet(self) -> Array:
        """Return ``log det (H + lam I) + (n m - K) log lam``, 0-d."""
        self._require_damping_unless_prepared()
        rest = (self._numbers() - self.gradients) * self._xp().log(self._lam())
        return self.gram.logdet() + rest

    def eigenvalues(self, *, damped: bool = True) -> Array:
        """Return those of H and zeros, plus lam, ascending, shape (n m,)."""
        xp, numbers = self._xp(), self._numbers()
        h = self.gram.eigenvalues(shifted=False)
        if numbers < self.gradients:
            every = h[self.gradients - numbers :]
        else:
            rest = numbers - self.gradients
            zeros = xp.zeros((rest,), dtype=h.dtype, device=device_of(h))
            every = xp.concat([zeros, h])
        return every + self._lam() if damped else every

    def to_dense(self, *, damped: bool = True) -> Array:
        """Return the block as one matrix; all D_k are formed."""
        xp = self._xp()
        D = xp.matmul(xp.matrix_transpose(self.inputs), self.output_grads)
        Y = xp.reshape(D, (self.gradients, -1))
        F = updated_gram(None, Y, tail=None, decay=0.0, scale=1.0, xp=xp).full()
        eye = xp.eye(self._numbers(), dtype=F.dtype, device=device_of(F))
        return F + self._lam() * eye if damped else F

    def status(self) -> Array:
        """Return the flags of the Gram matrix, 0-d int32."""
        xp = self._xp()
        positive = status_unless(xp, self._lam() > 0, Status.NOT_POSITIVE)
        flags = any_status(self.gram.status(), xp=xp)
        return flags | positive if self._is_prepared() else flags

    def _products(self, V: Array, xp: Namespace) -> Array:
        return gradient_products(self.inputs, self.output_grads, V, xp=xp)

    def _combined(self, c: Array, xp: Namespace) -> Array:
        return combined_gradients(self.inputs, self.output_grads, c, xp=xp)

    def _numbers(self) -> int:
        n, m = self.shape
        return n * m

    def _lam(self) -> Array:
        return cast(self._xp(), self.gram.shift, self.inputs.dtype)

    def _require_damping(self, name: str = "block") -> None:
        """Raise where F, which is singular, is seen not to be damped."""
        if truth_of(self._lam() > 0, xp=self._xp()) is False:
            raise FactorizationError(
                "a sum of few outer products is singular without damping. Increase "
                "`damping`.",
                factor=name,
            )

    def _require_damping_unless_prepared(self) -> None:
        # What is prepared was looked at then, or has its flag.
        if not self._is_prepared():
            self._require_damping()

    def _is_prepared(self) -> bool:
        return self.gram.inverse is not None or self.gram.basis is not None

    def _enter(self, vector: Array, name: str) -> tuple[Array, Namespace]:
        return entering(
            vector, self.shape, self.inputs.dtype, operator=self.inputs, name=name
        )

    def _xp(self) -> Namespace:
        return array_api_compat.array_namespace(self.inputs)


def example_gram_operator(
    inputs: Array,
    output_grads: Array,
    /,
    *,
    weights: Array,
    damping: Scalar,
    lost: Array | None = None,
    factorizations: tuple[Factorization, ...] = ("inverse",),
    check: Check = "raise",
    name: str = "block",
    apply_dtype: object = None,
) -> ExampleGramOperator:
    """Return ``sum_k w_k D_k D_k^T + lam I`` of the rows of K gradients.

    Parameters
    ----------
    inputs : array, shape (K, S, n)
        The x, with their homogeneous coordinate where there is a bias.
    output_grads : array, shape (K, S, m)
        The g; ``D_k = sum_s x_ks g_ks^T``.
    weights : array, shape (K,)
        The w, not negative: 1/N each for a mean over N examples.
    damping : float or 0-d array
        lam, finite and >= 0.
    lost : array, 0-d, optional
        The trace of what the gradients leave out; zero where left out.
    factorizations : tuple of {"inverse", "cholesky", "eigenbasis"}
        Of the Gram matrix: what is prepared now.
    check : {"raise", "status"}
        Whether trouble raises, or is in the operator's ``status()``.
    name : str
        What a message should call it.
    apply_dtype : dtype, optional
        In which the arrays are kept; that of the inputs, or float32 where it is narrower.

    Returns
    -------
    ExampleGramOperator
        An immutable snapshot.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError
        For arrays that do not fit.
    DampingError, NotFiniteError, FactorizationError
        As `kfac_core.linalg.ladder.cholesky_factor` (``check="raise"``).

    Notes
    -----
    ``K^2 (n + m) + K^3`` flops and ``K (K + n + m)`` numbers where S is 1.
    """
    require_damping(damping)
    xp = namespace_of(inputs=inputs, output_grads=output_grads, weights=weights)
    for label, array in (("inputs", inputs), ("output_grads", output_grads)):
        require_floating(xp, array, label)
        if array.ndim != 3 or array.shape[:2] != inputs.shape[:2]:
            raise ShapeError(
                f"Expected `{label}` to have shape (K, S, features), with the K and S of "
                f"`inputs`, got {tuple(array.shape)}."
            )
    require_floating(xp, weights, "weights")
    require_matrix(weights, (inputs.shape[0],), "weights")
    if 0 in inputs.shape or 0 in output_grads.shape:
        raise ShapeError(
            f"Expected at least one gradient of one row, got `inputs` of shape "
            f"{tuple(inputs.shape)}."
        )
    dtype = wide_dtype(xp, inputs.dtype)
    root = xp.sqrt(cast(xp, weights, dtype))[:, None, None]
    x, g = cast(xp, inputs, dtype) * root, cast(xp, output_grads, dtype)
    gram = shifted_matrix(
        gradient_gram(x, g, xp=xp),
        as_scalar(xp, damping, dtype, "damping"),
        apply_dtype=apply_dtype,
    )
    apply = dtype if apply_dtype is None else apply_dtype
    lost = xp.zeros_like(x[0, 0, 0]) if lost is None else lost
    made = ExampleGramOperator(
        cast(xp, x, apply), cast(xp, g, apply), gram, cast(xp, lost, apply)
    )
    return made.prepared(*factorizations, check=check, name=name)
