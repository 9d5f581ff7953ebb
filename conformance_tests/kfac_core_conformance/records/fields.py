"""Readers of JSON values: each takes a value and where it stands, or raises.

Conventions.  A reader returns the value in the form that Python code wants (tuples for
lists, floats for numbers) or raises `RecordError` that says where, what was expected and
what was found.  What was found is shown short, on one line and in ASCII, whatever a
hostile file put there.  Integers are bounded, so that arithmetic with them is too.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from kfac_core.errors import RecordError

__all__ = [
    "REQUIRED",
    "Field",
    "Reader",
    "Schema",
    "boolean",
    "choice",
    "integer",
    "items",
    "mapping",
    "name",
    "number",
    "one_line",
    "optional",
    "read_fields",
    "shown",
    "text",
]

Reader: TypeAlias = Callable[[object, str], Any]
"""Takes a JSON value and where it stands in the document; returns it or raises."""

REQUIRED: Any = object()
"""The default of a field that may not be left out."""

LARGEST_INTEGER = 2**53
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60


@dataclass(frozen=True)
class Field:
    """One field of a JSON object.

    Parameters
    ----------
    read : callable
        The reader of its value.
    default : object
        What stands for it where it is left out; `REQUIRED` where it may not be.
    """

    read: Reader
    default: Any = REQUIRED


Schema: TypeAlias = Mapping[str, Field]
"""The fields that an object may have, and no others."""


def read_fields(value: object, where: str, schema: Schema, /) -> dict[str, Any]:
    """Read a JSON object with known fields.

    Parameters
    ----------
    value : object
        As JSON gave it.
    where : str
        Where it stands, such as ``"blocks.fc1.layer"``; empty for the document.
    schema : mapping of str to Field
        All the fields that it may have.

    Returns
    -------
    dict of str to object
        Every field of the schema, read or by default.

    Raises
    ------
    RecordError
        For another type, an unknown field, a field that is missing, or one that its
        reader refuses.
    """
    found = mapping(value, where)
    place = f"{where}." if where else ""
    for key in found:
        if key not in schema:
            raise RecordError(
                f"{where or 'the document'}: unknown field {shown(key)}; expected some "
                f"of {', '.join(schema)}"
            )
    fields = {}
    for key, field in schema.items():
        if key in found:
            fields[key] = field.read(found[key], f"{place}{key}")
        elif field.default is REQUIRED:
            raise RecordError(
                f"{where or 'the document'}: the field {key!r} is missing"
            )
        else:
            fields[key] = field.default
    return fields


def shown(value: object, /) -> str:
    """Return a short representation of any value, in printable ASCII."""
    return _short.repr(value).encode("ascii", "backslashreplace").decode("ascii")


def one_line(message: str, /) -> str:
    """Return a text with everything escaped that would not print on one line."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii")
        for c in message
    )


def text(value: object, where: str, /) -> str:
    """Read a string."""
    if not isinstance(value, str):
        raise _unexpected(where, "a string", value)
    return value


def name(value: object, where: str, /) -> str:
    """Read a name: letters, digits, ``_`` and ``-``."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise _unexpected(where, "a name of letters, digits, '_' and '-'", value)
    return value


def boolean(value: object, where: str, /) -> bool:
    """Read true or false; 0 and 1 are neither."""
    if not isinstance(value, bool):
        raise _unexpected(where, "true or false", value)
    return value


def mapping(value: object, where: str, /) -> dict[str, Any]:
    """Read a JSON object, its values as they are."""
    if not isinstance(value, dict):
        raise _unexpected(where or "the document", "an object", value)
    return value


def integer(minimum: int, /) -> Reader:
    """Return the reader of an integer of at least `minimum`."""

    def read(value: object, where: str) -> int:
        if (
            not isinstance(value, int)
            or isinstance(value, bool)
            or not minimum <= value <= LARGEST_INTEGER
        ):
            raise _unexpected(where, f"an integer from {minimum} to 2**53", value)
        return value

    return read


def number(
    minimum: float = -math.inf, maximum: float = math.inf, *, above: bool = False
) -> Reader:
    """Return the reader of a finite number in a range.

    Parameters
    ----------
    minimum, maximum : float
        The range, both ends included.
    above : bool
        Whether `minimum` itself is left out.
    """
    bounds = [
        f"{'>' if above else '>='} {minimum:g}" if minimum > -math.inf else "",
        f"<= {maximum:g}" if maximum < math.inf else "",
    ]
    expected = " ".join(["a finite number", " and ".join(filter(None, bounds))]).strip()

    def read(value: object, where: str) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                found = float(value)
            except OverflowError:
                found = math.inf
            inside = found > minimum if above else found >= minimum
            if math.isfinite(found) and inside and found <= maximum:
                return found
        raise _unexpected(where, expected, value)

    return read


def choice(*known: Any) -> Reader:
    """Return the reader of one of some strings."""

    def read(value: object, where: str) -> Any:
        if not isinstance(value, str) or value not in known:
            expected = " or ".join(repr(k) for k in known)
            raise _unexpected(where, expected, value)
        return value

    return read


def items(read_item: Reader, *, shortest: int = 0, longest: int = 32) -> Reader:
    """Return the reader of a list, as a tuple of what one reader reads."""

    def read(value: object, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or not shortest <= len(value) <= longest:
            raise _unexpected(where, f"a list of {shortest} to {longest} items", value)
        return tuple(read_item(item, f"{where}[{i}]") for i, item in enumerate(value))

    return read


def optional(read_value: Reader) -> Reader:
    """Return a reader that also takes null, as None."""

    def read(value: object, where: str) -> Any:
        return None if value is None else read_value(value, where)

    return read


def _unexpected(where: str, expected: str, value: object) -> RecordError:
    return RecordError(f"{where}: expected {expected}, got {shown(value)}")
