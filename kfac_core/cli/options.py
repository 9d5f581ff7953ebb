"""Options that several commands have, and the values that these may take."""

from __future__ import annotations

import argparse


def add_json(parser: argparse.ArgumentParser, /) -> None:
    """Declare ``--json``, which every command has."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document instead of text"
    )


def add_verbosity(parser: argparse.ArgumentParser, /, *, also: str) -> None:
    """Declare ``--verbose``, which shows what is usually left out, and ``--quiet``."""
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("-v", "--verbose", action="store_true", help=f"show {also} too")
    shown.add_argument(
        "-q",
        "--quiet",
        action="store_true",
        help="print nothing; set only the exit code",
    )


def positive(text: str, /) -> int:
    """Return an integer of at least 1."""
    # Not by the error of `int`, whose message in argparse names a Python type.
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        message = f"expected an integer >= 1, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return number
