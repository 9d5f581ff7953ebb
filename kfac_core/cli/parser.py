"""The parser of the command line, which suggests the nearest name for a misspelt one."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable
from typing import NoReturn

from kfac_core.cli.screen import wrapped


def suggestion(word: str, known: Iterable[str], /) -> str:
    """Return ``; did you mean 'doctor'?`` for ``dcotor``, or nothing.

    Parameters
    ----------
    word : str
        Misspelt word.
    known : iterable of str
        Valid words.

    Returns
    -------
    str
        End of a message; empty if nothing known is close.
    """
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


class Parser(argparse.ArgumentParser):
    """A parser whose messages suggest the nearest choice or option."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and exit with 2."""
        message = message.replace(
            "argument COMMAND: invalid choice:", "unknown command"
        )
        if "invalid choice:" in message or message.startswith("unknown command"):
            wrong, *choices = re.findall(r"'([^']*)'", message)
            if meant := suggestion(wrong, choices):
                # Replace the list of choices, which would fill a line, by the nearest.
                message = message.partition(" (choose from")[0] + meant
        self.print_usage(sys.stderr)
        self.exit(2, wrapped(f"{self.prog}: error: {message}") + "\n")

    def refuse_unknown(self, arguments: Iterable[str], /) -> NoReturn:
        """Exit with an error for unknown arguments."""
        unknown = list(arguments)
        written = unknown[0].partition("=")[0]
        options = [name for action in self._actions for name in action.option_strings]
        end = suggestion(written, options)
        self.error(f"unrecognized arguments: {' '.join(unknown)}{end}")
