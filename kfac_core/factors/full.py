"""The full second moment of rows, ``E[x x^T]``."""

from __future__ import annotations

from dataclasses import dataclass

from kfac_core.array import Array, Namespace, Place, Scalar, replaced
from kfac_core.array import namespaces as ns
from kfac_core.factors.average import Average
from kfac_core.linalg.damped import damped_matrix
from kfac_core.linalg.gram import HomogeneousRows, updated_gram
from kfac_core.linalg.symmetric import ScaledMatrix, SymmetricMatrix


@dataclass(frozen=True)
class FullFactor:
    """A factor of n x n numbers; see `kfac_core.factors.factor.Factor`."""

    damped = staticmethod(damped_matrix)

    def initial(self, shape: tuple[int, ...], place: Place, /) -> Average:
        """Return a zero average."""
        zeros = place.zeros(*shape, shape[-1])
        # Start in column-major order, so that LAPACK reads the lower triangle without a
        # copy.  SYRK fills that triangle alone.
        columns = place.xp.matrix_transpose(zeros)
        empty = SymmetricMatrix(columns, full_storage=False)
        return Average(empty, place.zeros(), place.zeros())

    def updated(
        self,
        average: Average,
        rows: Array | HomogeneousRows,
        decay: Scalar,
        scale: Scalar,
        weight: Scalar,
        /,
        *,
        overwrite: bool = False,
        xp: Namespace,
    ) -> Average:
        """Return the average after ``sum <- decay sum + scale rows^T rows``."""
        total = updated_gram(
            average.sum, rows, decay, scale, overwrite=overwrite, xp=xp
        )
        x = rows.x if isinstance(rows, HomogeneousRows) else rows
        # The count of rows bounds the rank; masked rows only make the bound loose.
        return average.following(total, float(x.shape[-2]), decay, weight)

    def value(
        self, average: Average, /, *, debias: bool, dtype: object, xp: Namespace
    ) -> ScaledMatrix:
        """Return the average in a dtype; the sum is not copied if it has that dtype."""
        total: SymmetricMatrix = average.sum
        factor, rank = average.factor(debias=debias), average.rows
        roundoff = 0.0
        if total.array.dtype != dtype:
            # A wider dtype does not bring back digits that storage has lost, so its
            # roundoff stays with the matrix.
            roundoff = ns.roundoff_of(total.array.dtype, xp=xp)
            factor = ns.cast(xp, factor, dtype)
            total = replaced(total, array=ns.cast(xp, total.array, dtype))
            rank = rank if rank is None else ns.cast(xp, rank, dtype)
        # One weight per matrix of the stack.
        if factor.ndim:
            factor = xp.reshape(factor, total.array.shape[:-2])
        if rank is not None and rank.ndim:
            rank = xp.reshape(rank, factor.shape)
        return ScaledMatrix(total, factor, roundoff=roundoff, rank=rank)

    def mean_eigenvalue(self, value: ScaledMatrix, /) -> Array:
        """Return ``tr / n``, shape (...)."""
        return value.trace() / value.matrix.array.shape[-1]
