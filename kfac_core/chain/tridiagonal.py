"""A chain of dense layers and its block-tridiagonal inverse: what a user holds.

Conventions.  Layers are given from the first to the last, by name, and each example is one
row in each of them: the moments between two layers are of an example's rows in both.  So
there are no shared positions here; those of one layer need not be those of the next, and
where they are, every position can be fed as an example of its own.  An example that the
mask of any layer leaves out is left out of all.

Only the layers' own moments are damped, by a factored rule, and the damped ones are used
everywhere.  The functions are pure, and parallel to those of `kfac_core.Block`; no
estimator holds a chain.

Against one block a layer, it keeps two more moments and makes two eigendecompositions for
each pair of neighbors, and a product costs about four times as much.  Martens and Grosse
(2015) measured 25 to 40 percent more progress an iteration, and recommend blocks of single
layers nevertheless, which are cheaper.
"""

from __future__ import annotations

import functools
import itertools
import operator as operators
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from kfac_core.approximations.kronecker import Kronecker
from kfac_core.array.backend import Array
from kfac_core.array.namespaces import Scalar, as_scalar, device_of
from kfac_core.array.precision import Precision
from kfac_core.array.status import Check
from kfac_core.block import Block
from kfac_core.chain.operator import TridiagonalOperator
from kfac_core.chain.rows import crossed_moments, joined_rows
from kfac_core.chain.snapshot import tridiagonal_operator
from kfac_core.chain.statistics import ChainStatistics
from kfac_core.conventions import Conventions, require_one_of
from kfac_core.damping import DampingRule
from kfac_core.errors import ConventionError, UnsupportedError
from kfac_core.factors.average import Average
from kfac_core.factors.shares import update_shares
from kfac_core.layers.dense import Dense
from kfac_core.layers.rows import Batch

__all__ = ["BlockTridiagonal"]

_FULL_PRECISION = Precision()


@dataclass(frozen=True, kw_only=True)
class BlockTridiagonal:
    """A chain of dense layers.

    Parameters
    ----------
    layers : mapping of str to Dense
        By name, from the first layer to the last.

    Raises
    ------
    ConventionError
        For no layers.
    UnsupportedError
        For a layer that is not dense.
    """

    layers: Mapping[str, Dense]

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", dict(self.layers))
        if not self.layers:
            raise ConventionError("Expected `layers` to hold at least one layer.")
        for name, layer in self.layers.items():
            if layer.kind != "dense":
                raise UnsupportedError(
                    f"Layer {name!r} is {layer.kind}: only a dense layer has one row for "
                    "each example, which moments between layers are made of."
                )

    def initial(
        self, like: Array, /, *, precision: Precision = _FULL_PRECISION
    ) -> ChainStatistics:
        """Return the statistics of nothing; see `kfac_core.Block.initial`."""
        layers = {
            name: block.initial(like, precision=precision)
            for name, block in self._blocks().items()
        }
        first = next(iter(layers.values()))
        xp, device = first.namespace, device_of(like)

        def nothing(side: int) -> dict[str, Average]:
            sums = {}
            for name, following in self._pairs():
                shapes = [self.layers[n].matrix_shape for n in (name, following)]
                shape = tuple(shape[side] for shape in shapes)
                zeros = xp.zeros(shape, dtype=first.dtype, device=device)
                sums[name] = Average(zeros, first.any_weight)
            return sums

        return ChainStatistics(layers, nothing(0), nothing(1), first.status)

    def update(
        self,
        statistics: ChainStatistics,
        batches: Mapping[str, Batch],
        /,
        *,
        conventions: Conventions,
        decay: Scalar,
        weight: Scalar = 1.0,
        check: Check = "raise",
    ) -> ChainStatistics:
        """Return the statistics after ``v <- decay v + weight C``, C of this batch.

        Parameters
        ----------
        statistics : ChainStatistics
            As they were; never modified.
        batches : mapping of str to Batch
            What every layer saw of the same examples, in the same order.
        conventions : Conventions
            How the output gradients are scaled.
        decay : float or 0-d array
            In [0, 1].
        weight : float or 0-d array
            Positive.
        check : {"raise", "status"}
            Whether trouble raises, or is in the result's ``status``; one bad layer then
            leaves all as they were.

        Returns
        -------
        ChainStatistics
            New.

        Raises
        ------
        UnknownBlockError
            For other names than those of the layers.
        ShapeError
            For shared positions, or examples and sources that differ between layers.
        KFACError
            As `kfac_core.Block.update`, naming the layer.

        Notes
        -----
        For N examples and M sources, ``N (n^2 + M m^2)`` flops a layer and
        ``2 N (n n' + M m m')`` for each pair.
        """
        joined = joined_rows(self.layers, batches)
        xp, dtype = statistics.namespace, statistics.any_weight.dtype
        new = {
            name: block.update(
                statistics.layers[name],
                joined[name][0],
                conventions=conventions,
                decay=decay,
                weight=weight,
                check=check,
                name=name,
            )
            for name, block in self._blocks().items()
        }
        first = next(iter(self.layers))
        decay = as_scalar(xp, decay, dtype, "decay")
        shares = update_shares(
            statistics.layers[first],
            joined[first][1],
            conventions=conventions,
            weight=as_scalar(xp, weight, dtype, "weight"),
            xp=xp,
        )
        crossed: tuple[dict[str, Average], dict[str, Average]] = ({}, {})
        olds = statistics.crossed_inputs, statistics.crossed_output_grads
        scales = shares.rows, shares.rows * shares.outer_products
        for name, following in self._pairs():
            # The weight of the layers' own moments, so that the two can never be of
            # different data.
            total = new[name].averages["input"].weight
            moments = crossed_moments(
                joined[name][1], joined[following][1], dtype, xp=xp
            )
            for sums, old, moment, scale in zip(
                crossed, olds, moments, scales, strict=True
            ):
                sums[name] = Average(old[name].sum * decay + moment * scale, total)
        status = functools.reduce(operators.or_, (part.status for part in new.values()))
        made = ChainStatistics(new, *crossed, status)
        return made if check == "raise" else made.unless(status, statistics)

    def operator(
        self,
        statistics: ChainStatistics,
        /,
        *,
        damping: Scalar,
        rule: DampingRule,
        debias: bool = True,
        check: Check = "raise",
        precision: Precision = _FULL_PRECISION,
    ) -> TridiagonalOperator:
        """Make the curvature operator from the statistics as they are now.

        Parameters
        ----------
        statistics : ChainStatistics
            Never modified, and not referred to afterwards.
        damping : float or 0-d array
            Finite and >= 0.
        rule : {"factored", "factored_unit_pi"}
            How the damping of a layer is split over its factors.
        debias : bool
            Whether sums are divided by their weights.
        check : {"raise", "status"}
            Whether trouble raises, or is in the operator's ``status()``.
        precision : Precision
            Of computing and applying.

        Returns
        -------
        TridiagonalOperator
            An immutable snapshot.

        Raises
        ------
        ConventionError, DampingError
            As `kfac_core.Block.operator`.
        UnsupportedError
            For exact damping.
        NotFiniteError, FactorizationError
            Where a factor cannot be factorized, or where neighbors are correlated by
            more than 1: their moments are then not of the same rows
            (``check="raise"``).

        Notes
        -----
        About ``14 (n^3 + m^3)`` flops a layer; in float32 with ``check="raise"`` once more
        in float64 where a certificate is above its limit.
        """
        require_one_of("rule", rule, get_args(DampingRule))
        if rule == "exact":
            raise UnsupportedError(
                "A chain is damped in the moments of its layers, and has no exact "
                "damping. Use the rule 'factored' or 'factored_unit_pi'."
            )
        return tridiagonal_operator(
            self._blocks(),
            statistics,
            damping=damping,
            rule=rule,
            debias=debias,
            check=check,
            precision=precision,
        )

    def parameters_to_vectors(
        self, parameters: Mapping[str, Mapping[str, Array]], /
    ) -> dict[str, Array]:
        """Turn each layer's parameter-shaped arrays into its matrix ``(in(+1), out)``."""
        return {
            name: self.layers[name].parameters_to_matrix(part)
            for name, part in parameters.items()
        }

    def vectors_to_parameters(
        self, vectors: Mapping[str, Array], /
    ) -> dict[str, dict[str, Array]]:
        """Turn each layer's matrix back into parameter-shaped arrays."""
        return {
            name: self.layers[name].matrix_to_parameters(matrix)
            for name, matrix in vectors.items()
        }

    def _blocks(self) -> dict[str, Block]:
        kind = Kronecker()
        return {name: Block(layer, kind) for name, layer in self.layers.items()}

    def _pairs(self) -> list[tuple[str, str]]:
        """Return the names of neighbors, from the first layer on."""
        return list(itertools.pairwise(self.layers))
