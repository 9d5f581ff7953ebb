"""``M = blockdiag(I_K (x) (Sigma + d I), d) + u u^T``: many equal blocks and one vector.

Conventions.  K equal blocks of size c, then ``bias`` further diagonal entries (0 or 1)
that hold only the shift d; ``u = [1_K (x) mu, 1]``: the input factor of a convolution
whose activations are uncorrelated between positions.  Solved by Sherman-Morrison with
one factorization of size c, or, where that fails its residual check, by the inverse of the
dense matrix.  Triangular factors and powers other than 1 and -1 have no such form; they
are computed from the dense matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import array_api_compat

from kfac_core.array import Array, Check, DType, Namespace, Status, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import structure
from kfac_core.linalg.certificate import RESIDUAL_LIMIT, Spectrum, probe, relative_norm
from kfac_core.linalg.damped import DampedMatrix, damped_matrix
from kfac_core.linalg.factorizations import Eigendecomposition, Factorization
from kfac_core.linalg.groups import side_by_side
from kfac_core.linalg.symmetric import ScaledMatrix, SymmetricMatrix


@structure(static=("copies", "bias"))
class DampedRankOne:
    """``M = blockdiag(I_K (x) (Sigma + d I), d) + u u^T``, with ``u = [1_K (x) mu, 1]``.

    It has the products of `DampedMatrix`.

    Attributes
    ----------
    block : DampedMatrix
        ``Sigma + d I``, of size c.
    mean : array, shape (c,)
        Mean ``mu``.
    whole : DampedMatrix or None
        The dense matrix, where a product needs it.
    copies : int
        Number of equal blocks ``K``.
    bias : int
        0, or 1 for the homogeneous coordinate.
    """

    block: DampedMatrix
    mean: Array
    whole: DampedMatrix | None
    copies: int
    bias: int

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """The shape ``(n,)`` of a vector."""
        return (self.size,)

    @property
    def lead(self) -> tuple[int, ...]:
        """Empty, for a single matrix."""
        return ()

    @property
    def size(self) -> int:
        """The number ``K c + bias`` of rows."""
        return self.copies * self.block.size + self.bias

    @property
    def dtype(self) -> DType:
        """The dtype of the arrays."""
        return self.block.dtype

    @property
    def shift(self) -> Array:
        """The shift d, 0-d."""
        return ns.cast(self._xp(), self.block.shift, self.dtype)

    @property
    def factorizations(self) -> frozenset[Factorization]:
        """Factorizations that have been prepared."""
        prepared = self.block.factorizations & {"inverse"}
        return prepared if self.whole is None else prepared | self.whole.factorizations

    def prepared(
        self,
        *factorizations: Factorization,
        check: Check = "raise",
        name: str = "matrix",
    ) -> DampedRankOne:
        """Return the matrix with missing factorizations; as `DampedMatrix.prepared`."""
        matrix = self
        options: dict[str, Any] = {"check": check, "name": name}
        if "inverse" in factorizations:
            matrix = replaced(matrix, block=self.block.prepared("inverse", **options))
            if "inverse" not in self.factorizations:
                matrix = matrix._checked(**options)
        dense = tuple(f for f in factorizations if f != "inverse")
        if dense:
            whole = matrix._dense_matrix().prepared(*dense, **options)
            matrix = replaced(matrix, whole=whole)
        return matrix

    def in_wide_basis(self, *, name: str) -> DampedRankOne:
        """Return the matrix with its eigendecomposition computed in float64, or raise."""
        return replaced(self, whole=self._dense_matrix().in_wide_basis(name=name))

    def spectrum(self, basis: Eigendecomposition | None, /) -> Spectrum:
        """Return the eigenvalues, and how far each may be off."""
        assert basis is not None
        return Spectrum(basis.eigenvalues, basis.error)

    def multiply(self, v: Array, /, *, shifted: bool) -> Array:
        """Return ``M v``, with or without the shift; ``2 K c^2 k`` flops."""
        xp = self._xp()
        if v.ndim > 2:
            return side_by_side(
                lambda x: self.multiply(x, shifted=shifted), v, 2, xp=xp
            )
        product = self._by_block(v, lambda x: self.block.multiply(x, shifted=shifted))
        if self.bias:
            last = v[-1:, :]
            ends = self.shift * last if shifted else xp.zeros_like(last)
            product = xp.concat([product, ends], axis=0)
        u = self._vector()
        return product + xp.matmul(u, xp.matmul(xp.matrix_transpose(u), v))

    def solve(self, v: Array, /, *, overwrite: bool = False) -> Array:
        """Return ``M^-1 v`` by Sherman-Morrison; ``2 K c^2 k`` flops.

        The homogeneous coordinate is eliminated first, by its diagonal entry ``1 + d``:
        ``d`` alone, which may be tiny, is never divided by.
        """
        if v.ndim > 2:
            return side_by_side(self.solve, v, 2, xp=self._xp())
        if self.whole is not None and self.whole.inverse is not None:
            return self.whole.solve(v)
        return self._solve(v)

    def power(self, v: Array, exponent: float, /) -> Array:
        """Return ``M^p v``, from the dense matrix."""
        return self._dense_matrix().power(v, exponent)

    def lower_multiply(self, v: Array, /, *, transpose: bool) -> Array:
        """Return ``L v`` or ``L^T v``, from the dense matrix."""
        return self._dense_matrix().lower_multiply(v, transpose=transpose)

    def lower_solve(self, v: Array, /, *, transpose: bool) -> Array:
        """Return ``L^-1 v`` or ``L^-T v``, from the dense matrix."""
        return self._dense_matrix().lower_solve(v, transpose=transpose)

    def logdet(self) -> Array:
        """Return ``log det M``, 0-d, by the matrix determinant lemma."""
        xp = self._xp()
        weight, _ = self._elimination(xp)
        mean = self._body()
        inner = xp.matmul(xp.matrix_transpose(mean), self._solve_body(mean))
        # The matrix determinant lemma; log1p keeps the digits of a small shift.
        corner = xp.log1p(self.shift) if self.bias else 0.0
        lemma = xp.log1p(weight * inner[0, 0])
        return self.copies * self.block.logdet() + corner + lemma

    def trace(self, *, shifted: bool) -> Array:
        """Return the trace, 0-d."""
        xp = self._xp()
        trace = self.copies * self.block.trace(shifted=shifted)
        if self.bias and shifted:
            trace = trace + self.shift
        return trace + self.copies * xp.sum(self.mean * self.mean) + self.bias

    def eigenvalues(self, *, shifted: bool) -> Array:
        """Return the eigenvalues, ascending, from the dense matrix."""
        return self._dense_matrix().eigenvalues(shifted=shifted)

    def dense(self, *, shifted: bool) -> Array:
        """Return the matrix, shape (n, n)."""
        xp = self._xp()
        eye = xp.eye(self.size, dtype=self.dtype, device=ns.device_of(self.mean))
        return self.multiply(eye, shifted=shifted)

    def status(self) -> Array:
        """Return the flags of all factorizations, 0-d int32."""
        status = self.block.status()
        return status if self.whole is None else status | self.whole.status()

    def _by_block(self, v: Array, function: Callable[[Array], Array]) -> Array:
        """Apply a function of (c, k) matrices to each of the K blocks of rows of v."""
        xp = self._xp()
        c, columns = self.block.size, v.shape[-1]
        # One product of c x c with all K k columns, instead of K products.
        body = xp.reshape(v[: self.copies * c, :], (self.copies, c, columns))
        side = xp.reshape(xp.permute_dims(body, (1, 0, 2)), (c, self.copies * columns))
        done = xp.reshape(function(side), (c, self.copies, columns))
        return xp.reshape(xp.permute_dims(done, (1, 0, 2)), (self.copies * c, columns))

    def _solve(self, v: Array) -> Array:
        """Return ``M^-1 v`` by the block and the mean."""
        xp, mean = self._xp(), self._body()
        weight, corner = self._elimination(xp)
        body = v[: mean.shape[0], :]
        if self.bias:
            body = body - mean * (v[-1:, :] / corner)
        base, w = self._solve_body(body), self._solve_body(mean)
        # Sherman-Morrison, with the weight that eliminating the last coordinate leaves.
        gain = weight / (1.0 + weight * xp.matmul(xp.matrix_transpose(mean), w))
        solved = base - w * gain * xp.matmul(xp.matrix_transpose(w), body)
        if not self.bias:
            return solved
        last = (v[-1:, :] - xp.matmul(xp.matrix_transpose(mean), solved)) / corner
        return xp.concat([solved, last], axis=0)

    def _elimination(self, xp: Namespace) -> tuple[Array, Array]:
        """Return the weight of the means without the last coordinate, and its pivot.

        ``1 - 1 / (1 + d) = d / (1 + d)`` and ``1 + d``; 1 and 1 without that coordinate.
        """
        one = xp.ones_like(self.shift)
        if not self.bias:
            return one, one
        corner = one + self.shift
        return self.shift / corner, corner

    def _solve_body(self, v: Array) -> Array:
        """Return ``(I_K (x) (Sigma + d I))^-1 v``."""
        return self._by_block(v, self.block.solve)

    def _body(self) -> Array:
        """Return ``1_K (x) mu``, shape (K c, 1)."""
        return self._xp().tile(self.mean, (self.copies,))[:, None]

    def _vector(self) -> Array:
        """Return u, shape (n, 1)."""
        body = self._body()
        if not self.bias:
            return body
        return self._xp().concat([body, self._xp().ones_like(body[:1, :])], axis=0)

    def _checked(self, *, check: Check, name: str) -> DampedRankOne:
        """Return the matrix, with its dense inverse if Sherman-Morrison is inaccurate."""
        xp = self._xp()
        z = probe(self.size, dtype=self.dtype, device=ns.device_of(self.mean), xp=xp)
        solved = self._solve(self.multiply(z, shifted=True))
        residual = relative_norm(solved - z, z, xp=xp)
        flag = ns.status_unless(xp, residual <= RESIDUAL_LIMIT, Status.INACCURATE)
        if check == "status":
            block = self.block
            assert block.inverse is not None
            inverse = replaced(block.inverse, status=block.inverse.status | flag)
            return replaced(self, block=replaced(block, inverse=inverse))
        if not int(flag):
            return self
        # Where the mean dominates the covariance, Sherman-Morrison cancels.
        whole = self._dense_matrix().prepared("inverse", check=check, name=name)
        return replaced(self, whole=whole)

    def _dense_matrix(self) -> DampedMatrix:
        if self.whole is not None:
            return self.whole
        undamped = SymmetricMatrix(self.dense(shifted=False), full_storage=True)
        one = self._xp().ones_like(self.shift)
        stored = self.block.problem.roundoff
        return damped_matrix(ScaledMatrix(undamped, one, roundoff=stored), self.shift)

    def _xp(self) -> Namespace:
        return array_api_compat.array_namespace(self.mean)
