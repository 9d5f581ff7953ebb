"""The Kronecker product with factored damping, ``S (A + a I) (x) (G + b I)``."""

from __future__ import annotations

from typing import Any

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.namespaces import (
    own_namespace,
)
from kfac_core.array.status import Check
from kfac_core.array.structure import replaced, structure
from kfac_core.factors.factor import Shifted
from kfac_core.linalg.groups import dense_of_groups
from kfac_core.linalg.shifted import Factorization, ShiftedMatrix, Solving
from kfac_core.linalg.shifted_diagonal import ShiftedDiagonal
from kfac_core.operators.operator import CurvatureOperator
from kfac_core.operators.parts import Bases, eigenbasis_of
from kfac_core.operators.spectral import SpectralOperator

__all__ = ["FactoredKronecker"]


@structure()
class FactoredKronecker(CurvatureOperator):
    """The operator ``F_damped = S (A + a I) (x) (G + b I)``: K-FAC, factored damping.

    A is the input factor and stands left, G is the output factor, S is the number of
    shared positions; a and b are the shifts of `kfac_core.damping.factored_shifts`.  On a
    vector V of shape ``(in(+1), out)``

        F_damped v     =  S (A + a I) V (G + b I),
        F_damped^-1 v  =  (A + a I)^-1 V (G + b I)^-1 / S,

    and likewise for every power, and for the Cholesky factor ``S^1/2 L_A (x) L_G``.
    Each takes ``2 n m (n + m)`` flops.  If the factors are stacks, the block consists of
    independent groups, each with its own columns of V.

    Attributes
    ----------
    input, output : ShiftedMatrix, ShiftedDiagonal or ShiftedRankOne
        ``A + a I`` and ``G + b I``.
    scale : array, 0-d or one a group
        Scale ``S``.

    References
    ----------
    Martens and Grosse (2015), arXiv:1503.05671, section 4.2.
    """

    input: Shifted
    output: Shifted
    scale: Array

    @property
    def shape(self) -> tuple[int, int]:
        """The shape ``(in(+1), out)`` of the vectors."""
        groups = self.input.lead[0] if self.input.lead else 1
        return self.input.size, groups * self.output.size

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """The shape ``(*lead, n, m)`` of one vector for each part of a stack."""
        return (*self.input.lead, self.input.size, self.output.size)

    @property
    def like(self) -> Array:
        """An array of the operator's library, device and dtype."""
        return self.scale

    @property
    def factorizations(self) -> frozenset[Factorization]:
        """Factorizations that have been prepared."""
        return self.input.factorizations & self.output.factorizations

    def prepared(
        self,
        *factorizations: Factorization,
        check: Check = "raise",
        name: str = "block",
    ) -> FactoredKronecker:
        """Return the operator with missing factorizations computed."""
        A = self.input.prepared(*factorizations, check=check, name=f"{name}/input")
        G = self.output.prepared(*factorizations, check=check, name=f"{name}/output")
        # In every step but the first nothing is missing.
        if A is self.input and G is self.output:
            return self
        return replaced(self, input=A, output=G)

    def solved_by(self, solving: Solving, /) -> FactoredKronecker:
        """Return the operator with another method of solving with its full factors."""
        sides: dict[str, Any] = {"input": self.input, "output": self.output}
        for side, part in sides.items():
            if isinstance(part, ShiftedMatrix):
                sides[side] = replaced(part, solving=solving)
        return replaced(self, **sides)

    def at_rows(self, indices: Array, /) -> CurvatureOperator:
        """Return the operator on the rows of some ids, of a diagonal input factor."""
        if not isinstance(self.input, ShiftedDiagonal):
            return super().at_rows(indices)
        return replaced(self, input=self.input.at(indices))

    def spectral(
        self, *, check: Check = "raise", name: str = "block"
    ) -> SpectralOperator:
        """Return ``S A (x) G`` in its eigenbasis, without damping.

        About ``9 (n^3 + m^3)`` flops where the eigenbases were not prepared.
        """
        made = self.prepared("eigenbasis", check=check, name=name)
        xp = own_namespace(self.scale)
        bases = {side: eigenbasis_of(part) for side, part in made.parts().items()}
        return SpectralOperator(
            bases["input"],
            bases["output"],
            self.spectrum_of(bases),
            xp.zeros_like(self.scale),
            made.status(),
            self.shape,
        )

    def spectrum_of(self, bases: Bases, /) -> Array:
        """Return ``S a g^T``, the eigenvalues without damping, of the factors' bases."""
        a = self.input.spectrum(bases["input"]).eigenvalues
        g = self.output.spectrum(bases["output"]).eigenvalues
        return self._scale() * a[..., :, None] * g[..., None, :]

    def trace(self, *, damped: bool = True) -> Array:
        """Return ``S tr(A + a I) tr(G + b I)``, or ``S tr(A) tr(G)``."""
        traces = self.input.trace(shifted=damped) * self.output.trace(shifted=damped)
        return own_namespace(self.scale).sum(self.scale * traces)

    def logdet(self) -> Array:
        """Return ``m log det(A + a I) + n log det(G + b I) + n m log S``."""
        xp = own_namespace(self.scale)
        n, m = self.input.size, self.output.size
        logdets = m * self.input.logdet() + n * self.output.logdet()
        return xp.sum(logdets + n * m * xp.log(self.scale))

    def eigenvalues(self, *, damped: bool = True) -> Array:
        """Return all products of the factors' eigenvalues, times S, ascending."""
        xp = own_namespace(self.scale)
        a = self.input.eigenvalues(shifted=damped)
        g = self.output.eigenvalues(shifted=damped)
        products = self._scale() * a[..., :, None] * g[..., None, :]
        return xp.sort(xp.reshape(products, (-1,)))

    def to_dense(self, *, damped: bool = True) -> Array:
        """Return ``S kron(A + a I, G + b I)``, or ``S kron(A, G)``."""
        A = self.input.dense(shifted=damped)
        G = self.output.dense(shifted=damped)
        return dense_of_groups(self._scale() * A, G, xp=own_namespace(A))

    def status(self) -> Array:
        """Return the flags of both factors."""
        return self.input.status() | self.output.status()

    def parts(self) -> dict[str, Any]:
        """Return the two damped factors."""
        return {"input": self.input, "output": self.output}

    def _multiply(self, V: Array, xp: Namespace, damped: bool) -> Array:
        left = self.input.multiply(V, shifted=damped)
        both = self.output.multiply(xp.matrix_transpose(left), shifted=damped)
        return self._scale() * xp.matrix_transpose(both)

    def _multiply_inverse(self, V: Array, xp: Namespace) -> Array:
        left = self.input.solve(V)
        both = self.output.solve_right(left, overwrite=True)
        return both / self.scale[..., None, None]

    def _power(self, V: Array, xp: Namespace, exponent: float) -> Array:
        left = self.input.power(V, exponent)
        both = self.output.power(xp.matrix_transpose(left), exponent)
        return self._scale() ** exponent * xp.matrix_transpose(both)

    def _lower_multiply(self, V: Array, xp: Namespace, transpose: bool) -> Array:
        """Return ``S^1/2 L_A V L_G^T``, or ``S^1/2 L_A^T V L_G``."""
        left = self.input.lower_multiply(V, transpose=transpose)
        both = self.output.lower_multiply(
            xp.matrix_transpose(left), transpose=transpose
        )
        return xp.sqrt(self._scale()) * xp.matrix_transpose(both)

    def _lower_solve(self, V: Array, xp: Namespace, transpose: bool) -> Array:
        """Return ``L_A^-1 V L_G^-T / S^1/2``, or ``L_A^-T V L_G^-1 / S^1/2``."""
        left = self.input.lower_solve(V, transpose=transpose)
        both = self.output.lower_solve(xp.matrix_transpose(left), transpose=transpose)
        return xp.matrix_transpose(both) / xp.sqrt(self._scale())

    def _sample(self, Z: Array, xp: Namespace) -> Array:
        """Return ``L_A^-T Z L_G^-1 / S^1/2``.

        References
        ----------
        Ritter, Botev and Barber (2018), "A Scalable Laplace Approximation for Neural
        Networks", equation 9.
        """
        return self._lower_solve(Z, xp, True)

    def _scale(self) -> Array:
        """Return S with axes for the vectors' rows and columns."""
        return self.scale[..., None, None]

    def _dampings(self) -> dict[str, Array]:
        return {
            "input_damping": self.input.shift,
            "output_damping": self.output.shift,
        }
