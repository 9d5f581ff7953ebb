"""Patches of signals, images and volumes: what a convolution multiplies its kernel with.

Conventions.  Channels stand last, and d spatial axes before them.  A patch is flattened
kernel positions first (row-major) and channels last: its entry ``k C + c`` is channel c
under kernel position k.  Kernels are not flipped, as in every deep-learning framework.
With n pixels along an axis, a kernel of k, stride s, dilation e, and ``lo`` and ``hi``
zeros of padding, output position o reads the padded pixels ``o s + i e`` for i < k, and
there are ``(n + lo + hi - (k - 1) e - 1) // s + 1`` output positions.  ``"same"`` pads so
that there are ``ceil(n / s)``, with the smaller half of the zeros first (as TensorFlow,
Keras and JAX do); ``"valid"`` pads nothing.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import numpy as np

from kfac_core import constraints, errors
from kfac_core.array import Array, Namespace
from kfac_core.array import namespaces as ns
from kfac_core.array.backend import backend_of

__all__ = [
    "Index",
    "Padding",
    "Sizes",
    "choose_patches",
    "extract_patches",
    "extract_patches_at",
    "output_size",
    "resolve_padding",
    "take_rows",
]

Sizes: TypeAlias = tuple[int, ...]
"""One number for each spatial axis."""

Padding: TypeAlias = Literal["same", "valid"] | tuple[tuple[int, int], ...]
"""A rule, or the zeros ``(lo, hi)`` of each spatial axis."""

Index: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
"""Row numbers on the host: part of a traced program, not of its data."""


def resolve_padding(
    spatial: Sizes,
    /,
    *,
    kernel_size: Sizes,
    strides: Sizes,
    padding: Padding,
    dilation: Sizes,
) -> tuple[tuple[int, int], ...]:
    """Return the zeros ``(lo, hi)`` before and after each spatial axis.

    Parameters
    ----------
    spatial, kernel_size, strides, dilation : tuple of int
        One number for each of the d spatial axes, at least 1.
    padding : {"same", "valid"} or tuple of pairs
        A rule, or the answer itself.

    Raises
    ------
    ConventionError, ShapeError
        For an unknown rule; for other than d pairs of numbers >= 0.
    """
    if isinstance(padding, str):
        constraints.require_one_of("padding", padding, ("same", "valid"))
    if padding == "valid":
        return ((0, 0),) * len(spatial)
    if padding == "same":
        axes = zip(spatial, kernel_size, strides, dilation, strict=True)
        used = [(n, (-(-n // s) - 1) * s + (k - 1) * e + 1) for n, k, s, e in axes]
        totals = [max(reached - n, 0) for n, reached in used]
        return tuple((total // 2, total - total // 2) for total in totals)
    if [len(p) for p in padding] != [2] * len(spatial) or min(map(min, padding)) < 0:
        raise errors.ShapeError(
            f"Expected `padding` to be {len(spatial)} pairs (lo, hi) of numbers >= 0, one "
            f"for each spatial axis, got {padding}."
        )
    return padding


def output_size(
    spatial: Sizes,
    /,
    *,
    kernel_size: Sizes,
    strides: Sizes,
    padding: Padding,
    dilation: Sizes,
) -> Sizes:
    """Return the number of output positions along each spatial axis.

    Parameters
    ----------
    spatial, kernel_size, strides, padding, dilation
        See `resolve_padding`.

    Raises
    ------
    ShapeError, ConventionError
        As `resolve_padding`, and where the kernel does not fit even once.
    """
    window = {"kernel_size": kernel_size, "strides": strides, "dilation": dilation}
    pads = resolve_padding(spatial, padding=padding, **window)
    axes = zip(spatial, pads, kernel_size, strides, dilation, strict=True)
    sizes = tuple((n + sum(p) - (k - 1) * e - 1) // s + 1 for n, p, k, s, e in axes)
    if min(sizes) < 1:
        raise errors.ShapeError(
            f"Expected spatial axes into which `kernel_size` {kernel_size} with `dilation` "
            f"{dilation} fits, got {spatial}, padded by {pads}."
        )
    return sizes


def extract_patches(
    x: Array,
    /,
    *,
    kernel_size: Sizes,
    strides: Sizes,
    padding: Padding,
    dilation: Sizes,
    xp: Namespace,
) -> Array:
    """Return the patches at all output positions.

    Parameters
    ----------
    x : array, shape (..., *spatial, C)
        With as many spatial axes as `kernel_size` has entries.
    kernel_size, strides, padding, dilation
        See `resolve_padding`.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, shape (..., *out_spatial, prod(kernel_size) C)
        Patches with kernel positions before channels; a view if possible.

    Raises
    ------
    ShapeError, ConventionError
        See `output_size`.

    Notes
    -----
    No flops; between the padded array and the result there are patches along the last
    axis alone, then along the last two, and so on: a k-th of the result, for a kernel of k.
    """
    x, sizes = _prepared(x, kernel_size, strides, padding, dilation, xp)
    d = len(kernel_size)
    # Axis by axis there are sums of kernel sizes of slices, and not products of them.
    for axis in reversed(range(d)):
        k, s, e, size = (
            given[axis] for given in (kernel_size, strides, dilation, sizes)
        )
        behind = (slice(None),) * (d - axis)
        taps = [
            x[(..., slice(i * e, i * e + (size - 1) * s + 1, s), *behind)]
            for i in range(k)
        ]
        x = xp.concat(taps, axis=-1) if taps[1:] else taps[0]
    return x


def extract_patches_at(
    x: Array,
    row_indices: Index,
    /,
    *,
    kernel_size: Sizes,
    strides: Sizes,
    padding: Padding,
    dilation: Sizes,
    xp: Namespace,
) -> Array:
    """Return some of the patches, and make no others.

    Parameters
    ----------
    x : array, shape (..., N, *spatial, C)
        As for `extract_patches`, S patches in each example.
    row_indices : numpy.ndarray of int, shape (R, P)
        The numbers ``n S + s`` of the patches, as `choose_patches` draws them.
    kernel_size, strides, padding, dilation, xp
        See `extract_patches`.

    Returns
    -------
    array, shape (..., R, P, prod(kernel_size) C)
        A copy.  It raises as `extract_patches`, and besides makes one integer for each
        patch and kernel position.
    """
    x, sizes = _prepared(x, kernel_size, strides, padding, dilation, xp)
    d, pixels = len(kernel_size), x.shape[-len(kernel_size) - 1 : -1]
    steps = np.array([math.prod(pixels[i + 1 :]) for i in range(d)])
    examples, positions = np.divmod(row_indices, math.prod(sizes))
    corners = np.stack(np.unravel_index(positions, sizes), axis=-1) * strides @ steps
    taps = np.indices(kernel_size).reshape(d, -1).T * dilation @ steps
    index = (examples * math.prod(pixels) + corners)[..., None] + taps
    lead, C = x.shape[: -d - 2], x.shape[-1]
    found = take_rows(xp.reshape(x, (*lead, -1, C)), index, xp=xp)
    return xp.reshape(found, (*lead, *row_indices.shape, taps.size * C))


def take_rows(x: Array, index: Index, /, *, xp: Namespace) -> Array:
    """Return rows of an array of shape (..., n, C) as one of (..., index.size, C)."""
    flat = index.reshape(-1).astype(np.int32 if x.shape[-2] < 2**31 else np.int64)
    placed = backend_of(xp).asarray(flat, device=ns.device_of(x))
    return xp.take(x, placed, axis=-2)


def choose_patches(
    shape: tuple[int, int], /, *, keep: tuple[int, int], seed: int | tuple[int, ...]
) -> Index:
    """Draw examples, and positions in each of them, without replacement.

    Parameters
    ----------
    shape : tuple of int
        The numbers N of examples and S of positions that there are.
    keep : tuple of int
        The numbers R and P to draw; all, where there are no more.
    seed : int or tuple of int
        Seed of this call's own generator: ``(seed, step)`` for others in each update.

    Returns
    -------
    numpy.ndarray of int, shape (R, P)
        The numbers ``n S + s``, ascending; each is equally likely, and each example
        draws its positions independently.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> rows = kc.layers.choose_patches((8, 36), keep=(8, 9), seed=0)
    >>> rows.shape
    (8, 9)
    >>> batch = kc.Batch(
    ...     np.ones((8, 6, 6, 1)), np.ones((8, 6, 6, 4)), row_indices=rows
    ... )
    """
    constraints.require_range("keep", keep, constraints.tuple_of(constraints.SIZE))
    (N, S), rng = shape, np.random.default_rng(seed)
    R, P = min(keep[0], N), min(keep[1], S)
    examples = np.sort(rng.choice(N, R, replace=False))
    places = [rng.choice(S, P, replace=False, shuffle=False) for _ in range(R)]
    return examples[:, None] * S + np.sort(np.stack(places), axis=-1)


def _prepared(
    x: Array, k: Sizes, strides: Sizes, padding: Padding, dilation: Sizes, xp: Namespace
) -> tuple[Array, Sizes]:
    """Return the padded array, and the numbers of its output positions."""
    axes = [f"spatial_{i}" for i in range(1, len(k) + 1)]
    constraints.require_shape("x", x, (..., *axes, "C"))
    window = {"kernel_size": k, "strides": strides, "dilation": dilation}
    spatial: Sizes = tuple(x.shape[-len(k) - 1 : -1])
    pads = resolve_padding(spatial, padding=padding, **window)
    sizes = output_size(spatial, padding=pads, **window)
    for axis, pair in enumerate(pads, start=x.ndim - 1 - len(k)):
        if pair != (0, 0):
            shapes = [(*x.shape[:axis], size, *x.shape[axis + 1 :]) for size in pair]
            lo, hi = (
                xp.zeros(s, dtype=x.dtype, device=ns.device_of(x)) for s in shapes
            )
            x = xp.concat([lo, x, hi], axis=axis)
    return x, sizes
