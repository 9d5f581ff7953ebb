"""Preparation of batches: detaching, and checks of their status."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from kfac_core import errors
from kfac_core.array import Array, Status, map_structure, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.backend import backend_of
from kfac_core.array.generic_backend import GenericBackend
from kfac_core.array.status import raise_flagged
from kfac_core.array.structure import is_structure
from kfac_core.array.types import Tree
from kfac_core.layers.example_gradients import GradientBatch
from kfac_core.layers.rows import ARGUMENT_FLAGS, Batch

BatchLike: TypeAlias = (
    "Batch | GradientBatch | Sequence[BatchLike] | Mapping[str, BatchLike]"
)
"""A batch, several uses of one layer, or a batch of each layer of a chain."""

_detaching: dict[type[Any], Callable[[Array], Array] | None] = dict.fromkeys(
    (type(None), int, str, bool)
)
"""Functions that detach arrays, by type; None for types without gradient graphs."""


def detached(batch: BatchLike, name: str, /) -> BatchLike:
    """Return a batch, or several, without gradient graphs.

    Parameters
    ----------
    batch : Batch, GradientBatch, sequence of Batch or dict of str to Batch
        Batch that was fed.
    name : str
        Name of the block, for the message.

    Returns
    -------
    object
        Batch of the same form.

    Raises
    ------
    ArgumentError
        For anything else.
    """
    if is_structure(batch):
        changed = {}
        for field, value in vars(batch).items():
            detach = _detaching.get(type(value), _detached_parts)
            without = value if detach is None else detach(value)
            if without is not value:
                changed[field] = without
        return replaced(batch, **changed) if changed else batch
    if isinstance(batch, list | tuple):
        return tuple([detached(use, name) for use in batch])
    if isinstance(batch, dict):
        return {
            layer: detached(part, f"{name}/{layer}") for layer, part in batch.items()
        }
    raise errors.ArgumentError(
        f"Block {name!r}: expected a `Batch`, a `GradientBatch` or a sequence of "
        f"`Batch`, got {type(batch).__name__}. Make one: "
        "kfac_core.Batch(inputs, output_grads)."
    )


def is_empty(batch: Any, /) -> bool:
    """Whether a batch, or each of several, is None or has no examples.

    Parameters
    ----------
    batch : Batch, GradientBatch, sequence or dict of Batch, or None
        Batch that was fed.

    Returns
    -------
    bool
        True if there is no example to update with.
    """
    if batch is None:
        return True
    if isinstance(batch, list | tuple):
        return all(map(is_empty, batch))
    if isinstance(batch, dict):
        return all(map(is_empty, batch.values()))
    size = getattr(batch, "batch_size", None)
    if size is not None:
        return bool(size == 0)
    shape = getattr(batch.inputs, "shape", (1,))
    return len(shape) > 0 and shape[0] == 0


def detached_array(x: Array, /) -> Array:
    """Return an array detached from its gradient graph; other values unchanged."""
    kind = type(x)
    if kind not in _detaching:
        try:
            xp = ns.own_namespace(x)
        except TypeError:
            return x  # Not an array: validated later, where its name is known.
        native = backend_of(xp).detach
        generic = getattr(native, "__func__", None) is GenericBackend.detach
        _detaching[kind] = None if generic else native
    detach = _detaching[kind]
    return x if detach is None else detach(x)


def _detached_parts(value: Tree) -> Tree:
    """Return an array, or a structure of arrays, detached from its gradient graph."""
    return map_structure(detached_array, value)


def detached_arrays(arrays: Mapping[str, Array], /) -> dict[str, Array]:
    """Return arrays by name, detached from their gradient graphs."""
    without: dict[str, Array] = {}
    for name, x in arrays.items():
        detach = _detaching.get(type(x), detached_array)
        without[name] = x if detach is None else detach(x)
    return without


def require_finite_rows(updated: Mapping[str, Any], /) -> None:
    """Raise for rows that are not finite; one transfer to the host for each device.

    Parameters
    ----------
    updated : mapping of str to Statistics
        Statistics after an update, by block.

    Raises
    ------
    NotFiniteError, IdRangeError, DecayError
        Naming the block and the argument.
    """
    if len(updated) < 2:
        # A single status needs no stacking.
        for name, new in updated.items():
            if flags := int(new.status):
                raise_for_flags(flags, name=name)
        return
    groups: dict[Any, dict[str, Array]] = {}
    for name, new in updated.items():
        # One transfer for each library and device.
        place = type(new.status), str(ns.device_of(new.status))
        groups.setdefault(place, {})[name] = new.status
    for statuses in groups.values():
        flags_of = _read([*statuses.values()])
        for name, flag in zip(statuses, flags_of, strict=True):
            if flag:
                raise_for_flags(flag, name=name)


def raise_for_flags(flags: int, /, *, name: str) -> None:
    """Raise for the flags of one block's update.

    Parameters
    ----------
    flags : int
        `kfac_core.Status` flags.
    name : str
        Name of the block, for the message.

    Raises
    ------
    NotFiniteError, IdRangeError
        For rows that are not finite, or ids out of range.
    DecayError
        For a decay or weight, given as an array, that is out of range.
    """
    status = Status(flags)
    bad = [
        f"`{argument}`" for argument, flag in ARGUMENT_FLAGS.items() if flag in status
    ]
    reasons = {
        Status.IDS_OUT_OF_RANGE: "`inputs` of this batch hold an id that is negative, or "
        "not below the number of embeddings. Nothing was changed. Give "
        "a `mask` that is False where ids are padding.",
        Status.INPUTS_NOT_FINITE
        | Status.OUTPUT_GRADS_NOT_FINITE: f"{' and '.join(bad)} of this batch hold NaN or "
        "infinity in rows that count. Nothing was changed; skip the batch, or find where "
        "it diverged.",
        Status.OVERFLOWED: "the batch is finite, but the sums of its squares overflow. "
        "Nothing was changed. Scale the loss or the inputs, or keep statistics in float64 "
        '(Precision(storage="float64")).',
    }
    raise_flagged(flags, f"Block {name!r}", reasons)


def _read(statuses: list[Array]) -> list[int]:
    """Return 0-d integers of one device, in one transfer to the host."""
    if len(statuses) == 1:
        return [int(statuses[0])]
    xp = ns.own_namespace(statuses[0])
    flags: list[int] = backend_of(xp).to_numpy(xp.stack(statuses)).tolist()
    return flags
