"""Output of the commands: tables, one JSON document, and errors.

Conventions.  Standard output holds only the answer; standard error holds errors, a line
each (wrapped on a terminal).  Nothing writes control characters.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import textwrap
from collections.abc import Mapping, Sequence

WIDTH = 80
"""Width of a line of text, where possible."""

_LEAST = 12
"""Least width of a wrapped column."""


def complain(command: str, message: object, /) -> int:
    """Write one line to standard error that begins with the command's name.

    On a terminal it is wrapped to `WIDTH` columns.

    Parameters
    ----------
    command : str
        The subcommand.
    message : object
        Error; line breaks and control characters are escaped.

    Returns
    -------
    int
        2, the exit code of a command that could not answer.
    """
    line = f"kfac-core {command}: {printable(str(message))}"
    print(wrapped(line) if sys.stderr.isatty() else line, file=sys.stderr)
    return 2


def wrapped(line: str, /) -> str:
    """Return a line wrapped to `WIDTH` columns, between words only."""
    lines = textwrap.wrap(
        line,
        WIDTH,
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)


def printable(text: str, /) -> str:
    """Return text on one line, with everything escaped that could steer a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def print_json(document: object, /) -> None:
    """Print one document; numbers that are not finite become null."""
    print(json.dumps(_plain(document), indent=2, allow_nan=False))


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    /,
    *,
    width: int = WIDTH,
) -> None:
    """Print a title, and a table if there are rows; see `aligned`."""
    cells = [[printable(cell) for cell in row] for row in rows]
    print("\n".join([printable(title), *aligned(columns, cells, width=width)]))


def aligned(
    columns: Sequence[str], rows: Sequence[Sequence[str]], /, *, width: int = WIDTH
) -> list[str]:
    """Return the lines of a plain table, at most `width` wide; none without rows.

    Where a table is wider, the text of its widest columns is wrapped.
    """
    if not rows:
        return []
    table = [list(columns), *map(list, rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
    # Narrow the widest column until the table fits, down to a readable width.
    while sum(w + 2 for w in widths) > width and max(widths) > _LEAST:
        widths[widths.index(max(widths))] -= 1
    lines = []
    for row in table:
        cells = [
            textwrap.wrap(cell, w, break_on_hyphens=False) if w else []
            for cell, w in zip(row, widths, strict=True)
        ]
        for parts in itertools.zip_longest(*cells, fillvalue=""):
            # Wrapped cells continue below, in their own column.
            padded = (part.ljust(w) for part, w in zip(parts, widths, strict=True))
            lines.append("".join(f"  {part}" for part in padded).rstrip())
    return lines


def _plain(value: object) -> object:
    """Return a value in the types of JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
