"""Patches of signals, images and volumes, which a convolution multiplies by its kernel.

Conventions.  Channels are last, after d spatial axes.  A patch is flattened
kernel positions first (row-major) and channels last: its entry ``k C + c`` is channel c
under kernel position k.  Kernels are not flipped, as in every deep-learning framework.
With n pixels along an axis, a kernel of k, stride s, dilation e, and ``lo`` and ``hi``
zeros of padding, output position o reads the padded pixels ``o s + i e`` for i < k, and
there are ``(n + lo + hi - (k - 1) e - 1) // s + 1`` output positions.  ``"same"`` pads so
that there are ``ceil(n / s)``, with the smaller half of the zeros first (as TensorFlow,
Keras and JAX do); ``"valid"`` pads nothing.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from kfac_core import constraints, errors
from kfac_core.array import Array, Namespace
from kfac_core.array import namespaces as ns

Sizes: TypeAlias = tuple[int, ...]
"""One number for each spatial axis."""

Padding: TypeAlias = Literal["same", "valid"] | tuple[tuple[int, int], ...]
"""A rule, or the zeros ``(lo, hi)`` of each spatial axis."""


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
    No flops.  Intermediate arrays are patches along the last axis alone, then along the
    last two, and so on: a k-th of the result, for a kernel of k.
    """
    x, sizes = _prepared(x, kernel_size, strides, padding, dilation, xp)
    d = len(kernel_size)
    # One axis at a time takes k_1 + ... + k_d slices, all at once k_1 ... k_d.
    for axis in reversed(range(d)):
        k, s, e, size = (
            by_axis[axis] for by_axis in (kernel_size, strides, dilation, sizes)
        )
        behind = (slice(None),) * (d - axis)
        taps = [
            x[(..., slice(i * e, i * e + (size - 1) * s + 1, s), *behind)]
            for i in range(k)
        ]
        # Along the last axis, so that taps vary more slowly than channels.
        x = xp.concat(taps, axis=-1) if taps[1:] else taps[0]
    return x


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
