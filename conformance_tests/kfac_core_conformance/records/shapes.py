"""Which shapes fit a layer: what it saw in one update, and what a check answers.

Conventions as in the record's specification: N examples, S shared positions, M sources.
One function for each kind of layer takes the shapes of ``inputs`` and ``output_grads`` and
returns ``(N, *shared)``, or raises `RecordError` that says which shape was expected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from kfac_core.errors import RecordError
from kfac_core_conformance.records.document import BlockDescription, CheckDescription
from kfac_core_conformance.records.fields import shown

__all__ = ["answer_shape", "is_bag", "leading_axes", "output_sizes", "padded_sizes"]

Shape: TypeAlias = tuple[int, ...]


def leading_axes(block: BlockDescription, inputs: Shape, grads: Shape, /) -> Shape:
    """Return ``(N, *shared)`` of one update of a layer that has inputs.

    Parameters
    ----------
    block : BlockDescription
        Of any layer but ``parameters``.
    inputs, grads : tuple of int
        The shapes found.

    Returns
    -------
    tuple of int
        The shape of the mask; its product but for N is S.

    Raises
    ------
    RecordError
        Where a shape contradicts the description or the other.
    """
    lead, example = _SHAPES[block.layer](block.layer_fields, inputs, grads)
    sources = grads[:1] if len(grads) == len(example) + 1 else ("M",)
    expected = (*sources, *example)
    if grads != expected:
        raise RecordError(
            f"output_grads: expected shape {_written(expected)} for inputs of shape "
            f"{shown(inputs)}, got {shown(grads)}"
        )
    return lead


def is_bag(block: BlockDescription, inputs: Shape, grads: Shape, /) -> bool:
    """Whether the ids of an embedding are bags: ``(N, k)`` with gradients ``(M, N, f)``."""
    return block.layer == "embedding" and len(inputs) == 2 and len(grads) == 3


def answer_shape(
    check: CheckDescription,
    block: BlockDescription,
    matrix: tuple[int, int],
    groups: int,
    /,
) -> Shape:
    """Return the shape of an answer that is no vector.

    Parameters
    ----------
    check : CheckDescription
        Whose operation takes no vector.
    block : BlockDescription
        Its block.
    matrix : tuple of int
        The shape ``(in(+1), out)`` of the block's matrix.
    groups : int
        The number of groups of the layer.

    Returns
    -------
    tuple of int
        Empty for a scalar.
    """
    n, m = matrix
    lead = (groups,) if groups > 1 else ()
    if check.op in ("logdet", "trace"):
        return ()
    if check.op == "to_dense":
        return (n * m, n * m)
    if check.op == "eigenvalues":
        return (n * m,)
    if check.op == "damping_split":
        return (*lead, 2)
    which = check.fields["factor"]
    if which == "block":
        return _block_statistic(block, n, m, lead)
    size = n if which.endswith("input") else m // groups
    diagonal = block.approximation_fields.get(which) == "diagonal"
    return (*lead, size) if diagonal else (*lead, size, size)


def output_sizes(fields: Mapping[str, Any], spatial: Shape, /) -> Shape:
    """Return the sizes of a convolution's output for those of its inputs."""
    strides, dilation = _steps(fields)
    padded = padded_sizes(fields, spatial)
    used = [
        (k - 1) * d + 1 for k, d in zip(fields["kernel_size"], dilation, strict=True)
    ]
    sizes = [(p - u) // s + 1 for p, u, s in zip(padded, used, strides, strict=True)]
    if min(sizes) < 1:
        raise RecordError(
            f"inputs: a kernel {fields['kernel_size']} does not fit into spatial axes of "
            f"sizes {shown(spatial)} with this padding"
        )
    return tuple(sizes)


def padded_sizes(fields: Mapping[str, Any], spatial: Shape, /) -> Shape:
    """Return the sizes of a convolution's spatial axes with their padding."""
    strides, dilation = _steps(fields)
    padding = fields["padding"]
    if padding == "valid":
        return spatial
    if padding == "same":
        axes = zip(spatial, fields["kernel_size"], strides, dilation, strict=True)
        return tuple(
            max(n, (-(-n // s) - 1) * s + (k - 1) * d + 1) for n, k, s, d in axes
        )
    return tuple(n + lo + hi for n, (lo, hi) in zip(spatial, padding, strict=True))


def _steps(fields: Mapping[str, Any]) -> tuple[Shape, Shape]:
    """Return strides and dilation, after making sure that all axes are described."""
    axes = len(fields["kernel_size"])
    ones = (1,) * axes
    strides, dilation = fields["strides"] or ones, fields["dilation"] or ones
    pairs = ones if isinstance(fields["padding"], str) else fields["padding"]
    if not len(strides) == len(dilation) == len(pairs) == axes:
        raise RecordError(
            f"conv: expected {axes} strides, dilations and pairs of padding for a kernel "
            f"of {axes} axes, got {len(strides)}, {len(dilation)} and {len(pairs)}"
        )
    return strides, dilation


def _dense(
    fields: Mapping[str, Any], inputs: Shape, grads: Shape
) -> tuple[Shape, Shape]:
    width = fields["in_features"]
    if len(inputs) < 2 or inputs[-1] != width:
        raise RecordError(
            f"inputs: expected shape (N, ..., {width}), got {shown(inputs)}"
        )
    lead = inputs[:-1]
    return lead, (*lead, fields["out_features"])


def _conv(
    fields: Mapping[str, Any], inputs: Shape, grads: Shape
) -> tuple[Shape, Shape]:
    axes = len(fields["kernel_size"])
    first = fields["data_layout"] == "channels_first"
    channel_axis = 1 if first else -1
    if len(inputs) != axes + 2 or inputs[channel_axis] != fields["in_channels"]:
        wanted = ("N", fields["in_channels"], "...")
        raise RecordError(
            f"inputs: expected {axes} spatial axes and {fields['in_channels']} channels, "
            f"{'channels first' if first else 'channels last'}, such as "
            f"{_written(wanted if first else (wanted[0], wanted[2], wanted[1]))}, got "
            f"{shown(inputs)}"
        )
    spatial = inputs[2:] if first else inputs[1:-1]
    lead = (inputs[0], *output_sizes(fields, spatial))
    out = fields["out_channels"]
    return lead, (lead[0], out, *lead[1:]) if first else (*lead, out)


def _embedding(
    fields: Mapping[str, Any], inputs: Shape, grads: Shape
) -> tuple[Shape, Shape]:
    if not inputs:
        raise RecordError("inputs: expected ids of shape (N, ...), got ()")
    bag = len(inputs) == 2 and len(grads) == 3
    lead = inputs[:1] if bag else inputs
    return lead, (*lead, fields["features"])


def _scale_shift(
    fields: Mapping[str, Any], inputs: Shape, grads: Shape
) -> tuple[Shape, Shape]:
    event = inputs[1:]
    for which in ("scale_shape", "shift_shape"):
        shape = fields[which] or ()
        aligned = event[len(event) - len(shape) :]
        fits = len(shape) <= len(event) and all(
            length in (1, full) for length, full in zip(shape, aligned, strict=True)
        )
        if not inputs or not fits:
            raise RecordError(
                f"inputs: expected shape (N, *event) with an event that {which} "
                f"{shown(shape)} broadcasts with, got {shown(inputs)}"
            )
    return inputs[:1], inputs


_SHAPES: Mapping[
    str, Callable[[Mapping[str, Any], Shape, Shape], tuple[Shape, Shape]]
] = MappingProxyType(
    {
        "dense": _dense,
        "conv": _conv,
        "embedding": _embedding,
        "scale_shift": _scale_shift,
    }
)


def _block_statistic(block: BlockDescription, n: int, m: int, lead: Shape) -> Shape:
    if block.approximation == "full":
        return (n * m, n * m)
    if block.layer in ("scale_shift", "parameters"):
        return (n * m,)
    if block.approximation == "eigen":
        return (*lead, n, m // lead[0] if lead else m)
    return (n, m)


def _written(shape: tuple[Any, ...]) -> str:
    return f"({', '.join(map(str, shape))})"
