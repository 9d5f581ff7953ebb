"""A layer's weight and bias as two independent blocks, on one vector.

Conventions.  The vector V of shape ``(n + 1, m)`` has the bias in its last row.  The block
is that of the weight on the first n rows and that of the bias on the last, with nothing
between them, so that every function of it is the function of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kfac_core.array import Array, Check, Namespace, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import structure
from kfac_core.linalg.factorizations import Eigendecomposition, Factorization, Solving
from kfac_core.operators.operator import CurvatureOperator
from kfac_core.operators.spectral import SpectralOperator

__all__ = ["SeparateBias"]


@structure()
class SeparateBias(CurvatureOperator):
    """The operator of a weight and a bias without the curvature between them.

    Attributes
    ----------
    weight : CurvatureOperator
        Block of the weight, for vectors of shape ``(n, m)``.
    bias : CurvatureOperator
        Block of the bias, for vectors of shape ``(1, m)``, damped by itself.
    """

    weight: CurvatureOperator
    bias: CurvatureOperator

    @property
    def unsupported_products(self) -> Mapping[str, str]:
        """Products that one of the two lacks."""
        return {**self.weight.unsupported_products, **self.bias.unsupported_products}

    @property
    def vector_shape(self) -> tuple[int, int]:
        """The shape ``(n + 1, m)`` of the vectors."""
        n, m = self.weight.vector_shape
        return n + 1, m

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """The shape ``(*lead, n + 1, m)`` of one vector for each part of a stack."""
        *lead, n, m = self.weight.stack_shape
        return (*lead, n + 1, m)

    @property
    def like(self) -> Array:
        """An array of the operator's library, device and dtype."""
        return self.weight.like

    @property
    def factorizations(self) -> frozenset[Factorization]:
        """Factorizations that have been prepared."""
        return self.weight.factorizations & self.bias.factorizations

    def prepared(
        self,
        *factorizations: Factorization,
        check: Check = "raise",
        name: str = "block",
    ) -> SeparateBias:
        """Return the operator with missing factorizations computed."""
        weight = self.weight.prepared(*factorizations, check=check, name=name)
        bias = self.bias.prepared(*factorizations, check=check, name=f"{name}/bias")
        if weight is self.weight and bias is self.bias:
            return self
        return replaced(self, weight=weight, bias=bias)

    def solved_by(self, solving: Solving, /) -> SeparateBias:
        """Return the operator with another method of solving with its full factors."""
        weight, bias = self.weight.solved_by(solving), self.bias.solved_by(solving)
        return replaced(self, weight=weight, bias=bias)

    def spectral(
        self, *, check: Check = "raise", name: str = "block"
    ) -> SpectralOperator:
        """Return F in its eigenbasis, without damping; that of the bias is its own row."""
        weight: SpectralOperator = self.weight.spectral(check=check, name=name)
        bias: SpectralOperator = self.bias.spectral(check=check, name=f"{name}/bias")
        xp = ns.own_namespace(self.like)
        # The bias's output factor is a multiple of the weight's, in the same order.
        spectrum = xp.concat([weight._values(), bias._values()], axis=-2)
        return SpectralOperator(
            None if weight.input is None else _with_bias(weight.input, xp),
            weight.output,
            spectrum,
            weight.damping,
            weight.status() | bias.status(),
            self.vector_shape,
        )

    def trace(self, *, damped: bool = True) -> Array:
        """Return the sum of both traces, 0-d."""
        return self.weight.trace(damped=damped) + self.bias.trace(damped=damped)

    def eigenvalues(self, *, damped: bool = True) -> Array:
        """Return the eigenvalues of both, ascending."""
        xp = ns.own_namespace(self.like)
        both = [part.eigenvalues(damped=damped) for part in (self.weight, self.bias)]
        return xp.sort(xp.concat(both))

    def frobenius_norm(self, *, damped: bool = True) -> Array:
        """Return the root of the sum of both squared norms, 0-d."""
        xp = ns.own_namespace(self.like)
        both = [part.frobenius_norm(damped=damped) for part in (self.weight, self.bias)]
        return xp.linalg.vector_norm(xp.stack(both))

    def to_dense(self, *, damped: bool = True) -> Array:
        """Return both blocks on the diagonal of one matrix."""
        xp = ns.own_namespace(self.like)
        W = self.weight.to_dense(damped=damped)
        b = self.bias.to_dense(damped=damped)
        between = xp.zeros(
            (W.shape[0], b.shape[0]), dtype=W.dtype, device=ns.device_of(W)
        )
        upper = xp.concat([W, between], axis=1)
        lower = xp.concat([xp.matrix_transpose(between), b], axis=1)
        return xp.concat([upper, lower], axis=0)

    def status(self) -> Array:
        """Return the flags of both."""
        return self.weight.status() | self.bias.status()

    def parts(self) -> dict[str, Any]:
        """Return the damped factors of the weight, and of the bias its output factor."""
        return {**self.weight.parts(), "bias/output": self.bias.parts()["output"]}

    def _logdet(self) -> Array:
        return self.weight.logdet() + self.bias.logdet()

    def _undamped_logdet(self) -> Array:
        return self.weight.logdet(damped=False) + self.bias.logdet(damped=False)

    def _multiply(self, V: Array, xp: Namespace, damped: bool) -> Array:
        return _joined(
            self.weight._multiply(V[..., :-1, :], xp, damped),
            self.bias._multiply(V[..., -1:, :], xp, damped),
            xp,
        )

    def _multiply_inverse(self, V: Array, xp: Namespace) -> Array:
        return _joined(
            self.weight._multiply_inverse(V[..., :-1, :], xp),
            self.bias._multiply_inverse(V[..., -1:, :], xp),
            xp,
        )

    def _power(self, V: Array, xp: Namespace, exponent: float) -> Array:
        return _joined(
            self.weight._power(V[..., :-1, :], xp, exponent),
            self.bias._power(V[..., -1:, :], xp, exponent),
            xp,
        )

    def _lower_multiply(self, V: Array, xp: Namespace, transpose: bool) -> Array:
        return _joined(
            self.weight._lower_multiply(V[..., :-1, :], xp, transpose),
            self.bias._lower_multiply(V[..., -1:, :], xp, transpose),
            xp,
        )

    def _lower_solve(self, V: Array, xp: Namespace, transpose: bool) -> Array:
        return _joined(
            self.weight._lower_solve(V[..., :-1, :], xp, transpose),
            self.bias._lower_solve(V[..., -1:, :], xp, transpose),
            xp,
        )

    def _sample(self, Z: Array, xp: Namespace) -> Array:
        return _joined(
            self.weight._sample(Z[..., :-1, :], xp),
            self.bias._sample(Z[..., -1:, :], xp),
            xp,
        )

    def _dampings(self) -> dict[str, Array]:
        own = {f"bias_{key}": x for key, x in self.bias._dampings().items()}
        return {**self.weight._dampings(), **own}


def _joined(weight: Array, bias: Array, xp: Namespace) -> Array:
    return xp.concat([weight, bias], axis=-2)


def _with_bias(basis: Eigendecomposition, xp: Namespace) -> Eigendecomposition:
    """Return a basis with the coordinate of the bias as a further column."""
    Q, w = basis.eigenvectors, basis.eigenvalues
    column = xp.zeros_like(Q[..., :, :1])
    row = xp.concat(
        [xp.zeros_like(Q[..., :1, :]), xp.ones_like(Q[..., :1, :1])], axis=-1
    )
    Q = xp.concat([xp.concat([Q, column], axis=-1), row], axis=-2)
    w = xp.concat([w, xp.ones_like(w[..., :1])], axis=-1)
    return replaced(basis, eigenvectors=Q, eigenvalues=w)
