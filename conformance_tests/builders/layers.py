"""Layers with the layouts that most tests use."""

from __future__ import annotations

from typing import Any

import kfac_core as kc


def dense_layer(inputs: int, outputs: int, /, *, bias: bool = True) -> kc.Dense:
    """Return a dense layer whose weight is (in, out)."""
    return kc.Dense(
        in_features=inputs, out_features=outputs, bias=bias, weight_layout="io"
    )


def conv_layer(
    channels: int, outputs: int, kernel_size: tuple[int, ...], /, **options: Any
) -> kc.Conv:
    """Return a convolution with channels last, without padding unless it is given."""
    settings: dict[str, Any] = {
        "padding": "valid",
        "bias": True,
        "weight_layout": "spatial_io",
        "data_layout": "channels_last",
    }
    return kc.Conv(
        in_channels=channels,
        out_channels=outputs,
        kernel_size=kernel_size,
        **{**settings, **options},
    )
