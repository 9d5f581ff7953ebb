"""The curvature of a chain of layers whose inverse is block-tridiagonal.

Conventions.  A vector of the chain is one column: a matrix V_i of shape ``(in(+1), out)``
for each layer, flattened row-major, one after the other.  ``S A_i (x) G_i`` are the damped
blocks of the layers, S their number of rows in an example; see
`kfac_core.linalg.conditional` for Psi and Sigma.  F is S times the covariance of a Gaussian
chain that runs from the last layer to the first,

    V_l ~ N(0, A_l (x) G_l),        V_i | V_(i+1) ~ N(Psi_i V_(i+1), Sigma_i),

which agrees with ``A_ij (x) G_ij`` for i = j and for neighbors, and has

    F^-1 = (1/S) Xi^T Lambda Xi,    (Xi V)_i = V_i - Psi_i V_(i+1),    Lambda = Sigma^-1.

References
----------
Martens and Grosse (2015), arXiv:1503.05671, section 4.3.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kfac_core import errors
from kfac_core.array import Array, Check, Namespace, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import structure
from kfac_core.linalg.conditional import Link
from kfac_core.linalg.factorizations import Factorization
from kfac_core.linalg.series_chain import WeightedRoots
from kfac_core.operators.kronecker import FactoredKronecker
from kfac_core.operators.operator import CurvatureOperator

_NO_BASIS = "the layers' blocks and those between them share no eigenvectors"
_NO_FACTOR = (
    "a root of the inverse is known and the Cholesky factor is not; take `sample`"
)

TRIDIAGONAL_LACKS: Mapping[str, str] = MappingProxyType(
    {
        "multiply_matpower": _NO_BASIS,
        "multiply_cholesky": _NO_FACTOR,
        "multiply_cholesky_inverse": _NO_FACTOR,
    }
)
"""Unsupported products, each with the reason."""


@structure(static=("names",))
class TridiagonalOperator(CurvatureOperator):
    """The snapshot of the curvature of a chain of layers; see `CurvatureOperator`.

    Products with F and with its inverse take ``4 n m (n + m)`` flops for each layer, and
    as many for each pair of neighbors.

    Attributes
    ----------
    layers : dict of str to FactoredKronecker
        The damped blocks ``S A_i (x) G_i``, by the layer's place, from ``"0"``.
    links : dict of str to Link
        Psi_i, of all layers but the last.
    conditionals : dict of str to WeightedRoots
        Sigma_i; of the last layer its own block.
    scale : array, 0-d
        Scale ``S``.
    fallback : array of int32, 0-d
        `kfac_core.linalg.fallback.Fallback` that was used, the precision of the links.
    names : tuple of str
        Names of the layers, from the first to the last.
    """

    layers: dict[str, FactoredKronecker]
    links: dict[str, Link]
    conditionals: dict[str, WeightedRoots]
    scale: Array
    fallback: Array
    names: tuple[str, ...]

    @property
    def unsupported_products(self) -> Mapping[str, str]:
        """Unsupported products, each with the reason."""
        return TRIDIAGONAL_LACKS

    @property
    def vector_shape(self) -> tuple[int, int]:
        """The shape ``(p, 1)`` of the vectors."""
        return sum(n * m for n, m in self._shapes().values()), 1

    @property
    def like(self) -> Array:
        """An array of the operator's library, device and dtype."""
        return self.scale

    @property
    def factorizations(self) -> frozenset[Factorization]:
        """Factorizations that have been prepared."""
        return frozenset({"inverse", "cholesky"})

    def prepared(
        self,
        *factorizations: Factorization,
        check: Check = "raise",
        name: str = "block",
    ) -> TridiagonalOperator:
        """Return the operator, which is always complete."""
        return self

    def trace(self, *, damped: bool = True) -> Array:
        """Return the trace of F, 0-d: the sum over the layers' blocks."""
        _require_damped(damped)
        total = ns.own_namespace(self.scale).zeros_like(self.scale)
        for block in self.layers.values():
            total = total + block.trace()
        return total

    def _logdet(self) -> Array:
        """Return ``log det F``, 0-d: the sum over the blocks, reduced by the links."""
        xp = ns.own_namespace(self.scale)
        total = xp.zeros_like(self.scale)
        for place in self._places:
            reduction = self.conditionals[place].logdet(xp=xp)
            total = total + self.layers[place].logdet() + reduction
        return total

    def eigenvalues(self, *, damped: bool = True) -> Array:
        """Raise `UnsupportedError`: they are not products of eigenvalues of factors."""
        raise errors.UnsupportedError(
            f"TridiagonalOperator has no eigenvalues: {_NO_BASIS}."
        )

    def to_dense(self, *, damped: bool = True) -> Array:
        """Return F as one matrix, for tests."""
        _require_damped(damped)
        xp = ns.own_namespace(self.scale)
        column = self.conditionals[self._places[-1]].dense(xp=xp)
        # From the last layer to the first, each row of blocks is conditional on the next.
        rows = [[column]]
        for place, _ in reversed(self._pairs()):
            psi = self.links[place].dense()
            above = [xp.matmul(psi, block) for block in rows[0]]
            conditional = self.conditionals[place].dense(xp=xp)
            conditional = conditional + xp.matmul(above[0], xp.matrix_transpose(psi))
            rows = [[xp.matrix_transpose(above[j]), *row] for j, row in enumerate(rows)]
            rows = [[conditional, *above], *rows]
        dense = xp.concat([xp.concat(row, axis=1) for row in rows], axis=0)
        # Products of Psi leave the two triangles different by roundoff.
        return 0.5 * self.scale * (dense + xp.matrix_transpose(dense))

    def status(self) -> Array:
        """Return the flags of all parts, 0-d int32."""
        xp = ns.own_namespace(self.scale)
        status = xp.astype(xp.zeros_like(self.scale), xp.int32)
        for place in self._places:
            flags = self.conditionals[place].flags | self.layers[place].status()
            status = status | flags
        return status

    def flagged(self, flags: Array, /) -> TridiagonalOperator:
        """Return the operator with more `Status` flags."""
        last = self._places[-1]
        block = self.conditionals[last]
        block = replaced(block, flags=block.flags | flags)
        return replaced(self, conditionals={**self.conditionals, last: block})

    def parts(self) -> dict[str, Any]:
        """Return the damped factors of the layers, by names such as ``"fc1/input"``."""
        return {
            f"{name}/{side}": part
            for name, place in zip(self.names, self._places, strict=True)
            for side, part in self.layers[place].parts().items()
        }

    def _multiply(self, V: Array, xp: Namespace, damped: bool) -> Array:
        _require_damped(damped)
        v = self._split(V, xp)
        # F = Xi^-1 Lambda^-1 Xi^-T: a forward sweep, a diagonal, and a backward sweep.
        for place, following in self._pairs():
            guess = self.links[place].multiply(v[place], transpose=True, xp=xp)
            v[following] = v[following] + guess
        v = {p: self.conditionals[p].multiply(V, xp=xp) for p, V in v.items()}
        for place, following in reversed(self._pairs()):
            guess = self.links[place].multiply(v[following], transpose=False, xp=xp)
            v[place] = v[place] + guess
        return self._joined(v, self.scale)

    def _multiply_inverse(self, V: Array, xp: Namespace) -> Array:
        # F^-1 = Xi^T Lambda Xi / S (Martens and Grosse, section 4.3).
        v = self._split(V, xp)
        for place, following in self._pairs():
            guess = self.links[place].multiply(v[following], transpose=False, xp=xp)
            v[place] = v[place] - guess
        v = {p: self.conditionals[p].solve(V, xp=xp) for p, V in v.items()}
        return self._joined(self._spread(v, xp), 1.0 / self.scale)

    def _power(self, V: Array, xp: Namespace, exponent: float) -> Array:
        raise NotImplementedError

    def _sample(self, Z: Array, xp: Namespace) -> Array:
        z = self._split(Z, xp)
        z = {p: self.conditionals[p].solve_root(V, xp=xp) for p, V in z.items()}
        return self._joined(self._spread(z, xp), 1.0 / xp.sqrt(self.scale))

    def _spread(self, v: dict[str, Array], xp: Namespace) -> dict[str, Array]:
        """Return ``Xi^T v``."""
        spread = dict(v)
        for place, following in self._pairs():
            guess = self.links[place].multiply(v[place], transpose=True, xp=xp)
            spread[following] = v[following] - guess
        return spread

    @property
    def _places(self) -> list[str]:
        """The layers' places, in order."""
        return [f"{i}" for i in range(len(self.names))]

    def _shapes(self) -> dict[str, tuple[int, int]]:
        """Return the shapes of the layers' matrices."""
        return {place: self.layers[place].vector_shape for place in self._places}

    def _joined(self, v: dict[str, Array], factor: Array) -> Array:
        """Return matrices of the layers as one vector, multiplied by a number."""
        xp = ns.own_namespace(factor)
        flat = [xp.reshape(V, (*V.shape[:-2], -1, 1)) for V in v.values()]
        return factor * xp.concat(flat, axis=-2)

    def _split(self, V: Array, xp: Namespace) -> dict[str, Array]:
        """Return a vector, or many, as matrices of the layers."""
        parts, start = {}, 0
        for place, (n, m) in self._shapes().items():
            part = V[..., start : start + n * m, :]
            parts[place] = xp.reshape(part, (*V.shape[:-2], n, m))
            start += n * m
        return parts

    def _pairs(self) -> list[tuple[str, str]]:
        """Return the places of neighbors, from the first layer on."""
        return list(itertools.pairwise(self._places))


def _require_damped(damped: bool) -> None:
    if not damped:
        raise errors.UnsupportedError(
            "A chain is damped in the moments of its layers, and its operator does not "
            "hold the curvature without damping."
        )
