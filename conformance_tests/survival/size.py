"""How large a run is: small among the ordinary tests, or full."""

from __future__ import annotations

import os

FULL = os.environ.get("KFAC_CORE_SURVIVAL") == "full"
"""Whether ``KFAC_CORE_SURVIVAL=full`` asks for the sizes of `docs/robustness.md`."""


def sized(small: int, full: int, /) -> int:
    """Return how many of something a test runs."""
    return full if FULL else small


def report(line: str, /) -> None:
    """Print a figure of a full run, for ``pytest -s``; small runs print nothing."""
    if FULL:
        print(line, flush=True)
