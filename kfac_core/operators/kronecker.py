"""The Kronecker operator with factored damping, ``S (A + a I) (x) (G + b I)``.

Conventions.  ``A`` is the input factor and stands left, ``G`` the output factor, S a
positive number (the shared positions); a and b are the shifts that
`kfac_core.damping.factored_shifts` made from the damping.  On a vector V of shape
``(in(+1), out)`` the operator is ``S (A + a I) V (G + b I)``.  Every function of it is
the same function of the two factors, and of S.  Where the factors are stacks, the block
is made of independent groups, each with columns of V of its own.
"""

from __future__ import annotations

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.finite import plain_number
from kfac_core.array.namespaces import own_namespace
from kfac_core.array.status import Check
from kfac_core.array.structure import replaced, structure
from kfac_core.factors.factor import Shifted
from kfac_core.linalg.groups import dense_of_groups
from kfac_core.linalg.shifted import Factorization, ShiftedMatrix, Solving
from kfac_core.operators.operator import entering, leaving
from kfac_core.operators.sparse_rows import diagonal_at

__all__ = ["FactoredKronecker"]


@structure()
class FactoredKronecker:
    """A snapshot of ``S (A + a I) (x) (G + b I)``; see `CurvatureOperator`.

    Attributes
    ----------
    input : ShiftedMatrix or ShiftedDiagonal
        ``A + a I``.
    output : ShiftedMatrix or ShiftedDiagonal
        ``G + b I``.
    scale : array, 0-d or one a group
        S.
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
    def factorizations(self) -> frozenset[Factorization]:
        """What has been prepared."""
        return self.input.factorizations & self.output.factorizations

    def prepared(
        self,
        *factorizations: Factorization,
        check: Check = "raise",
        name: str = "block",
    ) -> FactoredKronecker:
        """Return the same operator with factorizations made that were missing."""
        A = self.input.prepared(*factorizations, check=check, name=f"{name}/input")
        G = self.output.prepared(*factorizations, check=check, name=f"{name}/output")
        # In every step but the first nothing is missing.
        if A is self.input and G is self.output:
            return self
        return replaced(self, input=A, output=G)

    def solved_by(self, solving: Solving, /) -> FactoredKronecker:
        """Return the same operator, whose full factors are divided by in a given way."""
        parts = {
            side: replaced(part, solving=solving)
            if isinstance(part, ShiftedMatrix)
            else part
            for side, part in (("input", self.input), ("output", self.output))
        }
        return replaced(self, **parts)

    def at_rows(self, indices: Array, /) -> FactoredKronecker:
        """Return the operator on the rows of some ids alone; see `SparseRows`.

        Parameters
        ----------
        indices : array of int, shape (k,)
            Different ids.

        Returns
        -------
        FactoredKronecker
            Of shape ``(k, out)``.

        Raises
        ------
        UnsupportedError
            Where the input factor is not diagonal, so that rows do not stand alone.
        """
        return replaced(self, input=diagonal_at(self.input, indices))

    def multiply(self, vector: Array, /, *, damped: bool = True) -> Array:
        """Return ``S (A + a I) V (G + b I)``, or ``S A V G``."""
        V, xp = self._enter(vector, "vector")
        left = self.input.multiply(V, shifted=damped)
        both = self.output.multiply(xp.matrix_transpose(left), shifted=damped)
        return leaving(self._scale() * xp.matrix_transpose(both), vector)

    def multiply_inverse(self, vector: Array, /) -> Array:
        """Return ``(A + a I)^-1 V (G + b I)^-1 / S``; ``2 n m (n + m)`` flops.

        References
        ----------
        Martens and Grosse (2015), arXiv:1503.05671, section 4.2.
        """
        V, xp = self._enter(vector, "vector")
        left = self.input.solve(V)
        if isinstance(self.output, ShiftedMatrix):
            both = self.output.solve_right(left, overwrite=True)
        else:
            both = xp.matrix_transpose(self.output.solve(xp.matrix_transpose(left)))
        return leaving(self._divided(both), vector)

    def multiply_matpower(self, vector: Array, exponent: float, /) -> Array:
        """Return ``S^p (A + a I)^p V (G + b I)^p``.

        The exponents 1 and -1 are `multiply` and `multiply_inverse`; every other one
        goes through the eigenbases.
        """
        if exponent == 1:
            return self.multiply(vector)
        if exponent == -1:
            return self.multiply_inverse(vector)
        V, xp = self._enter(vector, "vector")
        left = self.input.power(V, exponent)
        both = self.output.power(xp.matrix_transpose(left), exponent)
        return leaving(self._scale() ** exponent * xp.matrix_transpose(both), vector)

    def multiply_cholesky(self, vector: Array, /, *, transpose: bool = False) -> Array:
        """Return ``S^1/2 L_A V L_G^T``, or ``S^1/2 L_A^T V L_G``.

        ``S^1/2 L_A (x) L_G`` is the lower Cholesky factor of the damped block.
        """
        V, xp = self._enter(vector, "vector")
        left = self.input.lower_multiply(V, transpose=transpose)
        both = self.output.lower_multiply(
            xp.matrix_transpose(left), transpose=transpose
        )
        return leaving(xp.sqrt(self._scale()) * xp.matrix_transpose(both), vector)

    def multiply_cholesky_inverse(
        self, vector: Array, /, *, transpose: bool = False
    ) -> Array:
        """Return ``L_A^-1 V L_G^-T / S^1/2``, or ``L_A^-T V L_G^-1 / S^1/2``."""
        V, xp = self._enter(vector, "vector")
        return leaving(self._cholesky_inverse(V, xp, transpose=transpose), vector)

    def sample(self, noise: Array, /) -> Array:
        """Turn white noise Z into ``L_A^-T Z L_G^-1 / S^1/2``.

        Its covariance is the inverse of the damped block.

        References
        ----------
        Ritter, Botev and Barber (2018), "A Scalable Laplace Approximation for Neural
        Networks", equation 9.
        """
        Z, xp = self._enter(noise, "noise")
        return leaving(self._cholesky_inverse(Z, xp, transpose=True), noise)

    def trace(self, *, damped: bool = True) -> Array:
        """Return ``S tr(A + a I) tr(G + b I)``, or ``S tr(A) tr(G)``."""
        traces = self.input.trace(shifted=damped) * self.output.trace(shifted=damped)
        return self._xp().sum(self.scale * traces)

    def logdet(self) -> Array:
        """Return ``m log det(A + a I) + n log det(G + b I) + n m log S``."""
        xp = self._xp()
        n, m = self.input.size, self.output.size
        logdets = m * self.input.logdet() + n * self.output.logdet()
        return xp.sum(logdets + n * m * xp.log(self.scale))

    def eigenvalues(self, *, damped: bool = True) -> Array:
        """Return all products of the factors' eigenvalues, times S, ascending."""
        xp = self._xp()
        w = self.input.eigenvalues(shifted=damped)
        h = self.output.eigenvalues(shifted=damped)
        return xp.sort(
            xp.reshape(self._scale() * w[..., :, None] * h[..., None, :], (-1,))
        )

    def to_dense(self, *, damped: bool = True) -> Array:
        """Return ``S kron(A + a I, G + b I)``, or ``S kron(A, G)``."""
        A = self.input.dense(shifted=damped)
        G = self.output.dense(shifted=damped)
        return dense_of_groups(self._scale() * A, G, xp=self._xp())

    def status(self) -> Array:
        """Return the flags of both factors."""
        return self.input.status() | self.output.status()

    def _cholesky_inverse(self, V: Array, xp: Namespace, *, transpose: bool) -> Array:
        left = self.input.lower_solve(V, transpose=transpose)
        both = self.output.lower_solve(xp.matrix_transpose(left), transpose=transpose)
        return xp.matrix_transpose(both) / xp.sqrt(self._scale())

    def _divided(self, product: Array) -> Array:
        """Return a new array over S, itself where the host knows that S is 1.

        S is the mean number of positions that share the weight, most often 1, and the
        division a pass over memory.
        """
        S = self.scale
        full = isinstance(self.input, ShiftedMatrix) and isinstance(
            self.output, ShiftedMatrix
        )
        if full and plain_number(S, xp=self._xp()) == 1.0:
            return product
        return product / self._scale()

    def _enter(self, vector: Array, name: str) -> tuple[Array, Namespace]:
        return entering(
            vector,
            self.shape,
            self.input.dtype,
            operator=self.scale,
            name=name,
            lead=self.input.lead,
        )

    def _scale(self) -> Array:
        """Return S with axes for the vectors' rows and columns."""
        return self.scale[..., None, None]

    def _xp(self) -> Namespace:
        return own_namespace(self.scale)
