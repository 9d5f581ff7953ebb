"""The parser of the command line: what is misspelt is answered by what is close to it."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable
from typing import NoReturn

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
        if "invalid choice:" in message:
            wrong, *choices = re.findall(r"'([^']*)'", message)
            message += suggestion(wrong, choices)
        super().error(message)

    def refuse_unknown(self, arguments: Iterable[str], /) -> NoReturn:
        """Complain of arguments that nothing declared, by the first of them."""
        unknown = list(arguments)
        written = unknown[0].partition("=")[0]
        options = [name for action in self._actions for name in action.option_strings]
        end = suggestion(written, options)
        self.error(f"unrecognized arguments: {' '.join(unknown)}{end}")
