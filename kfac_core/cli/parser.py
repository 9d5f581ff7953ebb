"""The parser of the command line: what is misspelt is answered by what is close to it."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable
from typing import NoReturn

from kfac_core.cli.screen import wrapped

__all__ = ["Parser", "suggestion"]


def suggestion(word: str, known: Iterable[str], /) -> str:
    """Return ``; did you mean 'doctor'?`` for ``dcotor``, or nothing.

    Parameters
    ----------
    word : str
        What was written.
    known : iterable of str
        What could have been meant.

    Returns
    -------
    str
        End of a message; empty if nothing known is close.
    """
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


class Parser(argparse.ArgumentParser):
    """A parser whose messages suggest what is close to a wrong choice or option."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and exit with 2."""
        message = message.replace("argument COMMAND: invalid choice:", "no command")
        if "invalid choice:" in message or message.startswith("no command"):
            wrong, *choices = re.findall(r"'([^']*)'", message)
            if meant := suggestion(wrong, choices):
                # The choices would fill a line, and one of them is enough.
                message = message.partition(" (choose from")[0] + meant
        self.print_usage(sys.stderr)
        self.exit(2, wrapped(f"{self.prog}: error: {message}") + "\n")

    def refuse_unknown(self, arguments: Iterable[str], /) -> NoReturn:
        """Complain of arguments that nothing declared, by the first of them."""
        unknown = list(arguments)
        written = unknown[0].partition("=")[0]
        options = [name for action in self._actions for name in action.option_strings]
        end = suggestion(written, options)
        self.error(f"unrecognized arguments: {' '.join(unknown)}{end}")
