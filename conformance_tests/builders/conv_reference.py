"""Convolutions by explicit loops in NumPy, which share no code with the library.

Last, the gradients that PyTorch and JAX find by differentiating their own convolutions.

Everything is in one canonical form: inputs (N, *spatial, C), output gradients (M, N,
*out_spatial, out), weights (*kernel, C / groups, out).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Geometry:
    """One convolution, written down again for the reference."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str | tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1


def starts_that_fit(pixels: int, kernel: int, stride: int, dilation: int) -> list[int]:
    """List where a kernel may begin on one axis, by trying every pixel."""
    return [
        start
        for start in range(0, pixels, stride)
        if all(start + i * dilation < pixels for i in range(kernel))
    ]


def zeros_around(
    n: int, kernel: int, stride: int, dilation: int, padding: str | tuple[int, int]
) -> tuple[int, int]:
    """Return the zeros of one axis; for ``same`` by trying how many are needed."""
    if padding == "valid":
        return 0, 0
    if padding != "same":
        return padding
    wanted = len(range(0, n, stride))
    for total in itertools.count():
        if len(starts_that_fit(n + total, kernel, stride, dilation)) == wanted:
            return total // 2, total - total // 2
    raise AssertionError


def axes_of(spatial: tuple[int, ...], geometry: Geometry) -> list[tuple]:
    """Return, for each axis, its zeros in front and where the kernel begins."""
    pads = geometry.padding
    if isinstance(pads, str):
        pads = (pads,) * len(spatial)
    found = []
    for n, k, s, e, p in zip(
        spatial, geometry.kernel, geometry.strides, geometry.dilation, pads, strict=True
    ):
        lo, hi = zeros_around(n, k, s, e, p)
        found.append((lo, starts_that_fit(lo + n + hi, k, s, e)))
    return found


def output_size(spatial: tuple[int, ...], geometry: Geometry) -> tuple[int, ...]:
    """Count the output positions along each axis."""
    return tuple(len(starts) for _, starts in axes_of(spatial, geometry))


def patches(x: np.ndarray, geometry: Geometry) -> np.ndarray:
    """Return the patches (N, S, K, C): kernel positions, then channels."""
    spatial, C = x.shape[1:-1], x.shape[-1]
    axes = axes_of(spatial, geometry)
    positions = list(itertools.product(*(starts for _, starts in axes)))
    taps = list(itertools.product(*map(range, geometry.kernel)))
    result = np.zeros((x.shape[0], len(positions), len(taps), C))
    for s, start in enumerate(positions):
        for k, tap in enumerate(taps):
            pixel = tuple(
                begin + i * e - lo
                for begin, i, e, (lo, _) in zip(
                    start, tap, geometry.dilation, axes, strict=True
                )
            )
            if all(0 <= p < n for p, n in zip(pixel, spatial, strict=True)):
                result[:, s, k] = x[(slice(None), *pixel)]
    return result


def group_rows(
    x: np.ndarray, g: np.ndarray, geometry: Geometry
) -> tuple[np.ndarray, np.ndarray]:
    """Return x (Q, N, S, K c) and g (Q, M, N, S, m), copied channel by channel."""
    p, Q = patches(x, geometry), geometry.groups
    N, S, K, C = p.shape
    M, out = g.shape[0], g.shape[-1]
    c, m = C // Q, out // Q
    g = g.reshape(M, N, S, out)
    inputs, grads = np.zeros((Q, N, S, K * c)), np.zeros((Q, M, N, S, m))
    for channel in range(C):
        for k in range(K):
            inputs[channel // c, :, :, k * c + channel % c] = p[:, :, k, channel]
    for channel in range(out):
        grads[channel // m, ..., channel % m] = g[..., channel]
    return inputs, grads


def weight_gradient(x: np.ndarray, g: np.ndarray, geometry: Geometry) -> np.ndarray:
    """Return d/dW of sum(y * g), shape (*kernel, C / groups, out), for one source.

    Each output pixel of each channel is visited by itself, straight from the
    definition of a convolution: no rows and no matrices.
    """
    spatial, C, out = x.shape[1:-1], x.shape[-1], g.shape[-1]
    c, m = C // geometry.groups, out // geometry.groups
    axes = axes_of(spatial, geometry)
    padded = np.pad(x, [(0, 0), *((lo, 99) for lo, _ in axes), (0, 0)])
    W = np.zeros((*geometry.kernel, c, out))
    for tap in itertools.product(*map(range, geometry.kernel)):
        steps = [i * e for i, e in zip(tap, geometry.dilation, strict=True)]
        for o in range(out):
            first = (o // m) * c
            for position in itertools.product(*(range(len(s)) for _, s in axes)):
                pixel = tuple(
                    starts[at] + step
                    for (_, starts), at, step in zip(axes, position, steps, strict=True)
                )
                seen = padded[(slice(None), *pixel)][:, first : first + c]
                W[(*tap, slice(None), o)] += g[(slice(None), *position, o)] @ seen
    return W


def kronecker_factors(
    x: np.ndarray,
    g: np.ndarray,
    geometry: Geometry,
    *,
    bias: bool,
    mask: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return A (Q, n, n), G (Q, m, m) and S of one batch."""
    inputs, grads = group_rows(x, g, geometry)
    if bias:
        inputs = np.concatenate([inputs, np.ones((*inputs.shape[:-1], 1))], axis=-1)
    N, S = inputs.shape[1:3]
    keep = np.ones((N, S), bool) if mask is None else mask.reshape(N, S)
    n, m = inputs.shape[-1], grads.shape[-1]
    A, G = np.zeros((geometry.groups, n, n)), np.zeros((geometry.groups, m, m))
    for q, i, s in itertools.product(range(geometry.groups), range(N), range(S)):
        if keep[i, s]:
            A[q] += np.outer(inputs[q, i, s], inputs[q, i, s]) / keep.sum()
            for row in grads[q, :, i, s]:
                G[q] += np.outer(row, row) / keep.sum()
    return A, G, float(keep.sum()) / N


def geometries(dims: int) -> list[Geometry]:
    """List every combination of padding, strides, dilation and groups (1, 2, 4)."""
    explicit = ((0, 2), (1, 0), (2, 1))[:dims]
    kernel = (3, 2, 2)[:dims]
    return [
        Geometry(kernel, strides[:dims], padding, dilation[:dims], groups)
        for padding, strides, dilation, groups in itertools.product(
            ("same", "valid", explicit),
            ((1, 1, 1), (2, 3, 1)),
            ((1, 1, 1), (2, 1, 2)),
            (1, 2, 4),
        )
    ]


SPATIAL = {1: (8,), 2: (6, 5), 3: (5, 4, 3)}
"""Small images into which every kernel of `geometries` fits."""


def elements(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a shape."""
    return math.prod(shape)


def torch_gradient(x: Any, g: Any, shape: tuple[int, ...], geometry: Geometry) -> Any:
    """Differentiate torch's convolution, its zeros put around the image before."""
    import torch

    spatial = tuple(x.shape[2:])
    convolution = getattr(torch.nn.functional, f"conv{len(spatial)}d")
    pads = geometry.padding
    if isinstance(pads, str):
        axes = (spatial, geometry.kernel, geometry.strides, geometry.dilation)
        axes = zip(*axes, strict=True)
        pads = [zeros_around(*axis, pads) for axis in axes]
    x = torch.nn.functional.pad(x, [zeros for pair in reversed(pads) for zeros in pair])
    W = torch.zeros(shape, dtype=x.dtype, requires_grad=True)
    y = convolution(
        x,
        W,
        stride=geometry.strides,
        dilation=geometry.dilation,
        groups=geometry.groups,
    )
    return torch.autograd.grad(torch.sum(y * g), W)[0]


def jax_gradient(x: Any, g: Any, shape: tuple[int, ...], geometry: Geometry) -> Any:
    """Differentiate XLA's convolution, which pads by its own rule."""
    import jax

    pads = geometry.padding

    def convolution(W: Any) -> Any:
        return jax.lax.conv_general_dilated(
            x,
            W,
            geometry.strides,
            pads.upper() if isinstance(pads, str) else pads,
            rhs_dilation=geometry.dilation,
            feature_group_count=geometry.groups,
        )

    W = jax.ShapeDtypeStruct(shape, x.dtype)
    return jax.jit(jax.linear_transpose(convolution, W))(g)[0]


FRAMEWORKS = {"torch": torch_gradient, "jax": jax_gradient}
