"""Print the grid: ``python -m conformance_tests.precision [--quick] numpy torch jax``.

The last table has all backends.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import kfac_core as kc

from . import compiled, grid

QUICK: dict[str, Any] = {"scales": (1.0,), "dampings": (1e-40, 1e-14, 1e-6, 1.0, 1e30)}
Counts = dict[str, dict[str, dict[str, int]]]
"""Verdicts by backend and approximation."""


def main(arguments: list[str]) -> int:
    """Walk the grid on each backend; return how many cases are silently wrong."""
    options = _parser().parse_args(arguments)
    counts: Counts = {}
    for path in options.read:
        merge(counts, json.loads(path.read_text(encoding="utf-8")))
    walked = options.backends or ([] if options.read else ["numpy"])
    for backend in walked:
        started = time.perf_counter()
        if backend.startswith("jax"):
            kc.enable_float64(backend="jax")
        found: dict[grid.Case, str] = {}
        with kc.use_backend(backend), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            points = dict(QUICK) if options.quick else {}
            if options.kinds:
                points["kinds"] = options.kinds
            for case, result, told in verdicts(backend, options.check, points):
                found[case] = result
                if result == "silently wrong":
                    print(f"{case}: {told}", flush=True)
        print(f"\n{backend} ({time.perf_counter() - started:.0f} s)\n")
        print(aligned(grid.table(found)), flush=True)
        for case, result in found.items():
            merge(counts, {backend: {case.kind: {result: 1}}})
    if options.save:
        options.save.write_text(json.dumps(counts) + "\n", encoding="utf-8")
    print(f"\n{counts_table(counts)}")
    return sum(
        found.get("silently wrong", 0)
        for kinds in counts.values()
        for found in kinds.values()
    )


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m conformance_tests.precision")
    made.add_argument("backends", nargs="*", help="numpy, torch, jax")
    made.add_argument("--quick", action="store_true", help="fewer scales and dampings")
    made.add_argument("--check", nargs="+", default=["raise", "status"])
    made.add_argument("--kinds", nargs="+", metavar="NAME", help="some approximations")
    made.add_argument("--save", type=Path, help="write the counts to a file")
    made.add_argument("--read", type=Path, nargs="+", default=[], help="add such files")
    return made


def verdicts(
    backend: str, checks: Sequence[str], points: dict[str, Any]
) -> Iterator[tuple[grid.Case, str, str]]:
    """Yield the cases of a backend with their verdicts.

    On JAX those with ``check="status"`` are compiled, see `compiled`; those with
    ``check="raise"`` read values and are not, and are walked at scale 1, and
    with `QUICK` at one damping.
    """
    if not backend.startswith("jax"):
        for case in grid.cases(checks=checks, **points):
            yield (case, *grid.verdict(case, backend))
        return
    if "status" in checks:
        yield from compiled.verdicts(grid.cases(checks=("status",), **points))
    if "raise" in checks:
        points = {**points, "scales": (1.0,)}
        if "dampings" in points:
            points["dampings"] = QUICK["dampings"][2:3]
        for case in grid.cases(checks=("raise",), **points):
            yield (case, *grid.verdict(case, backend))


def merge(counts: Counts, others: Counts) -> None:
    """Add counts to counts."""
    for backend, kinds in others.items():
        for kind, found in kinds.items():
            own = counts.setdefault(backend, {}).setdefault(kind, {})
            for result, number in found.items():
                own[result] = own.get(result, 0) + number


def counts_table(counts: Counts) -> str:
    """Return the counts as a table of Markdown, ``right / refused / wrong of cases``.

    Which of two right answers is refused may depend on the processor's roundoff, so that
    shares are rounded to whole percents; what is wrong is counted.
    """
    backends = list(counts)
    heads = [_TITLES.get(name, name) for name in backends]
    lines = [
        f"| approximation | {' | '.join(heads)} |",
        f"| --- {'| ---: ' * len(backends)}|",
    ]
    kinds = list(dict.fromkeys(kind for found in counts.values() for kind in found))
    total: Counts = {name: {"all": {}} for name in backends}
    for name in backends:
        for found in counts[name].values():
            merge(total, {name: {"all": found}})
    for kind in [*kinds, "all"]:
        source = total if kind == "all" else counts
        cells = []
        for name in backends:
            found = source[name].get(kind, {})
            right, refused, wrong = (found.get(told, 0) for told in grid.VERDICTS)
            cases = right + refused + wrong
            shares = [f"{100 * part / max(cases, 1):.0f}%" for part in (right, refused)]
            cells.append(f"{' / '.join(shares)} / {wrong:,} of {cases:,}")
        label = "all" if kind == "all" else f"`{kind}`"
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


_TITLES = {"numpy": "NumPy", "torch": "PyTorch", "jax": "JAX"}


def aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows as lines of columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
