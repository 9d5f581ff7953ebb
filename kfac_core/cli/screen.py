"""What the commands write: tables, one JSON document, complaints, and progress.

Conventions.  Standard output holds the answer and nothing else; standard error holds
complaints, a line each (wrapped on a terminal), and progress.  Progress and color are for
terminals: what is written elsewhere holds no control characters.  ``rich`` draws both
where it is installed, and is imported when something is drawn.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
import textwrap
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kfac_core.array.optional import optional_module

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
"""After how many seconds progress is shown."""

WIDTH = 80
"""How wide a line of text is, where it can be."""

_LEAST = 12
"""The least width to which a column is wrapped."""

_STYLES = {
    **dict.fromkeys(("agrees", "holds", "usable"), "green"),
    **dict.fromkeys(("differs", "raised", "no answer"), "bold red"),
}
"""How a result, in the last column of a table, is colored."""


def complain(command: str, message: object, /) -> int:
    """Write one line to standard error that begins with the command's name.

    On a terminal it is wrapped to `WIDTH` columns.

    Parameters
    ----------
    command : str
        The subcommand.
    message : object
        What is wrong; line breaks and control characters are shown escaped.

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


def print_json(found: Any, /) -> None:
    """Print one document; what is not finite becomes null."""
    print(json.dumps(_plain(found), indent=2, allow_nan=False))


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], /
) -> None:
    """Print a title and a table, which a terminal gets in lines and colors.

    Parameters
    ----------
    title : str
        Title, one line.
    columns : sequence of str
        The head of each column; the last is colored by what stands in it.
    rows : sequence of sequence of str
        The cells; without any only the title is printed.
    """
    title = printable(title)
    cells = [[printable(cell) for cell in row] for row in rows]
    if not (cells and sys.stdout.isatty() and _print_pretty(title, columns, cells)):
        print("\n".join([title, *aligned(columns, cells)]))


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]], /) -> list[str]:
    """Return the lines of a plain table, at most `WIDTH` wide; none without rows.

    Where a table is wider, the text of its widest columns is wrapped.
    """
    if not rows:
        return []
    table = [list(columns), *map(list, rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
    while sum(width + 2 for width in widths) > WIDTH and max(widths) > _LEAST:
        widths[widths.index(max(widths))] -= 1
    lines = []
    for row in table:
        cells = [
            textwrap.wrap(cell, width, break_on_hyphens=False) if width else []
            for cell, width in zip(row, widths, strict=True)
        ]
        for parts in itertools.zip_longest(*cells, fillvalue=""):
            padded = (part.ljust(w) for part, w in zip(parts, widths, strict=True))
            lines.append("".join(f"  {part}" for part in padded).rstrip())
    return lines


class Progress:
    """A bar on standard error, on a terminal only and after some seconds only.

    Parameters
    ----------
    total : int, optional
        How many steps there are; a spinner without.
    patience : float
        After how many seconds it is shown.
    """

    def __init__(
        self, total: int | None = None, /, *, patience: float = PATIENCE
    ) -> None:
        self._total = total
        self._patience = patience
        self._done = 0
        self._doing = ""
        self._bar: Any = None
        self._task: Any = None
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            # A timer, as the work that is waited for does not call back.
            self._timer = threading.Timer(self._patience, self._show)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            self._timer = None
            if self._bar is not None:
                self._bar.stop()
                self._bar = None

    def begin(self, doing: str, /) -> None:
        """Say what is being done."""
        with self._lock:
            self._doing = printable(doing)
            self._update()

    def advance(self, steps: int = 1, /) -> None:
        """Count steps that are done."""
        with self._lock:
            self._done += steps
            self._update()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Take the bar away while something else is written to the terminal."""
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
            yield
            sys.stdout.flush()
            if self._bar is not None:
                self._bar.start()

    def _update(self) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=self._doing)

    def _show(self) -> None:
        if optional_module("rich.progress") is None:
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
        )
        from rich.progress import Progress as Bar

        counted = (BarColumn(), MofNCompleteColumn())
        columns = (
            SpinnerColumn(),
            # Names may come from files: no markup is read in them.
            TextColumn("{task.description}", markup=False),
            *(counted if self._total is not None else ()),
            TimeElapsedColumn(),
        )
        with self._lock:
            if self._timer is None:  # It ended while rich was imported.
                return
            self._bar = Bar(
                *columns,
                console=Console(stderr=True),
                transient=True,
                # What goes to standard output is not for standard error.
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._bar.add_task(self._doing, total=self._total)
            self._update()
            self._bar.start()


def _print_pretty(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> bool:
    """Print a table for people; return False where rich is not there to do it."""
    needed = ("rich.console", "rich.table", "rich.text")
    if any(optional_module(name) is None for name in needed):
        return False
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left")
    for column in columns:
        table.add_column(column)
    for *cells, word in rows:
        # `Text` takes what it is given literally: a record's names are not markup.
        table.add_row(*map(Text, cells), Text(word, style=_style(word)))
    Console().print(table)
    return True


def _style(word: str) -> str:
    return next((s for start, s in _STYLES.items() if word.startswith(start)), "")


def _plain(found: Any) -> Any:
    """Return what JSON can say."""
    if isinstance(found, float):
        return found if math.isfinite(found) else None
    if isinstance(found, Mapping):
        return {str(name): _plain(value) for name, value in found.items()}
    if isinstance(found, list | tuple):
        return [_plain(value) for value in found]
    return found
