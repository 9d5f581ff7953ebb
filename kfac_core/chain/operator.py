"""The curvature of a chain of layers whose inverse is block-tridiagonal.

Conventions.  A vector of the chain is one matrix V_i of shape ``(in(+1), out)`` for each
layer, in a dict by name.  ``S A_i (x) G_i`` are the damped blocks of the layers, S their
number of rows in an example; see `kfac_core.chain.conditional` for Psi and Sigma.  F is S
times the covariance of a Gaussian chain that runs from the last layer to the first,

    V_l ~ N(0, A_l (x) G_l),        V_i | V_(i+1) ~ N(Psi_i V_(i+1), Sigma_i),

which agrees with ``A_ij (x) G_ij`` for i = j and for neighbors, and has

    F^-1 = (1/S) Xi^T Lambda Xi,    (Xi V)_i = V_i - Psi_i V_(i+1),    Lambda = Sigma^-1.

The dense forms have the layers one after the other, each flattened row-major.

References
----------
Martens and Grosse (2015), arXiv:1503.05671, section 4.3.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import array_api_compat

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.namespaces import device_of
from kfac_core.array.structure import structure
from kfac_core.chain.conditional import Conditional, Link
from kfac_core.errors import UnknownBlockError
from kfac_core.operators.kronecker import FactoredKronecker
from kfac_core.operators.operator import entering, leaving

__all__ = ["TridiagonalOperator"]

Vectors = dict[str, Array]


@structure(static=("names",))
class TridiagonalOperator:
    """A snapshot of the curvature of the module's text.

    Attributes
    ----------
    layers : dict of str to FactoredKronecker
        The damped blocks ``S A_i (x) G_i``.
    links : dict of str to Link
        Psi_i, of all layers but the last.
    conditionals : dict of str to Conditional
        Sigma_i; of the last layer its own block.
    scale : array, 0-d
        S.
    fallback : array of int32, 0-d
        Of `kfac_core.linalg.factorizations.Fallback`: in which precision it was made.
    names : tuple of str
        The layers from the first to the last.
    """

    layers: dict[str, FactoredKronecker]
    links: dict[str, Link]
    conditionals: dict[str, Conditional]
    scale: Array
    fallback: Array
    names: tuple[str, ...]

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """The shapes ``(in(+1), out)`` of the vectors, by layer."""
        return {name: self.layers[name].shape for name in self.names}

    def multiply(self, vectors: Mapping[str, Array], /) -> Vectors:
        """Return ``F v``.

        Parameters
        ----------
        vectors : mapping of str to array
            One matrix for each layer, of the shapes that `shapes` says; none is left out,
            since all layers hang together.

        Returns
        -------
        dict of str to array
            Of the dtypes of the vectors.

        Raises
        ------
        UnknownBlockError
            For other names than those of the layers.
        ShapeError, DtypeError, MixedArraysError
            For vectors that do not fit.

        Notes
        -----
        ``4 n m (n + m)`` flops for each layer, and as many for each pair.
        """
        v, xp = self._enter(vectors, "vectors")
        # F = Xi^-1 Lambda^-1 Xi^-T: forwards, on the spot, and backwards.
        for name, following in self._pairs():
            guess = self.links[name].multiply(v[name], transpose=True, xp=xp)
            v[following] = v[following] + guess
        v = {name: self.conditionals[name].multiply(v[name], xp=xp) for name in v}
        for name, following in reversed(self._pairs()):
            guess = self.links[name].multiply(v[following], transpose=False, xp=xp)
            v[name] = v[name] + guess
        return self._leave(v, self.scale, vectors)

    def multiply_inverse(self, vectors: Mapping[str, Array], /) -> Vectors:
        """Return ``F^-1 v``; as `multiply`."""
        v, xp = self._enter(vectors, "vectors")
        for name, following in self._pairs():
            guess = self.links[name].multiply(v[following], transpose=False, xp=xp)
            v[name] = v[name] - guess
        v = {name: self.conditionals[name].solve(v[name], xp=xp) for name in v}
        return self._leave(self._spread(v, xp), 1.0 / self.scale, vectors)

    def sample(self, noise: Mapping[str, Array], /) -> Vectors:
        """Turn white noise into noise of covariance ``F^-1``; as `multiply`."""
        z, xp = self._enter(noise, "noise")
        z = {name: self.conditionals[name].solve_root(z[name], xp=xp) for name in z}
        return self._leave(self._spread(z, xp), 1.0 / xp.sqrt(self.scale), noise)

    def logdet(self) -> Array:
        """Return ``log det F``, 0-d: that of the layers' blocks, less what links take."""
        xp = self._xp()
        total = xp.zeros_like(self.scale)
        for name in self.names:
            reduction = self.conditionals[name].reduction(xp=xp)
            total = total + self.layers[name].logdet() + reduction
        return total

    def to_dense(self) -> Array:
        """Return F as one matrix, for tests."""
        xp = self._xp()
        column = self.conditionals[self.names[-1]].dense(xp=xp, inverse=False)
        rows = [[column]]
        for name, _ in reversed(self._pairs()):
            psi = self.links[name].dense()
            above = [xp.matmul(psi, block) for block in rows[0]]
            own = self.conditionals[name].dense(xp=xp, inverse=False)
            own = own + xp.matmul(above[0], xp.matrix_transpose(psi))
            rows = [[xp.matrix_transpose(above[j]), *row] for j, row in enumerate(rows)]
            rows = [[own, *above], *rows]
        dense = xp.concat([xp.concat(row, axis=1) for row in rows], axis=0)
        return 0.5 * self.scale * (dense + xp.matrix_transpose(dense))

    def inverse_to_dense(self) -> Array:
        """Return ``F^-1`` as one matrix, for tests: zero beyond neighboring layers."""
        xp = self._xp()
        sizes = {name: n * m for name, (n, m) in self.shapes.items()}
        inverses = {
            name: part.dense(xp=xp, inverse=True)
            for name, part in self.conditionals.items()
        }
        rows = []
        for i, name in enumerate(self.names):
            row = [
                xp.zeros(
                    (sizes[name], sizes[other]),
                    dtype=self.scale.dtype,
                    device=device_of(self.scale),
                )
                for other in self.names
            ]
            row[i] = inverses[name]
            if i > 0:
                psi, previous = self._link(i - 1), inverses[self.names[i - 1]]
                left = -xp.matmul(xp.matrix_transpose(psi), previous)
                row[i - 1], row[i] = left, row[i] - xp.matmul(left, psi)
            if i < len(self.names) - 1:
                row[i + 1] = -xp.matmul(inverses[name], self._link(i))
            rows.append(xp.concat(row, axis=1))
        dense = xp.concat(rows, axis=0)
        return 0.5 * (dense + xp.matrix_transpose(dense)) / self.scale

    def status(self) -> Array:
        """Return the flags of all parts, 0-d int32."""
        xp = self._xp()
        status = xp.astype(xp.zeros_like(self.scale), xp.int32)
        for name in self.names:
            flags = self.conditionals[name].flags | self.layers[name].status()
            status = status | flags
        return status

    def _spread(self, v: Vectors, xp: Namespace) -> Vectors:
        """Return ``Xi^T v``."""
        spread = dict(v)
        for name, following in self._pairs():
            guess = self.links[name].multiply(v[name], transpose=True, xp=xp)
            spread[following] = v[following] - guess
        return spread

    def _pairs(self) -> list[tuple[str, str]]:
        """Return the names of neighbors, from the first layer on."""
        return list(itertools.pairwise(self.names))

    def _link(self, i: int) -> Array:
        return self.links[self.names[i]].dense()

    def _enter(
        self, vectors: Mapping[str, Array], argument: str
    ) -> tuple[Vectors, Namespace]:
        if set(vectors) != set(self.names):
            raise UnknownBlockError(
                f"Expected `{argument}` of the layers {list(self.names)}, got "
                f"{sorted(vectors)}."
            )
        entered = {}
        for name, shape in self.shapes.items():
            entered[name], _ = entering(
                vectors[name],
                shape,
                self.scale,
                name=f"{argument}[{name!r}]",
            )
        return entered, self._xp()

    def _leave(
        self, results: Vectors, factor: Array, vectors: Mapping[str, Array]
    ) -> Vectors:
        return {
            name: leaving(results[name] * factor, vectors[name]) for name in self.names
        }

    def _xp(self) -> Namespace:
        return array_api_compat.array_namespace(self.scale)
