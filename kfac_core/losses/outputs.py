"""Checks of a network's outputs and targets that all losses share.

Conventions.  ``natural`` has shape ``(..., P)``; targets, noise and vectors have the
axes of the loss, and any number of axes in front.  Half precision is widened to
float32, and everything is brought to the dtype of ``natural``.
"""

from __future__ import annotations

import math

from kfac_core import constraints, errors
from kfac_core.array import Array, Namespace
from kfac_core.array import namespaces as ns


def wide_natural(
    natural: Array, /, *, multiple_of: int = 1, **others: Array
) -> tuple[Array, Namespace]:
    """Check a network's outputs, and return them in at least 32 bits.

    Parameters
    ----------
    natural : array, shape (..., P)
        Natural parameters, real floating-point.
    multiple_of : int
        Number that P must be a multiple of.
    **others : array
        Arrays that must be of the same library and device.

    Returns
    -------
    natural : array, shape (..., P)
        Cast where it is narrower.
    xp : namespace
        Array API namespace of the arrays.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError
        For invalid arrays; the message names the argument.
    """
    xp = ns.namespace_of(natural=natural, **others)
    ns.require_floating(xp, natural, "natural")
    constraints.require_shape("natural", natural, (..., "P"))
    if natural.shape[-1] % multiple_of:
        raise errors.ShapeError(
            f"Expected the last axis of `natural` to be a multiple of {multiple_of}, got "
            f"shape {tuple(natural.shape)}."
        )
    return ns.cast(xp, natural, ns.wide_dtype(xp, natural.dtype)), xp


def wide_companion(
    x: Array,
    shape: tuple[int, ...],
    name: str,
    /,
    *,
    dtype: object,
    xp: Namespace,
    any_real: bool = False,
) -> Array:
    """Check an array of the shape of outputs, and return it in their dtype.

    Parameters
    ----------
    x : array, shape (..., *shape)
        Real floating.
    shape : tuple of int
        The last axes.
    name : str
        Name used in error messages.
    dtype : dtype
        Dtype of the result.
    xp : namespace
        Array API namespace of the arrays.
    any_real : bool
        Whether integers and booleans will do.

    Returns
    -------
    array
        Array of that dtype.

    Raises
    ------
    ShapeError, DtypeError
        For invalid arrays; the message names the argument.
    """
    if not (any_real and (x.dtype == xp.bool or is_integral(xp, x))):
        ns.require_floating(xp, x, name)
    require_last_axes(x, shape, name)
    return ns.cast(xp, x, dtype)


def require_last_axes(x: Array, shape: tuple[int, ...], name: str, /) -> None:
    """Raise `ShapeError` unless an array's last axes have these lengths."""
    constraints.require_shape(name, x, (..., *shape))


def require_positive(value: float, name: str, /) -> float:
    """Return a number as a float; raise unless it is finite and positive."""
    if not ns.is_finite_number(value) or value <= 0 or not math.isfinite(1.0 / value):
        raise errors.ConventionError(
            f"Expected `{name}` to be a finite number > 0, got {constraints.shown(value)}."
        )
    return float(value)


def is_uniform(u: Array, /) -> Array:
    """Whether noise lies in [0, 1]; rounding to fewer bits may make 1 of a number below.

    Results of other noise, such as normal numbers, are to be NaN: it cannot raise under a
    tracer.
    """
    return (u >= 0) & (u <= 1)


def is_integral(xp: Namespace, x: Array, /) -> bool:
    """Whether an array holds integers; booleans do not count."""
    try:
        return bool(xp.isdtype(x.dtype, "integral"))
    except TypeError:
        # `isdtype` of NumPy raises for extension dtypes such as bfloat16.
        return False
