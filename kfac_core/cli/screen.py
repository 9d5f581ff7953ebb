"""Output of the commands: tables, one JSON document, errors, and progress.

Conventions.  Standard output holds only the answer; standard error holds errors, a line
each (wrapped on a terminal), and progress, which only a terminal gets.  Pipes and files get
no control characters.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = [
    "PATIENCE",
    "WIDTH",
    "Progress",
    "aligned",
    "complain",
    "print_json",
    "print_table",
    "printable",
    "wrapped",
]

PATIENCE = 2.0
"""Seconds after which progress is shown."""

WIDTH = 80
"""Width of a line of text, where possible."""

_LEAST = 12
"""Least width of a wrapped column."""

_CLEARED = "\r\x1b[2K"


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


def print_json(document: Any, /) -> None:
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


class Progress:
    """A line of progress on standard error, on a terminal only.

    Parameters
    ----------
    total : int, optional
        Number of steps.
    patience : float
        After how many seconds it is shown.
    """

    def __init__(
        self, total: int | None = None, /, *, patience: float = PATIENCE
    ) -> None:
        self._total, self._patience = total, patience
        self._done, self._doing, self._shown = 0, "", False
        self._start = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()

    def begin(self, doing: str, /) -> None:
        """Show a task."""
        self._doing = printable(doing)
        self._show()

    def advance(self, steps: int = 1, /) -> None:
        """Count finished steps."""
        self._done += steps
        self._show()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Clear the line while other text is written to the terminal."""
        self._clear()
        yield
        sys.stdout.flush()

    def _show(self) -> None:
        waited = time.monotonic() - self._start >= self._patience
        if waited and sys.stderr.isatty():
            count = "" if self._total is None else f"{self._done}/{self._total} "
            print(_CLEARED, count, self._doing, sep="", end="", file=sys.stderr)
            sys.stderr.flush()
            self._shown = True

    def _clear(self) -> None:
        if self._shown:
            print(_CLEARED, end="", file=sys.stderr, flush=True)
            self._shown = False


def _plain(value: Any) -> Any:
    """Return a value in the types of JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
