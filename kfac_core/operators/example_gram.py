"""The operator of ``sum_k D_k D_k^T + lam I``, by the Gram matrix of the D_k.

Conventions.  Those of `kfac_core.linalg.example_gram`, with the weights of the gradients
in the D_k: on a flattened vector v the block is ``F + lam I`` with ``F = Y^T Y``, and for
any function f

    f(F + lam I) v = f(lam) v + Y^T (f(H + lam) - f(lam)) H^-1 Y v,

where H is the K x K Gram matrix ``Y Y^T``; for the inverse that is Woodbury's formula,

    (F + lam I)^-1 v = (v - Y^T (H + lam I)^-1 Y v) / lam.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.finite import truth_of
from kfac_core.array.namespaces import (
    Scalar,
    any_status,
    as_scalar,
    cast,
    device_of,
    namespace_of,
    own_namespace,
    require_floating,
    require_matrix,
    roundoff_of,
    status_unless,
    wide_dtype,
)
from kfac_core.array.status import Check, Status
from kfac_core.array.structure import replaced, structure
from kfac_core.damping import require_damping
from kfac_core.errors import FactorizationError, ShapeError
from kfac_core.linalg.certificate import RESIDUAL_LIMIT, spectrum_error
from kfac_core.linalg.example_gram import (
    combined_gradients,
    divided_difference,
    gradient_gram,
    gradient_products,
)
from kfac_core.linalg.factorizations import Factorization
from kfac_core.linalg.gram import updated_gram
from kfac_core.linalg.shifted import ShiftedMatrix, shifted_matrix
from kfac_core.operators.operator import CurvatureOperator, raise_for

__all__ = ["NO_TRIANGLE", "ExampleGramOperator", "example_gram_operator"]

_REASON = (
    "a Cholesky factor of few gradients plus identity is dense; multiply_matpower with 0.5 "
    "and -0.5 is a root of the block, and sample draws from its inverse"
)

NO_TRIANGLE: Mapping[str, str] = MappingProxyType(
    {"multiply_cholesky": _REASON, "multiply_cholesky_inverse": _REASON}
)
"""The `unsupported_products` of such an operator."""

_SINGULAR = (
    "A sum of few outer products is singular without damping. Increase `damping`."
)


@structure(static=("definite",))
class ExampleGramOperator(CurvatureOperator):
    """The snapshot ``F_damped = sum_k D_k D_k^T + lam I`` of K examples' gradients.

    On a flattened vector v, with Y the K x n m matrix of the gradients and
    ``H = Y Y^T`` their Gram matrix,

        F_damped v     =  Y^T Y v + lam v,
        F_damped^-1 v  =  (v - Y^T (H + lam I)^-1 Y v) / lam,
        F_damped^p v   =  lam^p v + Y^T ((H + lam)^p - lam^p) H^-1 Y v,

    in ``4 K S n m`` flops each; no D_k is formed.  It has no triangular products.

    Attributes
    ----------
    inputs : array, shape (K, S, n)
        The x, each times the square root of its gradient's weight.
    output_grads : array, shape (K, S, m)
        The g; ``D_k = sum_s x_ks g_ks^T``.
    gram : ShiftedMatrix
        ``H + lam I``.
    truncated_trace : array, 0-d
        The trace of the gradients that were left out; see `kfac_core.factors.window`.
    flags : array of int32, 0-d
        `Status` flags of the damping.
    definite : bool
        Whether lam was checked to be positive, or, with ``check="status"``,
        reported on in the flags.
    """

    inputs: Array
    output_grads: Array
    gram: ShiftedMatrix
    truncated_trace: Array
    flags: Array
    definite: bool = False

    @property
    def unsupported_products(self) -> Mapping[str, str]:
        """Unsupported products, each with the reason."""
        return NO_TRIANGLE

    @property
    def vector_shape(self) -> tuple[int, int]:
        """The shape ``(in(+1), out)`` of the vectors."""
        return int(self.inputs.shape[-1]), int(self.output_grads.shape[-1])

    @property
    def like(self) -> Array:
        """An array of the operator's library, device and dtype."""
        return self.inputs

    @property
    def gradients(self) -> int:
        """K."""
        return int(self.inputs.shape[0])

    @property
    def factorizations(self) -> frozenset[Factorization]:
        """Factorizations that have been prepared."""
        made = self.gram.factorizations
        # The eigenbasis serves the inverse, too.
        return made | {"inverse"} if "eigenbasis" in made and self.definite else made

    def prepared(
        self,
        *factorizations: Factorization,
        check: Check = "raise",
        name: str = "block",
    ) -> ExampleGramOperator:
        """Return the same operator with factorizations of ``H + lam I`` made."""
        made, by_basis = self, False
        wanted = tuple(f for f in factorizations if f not in self.factorizations)
        if factorizations and not self.definite:
            xp, lam = own_namespace(self.inputs), self._lam()
            flag = status_unless(xp, lam > 0, Status.NOT_POSITIVE)
            # Woodbury's formula subtracts two vectors of which 1 - lam/h is equal.
            roundoff = roundoff_of(lam.dtype, xp=xp) * self.gram.trace(shifted=False)
            close = lam * RESIDUAL_LIMIT >= roundoff
            cancels = status_unless(xp, close, Status.INACCURATE)
            flags = int(flag | cancels) if check == "raise" else 0
            if Status.NOT_POSITIVE in Status(flags):
                raise_for(flag, name, remedy=_SINGULAR)
            if check == "status":
                flag = flag | cancels
            by_basis = bool(flags) and "inverse" in factorizations
            if by_basis and self.gradients >= self._numbers():
                # Without directions that no gradient goes, all of the formula cancels.
                raise_for(cancels, name, remedy="Increase `damping`, or take Full.")
            if by_basis:
                wanted = ("eigenbasis", *(f for f in wanted if f != "inverse"))
            made = replaced(self, flags=self.flags | flag, definite=True)
        gram = self.gram.prepared(*wanted, check=check, name=name)
        if gram.inverse is not None and gram.inverse is not self.gram.inverse:
            stable = status_unless(own_namespace(self.inputs), *_is_stable(gram))
            if check == "status":
                made = replaced(made, flags=made.flags | stable)
            elif int(stable):
                by_basis = True
                gram = replaced(gram, inverse=None).prepared("eigenbasis", name=name)
        if by_basis:
            _require_known(gram, name)
        return made if gram is made.gram else replaced(made, gram=gram)

    def trace(self, *, damped: bool = True) -> Array:
        """Return ``tr F + n m lam``, or ``tr F``, 0-d."""
        trace = self.gram.trace(shifted=False)
        return trace + self._numbers() * self._lam() if damped else trace

    def _logdet(self) -> Array:
        """Return ``log det (H + lam I) + (n m - K) log lam``, 0-d."""
        made = self._seen()
        xp = own_namespace(self.inputs)
        rest = (self._numbers() - self.gradients) * xp.log(self._lam())
        return made.gram.logdet() + rest

    def eigenvalues(self, *, damped: bool = True) -> Array:
        """Return those of H and zeros, plus lam, ascending, shape (n m,)."""
        xp, numbers = own_namespace(self.inputs), self._numbers()
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
        xp = own_namespace(self.inputs)
        D = xp.matmul(xp.matrix_transpose(self.inputs), self.output_grads)
        Y = xp.reshape(D, (self.gradients, -1))
        F = updated_gram(None, Y, tail=None, decay=0.0, scale=1.0, xp=xp).full()
        eye = xp.eye(self._numbers(), dtype=F.dtype, device=device_of(F))
        return F + self._lam() * eye if damped else F

    def status(self) -> Array:
        """Return the flags of the Gram matrix and of the damping, 0-d int32."""
        return self.flags | any_status(
            self.gram.status(), xp=own_namespace(self.inputs)
        )

    def parts(self) -> dict[str, Any]:
        """Return the damped Gram matrix."""
        return {"gram": self.gram}

    def _multiply(self, V: Array, xp: Namespace, damped: bool) -> Array:
        product = self._combined(self._products(V, xp), xp)
        return product + self._lam() * V if damped else product

    def _multiply_inverse(self, V: Array, xp: Namespace) -> Array:
        made = self._seen()
        if made.gram.inverse is None and made.gram.basis is not None:
            return made._power(V, xp, -1.0)
        inner = made.gram.solve(self._products(V, xp)[..., None])[..., 0]
        return (V - self._combined(inner, xp)) / self._lam()

    def _power(self, V: Array, xp: Namespace, exponent: float) -> Array:
        made, lam = self._seen(), self._lam()
        h = made.gram.eigenvalues(shifted=False)
        inner = made.gram.to_basis(self._products(V, xp)[..., None])[..., 0]
        quotient, unit = divided_difference(h, lam, exponent, xp=xp)
        scaled = made.gram.from_basis((inner * quotient)[..., None])[..., 0]
        return lam**exponent * V + unit * self._combined(scaled, xp)

    def _sample(self, Z: Array, xp: Namespace) -> Array:
        """Return ``(F + lam I)^-1/2 Z``."""
        return self._power(Z, xp, -0.5)

    def _seen(self) -> ExampleGramOperator:
        """Return itself, its damping positive where that can be seen."""
        if self.definite:
            return self
        xp = own_namespace(self.inputs)
        flag = status_unless(xp, self._lam() > 0, Status.NOT_POSITIVE)
        if truth_of(flag == 0, xp=xp) is False:
            raise_for(flag, "block", remedy=_SINGULAR)
        return self

    def _products(self, V: Array, xp: Namespace) -> Array:
        return gradient_products(self.inputs, self.output_grads, V, xp=xp)

    def _combined(self, c: Array, xp: Namespace) -> Array:
        return combined_gradients(self.inputs, self.output_grads, c, xp=xp)

    def _numbers(self) -> int:
        n, m = self.vector_shape
        return n * m

    def _lam(self) -> Array:
        xp = own_namespace(self.inputs)
        return cast(xp, self.gram.shift, self.inputs.dtype)

    def _dampings(self) -> dict[str, Array]:
        return {"damping": self.gram.shift}


def _is_stable(gram: ShiftedMatrix) -> tuple[Array, Status]:
    """Return whether Woodbury's formula may use the inverse, and the flag if not.

    Its error is ``u kappa^2``, with the condition number of ``H + lam I``; that of the
    formula itself is ``u |H| / lam``.
    """
    assert gram.inverse is not None
    xp = own_namespace(gram.shift)
    matrix, inverse = gram.applied, gram.inverse.matrix
    factor = cast(xp, gram.damped.factor, matrix.array.dtype)
    norm = factor * xp.max(matrix.diagonal())
    condition = norm * xp.max(inverse.diagonal())
    lam = cast(xp, gram.shift, matrix.array.dtype)
    return condition * condition <= 8.0 * (norm / lam), Status.INACCURATE


def _require_known(gram: ShiftedMatrix, name: str) -> None:
    """Raise if roundoff decides on the eigenvalues of ``H + lam I``."""
    xp, lam = own_namespace(gram.shift), gram.shift
    spectrum = gram.spectrum(gram.basis)
    error = spectrum_error([spectrum], scale=xp.ones_like(lam), damping=lam, xp=xp)
    if not bool(error <= RESIDUAL_LIMIT):
        raise FactorizationError(
            f"with damping {float(lam):.1e} the Gram matrix of the gradients is not "
            f"determined: its roundoff changes an eigenvalue by {float(error):.0e} of it "
            f"(limit {RESIDUAL_LIMIT}). Increase `damping`.",
            factor=name,
        )


def example_gram_operator(
    inputs: Array,
    output_grads: Array,
    /,
    *,
    weights: Array,
    damping: Scalar,
    truncated_trace: Array | None = None,
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
        Damping ``lam``, finite and >= 0.
    truncated_trace : array, 0-d, optional
        The trace of what the gradients leave out; zero by default.
    factorizations : tuple of {"inverse", "cholesky", "eigenbasis"}
        Factorizations of the Gram matrix to prepare now.
    check : {"raise", "status"}
        Whether failures raise, or are reported in the operator's ``status()``.
    name : str
        Name used in error messages.
    apply_dtype : dtype, optional
        Dtype of the arrays; that of the inputs, or float32 where it is narrower.

    Returns
    -------
    ExampleGramOperator
        An immutable snapshot.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError
        For arrays of incompatible shape, dtype, library or device.
    DampingError, NotFiniteError, FactorizationError
        As `kfac_core.linalg.damped.cholesky_factor` (``check="raise"``).

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
    if truncated_trace is None:
        truncated_trace = xp.zeros_like(x[0, 0, 0])
    made = ExampleGramOperator(
        cast(xp, x, apply),
        cast(xp, g, apply),
        gram,
        cast(xp, truncated_trace, apply),
        xp.zeros((), dtype=xp.int32, device=device_of(x)),
    )
    return made.prepared(*factorizations, check=check, name=name)
