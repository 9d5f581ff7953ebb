"""Run random sequences for a time, and print what was done; see the package."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from .driver import FindingError, Sequence, placing


def main(arguments: list[str] | None = None) -> int:
    """Run the sequences of consecutive seeds; return 1 if there was a finding."""
    parser = argparse.ArgumentParser(prog="python -m conformance_tests.sequences")
    parser.add_argument("--backend", default="numpy", help="name[:device]")
    parser.add_argument("--seed", type=int, default=0, help="of the first sequence")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to go on")
    parser.add_argument("--sequences", type=int, default=10**9, help="at most so many")
    parser.add_argument("--chunk", type=int, default=100, help="sequences in a line")
    parser.add_argument("--length", type=int, default=12, help="calls in a sequence")
    parser.add_argument("--faults", action="store_true", help="let calls fail inside")
    options = parser.parse_args(arguments)
    place = placing(options.backend)
    counts: Counter[str] = Counter()
    started, findings = time.monotonic(), 0
    first = last = options.seed
    with tempfile.TemporaryDirectory(prefix="kfac_core-sequences-") as folder:
        for seed in range(options.seed, options.seed + options.sequences):
            if time.monotonic() - started > options.seconds:
                break
            if seed - first == options.chunk:
                _tell(options.backend, first, seed, counts)
                first = seed
                counts.clear()
            sequence = Sequence(
                seed=seed,
                spec=options.backend,
                place=place,
                folder=Path(folder),
                counts=counts,
                faults=options.faults,
                length=options.length,
            )
            try:
                sequence.run()
            except FindingError as finding:
                findings += 1
                counts["findings"] += 1
                print(f"FINDING {finding}\n", flush=True)
            last = seed + 1
    _tell(options.backend, first, last, counts)
    seconds = time.monotonic() - started
    print(f"{last - options.seed:,} sequences, {seconds:.0f} s: {findings} findings")
    return 1 if findings else 0


def _tell(backend: str, first: int, last: int, counts: Counter[str]) -> None:
    """Print what was done with some seeds, so that runs can be added up."""
    done = ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
    print(f"{backend}, seeds {first} to {last - 1}: {done}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
