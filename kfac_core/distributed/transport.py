"""Structures as flat arrays, and back.

Conventions.  What a structure is made of (classes, static fields, shapes, dtypes) is its
*form*, plain data that JSON can hold; its numbers are one array for each dtype.  Of a
symmetric matrix one triangle is sent.  Booleans travel as int32.

A form can be sent to another process, which then needs no template.  Arrays and structures
that stand in several places of a structure are sent once, where the form goes with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from kfac_core import errors
from kfac_core.array import Array
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import (
    Mapped,
    fields_of,
    is_plain,
    is_structure,
    rebuilt,
    structure_of_name,
)
from kfac_core.array.types import Tree
from kfac_core.linalg.packing import PackedMatrix
from kfac_core.linalg.symmetric import SymmetricMatrix

T = TypeVar("T")

BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "int32": 4,
    "int64": 8,
}
"""Bytes of a number of each dtype that is sent."""

Form = Any
"""Plain data: dicts, lists, numbers, strings and None."""


LARGEST_MESSAGE = 2**28
"""Bytes up to which messages grow with the number of ranks."""


def message_bytes(bucket_bytes: int, size: int, /) -> int:
    """Return the size from which a message is sent among so many ranks.

    A message passes all ranks, so that its latency grows with their number; so do
    messages, beyond 8 ranks, for the latency to stay a small part of their time.
    """
    grown = bucket_bytes * max(1, size // 8)
    return min(grown, max(bucket_bytes, LARGEST_MESSAGE))


def buckets(
    items: Iterable[T], size: Callable[[T], int], limit: int, /
) -> list[list[T]]:
    """Return items in lists of about so many bytes, in their order.

    Parameters
    ----------
    items : iterable
        What is sent.
    size : callable
        Bytes of an item.
    limit : int
        Bytes from which a list is full.

    Returns
    -------
    list of list
        One for each message.
    """
    filled: list[list[T]] = []
    total = limit
    for item in items:
        if total >= limit:
            filled.append([])
            total = 0
        filled[-1].append(item)
        total += size(item)
    return filled


def packed_matrices(value: Tree, /) -> Tree:
    """Return a value with one triangle of each symmetric matrix; see `PackedMatrix`."""
    if isinstance(value, SymmetricMatrix):
        return PackedMatrix.of(value)
    return _with_parts(value, packed_matrices)


def unpacked_matrices(value: Tree, /) -> Tree:
    """Return the value that `packed_matrices` packed."""
    if isinstance(value, PackedMatrix):
        return value.unpacked()
    return _with_parts(value, unpacked_matrices)


def _with_parts(value: Tree, function: Callable[[Any], Any]) -> Tree:
    if isinstance(value, dict):
        return {name: function(part) for name, part in value.items()}
    return rebuilt(value, function) if is_structure(value) else value


class Packed:
    """A value as its form and flat arrays.

    Attributes
    ----------
    form : dict
        Plain data.
    arrays : dict of str to list of array
        One-dimensional arrays in the order in which the form refers to them, by dtype.
    """

    def __init__(self, *, shared: bool) -> None:
        self.form: Form = None
        self.arrays: dict[str, list[Array]] = {}
        self._shared = shared
        self._seen: dict[int, tuple[Any, int]] = {}

    def flat(self, dtype: str, like: Array, /) -> Array:
        """Return all numbers of one dtype, in the library of an array."""
        xp = ns.own_namespace(like)
        parts = self.arrays.get(dtype, [])
        if not parts:
            return xp.zeros((0,), dtype=getattr(xp, dtype), device=ns.device_of(like))
        return parts[0] if len(parts) == 1 else xp.concat(parts)

    def node(self, value: Tree) -> Form:
        """Return the form of a value, and keep its arrays."""
        if is_plain(value):
            return {"value": value}
        if isinstance(value, (tuple, list)):
            return {"tuple": [self.node(part) for part in value]}
        if isinstance(value, dict):
            return {"dict": {name: self.node(part) for name, part in value.items()}}
        # A shared factor stands in several operators: send it once, and keep it one
        # object.
        if self._shared and id(value) in self._seen:
            return {"same": self._seen[id(value)][1]}
        node = self._structure(value) if is_structure(value) else self._array(value)
        if self._shared:
            node["number"] = len(self._seen)
            # The value is kept with its id, which could be reused after it is freed.
            self._seen[id(value)] = value, node["number"]
        return node

    def _structure(self, value: Tree) -> dict[str, Any]:
        cls = type(value)
        if cls is SymmetricMatrix:
            # One triangle, about half of the bytes.
            return {"unpacked": self._structure(PackedMatrix.of(value))}
        fields = {
            name: {"static": _listed(getattr(value, name))}
            if static
            else self.node(getattr(value, name))
            for name, static in fields_of(cls)
        }
        return {"class": f"{cls.__module__}:{cls.__qualname__}", "fields": fields}

    def _array(self, value: Array) -> dict[str, Any]:
        xp = ns.own_namespace(value)
        x = xp.asarray(value)
        logical = xp.isdtype(x.dtype, "bool")
        # Not every engine adds up booleans.
        if logical:
            x = xp.astype(x, xp.int32)
        dtype = dtype_name(x)
        self.arrays.setdefault(dtype, []).append(xp.reshape(x, (-1,)))
        node: dict[str, Any] = {"array": dtype, "shape": list(x.shape)}
        if logical:
            node["bool"] = True
        if not ns.is_row_major(x):
            node["columns"] = True
        return node


def pack(value: Tree, /, *, shared: bool) -> Packed:
    """Return a value as its form and flat arrays.

    Parameters
    ----------
    value : structure, dict, tuple, array, number or None
        Nested in any way; not modified.
    shared : bool
        Whether what stands in several places is kept once.  It must be False where the
        form does not travel with the arrays: which places are shared may differ between
        ranks.

    Returns
    -------
    Packed
        Form and arrays.
    """
    packed = Packed(shared=shared)
    packed.form = packed.node(value)
    return packed


def unpack(form: Form, arrays: Mapping[str, Array], /) -> Tree:
    """Return the value of a form and flat arrays.

    Parameters
    ----------
    form : plain data
        Form from `pack`.
    arrays : mapping of str to array, shape (k,)
        All numbers of each dtype.

    Returns
    -------
    structure, dict, tuple, array, number or None
        Value with arrays in the library of the given ones.
    """
    return _Reader(arrays).value(form)


def lengths_of(form: Form, /) -> dict[str, int]:
    """Return how many numbers of each dtype a form refers to."""
    lengths: dict[str, int] = {}
    for node in _array_nodes(form):
        length = math.prod(node["shape"])
        lengths[node["array"]] = lengths.get(node["array"], 0) + length
    return lengths


def _array_nodes(node: Form) -> Iterator[dict[str, Any]]:
    """Yield the nodes of a form that stand for arrays, in their order."""
    if "value" in node or "static" in node or "same" in node:
        return
    if "array" in node:
        yield node
        return
    below = [node["unpacked"]] if "unpacked" in node else node.get("tuple", ())
    for kind in ("dict", "fields"):
        if kind in node:
            below = node[kind].values()
    for part in below:
        yield from _array_nodes(part)


class _Reader:
    """Takes flat arrays apart, in the order of a form."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = arrays
        self._at = dict.fromkeys(arrays, 0)
        self._seen: dict[int, Any] = {}

    def value(self, node: Form) -> Tree:
        if "value" in node:
            return node["value"]
        if "tuple" in node:
            return tuple([self.value(part) for part in node["tuple"]])
        if "dict" in node:
            return {name: self.value(part) for name, part in node["dict"].items()}
        if "same" in node:
            return self._seen[node["same"]]
        if "array" in node:
            value = self._array(node)
        elif "unpacked" in node:
            value = self._structure(node["unpacked"]).unpacked()
        else:
            value = self._structure(node)
        if "number" in node:
            self._seen[node["number"]] = value
        return value

    def _structure(self, node: dict[str, Any]) -> Tree:
        cls = _class_of(node["class"])
        fields = {
            name: _tupled(part["static"])
            if isinstance(part, dict) and "static" in part
            else self.value(part)
            for name, part in node["fields"].items()
        }
        return cls(**fields)

    def _array(self, node: dict[str, Any]) -> Array:
        dtype, shape = node["array"], tuple(node["shape"])
        start = self._at[dtype]
        stop = start + math.prod(shape)
        self._at[dtype] = stop
        flat = self._arrays[dtype][start:stop]
        xp = ns.own_namespace(flat)
        x = xp.reshape(flat, shape)
        if "columns" in node:
            # Products round by the order in memory, and all ranks must round alike.
            y = xp.matrix_transpose(x)
            x = xp.matrix_transpose(xp.reshape(xp.reshape(y, (-1,)), tuple(y.shape)))
        return xp.astype(x, xp.bool) if node.get("bool") else x


def _class_of(name: str) -> type[Any]:
    # Nothing is imported because another rank names it.
    cls = structure_of_name(name)
    if cls is None:
        raise errors.CommunicationError(
            f"Another rank sent a {name}, which is not a structure of arrays on this rank. "
            "All ranks must run the same code and import the same modules."
        )
    return cls


def _listed(value: object) -> Form:
    """Return a static field as JSON keeps it: tuples are marked."""
    if isinstance(value, tuple):
        return {"tuple": [_listed(part) for part in value]}
    if value is not None and type(value) not in (bool, int, float, str):
        raise errors.CommunicationError(
            f"A static field of type {type(value).__name__} cannot be sent: expected "
            "numbers, strings, None and tuples of these."
        )
    return value


def _tupled(value: Form) -> object:
    if isinstance(value, dict):
        return tuple([_tupled(part) for part in value["tuple"]])
    return value


def in_dtype(flat: Array, dtype: str, /) -> Array:
    """Return an array in the dtype of a name; itself where it has that already."""
    xp = ns.own_namespace(flat)
    if not hasattr(xp, dtype):
        raise errors.UnsupportedError(
            f"Messages in {dtype} were asked for, which {xp.__name__} does not have. Take "
            "'float32'."
        )
    return ns.cast(xp, flat, getattr(xp, dtype))


def dtype_name(x: Array, /) -> str:
    """Return the name of an array's dtype, such as ``"float32"``."""
    return str(x.dtype).rpartition(".")[2]


def narrower(name: str, requested: str | None, /) -> str:
    """Return the dtype in which numbers of a dtype are sent.

    Parameters
    ----------
    name : str
        Their own dtype.
    requested : str or None
        Dtype that was requested.

    Returns
    -------
    str
        The latter, where both are floating and it has fewer bits.
    """
    if requested is None or "float" not in name or BYTES[requested] >= BYTES[name]:
        return name
    return requested


def rounded(value: Tree, dtype: str, /) -> Tree:
    """Return a value as it arrives where it is sent in a dtype.

    Parameters
    ----------
    value : structure, dict, tuple, array, number or None
        Value that `pack` takes.
    dtype : str
        Dtype of the message; integers and narrower arrays stay as they are.

    Returns
    -------
    structure, dict, tuple, array, number or None
        In the dtypes of the value.  What stood in several places still does.
    """

    def arriving(x: Array) -> Array:
        name = dtype_name(x)
        wire = narrower(name, dtype)
        return x if wire == name else in_dtype(in_dtype(x, wire), name)

    # A rank keeps what it sent as others receive it, or replicas would differ by roundoff.
    return Mapped(arriving)(value)
