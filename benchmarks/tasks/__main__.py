"""``python -m benchmarks.tasks``: run the suite, as far as its file has not got."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

from benchmarks.tasks.methods import METHODS, available  # noqa: E402
from benchmarks.tasks.problems import TASKS  # noqa: E402
from benchmarks.tasks.running import reference_of, run  # noqa: E402
from benchmarks.tasks.tables import median_of, read_runs, tables  # noqa: E402

FINALISTS = 2
"""Rates of a grid that are run with all seeds: the best of the first seed."""


def main() -> None:
    """Run what is missing, and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tasks")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--file", type=Path, default=Path("tasks.jsonl"), help="where runs are kept"
    )
    parser.add_argument(
        "--peers", type=Path, help="folder with soap.py and kfac-pytorch's package"
    )
    parser.add_argument(
        "--times",
        type=float,
        default=1.0,
        help="multiple of the tasks' seconds; a file holds runs of one",
    )
    parser.add_argument(
        "--width", type=int, help="width of all networks; a file holds runs of one"
    )
    parser.add_argument("--tables", action="store_true", help="run nothing")
    options = parser.parse_args()
    if not options.tables:
        chosen = [m for m in available(options.peers) if m in options.methods]
        run_missing(
            options.file,
            options.tasks,
            chosen,
            options.seeds,
            times=options.times,
            width=options.width,
        )
    for table in tables(read_runs(options.file)).values():
        print(f"\n{table}")


def run_missing(
    path: Path,
    tasks: list[str],
    methods: list[str],
    seeds: int,
    *,
    times: float,
    width: int | None,
) -> None:
    """Append the runs that a file does not have yet, one line each."""
    done = read_runs(path)
    if any((r.get("times", 1.0), r.get("width")) != (times, width) for r in done):
        raise SystemExit(
            f"{path} holds runs of other --times or --width: begin a new --file."
        )
    reference = reference_of(path, done)
    warm: set[str] = set()
    for task, method, rate, seed in _wanted(path, tasks, methods, seeds):
        if method not in warm:
            # The first steps of a process import modules, a quarter of a second of K-FAC's.
            run(task, method, rate, seed, reference=reference, share=0.05, width=width)
            warm.add(method)
        measured = run(
            task, method, rate, seed, reference=reference, share=times, width=width
        )
        key = {"task": task, "method": method, "rate": rate, "seed": seed}
        size = {"times": times, "width": width, "reference": reference}
        line = json.dumps({**key, **measured, **size})
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(
            f"{task:20}{method:16}{rate:<8g}{seed:<3}{measured['final']:<10.3g}"
            f"{measured['test']:<8.3g}{measured['steps']}",
            flush=True,
        )


def _wanted(
    path: Path, tasks: list[str], methods: list[str], seeds: int
) -> Iterator[tuple[str, str, float, int]]:
    """Yield runs that are missing: all rates with the first seed, then the best ones."""
    for seed in range(seeds):
        for task in tasks:
            for name in methods:
                method = METHODS[name]
                if not method.apt(TASKS[task]):
                    continue
                done: dict[Any, Any] = {
                    (r["rate"], r["seed"]): r["final"]
                    for r in read_runs(path)
                    if (r["task"], r["method"]) == (task, name)
                }
                rates = list(method.rates or (0.0,))
                if seed:
                    rates.sort(key=lambda rate: median_of(done, rate))
                    rates = rates[:FINALISTS]
                for rate in rates:
                    if (rate, seed) not in done:
                        yield task, name, rate, seed


if __name__ == "__main__":
    main()
