"""Batches from a framework (`Batch`), and the rows that statistics read (`Rows`).

Conventions.  N examples; S shared positions in each (time steps, tokens, pixels) at which
the layer's weights are used again, 1 where nothing is shared; M sources, the vectors
backpropagated for one batch.  A mask is True for rows that count. Masked rows are zero,
the homogeneous coordinate included, whatever the padding held.  A mask of floats holds
the weights of rows in the loss: each g is multiplied by the root of its weight, and the
moments of x are means with these weights.  A layer made of Q independent groups (a
grouped convolution) has a leading axis of length Q in the rows; other layers have none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import array_api_compat

from kfac_core import constraints, errors
from kfac_core.array import Array, Namespace, Scalar, Status, finite, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import structure
from kfac_core.layers.homogeneous import append_coordinate, homogeneous_coordinate
from kfac_core.linalg.gram import HomogeneousRows
from kfac_core.linalg.groups import join_groups
from kfac_core.linalg.products import multiply_matrices

ARGUMENT_FLAGS = {
    "inputs": Status.INPUTS_NOT_FINITE,
    "output_grads": Status.OUTPUT_GRADS_NOT_FINITE,
}
"""The flag of each argument that is not finite."""

WeightSharing = Literal["expand", "reduce"]
"""Whether each shared position is a row, or each example is reduced to one row."""


@structure(static=("sources",))
class Batch:
    """Inputs and output gradients of one layer in one batch.

    Parameters
    ----------
    inputs : array, shape (N, ..., features in)
        Inputs of the layer; the axes between first and last are shared positions.
    output_grads : array, shape (N, ..., features out) or (M, N, ..., features out)
        Vectors backpropagated to the layer's outputs, one for each example.
    mask : array of bool or float, shape (N, ...), optional
        False for rows to ignore (padding).  Or the weights, >= 0, of the rows in the loss,
        whose roots the `output_grads` have been multiplied by.
    sources : int, optional
        Number M of backpropagated vectors, if `output_grads` has a leading axis of them;
        else None.
    bias : array of bool, shape (N,) or (N, ...), optional
        False for rows of a use of the layer's weight that adds no bias, as where layers
        with a bias and without are tied; all rows add it by default.  Of a layer that has
        a bias.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> rng = np.random.default_rng(0)
    >>> batch = kc.Batch(rng.normal(size=(32, 3)), rng.normal(size=(32, 2)))

    Tokens are a shared axis, and a mask leaves out those that pad:

    >>> mask = np.ones((32, 7), dtype=bool)
    >>> mask[:, 5:] = False
    >>> tokens = kc.Batch(
    ...     rng.normal(size=(32, 7, 3)), rng.normal(size=(32, 7, 2)), mask=mask
    ... )
    """

    inputs: Array
    output_grads: Array
    mask: Array | None = None
    sources: int | None = None
    bias: Array | None = None

    @property
    def like(self) -> Array:
        """An array whose library, device and dtype the statistics take."""
        return self.output_grads


class OfOutputs:
    """Base of all kinds of rows: counts and flags, from g of shape (..., M, N, S, m)."""

    output_grads: Array
    mask: Array | None

    @property
    def like(self) -> Array:
        """An array of the rows' library and device."""
        raise NotImplementedError

    @property
    def examples(self) -> int:
        """Number of examples N."""
        return int(self.output_grads.shape[-3])

    @property
    def positions(self) -> int:
        """Number of shared positions S."""
        return int(self.output_grads.shape[-2])

    @property
    def sources(self) -> int:
        """Number of backpropagated vectors M."""
        return int(self.output_grads.shape[-4])

    def counts(self, dtype: object, /, *, xp: Namespace) -> tuple[Scalar, int, int]:
        """Return the numbers R of rows, N of examples and M of sources.

        R is the number of rows that count, or their weight: an int, or a 0-d array.
        """
        M, N, S, _ = self.output_grads.shape[-4:]
        if self.mask is None:
            return int(N * S), int(N), int(M)
        return xp.sum(xp.astype(self.mask, dtype)), int(N), int(M)

    def status(
        self, *, xp: Namespace, known: frozenset[str] = frozenset(), stacked: int = 0
    ) -> Array | int:
        """Return which of the two arrays is not finite, as int32 `Status` flags.

        Parameters
        ----------
        xp : namespace
            Array API namespace of the rows.
        known : frozenset of str
            Arguments that are finite and need not be read.
        stacked : int
            Number of leading axes of a stack of row sets: one flag for each set.

        Returns
        -------
        int or array of int32
            Flags of all rows, 0-d, or of each set; 0 where both are known.
        """
        flags: Array | int = 0
        for argument, flag in ARGUMENT_FLAGS.items():
            if argument in known:
                continue
            array = self.like if argument == "inputs" else self.output_grads
            if stacked:
                axes = tuple(range(stacked, array.ndim))
                good = xp.all(xp.isfinite(array), axis=axes)
            else:
                good = finite.all_finite(array, xp=xp)
            flags = ns.status_unless(xp, good, flag) | flags
        return flags


@structure(static=("homogeneous", "batch_examples"))
class Rows(OfOutputs):
    """The rows ``(x, g)`` of one batch, grouped by example.

    Attributes
    ----------
    inputs : array, shape ((Q,) N, S, n)
        The x, without their homogeneous coordinate; zero where masked.
    output_grads : array, shape ((Q,) M, N, S, m)
        The g; zero where masked.
    mask : array of bool or float, shape (N, S), or None
        The rows that count, or the weights of all.
    homogeneous : bool
        Whether each x has a 1 appended.
    batch_examples : int or None
        N of the batch that these rows are a part of; None where they are all of it.
    batch_rows : int, 0-d array or None
        The number of rows that count in that batch.
    """

    inputs: Array
    output_grads: Array
    mask: Array | None
    homogeneous: bool
    batch_examples: int | None = None
    batch_rows: Scalar | None = None

    @property
    def like(self) -> Array:
        """An array of the rows' library and device."""
        return self.inputs

    def shared_rows(
        self, sharing: WeightSharing, dtype: object, /, *, xp: Namespace
    ) -> tuple[Array | HomogeneousRows, Array]:
        """Return the rows that the factors of a Kronecker product are moments of.

        Parameters
        ----------
        sharing : {"expand", "reduce"}
            Whether each position is a row; or each example, with the mean of its x and
            the sum of its g.
        dtype : dtype
            Dtype of the result.
        xp : namespace
            Array API namespace of the rows.

        Returns
        -------
        x : array or HomogeneousRows, shape ((Q,) N S, n) or ((Q,) N, n)
            With a 1 where the layer has a bias.
        g : array, shape ((Q,) M N S, m) or ((Q,) M N, m)
            For M sources.

        References
        ----------
        Eschenhagen et al. (2023), arXiv:2311.00636, sections 3.2 and 3.3.
        """
        x = ns.cast(xp, self.inputs, dtype)
        g = output_rows(self.output_grads, sharing, dtype, xp=xp)
        if sharing == "expand":
            x = ns.reshaped(x, (*x.shape[:-3], -1, x.shape[-1]), xp=xp)
            mask = None if self.mask is None else xp.reshape(self.mask, (-1,))
            if mask is not None and has_weights(mask, xp=xp):
                # sum w x x^T is the Gram matrix of sqrt(w) x, its homogeneous 1 included.
                mask = xp.sqrt(ns.cast(xp, mask, dtype))
                x = x * mask[:, None]
            if not self.homogeneous:
                return x, g
            ones = homogeneous_coordinate(x, mask, dtype, xp=xp)
            return HomogeneousRows(x, ones), g
        require_no_weights(self.mask, "sharing='reduce'", xp=xp)
        ones = homogeneous_coordinate(x, self.mask, dtype, xp=xp)
        # The mean runs over unmasked positions; a fully masked example gives a row of 0.
        number = xp.sum(ones, axis=-1)
        one = ns.cast(xp, number > 0, dtype)
        mean = xp.sum(x, axis=-2) / xp.where(number > 0, number, one + 1.0)[..., None]
        return HomogeneousRows(mean, one) if self.homogeneous else mean, g

    def per_example(self, dtype: object, /, *, xp: Namespace) -> Array:
        """Return each example's gradient ``D = sum_s x g^T``, shape ((Q,) M, N, n, m)."""
        x = self.full_inputs(dtype, xp=xp)
        # The new axis is that of the sources, which share x.
        across = xp.matrix_transpose(x)[..., None, :, :, :]
        return xp.matmul(across, ns.cast(xp, self.output_grads, dtype))

    def gradient_sum(self, dtype: object, /, *, xp: Namespace) -> Array:
        """Return ``sum_mns x g^T``, shape (n, Q m)."""
        g = xp.sum(ns.cast(xp, self.output_grads, dtype), axis=-4, keepdims=True)
        if has_weights(self.mask, xp=xp):
            # A weight w scales x by its root in A and counts once in N.  A gradient is
            # linear in g, whose rows were scaled by the other root already.
            g = g * xp.sqrt(ns.cast(xp, self.mask, dtype))[..., None]
        summed = Rows(self.inputs, g, self.mask, self.homogeneous)
        return join_groups(
            xp.sum(summed.per_example(dtype, xp=xp), axis=(-4, -3)), xp=xp
        )

    def per_position(self) -> Rows:
        """Return the rows with every position as an example."""
        xp = array_api_compat.array_namespace(self.inputs)
        x, g, mask = self.inputs, self.output_grads, self.mask
        x = xp.reshape(x, (*x.shape[:-3], -1, 1, x.shape[-1]))
        g = xp.reshape(g, (*g.shape[:-3], -1, 1, g.shape[-1]))
        if mask is not None:
            mask = xp.reshape(mask, (-1, 1))
        return Rows(x, g, mask, self.homogeneous)

    def in_basis(
        self,
        input_basis: Array | None,
        output_basis: Array | None,
        dtype: object,
        /,
        *,
        xp: Namespace,
    ) -> Rows:
        """Return the rows in other coordinates: ``Q_A^T x`` and ``Q_G^T g``.

        Parameters
        ----------
        input_basis, output_basis : array, shapes ((Q,) n, n) and ((Q,) m, m), or None
            Orthogonal matrices; None leaves a side as it is.
        dtype : dtype
            Dtype of the result.
        xp : namespace
            Array API namespace of the arrays.

        Returns
        -------
        Rows
            The homogeneous coordinate is one of the inputs' in another basis.
        """
        x, homogeneous = ns.cast(xp, self.inputs, dtype), self.homogeneous
        g = ns.cast(xp, self.output_grads, dtype)
        if input_basis is not None:
            x = _in_coordinates(self.full_inputs(dtype, xp=xp), input_basis, xp=xp)
            homogeneous = False
        if output_basis is not None:
            g = _in_coordinates(g, output_basis, xp=xp)
        return Rows(x, g, self.mask, homogeneous)

    def squares(self, dtype: object, /, *, xp: Namespace) -> Array:
        """Return ``sum_mn D * D``, shape (n, m).

        No D is formed where S is 1.  Elsewhere, as many of them at a time as take no
        more than half of the memory of the rows.
        """
        count = max(1, self.inputs.shape[-1])
        ((_, squares),) = self.squares_by_inputs(count, dtype, xp=xp)
        return squares

    def squares_by_inputs(
        self, count: int, dtype: object, /, *, xp: Namespace
    ) -> Iterator[tuple[slice, Array]]:
        """Yield the rows of `squares`, `count` of the inputs at a time, and which they are.

        With a homogeneous coordinate, `count` must cover all inputs.
        """
        starts = range(0, max(1, self.inputs.shape[-1]), count)
        if self.positions > 1 and self.examples:
            for start in starts:
                inputs = slice(start, start + count)
                part = replaced(self, inputs=self.inputs[..., inputs])
                yield inputs, join_groups(part.summed_squares(dtype, xp=xp), xp=xp)
            return
        # One position: (x g^T)^2 = x^2 (g^2)^T, so that no gradient of an example is
        # formed.
        g, ones = ns.cast(xp, self.output_grads, dtype), self.coordinates(dtype, xp=xp)
        g2 = xp.sum((g * g)[..., 0, :], axis=-3)
        for start in starts:
            inputs = slice(start, start + count)
            x = ns.cast(xp, self.inputs[..., 0, inputs], dtype)
            x2 = x * x
            if ones is not None:
                x2 = append_coordinate(x2, ones[..., 0], xp=xp)
            squares = multiply_matrices(xp.matrix_transpose(x2), g2, xp=xp)
            yield inputs, join_groups(squares, xp=xp)

    def summed_squares(self, dtype: object, /, *, xp: Namespace) -> Array:
        """Return the sum of the squares of the examples' gradients, shape ((Q,) n, m)."""
        n, m = self.inputs.shape[-1] + self.homogeneous, self.output_grads.shape[-1]
        # As many gradients at a time as fill a quarter of the memory of the rows.
        each = 4 * n * m * self.sources
        at_once = max(1, self.examples * self.positions * (n + m) // each)
        total = 0.0
        for start in range(0, self.examples, at_once):
            stop = min(start + at_once, self.examples)
            D = self._examples(start, stop).per_example(dtype, xp=xp)
            total = xp.sum(D * D, axis=(-4, -3)) + total
        return total

    def vectors(self, dtype: object, /, *, xp: Namespace) -> Array:
        """Return each example's gradient flattened row-major, shape (M N, n Q m)."""
        D = self.per_example(dtype, xp=xp)
        if D.ndim == 5:
            D = xp.permute_dims(D, (1, 2, 3, 0, 4))
        return xp.reshape(D, (self.sources * self.examples, -1))

    def full_inputs(self, dtype: object, /, *, xp: Namespace) -> Array:
        """Return the x with their homogeneous coordinate, shape ((Q,) N, S, n(+1))."""
        x, ones = ns.cast(xp, self.inputs, dtype), self.coordinates(dtype, xp=xp)
        return x if ones is None else append_coordinate(x, ones, xp=xp)

    def coordinates(self, dtype: object, /, *, xp: Namespace) -> Array | None:
        """Return the homogeneous coordinates, shape ((Q,) N, S); None without a bias."""
        if not self.homogeneous:
            return None
        counted = None if self.mask is None else counted_rows(self.mask, xp=xp)
        return homogeneous_coordinate(self.inputs, counted, dtype, xp=xp)

    def _examples(self, start: int, stop: int) -> Rows:
        """Return the rows of some of the examples."""
        mask = None if self.mask is None else self.mask[start:stop, ...]
        return Rows(
            self.inputs[..., start:stop, :, :],
            self.output_grads[..., start:stop, :, :],
            mask,
            self.homogeneous,
        )


def _in_coordinates(rows: Array, basis: Array, /, *, xp: Namespace) -> Array:
    """Return ``Q^T x`` of all rows by one product; bases may have axes of a stack."""
    flat = ns.reshaped(rows, (*basis.shape[:-2], -1, rows.shape[-1]), xp=xp)
    product = multiply_matrices(flat, basis, xp=xp)
    return ns.reshaped(product, rows.shape, xp=xp)


def has_weights(mask: Array | None, /, *, xp: Namespace) -> bool:
    """Whether a mask holds the weights of rows."""
    return mask is not None and mask.dtype != xp.bool


def counted_rows(mask: Array, /, *, xp: Namespace) -> Array:
    """Return which rows count: the mask, or where weights are not zero."""
    return mask != 0 if has_weights(mask, xp=xp) else mask


def require_no_weights(mask: Array | None, what: str, /, *, xp: Namespace) -> None:
    """Raise `UnsupportedError` for weights of rows where only a mask has a meaning."""
    if has_weights(mask, xp=xp):
        raise errors.UnsupportedError(
            f"Expected `mask` to be boolean with {what}, got weights of rows. Take "
            "Kronecker() with sharing='expand', or leave the weights out."
        )


def zeroed(x: Array, g: Array, mask: Array, /, *, xp: Namespace) -> tuple[Array, Array]:
    """Return x and g, with zeros in masked rows.

    Padding may hold NaN, so it is replaced and not multiplied by zero.
    """
    counted = counted_rows(mask, xp=xp)[..., None]
    x = xp.where(counted, x, xp.zeros_like(x))
    return x, xp.where(counted, g, xp.zeros_like(g))


def with_some_biases(rows: Rows, bias: Array, /) -> Rows:
    """Return rows of which only some uses of the weight add the bias.

    Parameters
    ----------
    rows : Rows
        Rows of a layer with a bias.
    bias : array of bool, shape (N,) or (N, ...)
        False for rows without it: their homogeneous coordinate is 0.

    Returns
    -------
    Rows
        With the coordinate as a last column of the inputs.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError
        For a `bias` that does not fit.
    ConventionError
        For a layer without a bias.
    """
    xp = ns.namespace_of(inputs=rows.inputs, bias=bias)
    if not rows.homogeneous:
        raise errors.ConventionError(
            "Rows without a bias can only be marked in a layer that has one; set "
            "bias=True in the layer, or leave `Batch.bias` out."
        )
    N, S = rows.examples, rows.positions
    if bias.dtype != xp.bool:
        raise errors.DtypeError(
            f"Expected `bias` to be an array of bool, got {bias.dtype}."
        )
    # One flag for each example, or for each of its positions.
    size = math.prod(bias.shape)
    if size != N:
        constraints.require_shape("bias", xp.reshape(bias, (-1,)), (N * S,))
    constraints.require_shape("bias", bias, (N, ...))
    # The bias column is then data of 0 and 1, and the rows are no longer homogeneous.
    has = xp.broadcast_to(xp.reshape(bias, (N, -1)), (N, S))
    if rows.mask is not None:
        has = has & counted_rows(rows.mask, xp=xp)
    x = rows.inputs
    ones = xp.broadcast_to(ns.cast(xp, has, x.dtype), x.shape[:-1])
    x = append_coordinate(x, ones, xp=xp)
    return replaced(rows, inputs=x, homogeneous=False)


def _with_coordinate(rows: Rows) -> Rows:
    """Return rows with their homogeneous coordinate, if any, as a column of the inputs."""
    if not rows.homogeneous:
        return rows
    xp = array_api_compat.array_namespace(rows.inputs)
    x = rows.full_inputs(rows.inputs.dtype, xp=xp)
    return replaced(rows, inputs=x, homogeneous=False)


def join_uses(uses: Sequence[Rows], /) -> Rows:
    """Return several uses of one layer in the same examples as shared positions.

    Parameters
    ----------
    uses : sequence of Rows
        Rows with the same examples and sources.

    Returns
    -------
    Rows
        With the positions of all uses.

    Raises
    ------
    ShapeError
        If examples or sources differ.
    """
    first = uses[0]
    counts = {f"use {i}": (use.examples, use.sources) for i, use in enumerate(uses)}
    constraints.require_same("number of examples and of sources in all uses", counts)
    # Uses with and without a bias: append the 1 or 0 as a column to all of them.
    if any(use.homogeneous != first.homogeneous for use in uses):
        uses = [_with_coordinate(use) for use in uses]
        first = uses[0]
    xp = ns.namespace_of(**{f"uses[{i}]": use.inputs for i, use in enumerate(uses)})
    mask = None
    masks = [use.mask for use in uses if use.mask is not None]
    if masks:
        weights = [m.dtype for m in masks if has_weights(m, xp=xp)]
        dtype = weights[0] if weights else xp.bool
        every = [
            xp.ones_like(use.inputs[..., 0], dtype=dtype)
            if use.mask is None
            else xp.astype(use.mask, dtype)
            for use in uses
        ]
        mask = xp.concat(every, axis=-1)
    inputs = xp.concat([use.inputs for use in uses], axis=-2)
    output_grads = xp.concat([use.output_grads for use in uses], axis=-2)
    return Rows(inputs, output_grads, mask, first.homogeneous)


def output_rows(
    output_grads: Array, sharing: WeightSharing, dtype: object, /, *, xp: Namespace
) -> Array:
    """Return g as rows: each position's, or each example's sum over positions."""
    g = ns.cast(xp, output_grads, dtype)
    if sharing == "reduce":
        g = xp.sum(g, axis=-2, keepdims=True)
    return ns.reshaped(g, (*g.shape[:-4], -1, g.shape[-1]), xp=xp)


@structure()
class PixelRows(OfOutputs):
    """The rows of a convolution with its pixels in place of its patches.

    Attributes
    ----------
    pixels : array, shape (N, P, c)
        The inputs, channels last, without any padding.
    output_grads : array, shape (M, N, S, m)
        The g; zero where masked.
    mask : array of bool, shape (N, S), or None
        The rows that count, for g alone.
    """

    pixels: Array
    output_grads: Array
    mask: Array | None

    @property
    def like(self) -> Array:
        """An array of the rows' library and device."""
        return self.pixels

    def shared_rows(
        self, sharing: WeightSharing, dtype: object, /, *, xp: Namespace
    ) -> tuple[Array, Array]:
        """Return pixels and output gradients as rows; see `Rows.shared_rows`."""
        pixels = ns.cast(xp, self.pixels, dtype)
        g = output_rows(self.output_grads, sharing, dtype, xp=xp)
        return xp.reshape(pixels, (-1, pixels.shape[-1])), g
