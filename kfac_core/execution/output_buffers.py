"""Writing results into arrays that the caller keeps.

Conventions.  A buffer has the form of a result: by block and parameter, in the
parameter's shape and dtype, on its device.  Shapes, dtypes and places are checked
before anything is written, so that a buffer that does not fit leaves all of them as they
were; that one is read-only shows when its turn comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kfac_core.array.backend import Array
from kfac_core.array.namespaces import namespace_of
from kfac_core.errors import DtypeError, ShapeError, UnsupportedError
from kfac_core.layers.feeding import detached_array

__all__ = ["write_into"]


def write_into(
    out: Mapping[str, Mapping[str, Array]],
    results: Mapping[str, Mapping[str, Any]],
    /,
) -> dict[str, dict[str, Array]]:
    """Copy results into buffers.

    Parameters
    ----------
    out : mapping of str to mapping of str to array
        A buffer for each result, of a library whose arrays can be written to.
    results : mapping of str to mapping of str to array
        By block and parameter.

    Returns
    -------
    dict of str to dict of str to array
        The buffers themselves, in the order of `results`.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError
        For a buffer that is missing or does not fit.
    UnsupportedError
        For arrays that cannot be written to.
    """
    pairs = [
        (f"out[{name!r}][{parameter!r}]", _buffer(out, name, parameter), result)
        for name, parameters in results.items()
        for parameter, result in parameters.items()
    ]
    for place, buffer, result in pairs:
        _require_fit(place, buffer, result)
    for place, buffer, result in pairs:
        try:
            detached_array(buffer)[...] = result
        except (TypeError, ValueError, RuntimeError) as error:
            raise UnsupportedError(
                f"`{place}` cannot be written to: {error}. Leave `out` out, and take the "
                "arrays that are returned."
            ) from error
    return {name: {p: out[name][p] for p in results[name]} for name in results}


def _buffer(out: Mapping[str, Mapping[str, Array]], name: str, parameter: str) -> Array:
    try:
        return out[name][parameter]
    except KeyError:
        raise ShapeError(
            f"Expected `out` to hold an array for {parameter!r} of block {name!r}, as the "
            f"gradients do, got {_names(out)}."
        ) from None


def _names(out: Mapping[str, Mapping[str, Array]]) -> list[str]:
    return [f"{name}.{p}" for name, parameters in out.items() for p in parameters]


def _require_fit(place: str, buffer: Array, result: Any) -> None:
    if not hasattr(result, "dtype"):
        raise UnsupportedError(
            f"`{place}` is for some rows of an embedding, which have no buffer. Leave "
            "`out` out for that block."
        )
    namespace_of(**{place: buffer, "gradients": result})
    if tuple(buffer.shape) != tuple(result.shape):
        raise ShapeError(
            f"Expected `{place}` to have shape {tuple(result.shape)}, got "
            f"{tuple(buffer.shape)}."
        )
    if buffer.dtype != result.dtype:
        raise DtypeError(
            f"Expected `{place}` to have dtype {result.dtype}, got {buffer.dtype}."
        )
