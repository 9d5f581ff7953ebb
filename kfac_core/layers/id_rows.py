"""Rows whose inputs are one-hot (or n-hot) vectors, kept as ids.

Conventions.  ``x`` is the vector of V zeros with a 1 at its id.  For a bag, an example's
x has a 1 at each of its k ids, or the number of times that an id occurs.  No such vector
is formed.
"""

from __future__ import annotations

from kfac_core.array import Array, Namespace, Status, finite, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import structure
from kfac_core.layers.rows import (
    OfOutputs,
    WeightSharing,
    counted_rows,
    has_weights,
    output_rows,
)
from kfac_core.linalg.indexing import count_indices, sum_rows_at


@structure(static=("size", "bag", "binary"))
class IdRows(OfOutputs):
    """The rows of one batch of an embedding.

    Attributes
    ----------
    ids : array of int, shape (N, S), or (N, k) for bags
        The ids.
    output_grads : array, shape (M, N, S, m); S is 1 for bags
        The g, zero where masked.
    mask : array of bool, shape (N, S), or None
        The rows that count; of one column for bags.
    size : int
        Vocabulary size ``V``.
    bag : bool
        Whether the k ids of an example make one row.
    binary : bool
        Whether an id that occurs twice in a bag counts once.
    """

    ids: Array
    output_grads: Array
    mask: Array | None
    size: int
    bag: bool
    binary: bool

    homogeneous = False

    @property
    def like(self) -> Array:
        """An array of the rows' library and device."""
        return self.output_grads

    def with_ids_inside(self, *, xp: Namespace) -> tuple[IdRows, Array | int]:
        """Return the rows with id 0 in place of ids out of range, and their flag.

        Not every library raises for an index out of range; some crash.
        """
        inside = (self.ids >= 0) & (self.ids < self.size)
        if finite.known_true(inside, xp=xp):
            return self, 0
        ids = xp.where(inside, self.ids, xp.zeros_like(self.ids))
        flag = ns.status_unless(xp, xp.all(inside), Status.IDS_OUT_OF_RANGE)
        return replaced(self, ids=ids), flag

    def shared_rows(
        self, sharing: WeightSharing, dtype: object, /, *, xp: Namespace
    ) -> tuple[Array, Array]:
        """Return rows whose second moments are those of the factors.

        One row, whose squares are the counts of the ids, replaces the one-hot vectors x:
        the factor keeps only the diagonal of ``sum x x^T``.  See `Rows.shared_rows`.
        """
        counts = self.input_squares(dtype, xp=xp)
        g = output_rows(self.output_grads, sharing, dtype, xp=xp)
        return xp.sqrt(counts)[None, :], g

    def input_squares(self, dtype: object, /, *, xp: Namespace) -> Array:
        """Return ``sum x * x``, shape (V,): counts of ids, or their weights."""
        values = self.values(dtype, xp=xp)
        if self.bag:
            # An id that occurs c times in a bag adds c^2: c from each of its entries.
            values = values if self.binary else values * self._standing(dtype, xp)
        if has_weights(self.mask, xp=xp):
            values = values * ns.cast(xp, self.mask, dtype)
        # One number per id: the V-wide diagonal comes from counting.
        flat = xp.reshape(self.ids, (-1,))
        return count_indices(flat, xp.reshape(values, (-1,)), size=self.size, xp=xp)

    def squares(self, dtype: object, /, *, xp: Namespace) -> Array:
        """Return ``sum_mn D * D`` with ``D = sum_s x g^T``, shape (V, m)."""
        g = ns.cast(xp, self.output_grads, dtype)
        if self.bag:
            weights = self.values(dtype, xp=xp)
            if not self.binary:
                weights = weights * self._standing(dtype, xp)
            squares = xp.sum(g * g, axis=0) * weights[..., None]
        else:
            # Gradients of positions with the same id add up before they are squared; each
            # of these c positions then adds a c-th of the square.
            same = ns.cast(xp, self.ids[:, :, None] == self.ids[:, None, :], dtype)
            if self.mask is not None:
                same = same * self._counted(dtype, xp)[:, None, :]
            sums = xp.matmul(same, g)
            share = self._once(dtype, xp)
            squares = xp.sum(sums * sums, axis=0) * share[..., None]
        rows = xp.reshape(squares, (-1, squares.shape[-1]))
        return sum_rows_at(rows, xp.reshape(self.ids, (-1,)), size=self.size, xp=xp)

    def in_basis(
        self,
        input_basis: Array | None,
        output_basis: Array | None,
        dtype: object,
        /,
        *,
        xp: Namespace,
    ) -> IdRows:
        """Return the rows with ``Q_G^T g`` for g; ids have no other coordinates."""
        assert input_basis is None
        g = ns.cast(xp, self.output_grads, dtype)
        if output_basis is not None:
            g = xp.matmul(g, output_basis)
        return replaced(self, output_grads=g)

    def gradient_sum(self, dtype: object, /, *, xp: Namespace) -> Array:
        """Return ``sum_mns x g^T``, shape (V, m)."""
        g = xp.sum(ns.cast(xp, self.output_grads, dtype), axis=0)
        if has_weights(self.mask, xp=xp):
            g = g * xp.sqrt(ns.cast(xp, self.mask, dtype))[..., None]
        rows = g * self.values(dtype, xp=xp)[..., None]
        flat = xp.reshape(self.ids, (-1,))
        return sum_rows_at(
            xp.reshape(rows, (flat.shape[0], -1)), flat, size=self.size, xp=xp
        )

    def vectors(self, dtype: object, /, *, xp: Namespace) -> Array:
        """Return each example's gradient flattened row-major, shape (M N, V m).

        Only for the full matrix of the block, which is V m times larger still.
        """
        g = ns.cast(xp, self.output_grads, dtype)
        M, N, _, m = g.shape
        vocabulary = xp.arange(
            self.size, dtype=self.ids.dtype, device=ns.device_of(self.ids)
        )
        # Only for exact per-example gradients, whose V m numbers are as many.
        hot = ns.cast(xp, self.ids[:, :, None] == vocabulary, dtype)
        hot = hot * self.values(dtype, xp=xp)[:, :, None]
        if self.bag:
            hot = xp.sum(hot, axis=1, keepdims=True)
        D = xp.matmul(xp.matrix_transpose(hot), g)
        return xp.reshape(D, (M * N, self.size * m))

    def status(
        self, *, xp: Namespace, known: frozenset[str] = frozenset(), stacked: int = 0
    ) -> Array | int:
        """Return whether the output gradients are not finite; see `Rows.status`."""
        return super().status(xp=xp, known=known | {"inputs"}, stacked=stacked)

    def values(self, dtype: object, /, *, xp: Namespace) -> Array:
        """Return the entry of x that each id sets or adds to, shape of the ids."""
        if self.bag and self.binary:
            return self._once(dtype, xp)
        ones = xp.ones_like(self.ids, dtype=dtype)
        return ones if self.mask is None else ones * self._counted(dtype, xp)

    def _counted(self, dtype: object, xp: Namespace) -> Array:
        """Return 1 for rows that count, and 0 for others."""
        return ns.cast(xp, counted_rows(self.mask, xp=xp), dtype)

    def _standing(self, dtype: object, xp: Namespace) -> Array:
        """Return how often each id occurs in its example, shape of the ids."""
        same = ns.cast(xp, self.ids[:, :, None] == self.ids[:, None, :], dtype)
        if self.mask is not None:
            same = same * self._counted(dtype, xp)[:, None, :]
        return xp.sum(same, axis=-1)

    def _once(self, dtype: object, xp: Namespace) -> Array:
        """Return 1 over the number of times that each id occurs in its example."""
        count = self._standing(dtype, xp)
        # Each of c occurrences has weight 1/c, so that an id of a bag counts once.
        share = 1.0 / xp.where(count > 0, count, xp.ones_like(count))
        return share if self.mask is None else share * self._counted(dtype, xp)
