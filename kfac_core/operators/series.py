"""The operator of a chain of time steps, symmetric (option 1) or infinite (option 2).

Conventions.  ``V0 = (A_0 + a I) (x) (G_0 + b I)``, with shifts a and b that
`kfac_core.damping.factored_shifts` computes from the damping; the moments of lag 1 are
not damped.  Which F is made from V0 and lag 1 is the chain's: see
`kfac_core.linalg.series_chain` and `kfac_core.linalg.series_infinite`.

What is structured: F, its inverse, a square root of the inverse (so samples), and for the
symmetric variant the trace and the log-determinant.  F is a sum of Kronecker products
which share no eigenvectors, so that its other powers, its eigenvalues and its Cholesky
factor are not products of small matrices.  They are computed from the dense matrix, up to
`DENSE_LIMIT` rows, and refused above.

Without damping A_0 and G_0 may be singular.  Lag 1 then lies in their ranges, and roots
by eigendecomposition, with directions below roundoff left out, take the place of
Cholesky factors.
"""

from __future__ import annotations

from typing import Any

from kfac_core import errors
from kfac_core.array import Array, Check, Namespace, Status, finite, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import structure
from kfac_core.linalg.certificate import RESIDUAL_LIMIT, probe, relative_norm
from kfac_core.linalg.damped import DampedMatrix, damped_matrix
from kfac_core.linalg.factorizations import Factorization
from kfac_core.linalg.series_chain import Root, WeightedRoots, symmetric_chain
from kfac_core.linalg.series_infinite import InfiniteChain, infinite_chain
from kfac_core.linalg.symmetric import SymmetricMatrix
from kfac_core.operators.dense import DenseOperator
from kfac_core.operators.operator import CurvatureOperator, raise_for

DENSE_LIMIT = 2048
"""The most rows that F may have to be factorized as a dense matrix (34 MB)."""

_DENSE: tuple[Factorization, ...] = ("cholesky", "eigenbasis")


@structure()
class SeriesOperator(CurvatureOperator):
    """The snapshot of the curvature of a chain of time steps; see `CurvatureOperator`.

    ``F v`` takes ``4 n m (n + m)`` flops (symmetric), or that and ``2 (n^3 + m^3)`` for
    each of at most about ``2 log2 T + 2`` doublings (infinite; 24 with
    ``check="status"``); ``F_damped^-1 v`` and samples take ``4 n m (n + m)``, twice that
    if infinite.  All else is of the dense matrix, up to `DENSE_LIMIT` rows.

    Attributes
    ----------
    input, output : DampedMatrix
        ``A_0 + a I`` and ``G_0 + b I``.
    lagged_input, lagged_output : array, shapes (n, n) and (m, m)
        A_1 and G_1, not symmetrized.
    scale : array, 0-d
        S, the mean number of steps.
    shares : array, shape (T,), or None
        The shares of the lengths; None for the infinite variant.
    chain : WeightedRoots or InfiniteChain
        F, damped.
    dense : DampedMatrix or None
        F as one matrix, if a factorization of it was requested.
    fallback : array of int32, 0-d
        `kfac_core.linalg.fallback.Fallback` that was used: in which precision the chain was
        made.

    References
    ----------
    Martens, Ba and Johnson (2018), "Kronecker-factored Curvature Approximations for
    Recurrent Neural Networks", ICLR.
    """

    input: DampedMatrix
    output: DampedMatrix
    lagged_input: Array
    lagged_output: Array
    scale: Array
    shares: Array | None
    chain: WeightedRoots | InfiniteChain
    dense: DampedMatrix | None
    fallback: Array

    @property
    def vector_shape(self) -> tuple[int, int]:
        """The shape ``(in(+1), out)`` of the vectors."""
        return self.input.size, self.output.size

    @property
    def like(self) -> Array:
        """An array of the operator's library, device and dtype."""
        return self.scale

    @property
    def factorizations(self) -> frozenset[Factorization]:
        """Factorizations that have been prepared."""
        available: frozenset[Factorization] = frozenset({"inverse"})
        return (
            available if self.dense is None else available | self.dense.factorizations
        )

    def prepared(
        self,
        *factorizations: Factorization,
        check: Check = "raise",
        name: str = "block",
    ) -> SeriesOperator:
        """Return the operator with missing factorizations computed.

        The inverse is there always.  ``"cholesky"`` and ``"eigenbasis"`` are of the
        dense matrix; a block above `DENSE_LIMIT` goes without.  ``"eigenbasis"`` also
        prepares the undamped products.
        """
        operator = self
        if "eigenbasis" in factorizations:
            operator = replaced(
                operator,
                input=self.input.prepared(
                    "eigenbasis", check=check, name=f"{name}/input"
                ),
                output=self.output.prepared(
                    "eigenbasis", check=check, name=f"{name}/output"
                ),
            )
        dense_only = tuple(f for f in _DENSE if f in factorizations)
        if not dense_only or self._rows() > DENSE_LIMIT:
            return operator
        dense = operator._dense_matrix().prepared(*dense_only, check=check, name=name)
        operator = replaced(operator, dense=dense.block)
        if "cholesky" not in dense_only:
            return operator
        # The dense matrix was rounded, so compare its solve with the chain's inverse.
        xp = ns.own_namespace(self.scale)
        z = probe(
            self._rows(), dtype=self.scale.dtype, device=ns.device_of(self.scale), xp=xp
        )
        column = xp.reshape(
            operator.chain.solve(xp.reshape(z, operator.stack_shape), xp=xp), (-1, 1)
        )
        half = dense.block.lower_solve(z, transpose=False)
        root = dense.block.lower_solve(half, transpose=True)
        error = relative_norm(root - column, column, xp=xp)
        flags = ns.status_unless(xp, error <= RESIDUAL_LIMIT, Status.INACCURATE)
        if check == "raise":
            raise_for(flags, name)
        return operator.flagged(flags)

    def trace(self, *, damped: bool = True) -> Array:
        """Return the trace of F; from the dense matrix for the infinite variant."""
        xp = ns.own_namespace(self.scale)
        chain = self._chain(damped=damped)
        if isinstance(chain, WeightedRoots):
            return chain.trace(xp=xp)
        self._require_small()
        return xp.linalg.trace(chain.dense(xp=xp))

    def _logdet(self) -> Array:
        """Return ``log det F_damped``; from the dense matrix for the infinite variant.

        ``m log det(A_0 + a I) + n log det(G_0 + b I) + sum log W`` if symmetric.
        """
        if not isinstance(self.chain, WeightedRoots):
            return self._factored().logdet()
        n, m = self.vector_shape
        logdets = m * self.input.logdet() + n * self.output.logdet()
        return logdets + self.chain.logdet(xp=ns.own_namespace(self.scale))

    def eigenvalues(self, *, damped: bool = True) -> Array:
        """Return the eigenvalues of the dense matrix, ascending."""
        return self._dense_matrix(damped=damped).eigenvalues()

    def to_dense(self, *, damped: bool = True) -> Array:
        """Return F as one matrix, ``2 (n m)^3`` flops."""
        dense = self._chain(damped=damped).dense(xp=ns.own_namespace(self.scale))
        # Symmetric up to rounding, since the chain is a product of several matrices.
        return 0.5 * (dense + ns.own_namespace(self.scale).matrix_transpose(dense))

    def status(self) -> Array:
        """Return the flags of both factors, of the chain and of the dense matrix."""
        status = self.input.status() | self.output.status() | self.chain.flags
        return status if self.dense is None else status | self.dense.status()

    def flagged(self, flags: Array, /) -> SeriesOperator:
        """Return the operator with more `Status` flags."""
        return replaced(
            self, chain=replaced(self.chain, flags=self.chain.flags | flags)
        )

    def parts(self) -> dict[str, Any]:
        """Return the damped moments of lag 0."""
        return {"input": self.input, "output": self.output}

    def _multiply(self, V: Array, xp: Namespace, damped: bool) -> Array:
        return self._chain(damped=damped).multiply(V, xp=xp)

    def _multiply_inverse(self, V: Array, xp: Namespace) -> Array:
        return self.chain.solve(V, xp=xp)

    def _power(self, V: Array, xp: Namespace, exponent: float) -> Array:
        # The terms share no eigenvectors: powers have no structure.
        return self._dense_matrix().multiply_matpower(V, exponent)

    def _lower_multiply(self, V: Array, xp: Namespace, transpose: bool) -> Array:
        return self._factored().multiply_cholesky(V, transpose=transpose)

    def _lower_solve(self, V: Array, xp: Namespace, transpose: bool) -> Array:
        return self._factored().multiply_cholesky_inverse(V, transpose=transpose)

    def _sample(self, Z: Array, xp: Namespace) -> Array:
        """Return a root of the inverse times Z: structured, and not triangular."""
        return self.chain.solve_root(Z, xp=xp)

    def _chain(self, *, damped: bool) -> WeightedRoots | InfiniteChain:
        if damped:
            return self.chain
        xp = ns.own_namespace(self.scale)
        if self.shares is None and not finite.is_readable(self.scale, xp=xp):
            raise errors.NotReadyError(
                "the undamped infinite chain need not converge, which could not be "
                "reported while a program is traced. Multiply with it outside."
            )
        A = _pseudo_root(self.input, self.lagged_input, xp)
        G = _pseudo_root(self.output, self.lagged_output, xp)
        if self.shares is not None:
            return symmetric_chain(A, G, self.shares, xp=xp)
        return infinite_chain(A, G, self.scale, check="raise", xp=xp)

    def _dense_matrix(self, *, damped: bool = True) -> DenseOperator:
        """Return F as an operator without structure, prepared or not yet."""
        if damped and self.dense is not None:
            return DenseOperator(self.dense, self.vector_shape)
        self._require_small()
        matrix = SymmetricMatrix(self.to_dense(damped=damped), full_storage=True)
        zero = ns.full_of(ns.own_namespace(self.scale), 0.0, matrix.array)
        return DenseOperator(damped_matrix(matrix, zero), self.vector_shape)

    def _factored(self) -> DenseOperator:
        """Return F as a dense operator with a Cholesky factor."""
        there = self.dense is not None and self.dense.cholesky is not None
        if there or not finite.is_readable(self.scale, xp=ns.own_namespace(self.scale)):
            return self._dense_matrix()
        self._require_small()
        return self.prepared("cholesky")._dense_matrix()

    def _require_small(self) -> None:
        if self._rows() > DENSE_LIMIT:
            raise errors.UnsupportedError(
                "the terms of a series share no eigenvectors, so this needs the dense "
                f"matrix, and {self._rows()} rows are more than {DENSE_LIMIT}. Use "
                "`multiply`, `multiply_inverse` or `sample`, or the variant "
                "'independent', which has every function."
            )

    def _rows(self) -> int:
        return self.input.size * self.output.size


def _pseudo_root(factor: DampedMatrix, lagged: Array, xp: Namespace) -> Root:
    """Return a root of the matrix without its shift, which may be singular."""
    w, Q = factor.eigenvalues(shifted=False), factor.eigenvectors()
    # Directions without data have no correlation either, so leave them out.
    roundoff = 10.0 * factor.size * ns.roundoff_of(w.dtype, xp=xp)
    positive = w > roundoff * xp.max(w)
    root = xp.sqrt(xp.where(positive, w, xp.zeros_like(w)))
    inverse = xp.where(
        positive, 1.0 / xp.where(positive, root, xp.ones_like(w)), 0.0 * w
    )
    return Root(Q * root[None, :], Q * inverse[None, :], lagged)
