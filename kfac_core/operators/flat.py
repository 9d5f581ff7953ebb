"""The operator of a block that is one damped matrix, full or diagonal.

Conventions.  The matrix acts on the vector V of shape ``(in(+1), out)`` flattened
row-major; damping is exact, ``F + lam I``, whatever the rule, since there is nothing to
split it over.
"""

from __future__ import annotations

import array_api_compat

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.namespaces import device_of
from kfac_core.array.status import Check
from kfac_core.array.structure import replaced, structure
from kfac_core.factors.factor import Shifted
from kfac_core.linalg.shifted import Factorization
from kfac_core.operators.operator import entering, leaving
from kfac_core.operators.sparse_rows import diagonal_at

__all__ = ["FlatOperator"]


@structure(static=("shape",))
class FlatOperator:
    """A snapshot of ``F + lam I``; see `CurvatureOperator`.

    Attributes
    ----------
    block : ShiftedMatrix or ShiftedDiagonal
        ``F + lam I``, of as many rows as the vector has numbers.
    shape : tuple of int
        The shape ``(in(+1), out)`` of the vectors.
    """

    block: Shifted
    shape: tuple[int, int]

    @property
    def factorizations(self) -> frozenset[Factorization]:
        """What has been prepared."""
        return self.block.factorizations

    def prepared(
        self,
        *factorizations: Factorization,
        check: Check = "raise",
        name: str = "block",
    ) -> FlatOperator:
        """Return the same operator with factorizations made that were missing."""
        block = self.block.prepared(*factorizations, check=check, name=name)
        return replaced(self, block=block)

    def at_rows(self, indices: Array, /) -> FlatOperator:
        """Return the operator on the rows of some ids; see `FactoredKronecker.at_rows`."""
        xp, m = self._xp(), self.shape[1]
        every = xp.arange(m, dtype=indices.dtype, device=device_of(indices))
        flat = xp.reshape(indices[:, None] * m + every, (-1,))
        block = diagonal_at(self.block, flat)
        return replaced(self, block=block, shape=(int(indices.shape[0]), m))

    def multiply(self, vector: Array, /, *, damped: bool = True) -> Array:
        """Return ``(F + lam I) v``, or ``F v``."""
        v, xp = self._enter(vector, "vector")
        return self._leave(self.block.multiply(v, shifted=damped), vector, xp)

    def multiply_inverse(self, vector: Array, /) -> Array:
        """Return ``(F + lam I)^-1 v``."""
        v, xp = self._enter(vector, "vector")
        return self._leave(self.block.solve(v), vector, xp)

    def multiply_matpower(self, vector: Array, exponent: float, /) -> Array:
        """Return ``(F + lam I)^p v``; 1 and -1 are the two functions above."""
        if exponent == 1:
            return self.multiply(vector)
        if exponent == -1:
            return self.multiply_inverse(vector)
        v, xp = self._enter(vector, "vector")
        return self._leave(self.block.power(v, exponent), vector, xp)

    def multiply_cholesky(self, vector: Array, /, *, transpose: bool = False) -> Array:
        """Return ``L v`` or ``L^T v``."""
        v, xp = self._enter(vector, "vector")
        return self._leave(
            self.block.lower_multiply(v, transpose=transpose), vector, xp
        )

    def multiply_cholesky_inverse(
        self, vector: Array, /, *, transpose: bool = False
    ) -> Array:
        """Return ``L^-1 v`` or ``L^-T v``."""
        v, xp = self._enter(vector, "vector")
        return self._leave(self.block.lower_solve(v, transpose=transpose), vector, xp)

    def sample(self, noise: Array, /) -> Array:
        """Turn white noise z into ``L^-T z``, of covariance ``(F + lam I)^-1``."""
        z, xp = self._enter(noise, "noise")
        return self._leave(self.block.lower_solve(z, transpose=True), noise, xp)

    def trace(self, *, damped: bool = True) -> Array:
        """Return the trace, 0-d."""
        return self.block.trace(shifted=damped)

    def logdet(self) -> Array:
        """Return ``log det (F + lam I)``, 0-d."""
        return self.block.logdet()

    def eigenvalues(self, *, damped: bool = True) -> Array:
        """Return the eigenvalues, ascending."""
        return self._xp().sort(self.block.eigenvalues(shifted=damped))

    def to_dense(self, *, damped: bool = True) -> Array:
        """Return the matrix."""
        return self.block.dense(shifted=damped)

    def status(self) -> Array:
        """Return the flags of the factorizations."""
        return self.block.status()

    def _enter(self, vector: Array, name: str) -> tuple[Array, Namespace]:
        V, xp = entering(
            vector, self.shape, self.block.dtype, operator=self.block.shift, name=name
        )
        return xp.reshape(V, (-1, 1)), xp

    def _leave(self, v: Array, vector: Array, xp: Namespace) -> Array:
        return leaving(xp.reshape(v, self.shape), vector)

    def _xp(self) -> Namespace:
        return array_api_compat.array_namespace(self.block.shift)
