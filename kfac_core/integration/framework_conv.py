"""A convolution's geometry from the options of frameworks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from kfac_core import constraints
from kfac_core.layers.conv import Conv

Channels = Literal["first", "last"]


def framework_conv(
    kernel_shape: Sequence[int],
    /,
    *,
    strides: int | Sequence[int] | None = None,
    padding: Any,
    dilation: int | Sequence[int] | None = None,
    groups: int = 1,
    bias: bool,
    channels: Channels = "last",
) -> Conv | None:
    """Return the geometry of a convolution as a framework's layer describes it.

    Parameters
    ----------
    kernel_shape : sequence of int
        Shape of the weight: ``(*kernel_size, in_channels / groups, out_channels)``, or with
        ``channels="first"`` ``(out_channels, in_channels / groups, *kernel_size)``.
    strides, dilation : int or sequence of int, optional
        One number for all spatial axes, or one for each; 1 by default.
    padding : str, int, or sequence of int or of pairs
        ``"SAME"`` or ``"VALID"`` in any case; or the zeros before and after each axis:
        one number for all, one for each, or a pair for each.
    groups : int
        See `kfac_core.Conv`.
    bias : bool
        Whether the layer has a bias.
    channels : {"last", "first"}
        Which axis of inputs, outputs and weight the channels are.

    Returns
    -------
    Conv or None
        None for a rule of padding that puts no zeros, such as ``"CIRCULAR"``.

    Raises
    ------
    ShapeError
        See `kfac_core.Conv`.
    ConventionError
        For unknown `channels`.
    """
    constraints.require_one_of("channels", channels, get_args(Channels))
    last = channels == "last"
    lengths = [int(length) for length in kernel_shape]
    *kernel, width, out = lengths if last else (*lengths[2:], lengths[1], lengths[0])
    d = len(kernel)
    if isinstance(padding, str):
        padding = padding.lower()
        if padding not in ("same", "valid"):
            return None
    else:
        pads = np.asarray(padding)
        padding = np.broadcast_to(pads if pads.ndim == 2 else pads[..., None], (d, 2))
        padding = padding.tolist()
    window = {
        name: np.broadcast_to(1 if option is None else option, d).tolist()
        for name, option in (("strides", strides), ("dilation", dilation))
    }
    return Conv(
        # Frameworks store the channels of one group in the kernel.
        in_channels=width * groups,
        out_channels=out,
        kernel_size=tuple(kernel),
        padding=padding,
        groups=groups,
        bias=bias,
        weight_layout="spatial_io" if last else "oi_spatial",
        data_layout="channels_last" if last else "channels_first",
        **window,
    )
