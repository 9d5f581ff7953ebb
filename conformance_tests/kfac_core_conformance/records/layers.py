"""The layers of a record: their fields, and which shapes fit them.

A struct has the name and the fields of the class of `kfac_core` that it describes.
Shapes are named as in the format: N examples, M backpropagated vectors for each.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias, get_args

import msgspec

from kfac_core.errors import RecordError
from kfac_core_conformance.records.schema import Count, Name, Part, Shape, Size, Sizes
from kfac_core_conformance.records.text import shape_text, shown

Padding: TypeAlias = (
    Literal["same", "valid"]
    | Annotated[
        tuple[tuple[Count, Count], ...], msgspec.Meta(min_length=1, max_length=32)
    ]
)
EventShape: TypeAlias = Annotated[tuple[Size, ...], msgspec.Meta(max_length=32)]


class Layer(Part, tag_field="kind", frozen=True):
    """A layer of a block."""

    approximations: ClassVar[tuple[str, ...]] = ("diagonal", "full")
    """Those that the format defines for it."""

    is_matrix: ClassVar[bool] = True
    """Whether the format gives its diagonal block as a matrix ``(in(+1), out)``."""

    def axes(self, inputs: Shape, grads: Shape, /) -> tuple[Shape, Shape]:
        """Return ``(N, *shared)`` and the expected shape of one gradient.

        Parameters
        ----------
        inputs, grads : tuple of int
            The shapes found.

        Raises
        ------
        RecordError
            If the inputs contradict the layer.
        """
        raise NotImplementedError

    def leading_axes(self, inputs: Shape, grads: Shape, /) -> Shape:
        """Return ``(N, *shared)``, the shape of a mask, of one update.

        Parameters
        ----------
        inputs, grads : tuple of int
            The shapes found.

        Raises
        ------
        RecordError
            If a shape contradicts the layer or the other shape.
        """
        lead, example = self.axes(inputs, grads)
        vectors = grads[0] if len(grads) == len(example) + 1 else "M"
        if grads != (vectors, *example):
            raise RecordError(
                f"output_grads: expected shape {shape_text(vectors, *example)} for "
                f"inputs of shape {shown(inputs)}, got {shown(grads)}"
            )
        return lead


class Dense(Layer, tag="dense", frozen=True):
    """A fully connected layer: inputs ``(N, ..., in)``, gradients ``(M, N, ..., out)``."""

    approximations = ("kronecker", "diagonal", "full", "tnt", "eigen", "series")

    in_features: Size
    out_features: Size
    bias: bool
    weight_layout: Literal["io", "oi"]

    def axes(self, inputs: Shape, grads: Shape, /) -> tuple[Shape, Shape]:
        """Return ``(N, ...)`` and ``(N, ..., out)``."""
        width = self.in_features
        if len(inputs) < 2 or inputs[-1] != width:
            raise RecordError(
                f"inputs: expected shape (N, ..., {width}), got {shown(inputs)}"
            )
        return inputs[:-1], (*inputs[:-1], self.out_features)


class Conv(Layer, tag="conv", frozen=True):
    """A convolution over any number of spatial axes; the shared axes are its outputs."""

    approximations = ("kronecker", "diagonal", "full", "tnt", "eigen")

    in_channels: Size
    out_channels: Size
    kernel_size: Sizes
    padding: Padding
    bias: bool
    weight_layout: Literal["spatial_io", "oi_spatial"]
    data_layout: Literal["channels_last", "channels_first"]
    strides: Sizes | None = None
    dilation: Sizes | None = None
    groups: Size = 1

    def __post_init__(self) -> None:
        """Refuse fields that have entries for other numbers of spatial axes."""
        axes = len(self.kernel_size)
        for name in ("strides", "dilation", "padding"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != axes:
                raise RecordError(
                    f"expected {axes} entries of `{name}` for a kernel of {axes} axes, "
                    f"got {len(value)}"
                )

    def spatial(self, inputs: Shape, /) -> Shape:
        """Return the spatial axes of the inputs' shape."""
        return inputs[2:] if self.data_layout == "channels_first" else inputs[1:-1]

    def padded(self, spatial: Shape, /) -> Shape:
        """Return the sizes of the spatial axes with their padding."""
        if self.padding == "valid":
            return spatial
        if self.padding == "same":
            return tuple(
                max(n, (-(-n // s) - 1) * s + used)
                for n, s, used in zip(
                    spatial, self._strides(), self._used(), strict=True
                )
            )
        return tuple(
            n + low + high for n, (low, high) in zip(spatial, self.padding, strict=True)
        )

    def axes(self, inputs: Shape, grads: Shape, /) -> tuple[Shape, Shape]:
        """Return ``(N, *out_spatial)`` and that with the channels in their place."""
        first = self.data_layout == "channels_first"
        axes, channels = len(self.kernel_size), self.in_channels
        if len(inputs) != axes + 2 or inputs[1 if first else -1] != channels:
            example = ("N", channels, "...") if first else ("N", "...", channels)
            raise RecordError(
                f"inputs: expected {axes} spatial axes and {channels} channels, "
                f"{'channels first' if first else 'channels last'}, such as "
                f"{shape_text(*example)}, got {shown(inputs)}"
            )
        spatial = self.spatial(inputs)
        sizes = tuple(
            (padded - used) // stride + 1
            for padded, used, stride in zip(
                self.padded(spatial), self._used(), self._strides(), strict=True
            )
        )
        if min(sizes) < 1:
            raise RecordError(
                f"inputs: a kernel {shown(self.kernel_size)} does not fit into spatial "
                f"axes of sizes {shown(spatial)} with this padding"
            )
        lead = (inputs[0], *sizes)
        out = self.out_channels
        return lead, (inputs[0], out, *sizes) if first else (*lead, out)

    def _strides(self) -> Shape:
        return self.strides or (1,) * len(self.kernel_size)

    def _used(self) -> Shape:
        """Return how many positions of each axis the dilated kernel spans."""
        dilation = self.dilation or (1,) * len(self.kernel_size)
        return tuple(
            (k - 1) * d + 1 for k, d in zip(self.kernel_size, dilation, strict=True)
        )


class Embedding(Layer, tag="embedding", frozen=True):
    """A table of rows: ids ``(N, ...)`` of single rows, or ``(N, k)`` of bags."""

    approximations = ("kronecker", "diagonal", "full")

    num_embeddings: Size
    features: Size
    weight_layout: Literal["io", "oi"]
    duplicates: Literal["binary", "count"] = "binary"

    @staticmethod
    def is_bag(inputs: Shape, grads: Shape, /) -> bool:
        """Whether ids ``(N, k)`` are bags, which have gradients ``(M, N, features)``."""
        return len(inputs) == 2 and len(grads) == 3

    def axes(self, inputs: Shape, grads: Shape, /) -> tuple[Shape, Shape]:
        """Return ``(N, ...)``, of bags ``(N,)``, and that with the features."""
        if not inputs:
            raise RecordError("inputs: expected ids of shape (N, ...), got ()")
        lead = inputs[:1] if self.is_bag(inputs, grads) else inputs
        return lead, (*lead, self.features)


class ScaleShift(Layer, tag="scale_shift", frozen=True):
    """An elementwise scale and shift: inputs ``(N, *event)``, gradients alike."""

    is_matrix = False

    scale_shape: EventShape | None
    shift_shape: EventShape | None

    def axes(self, inputs: Shape, grads: Shape, /) -> tuple[Shape, Shape]:
        """Return ``(N,)`` and the shape of the inputs."""
        event = inputs[1:]
        for name in ("scale_shape", "shift_shape"):
            shape = getattr(self, name) or ()
            aligned = event[len(event) - len(shape) :]
            fits = len(shape) <= len(event) and all(
                length in (1, full) for length, full in zip(shape, aligned, strict=True)
            )
            if not inputs or not fits:
                raise RecordError(
                    f"inputs: expected shape (N, *event) with an event that {name} "
                    f"{shown(shape)} broadcasts with, got {shown(inputs)}"
                )
        return inputs[:1], inputs


class Parameters(Layer, tag="parameters", frozen=True):
    """Any parameters, known by their batch-summed gradients alone."""

    is_matrix = False

    shapes: Annotated[dict[Name, EventShape], msgspec.Meta(min_length=1)]


AnyLayer: TypeAlias = Dense | Conv | Embedding | ScaleShift | Parameters

LAYERS: dict[str, type[Layer]] = {layer.tag(): layer for layer in get_args(AnyLayer)}
"""The struct of each kind of layer."""
