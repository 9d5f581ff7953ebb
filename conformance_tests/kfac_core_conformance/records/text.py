"""Text for error messages: short, on one line, whatever a hostile file contains."""

from __future__ import annotations

import reprlib

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60


def shown(value: object, /) -> str:
    """Return a short representation of any value, in printable ASCII."""
    return _short.repr(value).encode("ascii", "backslashreplace").decode("ascii")


def one_line(message: str, /) -> str:
    """Return the text with every unprintable character escaped."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii")
        for c in message
    )


def shape_text(*axes: object) -> str:
    """Return a shape whose axes are lengths or names, such as ``(N, ..., 3)``."""
    return f"({', '.join(map(str, axes))})"
