"""Options that several commands have, and the values that these may take."""

from __future__ import annotations

import argparse

__all__ = ["add_json", "not_negative", "positive"]


def add_json(parser: argparse.ArgumentParser, /) -> None:
    """Declare ``--json``, which every command has."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document instead of text"
    )


def positive(text: str, /) -> int:
    """Return an integer of at least 1."""
    return _at_least(1, text)


def not_negative(text: str, /) -> int:
    """Return an integer of at least 0."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        message = f"expected an integer >= {least}, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return number
