"""Random arguments: whatever is refused is refused by an error of the library."""

from __future__ import annotations

from ..fuzzing.arguments import ArgumentFuzzer
from .size import report, sized


def test_random_arguments_have_no_findings():
    """Of every public constructor and call; the fuzzer of its own runs for longer."""
    fuzzer = ArgumentFuzzer(seed=3)
    found = [fuzzer.run() for _ in range(sized(200, 20_000))]

    assert [finding for finding in found if finding is not None] == []
    assert fuzzer.counts["refused"] > len(found) // 4
    report(f"\n{fuzzer.counts}")
