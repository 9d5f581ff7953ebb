"""A convolution's geometry from the ways in which frameworks write one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kfac_core.layers.conv import Conv

__all__ = ["framework_conv"]


def framework_conv(
    kernel_shape: Sequence[int],
    /,
    *,
    strides: Any = None,
    padding: Any,
    dilation: Any = None,
    groups: int = 1,
    bias: bool,
) -> Conv | None:
    """Return the geometry of a convolution with channels last.

    Parameters
    ----------
    kernel_shape : sequence of int
        Of the weight, ``(*kernel_size, in_channels / groups, out_channels)``.
    strides, dilation : int or sequence of int, optional
        One number for all spatial axes, or one for each; 1 where left out.
    padding : str, int, or sequence of int or of pairs
        ``"SAME"`` or ``"VALID"`` in any case; or the zeros before and after each axis:
        one number for all, one for each, or a pair for each.
    groups : int
        As for `kfac_core.Conv`.
    bias : bool
        Whether there is one.

    Returns
    -------
    Conv or None
        None for a rule of padding that puts no zeros, such as ``"CIRCULAR"``.

    Raises
    ------
    ShapeError
        As `kfac_core.Conv`.
    """
    *kernel, channels, out = map(int, kernel_shape)
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
        name: np.broadcast_to(1 if given is None else given, d).tolist()
        for name, given in (("strides", strides), ("dilation", dilation))
    }
    return Conv(
        in_channels=channels * groups,
        out_channels=out,
        kernel_size=tuple(kernel),
        padding=padding,
        groups=groups,
        bias=bias,
        weight_layout="spatial_io",
        data_layout="channels_last",
        **window,
    )
