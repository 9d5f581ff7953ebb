"""Files that are damaged by chance, and files that are forged with right checksums."""

from __future__ import annotations

import copy
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

from .container import Container, opened, sealed

NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 1000, 2**31, 2**63, -(2**63), 10**30, 10**400),
    *(0.5, -1.0, 1e308, 5e-324, float("nan"), float("inf"), "", "\udcff", "a" * 5000),
    *("inverse", "cholesky", "factored", "exact", "raise", "status", "float64"),
    *([], [1, 2], [10**9, 10**9], [[1], [2]], {}, {"statistics.status": 0}),
)
PARTS = ("cholesky", "basis", "whole", "triangular", "input", "other")
NUMBERS = (0.0, -0.0, 1.0, -1.0, 1e-320, 1e300, -1e300, float("nan"), float("inf"))
WIDTHS = {"F64": 8, "F32": 4, "I32": 4, "I64": 8, "F16": 2, "BF16": 2, "U8": 1}


def damaged(data: bytes, rng: random.Random, /) -> bytes:
    """Return a file as a bad disk or a broken copy leaves it."""
    raw = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        if not raw:
            break
        at = rng.randrange(len(raw))
        end = min(len(raw), at + rng.choice((1, 4, 8, 64, 4096)))
        kind = rng.randrange(6)
        if kind <= 1:
            raw[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            raw[at:end] = bytes(end - at)
        elif kind == 3:
            del raw[at:end]
        elif kind == 4:
            raw[at:at] = raw[at:end]
        else:
            del raw[at:]
    return bytes(raw)


def forged(data: bytes, rng: random.Random, /) -> bytes:
    """Return a file that says something else, as its writer would seal it."""
    container = opened(data)
    changed(container, rng)
    return sealed(container, listed=rng.random() < 0.97)


def changed(
    container: Container, rng: random.Random, /, *, part: str | None = "state"
) -> None:
    """Make a few changes, of the document most within one part of it."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        change = rng.choice((_value, _value, _key, _swap, *_TENSOR_CHANGES))
        if change in _TENSOR_CHANGES:
            change(container, rng)
        else:
            inner = container.document
            if part is not None and isinstance(inner, dict) and rng.random() < 0.95:
                inner = inner.get(part)
            change(Container(inner, container.tensors), rng)


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Walk over what can be replaced: containers and their keys."""
    if isinstance(tree, dict):
        for key, part in tree.items():
            yield tree, key
            yield from _places(part)
    elif isinstance(tree, list):
        for k, part in enumerate(tree):
            yield tree, k
            yield from _places(part)


def _place(container: Container, rng: random.Random) -> tuple[Any, Any]:
    return rng.choice(list(_places(container.document)) or [([None], 0)])


def _value(container: Container, rng: random.Random) -> None:
    owner, key = _place(container, rng)
    owner[key] = copy.deepcopy(rng.choice(NASTY))


def _key(container: Container, rng: random.Random) -> None:
    owner, key = _place(container, rng)
    if isinstance(owner, dict):
        part = owner.pop(key)
        if rng.random() < 0.5:
            owner[rng.choice(("values", "damping", "operator", "other"))] = part


def _swap(container: Container, rng: random.Random) -> None:
    first, key = _place(container, rng)
    second, other = _place(container, rng)
    # Copies: a tree must not come to stand in itself.
    value = copy.deepcopy(second[other])
    second[other] = copy.deepcopy(first[key])
    if _still_in(first, container):
        first[key] = value


def _still_in(owner: Any, container: Container) -> bool:
    return any(place is owner for place, _ in _places(container.document))


def _renamed(container: Container, rng: random.Random) -> None:
    """Put a tensor elsewhere: at another's place, or in a part that had not been made."""
    first, second = _any_tensor(container, rng), _any_tensor(container, rng)
    if first is None or second is None:
        return
    kept = container.tensors.pop(first)
    if rng.random() < 0.5:
        owner, _, path = first.rpartition("/")
        second = f"{owner}/{path.replace('inverse', rng.choice(PARTS))}"
    container.tensors[second] = kept


def _any_tensor(container: Container, rng: random.Random) -> str | None:
    return rng.choice(list(container.tensors)) if container.tensors else None


def _numbers(container: Container, rng: random.Random) -> None:
    name = _any_tensor(container, rng)
    if name is None or container.tensors[name][0] not in ("F64", "F32"):
        return
    dtype, shape, values = container.tensors[name]
    code = {"F64": "<d", "F32": "<f"}[dtype]
    raw = bytearray(values)
    for at in range(0, len(raw), struct.calcsize(code)):
        if rng.random() < 0.3:
            number = rng.choice(NUMBERS)
            if dtype == "F32" and 1e38 < abs(number) < float("inf"):
                number = 1e38
            struct.pack_into(code, raw, at, number)
    container.tensors[name] = (dtype, shape, bytes(raw))


def _shape(container: Container, rng: random.Random) -> None:
    name = _any_tensor(container, rng)
    if name is None:
        return
    dtype, shape, values = container.tensors[name]
    changes: tuple[Callable[[], list[int]], ...] = (
        lambda: shape[::-1],
        lambda: [1, *shape],
        lambda: [*shape, 1],
        lambda: shape[:-1],
        lambda: [0, *shape],
        lambda: [0, 10**6, 10**6],
        lambda: [len(values) // WIDTHS.get(dtype, 8)],
        lambda: [2**40, 2**40],
    )
    new = rng.choice(changes)()
    if 0 in new:
        values = b""
    container.tensors[name] = (dtype, new, values)


def _dtype(container: Container, rng: random.Random) -> None:
    name = _any_tensor(container, rng)
    if name is None:
        return
    _, shape, values = container.tensors[name]
    dtype = rng.choice(list(WIDTHS))
    count = 1
    for length in shape:
        count *= length
    if count < 10**6:
        values = (values + bytes(8 * count))[: count * WIDTHS[dtype]]
    container.tensors[name] = (dtype, shape, values)


def _grown(container: Container, rng: random.Random) -> None:
    """Lengthen one axis, so that products of two arrays could be large."""
    name = _any_tensor(container, rng)
    if name is None or not container.tensors[name][1]:
        return
    dtype, shape, values = container.tensors[name]
    times = rng.choice((2, 3, 50))
    axis = rng.randrange(len(shape))
    new = list(shape)
    new[axis] *= times
    container.tensors[name] = (dtype, new, values * times)


def _gone(container: Container, rng: random.Random) -> None:
    name = _any_tensor(container, rng)
    if name is not None:
        part = container.tensors.pop(name)
        if rng.random() < 0.5:
            container.tensors[name + "x"] = part


_TENSOR_CHANGES = (_numbers, _shape, _dtype, _grown, _gone, _renamed)
