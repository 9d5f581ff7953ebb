"""``python -m benchmarks.tasks.robust``: count runs that diverge at the defaults.

Tasks, widths, batch sizes and seeds are drawn.  A run diverges if a loss is not finite, or
if the last loss on the training data is above the first.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import time
import warnings

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import torch  # noqa: E402

from benchmarks.tasks.methods import METHODS, Method  # noqa: E402
from benchmarks.tasks.problems import TASKS  # noqa: E402
from benchmarks.tasks.running import one_step  # noqa: E402
from kfac_core import KFACError  # noqa: E402

RUNS, STEPS, FEWEST, SECONDS = 50, 200, 30, 10.0


def losses(
    task: str, method: Method, *, width: int, batch: int, seed: int
) -> tuple[float, float, int]:
    """Return the first and the last loss, infinite after an error, and the steps taken."""
    torch.manual_seed(seed)
    problem = TASKS[task].build(width)
    problem.batch = batch
    problem.network.train()
    batches, optimizer = problem.batches(seed), method.make(problem, 0.0)
    first, started, step = problem.evaluate()[0], time.process_time(), 0
    try:
        for step in range(1, STEPS + 1):
            x, y = problem.train if method.whole else next(batches)
            if not math.isfinite(float(one_step(problem, method, optimizer, x, y))):
                return first, math.inf, step
            if step >= FEWEST and time.process_time() - started > SECONDS:
                break
    except (KFACError, RuntimeError):
        return first, math.inf, step
    return first, problem.evaluate()[0], step


def main() -> None:
    """Run, and print those that diverge."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tasks.robust")
    parser.add_argument("--method", choices=METHODS, default="kfac")
    parser.add_argument("--runs", type=int, default=RUNS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    method, rng, diverged = METHODS[options.method], random.Random(0), 0
    apt = [name for name, task in TASKS.items() if method.apt(task)]
    for seed in range(options.runs):
        task, exponent = rng.choice(apt), rng.uniform(4.0, 9.0)
        batch = round(2.0 ** rng.uniform(4.0, 10.0))
        # Four heads; channels of convolutions are a quarter as many.
        width = 4 * round(2.0 ** (exponent - 2.0))
        if task in ("convolutions", "residual", "denoising"):
            width = max(4, width // 4)
        first, last, steps = losses(task, method, width=width, batch=batch, seed=seed)
        failed = not last < first
        diverged += failed
        print(
            f"{seed:<4}{task:20}width {width:<5}batch {batch:<6}steps {steps:<5}"
            f"{first:<10.3g}{last:<10.3g}{'diverges' if failed else ''}",
            flush=True,
        )
    print(f"{diverged} of {options.runs} runs of {method.title} diverge")


if __name__ == "__main__":
    main()
