"""The convolution, in any number of spatial axes: a dense layer on patches.

Conventions.  The block's matrix has shape ``(K c (+1), out)`` with ``K =
prod(kernel_size)`` and ``c = in_channels / groups``: kernel positions before channels,
the bias as its last row.  ``weight_layout`` is the framework's layout of the weight:
``"spatial_io"`` as ``(*kernel_size, c, out)`` (JAX, Keras), ``"oi_spatial"`` as
``(out, c, *kernel_size)`` (PyTorch); ``data_layout`` where inputs and output gradients
have their channels.  A row for each output position: x the patch that it sees, in the
order and with the padding of `kfac_core.linalg.patches`, g the output gradient there.

With Q > 1 groups, group q owns the input channels ``q c`` to ``(q + 1) c`` and the output
channels ``q m`` to ``(q + 1) m``, ``m = out_channels / Q``; its rows are its own, and the
arrays of `Rows` have a leading axis of groups.  Depthwise is ``Q = in_channels``.

A chunk of a batch (`Conv.row_chunks`) holds whole examples.  The S of ``S A (x) G`` and
the N of a mean loss are those of the whole batch.

References
----------
Grosse and Martens (2016), arXiv:1602.01407, section 3, for convolutions.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from kfac_core import constraints, errors
from kfac_core.array import Array, Namespace, replaced
from kfac_core.array import namespaces as ns
from kfac_core.constraints import shown
from kfac_core.layers import checks
from kfac_core.layers.homogeneous import join_bias, split_bias
from kfac_core.layers.rows import (
    Batch,
    PixelRows,
    Rows,
    require_no_weights,
    with_some_biases,
    zeroed,
)
from kfac_core.linalg import patches

ConvWeightLayout = Literal["spatial_io", "oi_spatial"]
DataLayout = Literal["channels_last", "channels_first"]


_Entered: TypeAlias = tuple[Array, Array, Array | None, Namespace]


@dataclass(frozen=True, kw_only=True)
class Conv:
    """A convolution in any number of spatial axes: a dense layer on patches.

    The block's matrix has shape ``(K c (+1), out)`` with ``K = prod(kernel_size)`` and
    ``c = in_channels / groups``: kernel positions before channels, the bias as its last
    row.  There is one row for each output position.

    Parameters
    ----------
    in_channels, out_channels : int
        Numbers of channels, at least 1.
    kernel_size : sequence of int
        One size for each of the d spatial axes.
    strides, dilation : sequence of int, optional
        One for each spatial axis; all 1 by default.
    padding : {"same", "valid"} or sequence of pairs
        A rule, or the zeros ``(lo, hi)`` of each spatial axis.
    groups : int
        Q, which divides both numbers of channels.
    bias : bool
        Whether the layer has a bias.
    weight_layout : {"spatial_io", "oi_spatial"}
        ``"spatial_io"`` for weights ``(*kernel_size, c, out)`` (JAX, Keras),
        ``"oi_spatial"`` for ``(out, c, *kernel_size)`` (PyTorch), with
        ``c = in_channels / groups``.
    data_layout : {"channels_last", "channels_first"}
        Position of the channels in inputs and output gradients.

    Raises
    ------
    ShapeError
        For numbers below 1, of the wrong count, or that do not divide.
    ConventionError
        For an unknown layout or rule of padding.

    Examples
    --------
    >>> import kfac_core as kc
    >>> layer = kc.Conv(
    ...     in_channels=3,
    ...     out_channels=8,
    ...     kernel_size=(3, 3),
    ...     padding="same",
    ...     bias=True,
    ...     weight_layout="spatial_io",
    ...     data_layout="channels_last",
    ... )
    >>> layer.kernel_size
    (3, 3)
    """

    in_channels: int
    out_channels: int
    kernel_size: patches.Sizes
    strides: patches.Sizes | None = None
    padding: patches.Padding
    dilation: patches.Sizes | None = None
    groups: int = 1
    bias: bool
    weight_layout: ConvWeightLayout
    data_layout: DataLayout

    kind = "conv"

    def __post_init__(self) -> None:
        kernel = _numbers("kernel_size", self.kernel_size)
        ones = (1,) * len(kernel)
        sizes = {"kernel_size": kernel}
        for name in ("strides", "dilation"):
            numbers = getattr(self, name)
            sizes[name] = _numbers(name, ones if numbers is None else numbers)
        for name, size in sizes.items():
            if not kernel or len(size) != len(kernel) or min(size) < 1:
                raise errors.ShapeError(
                    f"Expected `{name}` to be numbers >= 1, one for each spatial axis of "
                    f"`kernel_size` {kernel}, got {size}."
                )
            object.__setattr__(self, name, size)
        if not isinstance(self.padding, str):
            object.__setattr__(self, "padding", _pairs(self.padding))
        channels = dict.fromkeys(("in_channels", "out_channels"), constraints.SIZE)
        constraints.require_options(
            self,
            groups=constraints.SIZE,
            bias=constraints.FLAG,
            weight_layout=constraints.literal(ConvWeightLayout),
            data_layout=constraints.literal(DataLayout),
            **channels,
        )
        patches.resolve_padding(kernel, padding=self.padding, **sizes)
        for name in ("in_channels", "out_channels"):
            number = getattr(self, name)
            # Each group owns an equal range of channels.
            if number % self.groups:
                raise errors.ShapeError(
                    f"Expected `{name}` to be a multiple of `groups`, got {number} and "
                    f"{self.groups}."
                )

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The shape ``(K c (+1), out)`` of the block's matrix."""
        return self._patch_size + int(self.bias), self.out_channels

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters, by name, in a framework's layout."""
        c, out = self.in_channels // self.groups, self.out_channels
        shapes: dict[str, tuple[int, ...]] = {"weight": (*self.kernel_size, c, out)}
        if self.weight_layout == "oi_spatial":
            shapes["weight"] = (out, c, *self.kernel_size)
        if self.bias:
            shapes["bias"] = (out,)
        return shapes

    def output_size(self, spatial: patches.Sizes, /) -> patches.Sizes:
        """Return the sizes of the output's spatial axes, given the sizes of the input's."""
        return patches.output_size(tuple(spatial), **self._window)

    def rows(self, batch: Batch, /) -> Rows:
        """Turn a batch into rows, S patches for each example.

        Parameters
        ----------
        batch : Batch
            Inputs ``(N, *spatial, C)`` or ``(N, C, *spatial)``, output gradients
            likewise after an axis of sources, and a mask ``(N, *out_spatial)``.

        Returns
        -------
        Rows
            Rows of N examples with S positions; with a leading axis of groups where there
            are several.

        Raises
        ------
        ShapeError
            For a wrong number of channels, axes, positions or examples, or no examples.
        DtypeError
            For integers, in a mask too.
        MixedArraysError
            For arrays of several libraries or devices.

        Notes
        -----
        No flops; ``N S K C`` numbers, a second time where rows are masked.
        """
        rows = self._all_rows(self._entered(batch, "bias"), slice(None))
        return rows if batch.bias is None else with_some_biases(rows, batch.bias)

    def row_chunks(self, batch: Batch, /, *, max_patch_elements: int) -> Iterator[Rows]:
        """Yield the rows of successive examples, few enough to fit a budget.

        Parameters
        ----------
        batch : Batch
            See `rows`.
        max_patch_elements : int
            How many numbers the patches of one chunk, all channels together, may hold.

        Yields
        ------
        Rows
            Chunks of the rows of `rows`, computed one after the other.

        Raises
        ------
        ShapeError
            If one example exceeds the budget; otherwise as `rows`, at once.

        Notes
        -----
        A loop's variable keeps its chunk alive while the next one is computed: delete it at
        the end of the loop's body.  Masking copies a chunk.
        """
        entered = self._entered(batch)
        examples, positions = entered[1].shape[-3:-1]
        one = positions * self._patch_size * self.groups
        if one > max_patch_elements:
            raise errors.ShapeError(
                f"Expected `max_patch_elements` to hold one example, which has {positions} "
                f"patches and {one} elements, got {max_patch_elements}. Give more."
            )
        # Whole examples only: some statistics sum over the positions of an example.
        step = max_patch_elements // one
        starts = range(0, examples, step)
        parts = (slice(i, min(i + step, examples)) for i in starts)
        return (self._all_rows(entered, part) for part in parts)

    def pixel_rows(self, batch: Batch, /) -> PixelRows:
        """Turn a batch into pixels and output gradients.

        Parameters
        ----------
        batch : Batch
            See `rows`; not modified.

        Returns
        -------
        PixelRows
            All pixels of the inputs, whether or not a patch covers them, and the g of
            all output positions, zero where masked.

        Raises
        ------
        ShapeError, DtypeError, MixedArraysError
            For arrays of incompatible shape, dtype, library or device.
        UnsupportedError
            For a convolution with groups.
        """
        if self.groups > 1:
            raise errors.UnsupportedError("Expected a convolution without groups.")
        x, g, mask, xp = self._entered(batch)
        require_no_weights(mask, "pixels in the place of patches", xp=xp)
        if mask is not None:
            g = xp.where(mask[..., None], g, ns.full_of(xp, 0.0, g))
        pixels = xp.reshape(x, (x.shape[0], -1, x.shape[-1]))
        return PixelRows(pixels, g, mask)

    def stacked(self, count: int, /) -> None:
        """Return None: convolutions are not stacked."""

    def parameters_to_matrix(self, parameters: Mapping[str, Array], /) -> Array:
        """Turn parameter-shaped arrays into the block's matrix.

        The weight, and the bias as the last row; raises as `Dense.parameters_to_matrix`.
        """
        xp = checks.require_parameters(parameters, self.parameter_shapes)
        weight = parameters["weight"]
        outputs_first = self.weight_layout == "oi_spatial"
        shape: tuple[int, int] = (self._patch_size, self.out_channels)
        if outputs_first:
            weight = xp.permute_dims(weight, (0, *range(2, weight.ndim), 1))
            shape = shape[::-1]
        weight = xp.reshape(weight, shape)
        bias = parameters.get("bias")
        return join_bias(weight, bias, transposed=outputs_first, xp=xp)

    def matrix_to_parameters(self, matrix: Array, /) -> dict[str, Array]:
        """Turn a block's matrix back into parameter-shaped arrays, possibly views.

        Raises `ShapeError` for another shape than `matrix_shape`.
        """
        xp = ns.namespace_of(matrix=matrix)
        ns.require_matrix(matrix, self.matrix_shape, "matrix")
        c, d = self.in_channels // self.groups, len(self.kernel_size)
        weight, bias = split_bias(matrix, self._patch_size)
        weight = xp.reshape(weight, (*self.kernel_size, c, self.out_channels))
        if self.weight_layout == "oi_spatial":
            # From (*kernel, in, out) to (out, in, *kernel).
            weight = xp.permute_dims(weight, (d + 1, d, *range(d)))
        return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}

    @property
    def _patch_size(self) -> int:
        return math.prod(self.kernel_size) * self.in_channels // self.groups

    @property
    def _window(self) -> dict[str, Any]:
        names = ("kernel_size", "strides", "padding", "dilation")
        return {name: getattr(self, name) for name in names}

    def _entered(self, batch: Batch, *supported: str) -> _Entered:
        """Return x (.., N, *spatial, c), g (.., M, N, S, m) and mask (N, S), checked."""
        x, g, mask, xp = checks.entering(batch, "mask", *supported)
        lead = self._leading_axes(batch)
        Q, d, (N, *out) = self.groups, len(self.kernel_size), lead
        if self.data_layout == "channels_first":
            x = ns.moved_axis(x, 1, -1, xp=xp)
            g = ns.moved_axis(g, -d - 1, -1, xp=xp)
        # Channels of group q are consecutive, so a reshape splits the groups.
        g = xp.reshape(g, (batch.sources or 1, N, math.prod(out), Q, -1))
        if Q > 1:
            x = ns.moved_axis(xp.reshape(x, (*x.shape[:-1], Q, -1)), -2, 0, xp=xp)
            g = ns.moved_axis(g, -2, 0, xp=xp)
        else:
            g = g[..., 0, :]
        if mask is not None:
            mask = checks.require_mask(mask, lead, xp=xp)
        return x, g, mask, xp

    def _leading_axes(self, batch: Batch) -> tuple[int, ...]:
        """Return ``(N, *out_spatial)``, after checking both arrays against it."""
        x, d = batch.inputs, len(self.kernel_size)
        last = self.data_layout == "channels_last"
        axes: list[Any] = [f"spatial_{i}" for i in range(1, d + 1)]
        axes.insert(d if last else 0, self.in_channels)
        constraints.require_shape("inputs", x, ("N", *axes))
        spatial = tuple(x.shape[1:-1] if last else x.shape[2:])
        N, out = x.shape[0], self.output_size(spatial)
        one = (*out, self.out_channels) if last else (self.out_channels, *out)
        hint = "It must fit the layer's strides, padding and dilation."
        checks.require_output_grads(batch, (N, *one), hint=hint)
        return (N, *out)

    def _all_rows(self, entered: _Entered, part: slice) -> Rows:
        """Return all rows of some successive examples."""
        x, g, mask, xp = entered
        every = (slice(None),) * (len(self.kernel_size) + 1)
        x = patches.extract_patches(x[(..., part, *every)], **self._window, xp=xp)
        g = g[..., part, :, :]
        x = xp.reshape(x, (*x.shape[: -len(every) - 1], *g.shape[-3:-1], -1))
        if mask is not None:
            # Patches of masked positions are zeroed after the extraction, as their
            # pixels also belong to neighbours that count.
            mask = mask[part, :]
            x, g = zeroed(x, g, mask, xp=xp)
        rows = Rows(x, g, mask, self.bias)
        return rows if part == slice(None) else self._of_batch(rows, entered)

    def _of_batch(self, rows: Rows, entered: _Entered) -> Rows:
        """Return a part of a batch, with the counts of the whole batch."""
        _, g, mask, xp = entered
        N, S = g.shape[-3:-1]
        count = N * S
        if mask is not None:
            count = xp.sum(xp.astype(mask, ns.wide_dtype(xp, g.dtype)))
        return replaced(rows, batch_examples=int(N), batch_rows=count)


def _numbers(name: str, values: Iterable[int]) -> patches.Sizes:
    """Return a sequence of integers as a tuple of `int`."""
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError:
        raise errors.ShapeError(
            f"Expected `{name}` to have integers for each spatial axis, got "
            f"{shown(values)}."
        ) from None


def _pairs(padding: Any) -> tuple[patches.Sizes, ...]:
    """Return explicit padding as tuples."""
    pairs = padding if hasattr(padding, "__iter__") else (padding,)
    return tuple(_numbers("padding", pair) for pair in pairs)
