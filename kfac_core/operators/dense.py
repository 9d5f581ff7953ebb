"""A block that is one full damped matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kfac_core.array import Array, Check, Namespace, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import structure
from kfac_core.linalg.damped import DampedMatrix
from kfac_core.linalg.factorizations import Factorization
from kfac_core.operators.operator import CurvatureOperator, products_without
from kfac_core.operators.spectral import SpectralOperator


@structure(static=("matrix_shape",))
class DenseOperator(CurvatureOperator):
    """The snapshot ``F + lam I`` of a full matrix F; see `CurvatureOperator`.

    F acts on the vector V of shape ``(in(+1), out)`` flattened row-major, ``2 (n m)^2``
    flops.  Damping is exact for every rule, since one factor leaves nothing to split.

    Attributes
    ----------
    block : DampedMatrix
        ``F + lam I``, of as many rows as the vector has numbers.
    matrix_shape : tuple of int
        The shape ``(in(+1), out)`` of the vectors.
    """

    block: DampedMatrix
    matrix_shape: tuple[int, int]

    @property
    def unsupported_products(self) -> Mapping[str, str]:
        """Products that need F, where only factorizations were kept."""
        return products_without(self.block)

    @property
    def vector_shape(self) -> tuple[int, int]:
        """The shape ``(in(+1), out)`` of the vectors."""
        return self.matrix_shape

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """The shape ``(*lead, n, m)`` of one vector for each part of a stack."""
        return (*self.block.lead, *self.matrix_shape)

    @property
    def inner_shape(self) -> tuple[int, ...]:
        """The shape of a flattened vector, one column."""
        return (*self.block.lead, self.block.size, 1)

    @property
    def like(self) -> Array:
        """An array of the operator's library, device and dtype."""
        return self.block.like

    @property
    def factorizations(self) -> frozenset[Factorization]:
        """Factorizations that have been prepared."""
        return self.block.factorizations

    def prepared(
        self,
        *factorizations: Factorization,
        check: Check = "raise",
        name: str = "block",
    ) -> DenseOperator:
        """Return the operator with missing factorizations computed."""
        block = self.block.prepared(*factorizations, check=check, name=name)
        return self if block is self.block else replaced(self, block=block)

    def spectral(
        self, *, check: Check = "raise", name: str = "block"
    ) -> SpectralOperator:
        """Return F in its eigenbasis, without damping; about ``9 (n m)^3`` flops."""
        block = self.block.prepared("eigenbasis", check=check, name=name)
        xp = ns.own_namespace(block.shift)
        return SpectralOperator(
            block.basis,
            None,
            block.eigenvalues(shifted=False)[..., :, None],
            # Zero damping: the caller adds its own.
            xp.zeros_like(self.like[..., 0, 0]),
            block.status(),
            self.matrix_shape,
        )

    def trace(self, *, damped: bool = True) -> Array:
        """Return the trace, 0-d."""
        return self.block.trace(shifted=damped)

    def _logdet(self) -> Array:
        """Return ``log det (F + lam I)``, 0-d."""
        return self.block.logdet()

    def eigenvalues(self, *, damped: bool = True) -> Array:
        """Return the eigenvalues, ascending."""
        return self.block.eigenvalues(shifted=damped)

    def to_dense(self, *, damped: bool = True) -> Array:
        """Return the matrix."""
        return self.block.dense(shifted=damped)

    def status(self) -> Array:
        """Return the flags of the factorizations."""
        return self.block.status()

    def parts(self) -> dict[str, Any]:
        """Return the damped matrix."""
        return {"block": self.block}

    def _multiply(self, V: Array, xp: Namespace, damped: bool) -> Array:
        return self.block.multiply(V, shifted=damped)

    def _multiply_inverse(self, V: Array, xp: Namespace) -> Array:
        return self.block.solve(V)

    def _power(self, V: Array, xp: Namespace, exponent: float) -> Array:
        return self.block.power(V, exponent)

    def _lower_multiply(self, V: Array, xp: Namespace, transpose: bool) -> Array:
        return self.block.lower_multiply(V, transpose=transpose)

    def _lower_solve(self, V: Array, xp: Namespace, transpose: bool) -> Array:
        return self.block.lower_solve(V, transpose=transpose)

    def _sample(self, Z: Array, xp: Namespace) -> Array:
        """Return ``L^-T z``."""
        return self.block.lower_solve(Z, transpose=True)

    def _dampings(self) -> dict[str, Array]:
        return {"damping": self.block.shift}
