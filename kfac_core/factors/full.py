"""The full second moment of rows, ``E[x x^T]``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kfac_core.array import Array, Check, Namespace, Place, Scalar, replaced
from kfac_core.array import namespaces as ns
from kfac_core.factors.average import Average
from kfac_core.linalg.damped import DampedMatrix, damped_matrix
from kfac_core.linalg.gram import gram_update
from kfac_core.linalg.symmetric import ScaledMatrix, SymmetricMatrix

__all__ = ["FullFactor"]


@dataclass(frozen=True)
class FullFactor:
    """A factor of n x n numbers; see `kfac_core.factors.factor.Factor`."""

    kind = "full"

    def initial(self, shape: tuple[int, ...], place: Place, /) -> Average:
        """Return a zero average."""
        zeros = place.zeros(*shape, shape[-1])
        # Sums that start so stay in the order in which LAPACK reads a lower triangle, and
        # in one form: what is added to them may be a lower triangle alone.
        columns = place.xp.matrix_transpose(zeros)
        empty = SymmetricMatrix(columns, full_storage=False)
        return Average(empty, place.zeros(), place.zeros())

    def updated(
        self,
        average: Average,
        rows: Array,
        /,
        *,
        tail: Array | None,
        decay: Scalar,
        scale: Scalar,
        weight: Array,
        xp: Namespace,
    ) -> Average:
        """Return the average after ``sum <- decay sum + scale rows^T rows``."""
        held: SymmetricMatrix = average.sum
        array, full_storage = gram_update(
            held, rows, tail=tail, decay=decay, scale=scale, xp=xp
        )
        # Whatever the library keeps of it, the sum has the form that it began with.
        total = SymmetricMatrix(array, held.full_storage and full_storage)
        number = float(rows.shape[-2])
        return average.following(total, number, decay=decay, weight=weight)

    def value(
        self, average: Average, /, *, debias: bool, dtype: Any, xp: Namespace
    ) -> ScaledMatrix:
        """Return the average in a dtype, without a pass over the sum where it has that."""
        total: SymmetricMatrix = average.sum
        factor, rank = average.factor(debias=debias), average.rows
        roundoff = 0.0
        if total.array.dtype != dtype:
            roundoff = ns.roundoff_of(total.array.dtype, xp=xp)
            factor = ns.cast(xp, factor, dtype)
            total = replaced(total, array=ns.cast(xp, total.array, dtype))
            rank = rank if rank is None else ns.cast(xp, rank, dtype)
        # Of the weights of a stack, one a matrix.
        if factor.ndim:
            factor = xp.reshape(factor, total.array.shape[:-2])
        if rank is not None and rank.ndim:
            rank = xp.reshape(rank, factor.shape)
        return ScaledMatrix(total, factor, roundoff, rank)

    def mean_eigenvalue(self, value: ScaledMatrix, /) -> Array:
        """Return ``tr / n``, shape (...)."""
        return value.trace() / value.matrix.array.shape[-1]

    def damped(
        self,
        value: ScaledMatrix,
        shift: Scalar,
        /,
        *,
        check: Check,
        name: str,
        apply_dtype: Any,
    ) -> DampedMatrix:
        """Return ``A + shift I``, which is checked where it is factorized."""
        return damped_matrix(value, shift, apply_dtype=apply_dtype)
