"""Sums of the outer products of rows, in the place of the rows.

Conventions.  Second moments read nothing else of their rows, and where rows are more
numbers than the factors of their layer, their sums are all that must be held until an
update.  Sums of further rows are added to them.
"""

from __future__ import annotations

from typing import Any

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.finite import all_finite
from kfac_core.array.namespaces import Scalar, cast, status_unless
from kfac_core.array.status import Status
from kfac_core.array.structure import replaced, structure
from kfac_core.errors import ConventionError
from kfac_core.layers.rows import WeightSharing
from kfac_core.linalg.symmetric import ScaledMatrix, SymmetricMatrix

__all__ = ["RowSums"]


@structure(static=("examples", "sources", "sharing"))
class RowSums:
    """The sums of outer products of one or more batches of a layer.

    `kfac_core.Block.row_sums` makes them of a batch, in the place of which a block takes
    them.

    Attributes
    ----------
    inputs : SymmetricMatrix, shape (n, n)
        ``sum x x^T``, with the homogeneous coordinate where there is a bias.
    output_grads : SymmetricMatrix, shape (m, m)
        ``sum g g^T`` over rows and sources.
    count : int or 0-d array
        Number of rows that count.
    examples : int
        Number of examples N.
    sources : int
        Number of backpropagated vectors M.
    sharing : {"expand", "reduce"}
        What a row is.
    grads_factor : float
        What `output_grads` is multiplied by.
    """

    inputs: SymmetricMatrix
    output_grads: SymmetricMatrix
    count: Scalar
    examples: int
    sources: int
    sharing: WeightSharing
    grads_factor: float = 1.0

    @property
    def like(self) -> Array:
        """An array of the library, on the device and of the dtype of the sums."""
        return self.output_grads.array

    def kept(self, dtype: object, /, *, xp: Namespace) -> Scalar:
        """Return the number of rows that count: an int, or a 0-d array with a mask."""
        return (
            self.count if isinstance(self.count, int) else cast(xp, self.count, dtype)
        )

    def factor_rows(
        self, sharing: WeightSharing, dtype: object, /, *, xp: Namespace
    ) -> tuple[SymmetricMatrix, None, ScaledMatrix]:
        """Return both sums, where `kfac_core.layers.Rows.factor_rows` returns rows.

        Raises
        ------
        ConventionError
            For another `sharing` than that of the sums.
        """
        if sharing != self.sharing:
            raise ConventionError(
                f"The sums are of rows with sharing={self.sharing!r}, and the block has "
                f"sharing={sharing!r}."
            )
        x, g = self.inputs, self.output_grads
        if x.array.dtype != dtype or g.array.dtype != dtype:
            x = replaced(x, array=cast(xp, x.array, dtype))
            g = replaced(g, array=cast(xp, g.array, dtype))
        return x, None, ScaledMatrix(g, self.grads_factor)

    def status(
        self, *, xp: Namespace, known: frozenset[str] = frozenset()
    ) -> Array | int:
        """Return which of the two sums is not finite; see `kfac_core.layers.Rows`."""
        status: Array | int = 0
        for argument, total, flag in self._parts():
            if argument not in known:
                good = all_finite(total.diagonal(), xp=xp)
                status = status_unless(xp, good, flag) | status
        return status

    def status_of_stack(self, *, xp: Namespace, known: frozenset[str]) -> Array:
        """Return the same flags for each of a stack, shape (L,)."""
        status: Any = 0
        for argument, total, flag in self._parts():
            good = xp.all(xp.isfinite(total.diagonal()), axis=-1)
            if argument in known:
                good = xp.ones_like(good)
            status = status_unless(xp, good, flag) | status
        return status

    def plus(self, other: RowSums, /) -> RowSums:
        """Return the sums of both batches, of as many sources each."""
        ours, theirs = self.grads_factor, other.grads_factor
        g = _added(self.output_grads, other.output_grads, theirs / ours)
        return RowSums(
            _added(self.inputs, other.inputs, 1.0),
            g,
            self.count + other.count,
            self.examples + other.examples,
            self.sources,
            self.sharing,
            ours,
        )

    def with_scaled_grads(self, factor: float, /) -> RowSums:
        """Return the sums with each g multiplied by a factor."""
        return replaced(self, grads_factor=self.grads_factor * factor * factor)

    def _parts(self) -> tuple[tuple[str, SymmetricMatrix, Status], ...]:
        return (
            ("inputs", self.inputs, Status.INPUTS_NOT_FINITE),
            ("output_grads", self.output_grads, Status.OUTPUT_GRADS_NOT_FINITE),
        )


def _added(
    first: SymmetricMatrix, second: SymmetricMatrix, factor: float
) -> SymmetricMatrix:
    """Return ``first + factor second``."""
    array = second.array if factor == 1.0 else second.array * factor
    full_storage = first.full_storage and second.full_storage
    return SymmetricMatrix(first.array + array, full_storage)
