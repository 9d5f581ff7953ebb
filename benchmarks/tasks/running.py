"""One run: a task, a method, a rate and a seed, for a CPU time of training.

The clock is the CPU time of the process on one thread, and stands still while losses are
measured.  Seconds are those of the machine at the file's first run: before each run a
fixed piece of work is timed, and the budget is stretched where other programs slow the
machine down, so that runs of one file have done equal work.  A file belongs to one
machine: on another processor this piece of work and a step of training differ by
different factors.
"""

from __future__ import annotations

import math
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.tasks.methods import METHODS, Method, set_share
from benchmarks.tasks.problems import TASKS, Problem
from kfac_core import KFACError

SHARES = 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0
"""When the loss on all training data is measured, as shares of the budget."""


def price_of_work() -> float:
    """Return the CPU seconds of a fixed piece of work, the least of a few times."""
    x = torch.ones(96, 96)
    times = []
    for _ in range(5):
        started = time.process_time()
        for _ in range(60):
            y = (x @ x).tanh_()
            y.sum().item()
        times.append(time.process_time() - started)
    return min(times)


def reference_of(path: Path, runs: list[dict[str, Any]], /) -> float:
    """Return the price of work at a file's first run; refuse another machine's file."""
    price = price_of_work()
    reference = float(runs[0]["reference"]) if runs else price
    if not 0.5 < price / reference < 2.0:
        raise SystemExit(
            f"{path} holds runs of a machine that does the fixed piece of work in "
            f"{reference:.2g} s, and this one takes {price:.2g} s: its ratio to a step "
            "of training differs too, so begin a new --file."
        )
    return reference


def run(
    task_name: str,
    method: str | Method,
    rate: float,
    seed: int,
    *,
    reference: float,
    share: float = 1.0,
    width: int | None = None,
) -> dict[str, Any]:
    """Train, and return what was measured.

    Parameters
    ----------
    task_name : str
        In `TASKS`.
    method : str or Method
        In `METHODS`, or one of your own.
    rate : float
        Learning rate; 0 for a method that has none.
    seed : int
        Of the network and the batches.
    reference : float
        `price_of_work` at the file's first run.
    share : float
        Of the task's seconds.
    width : int, optional
        Of the network; by default the task's own.

    Returns
    -------
    dict
        ``final``: loss above the floor, infinite where the run broke off; ``test``;
        ``steps``; ``curve``, pairs of seconds and losses; and ``slowdown``.
    """
    torch.set_num_threads(1)
    task = TASKS[task_name]
    of_method = METHODS[method] if isinstance(method, str) else method
    slowdown = price_of_work() / reference
    torch.manual_seed(seed)
    problem = task.build() if width is None else task.build(width)
    problem.network.train()
    batches = problem.batches(seed)
    budget = task.seconds * share * slowdown
    marks = [s * budget for s in SHARES]
    spent, steps, curve = 0.0, 0, []
    final, test = math.inf, math.inf
    optimizer: Any = None
    base: list[float] = []
    while marks:
        x, y = problem.train if of_method.whole else next(batches)
        started = time.process_time()
        if optimizer is None:
            optimizer = of_method.make(problem, rate)
            base = [group["lr"] for group in optimizer.param_groups]
        if of_method.cosine:
            set_share(optimizer, base, spent / budget)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loss = float(one_step(problem, of_method, optimizer, x, y))
        except (KFACError, RuntimeError):  # The numbers left their range.
            break
        spent += time.process_time() - started
        steps += 1
        if not math.isfinite(loss):
            break
        if spent < marks[0]:
            continue
        while marks and spent >= marks[0]:
            marks.pop(0)
        final, test = problem.evaluate()
        curve.append((round(spent / slowdown, 4), final))
    broke_off = bool(marks) or not math.isfinite(final)
    return {
        "final": math.inf if broke_off else final,
        "test": test,
        "steps": steps,
        "curve": curve,
        "slowdown": round(slowdown, 3),
    }


def one_step(problem: Problem, method: Method, optimizer: Any, x: Any, y: Any) -> Any:
    """Take a step, and return the batch's loss before it."""
    network = problem.network
    if method.uses == "residuals":
        return optimizer.step(lambda: network(x) - y)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = problem.loss(network, x, y)
        loss.backward()
        return loss

    if method.uses == "closure":
        return optimizer.step(closure)
    loss = closure()
    optimizer.step()
    return loss.detach()
