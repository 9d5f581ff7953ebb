"""Preparation of batches: detaching, and checks of their status."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kfac_core import errors
from kfac_core.array import Array, Status, map_structure, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.backend import backend_of
from kfac_core.array.generic_backend import GenericBackend
from kfac_core.array.structure import is_structure
from kfac_core.layers.rows import require_finite

__all__ = [
    "detached",
    "detached_array",
    "is_empty",
    "raise_for_flags",
    "require_finite_rows",
]


_detaching: dict[type[Any], Callable[[Array], Array] | None] = dict.fromkeys(
    (type(None), int, str, bool)
)
"""What detaches arrays of the types that were met; None where none has a graph."""


def detached(batch: Any, name: str, /) -> Any:
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
            if _detaching.get(type(value), detached_array) is not None:
                without = map_structure(detached_array, value)
                if without is not value:
                    changed[field] = without
        return replaced(batch, **changed) if changed else batch
    if isinstance(batch, list | tuple):
        return tuple([detached(use, name) for use in batch])
    if isinstance(batch, dict):
        return {layer: detached(own, f"{name}/{layer}") for layer, own in batch.items()}
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
        True where there is nothing to update with.
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
        detach = backend_of(xp).detach
        generic = getattr(detach, "__func__", None) is GenericBackend.detach
        _detaching[kind] = None if generic else detach
    found = _detaching[kind]
    return x if found is None else found(x)


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
        # One alone is read whatever its place is.
        for name, new in updated.items():
            if flags := int(new.status):
                raise_for_flags(flags, name=name)
        return
    groups: dict[Any, dict[str, Array]] = {}
    for name, new in updated.items():
        place = type(new.status), str(ns.device_of(new.status))
        groups.setdefault(place, {})[name] = new.status
    for statuses in groups.values():
        found = _read([*statuses.values()])
        for name, flag in zip(statuses, found, strict=True):
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
    require_finite(flags, name=name)
    if Status.OVERFLOWED in Status(flags):
        raise errors.NotFiniteError(
            f"Block {name!r}: the batch is finite, but the sums of its squares overflow. "
            "Nothing was changed. Scale the loss or the inputs, or keep statistics in "
            'float64 (Precision(storage="float64")).'
        )
    if Status.BAD_DECAY in Status(flags):
        raise errors.DecayError(
            f"Block {name!r}: expected `decay` in [0, 1] and `weight` > 0, both finite. "
            "Nothing was changed."
        )


def _read(statuses: list[Array]) -> list[int]:
    """Return 0-d integers of one device, in one transfer to the host."""
    if len(statuses) == 1:
        return [int(statuses[0])]
    xp = ns.own_namespace(statuses[0])
    found: list[int] = backend_of(xp).to_numpy(xp.stack(statuses)).tolist()
    return found
