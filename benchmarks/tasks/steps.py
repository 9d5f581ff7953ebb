"""``python -m benchmarks.tasks.steps``: what a step of `KFAC` costs beside one of Adam's.

CPU time on one thread, averaged over 100 steps, among which statistics and refreshes fall
as they do by default.  Methods take turns of ten steps in one process; the ratio is the
median over passes of that to the faster of Adam's two forms.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import torch  # noqa: E402

from benchmarks.tasks.methods import METHODS, Method, kfac  # noqa: E402
from benchmarks.tasks.problems import TASKS  # noqa: E402
from benchmarks.tasks.running import one_step  # noqa: E402
from benchmarks.tasks.tables import markdown  # noqa: E402

STEPS, TURN = 100, 10
# 2,048 tokens.
BATCHES = {"characters": 64}


def _adam(*, fused: bool) -> Method:
    return Method(
        title="Adam, fused" if fused else "Adam",
        make=lambda problem, rate: torch.optim.Adam(
            problem.network.parameters(), lr=3e-3, fused=fused
        ),
    )


def measured(task: str, method: Method, passes: int) -> tuple[list[float], ...]:
    """Return the CPU seconds of a step of both Adams and of a method, for each pass.

    Parameters
    ----------
    task : str
        In `TASKS`.
    method : Method
        What is compared with Adam.
    passes : int
        Passes of 100 steps after a first one, which is not measured.
    """
    methods = _adam(fused=False), _adam(fused=True), method
    steps = [_stepper(task, one) for one in methods]
    times: tuple[list[float], ...] = ([], [], [])
    for number in range(passes + 1):
        spent = [0.0] * len(steps)
        for _ in range(STEPS // TURN):
            for i, step in enumerate(steps):
                started = time.process_time()
                for _ in range(TURN):
                    step()
                spent[i] += time.process_time() - started
        if number:
            for of_method, seconds in zip(times, spent, strict=True):
                of_method.append(seconds / STEPS)
    return times


def _stepper(task: str, method: Method) -> Callable[[], Any]:
    """Return a function that takes a step on the next batch."""
    torch.manual_seed(0)
    problem = TASKS[task].build()
    problem.batch = BATCHES.get(task, problem.batch)
    problem.network.train()
    batches, optimizer = problem.batches(0), method.make(problem, 0.0)
    return lambda: one_step(problem, method, optimizer, *next(batches))


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tasks.steps")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--method", choices=METHODS, default="kfac")
    parser.add_argument("--passes", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    method, rows = METHODS[options.method], []
    if options.method == "kfac":
        # Of SGD, too, the form that takes less time.
        method = dataclasses.replace(
            method, make=lambda problem, rate: kfac(problem, fused=True)
        )
    for task in options.tasks:
        times = measured(task, method, options.passes)
        ratios = [c / min(a, b) for a, b, c in zip(*times, strict=True)]
        least = [f"{min(seconds) * 1e3:.2f}" for seconds in times]
        rows.append([TASKS[task].title, *least, f"{statistics.median(ratios):.2f}"])
    head = "ms a step of", "Adam", "Adam, fused", method.title, "to the faster Adam"
    print(markdown([*head], rows))


if __name__ == "__main__":
    main()
