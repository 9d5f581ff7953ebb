"""Influence scores: inner products of gradients in the inverse curvature.

Conventions.  For a query q and a training example n with gradients ``g_q`` and ``g_n`` of
their own losses,

    score[q, n] = sum_b < g_q, (F_b + lam_b I)^-1 g_n >_b,

over the blocks b of a network, F_b averaged over examples.  Removing example n from a
training set of N changes the query's loss by about ``+ score / N``: the loss that the
parameters minimize is a mean over N examples, of which F + lam I stands for the Hessian.
A positive score is an example that helps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

from kfac_core import constraints, errors
from kfac_core.array import Array, Check, Scalar, Status
from kfac_core.array import namespaces as ns
from kfac_core.block import Block
from kfac_core.conventions import LossReduction
from kfac_core.factors.statistics import Statistics
from kfac_core.influence.chunks import example_chunk, joined, parts, score_chunks
from kfac_core.influence.damping import damping_by_block, mean_eigenvalue_damping
from kfac_core.influence.example_gradients import LayerGradients
from kfac_core.influence.queries import (
    LowRankQueries,
    Queries,
    Storage,
    StoredQueries,
    low_rank_queries,
    storage_dtype,
    stored_queries,
)
from kfac_core.layers.rows import Batch
from kfac_core.operators.spectral import SpectralOperator
from kfac_core.posterior.spectra import spectral_blocks

Gradients: TypeAlias = Mapping[str, Mapping[str, Array] | Batch | Sequence[Batch]]
"""For each block, batches with gradients of each example's own loss, or parameter-shaped
gradients with a first axis of examples."""


@dataclass(frozen=True)
class Influence:
    r"""The damped inverse curvature of a network; made by `Influence.of_statistics`.

    .. math:: \text{score}_{q,n} = \sum_b g_q^T \, (F_b + \lambda_b I)^{-1} \, g_n

    over the blocks b of a network, for the gradients of the losses of a query q and of a
    training example n.  Removing example n from N changes the query's loss by about
    :math:`\text{score}_{q,n} / N`.

    Parameters
    ----------
    blocks : mapping of str to Block
        Blocks whose layers are used.
    curvatures : mapping of str to SpectralOperator
        The F_b.
    damping : mapping of str to 0-d array
        The lam_b.
    check : {"raise", "status"}
        Whether results that are not finite raise, which synchronizes with the device, or
        come back as they are.

    Raises
    ------
    UnknownBlockError
        If the names differ.
    """

    blocks: Mapping[str, Block]
    curvatures: Mapping[str, SpectralOperator]
    damping: Mapping[str, Array]
    check: Check = "raise"

    def __post_init__(self) -> None:
        constraints.require_names("curvatures", self.curvatures, self.blocks)
        constraints.require_names("damping", self.damping, self.blocks)

    @classmethod
    def of_statistics(
        cls,
        blocks: Mapping[str, Block],
        statistics: Mapping[str, Statistics],
        /,
        *,
        damping: Scalar | Mapping[str, Scalar] | None = None,
        damping_fraction: Scalar | None = None,
        check: Check = "raise",
    ) -> Influence:
        """Decompose the curvature of each block and choose its damping.

        Parameters
        ----------
        blocks, statistics, check
            See `kfac_core.posterior.spectral_blocks`.
        damping : float, 0-d array, or mapping of str to these
            Damping ``lam`` of all blocks, or of each.
        damping_fraction : float or 0-d array
            Damping as a fraction of each block's mean eigenvalue; see
            `kfac_core.influence.damping`.  Exactly one of the two is given.

        Returns
        -------
        Influence
            Influence whose curvature is decomposed once.

        Raises
        ------
        ConventionError
            If neither or both dampings are given.
        DampingError
            For a damping out of range.
        FactorizationError
            If a damped block has an eigenvalue that is not positive
            (``check="raise"``).
        KFACError
            See `spectral_blocks`.
        """
        curvatures = spectral_blocks(blocks, statistics, check=check)
        if (damping is None) == (damping_fraction is None):
            raise errors.ConventionError(
                "Expected exactly one of `damping` and `damping_fraction`, got "
                f"{damping!r} and {damping_fraction!r}."
            )
        fraction = constraints.optional(constraints.DAMPING)
        constraints.require_range("damping_fraction", damping_fraction, fraction)
        if damping_fraction is None:
            damping = damping_by_block(curvatures, damping)
        else:
            damping = mean_eigenvalue_damping(curvatures, fraction=damping_fraction)
        influence = cls(dict(blocks), curvatures, damping, check)
        if check == "raise":
            influence._require_definite()
        return influence

    def precondition(
        self,
        gradients: Gradients,
        /,
        *,
        reduction: LossReduction,
        storage: Storage,
        max_elements: int,
        rank: int | None = None,
    ) -> Queries:
        """Return ``(F + lam I)^-1 g_q`` of the queries.

        Parameters
        ----------
        gradients : mapping of str to Batch, sequence of Batch, or mapping of arrays
            Gradients of the queries, for every block; see `Gradients`.
        reduction : {"sum", "mean", "mean_rows"}
            Reduction of the queries' loss in this batch.
        storage : {"float16", "bfloat16", "float32", "float64"}
            The dtype of the result; float32 where the library lacks it.
        max_elements : int
            The budget; see `kfac_core.influence.chunks`.
        rank : int, optional
            Rank of the best approximation that is stored in the place of each matrix.

        Returns
        -------
        Queries
            One matrix of the block's size for each query and block.

        Raises
        ------
        UnknownBlockError, ShapeError, DtypeError, MixedArraysError, UnsupportedError
            For gradients of incompatible shape, dtype, library or device.
        ShapeError
            If not even one query fits the budget.
        NotFiniteError
            If a gradient is not finite (``check="raise"``).

        Notes
        -----
        ``2 n m (n + m)`` flops for each query and block.
        """
        optional = constraints.optional(constraints.COUNT)
        constraints.require_range("rank", rank, optional)
        by_block = self._gradients(gradients, reduction, max_elements)
        return Queries(
            {
                name: self._preconditioned(name, examples, storage, max_elements, rank)
                for name, examples in by_block.items()
            }
        )

    def multiply_inverse(self, vectors: Mapping[str, Array], /) -> dict[str, Array]:
        """Return ``(F_b + lam_b I)^-1 V_b``, shapes (..., in(+1), out), of each block."""
        constraints.require_names("vectors", vectors, self.blocks)
        return {
            name: F.from_basis(F.to_basis(vectors[name]) * self._weights(name))
            for name, F in self.curvatures.items()
        }

    def scores(
        self,
        queries: Queries,
        gradients: Gradients,
        /,
        *,
        reduction: LossReduction,
        max_elements: int,
    ) -> Array:
        """Return the scores of some training examples for all queries.

        Parameters
        ----------
        queries : Queries
            Queries made by `precondition`.
        gradients : mapping of str to Batch, sequence of Batch, or mapping of arrays
            Gradients of the examples; as for `precondition`.
        reduction : {"sum", "mean", "mean_rows"}
            Reduction of their loss in this batch.
        max_elements : int
            The budget; see `kfac_core.influence.chunks`.

        Returns
        -------
        array, shape (queries, examples)
            Summed in the blocks' dtype, float32 at least.

        Raises
        ------
        UnknownBlockError, ShapeError, DtypeError, MixedArraysError, UnsupportedError
            For gradients of incompatible shape, dtype, library or device.
        ShapeError
            If not even one query and one example fit the budget.
        NotFiniteError
            If a gradient is not finite (``check="raise"``).

        Notes
        -----
        ``2 n m`` flops for each query, example and block, by ``x^T P_q g`` where an
        example has a single row: its gradient is not formed.
        """
        constraints.require_kind("queries", queries, Queries, "Queries")
        by_block = self._gradients(gradients, reduction, max_elements)
        constraints.require_names("queries", queries.blocks, by_block)
        # Blocks are independent, so that the inner product is a sum over them.
        total = None
        for name, examples in by_block.items():
            part = self._scores(name, queries.blocks[name], examples, max_elements)
            total = part if total is None else total + part
        return total

    def self_scores(
        self, gradients: Gradients, /, *, reduction: LossReduction, max_elements: int
    ) -> Array:
        """Return ``<g_n, (F + lam I)^-1 g_n>`` of each example, shape (examples,).

        Parameters
        ----------
        gradients, reduction, max_elements
            As for `scores`.

        Returns
        -------
        array, shape (examples,)
            The self-influence, not negative.

        Raises
        ------
        KFACError
            See `scores`.

        Notes
        -----
        ``2 (n^2 + n m + m^2)`` flops for an example of a single row, whose gradient is
        not formed, and ``2 n m (n + m)`` for one of several.
        """
        by_block = self._gradients(gradients, reduction, max_elements)
        total = None
        for name, examples in by_block.items():
            F, weights = self.curvatures[name], self._weights(name)
            single = examples.is_rows and examples.rows_each == 1
            # A single row needs no D: (Q_A^T x)^2 and (Q_G^T g)^2 give the score.
            step = example_chunk(
                examples, max_elements=max_elements, matrices=0 if single else 3
            )
            pieces = []
            for start, stop in parts(examples.examples, step):
                pieces.append(examples.part(start, stop).squares(F, weights))
            part = joined(pieces, (0,), F, axis=0)
            self._require_finite(part, name, "the examples")
            total = part if total is None else total + part
        return total

    def status(self) -> Array:
        """Return the flags of all blocks, 0-d int32."""
        status = None
        for name, F in self.curvatures.items():
            positive = F.namespace.min(F.spectrum) + self.damping[name] > 0
            flags = F.status() | ns.status_unless(
                F.namespace, positive, Status.NOT_POSITIVE
            )
            status = flags if status is None else status | flags
        return status

    def _weights(self, name: str) -> Array:
        return 1.0 / (self.curvatures[name].spectrum + self.damping[name])

    def _gradients(
        self, gradients: Gradients, reduction: LossReduction, max_elements: int
    ) -> dict[str, LayerGradients]:
        constraints.require_one_of("reduction", reduction, get_args(LossReduction))
        constraints.require_range("max_elements", max_elements, constraints.COUNT)
        constraints.require_names("gradients", gradients, self.blocks)
        by_block = {
            name: LayerGradients(block.layer, gradients[name], reduction=reduction)
            for name, block in self.blocks.items()
        }
        counts = {name: examples.examples for name, examples in by_block.items()}
        constraints.require_same(
            "number of examples in `gradients` of all blocks", counts
        )
        return by_block

    def _preconditioned(
        self,
        name: str,
        examples: LayerGradients,
        storage: Storage,
        max_elements: int,
        rank: int | None,
    ) -> StoredQueries | LowRankQueries:
        F, weights = self.curvatures[name], self._weights(name)
        dtype = storage_dtype(storage, xp=F.namespace)
        step = example_chunk(examples, max_elements=max_elements, matrices=4)
        pieces: list[Any] = []
        for start, stop in parts(examples.examples, step):
            R = examples.part(start, stop).coordinates(F)
            P = F.from_basis(R * weights)
            del R  # before P is rounded, which takes as much memory again
            self._require_finite(P, name, "the queries")
            if rank is None:
                pieces.append(stored_queries(P, dtype))
            else:
                pieces.append(low_rank_queries(P, dtype, rank))
            del P
        scales = [p.scale for p in pieces if p.scale is not None]
        scale = joined(scales, (0,), F, axis=0) if scales else None
        if rank is not None:
            n, m = F.vector_shape
            rank = min(rank, n, m)
            left = joined([p.left for p in pieces], (0, n, rank), F, axis=0)
            right = joined([p.right for p in pieces], (0, rank, m), F, axis=0)
            return LowRankQueries(left, right, scale)
        values = joined([p.values for p in pieces], (0, *F.vector_shape), F, axis=0)
        return StoredQueries(values, scale)

    def _scores(
        self,
        name: str,
        queries: StoredQueries | LowRankQueries,
        examples: LayerGradients,
        max_elements: int,
    ) -> Array:
        F, count = self.curvatures[name], queries.count
        chunks = score_chunks(examples, queries=count, max_elements=max_elements)
        columns = []
        for start, stop in parts(examples.examples, chunks.examples):
            part, pieces = examples.part(start, stop), []
            for first, last in parts(count, chunks.queries):
                P = queries.widened(first, last, F.dtype)
                pieces.append(part.inner_products(P, by_rows=chunks.by_rows))
                del P
            # All queries for one part of the examples, whose rows are read once.
            columns.append(joined(pieces, (0, stop - start), F, axis=0))
            del part
        scores = joined(columns, (count, 0), F, axis=1)
        self._require_finite(scores, name, "the examples")
        return scores

    def _require_finite(self, result: Array, name: str, whose: str) -> None:
        xp = self.curvatures[name].namespace
        if self.check == "raise" and not bool(xp.all(xp.isfinite(result))):
            raise errors.NotFiniteError(
                f"Block {name!r}: gradients of {whose} contain NaN, infinity, or "
                "numbers whose products overflow. Leave those examples out."
            )

    def _require_definite(self) -> None:
        for name, F in self.curvatures.items():
            smallest = F.namespace.min(F.spectrum) + self.damping[name]
            if not bool(smallest > 0):
                raise errors.FactorizationError(
                    f"the damped block has the eigenvalue {float(smallest):.1e}. Give a "
                    "positive `damping`, or data to a block that saw none.",
                    factor=name,
                )
