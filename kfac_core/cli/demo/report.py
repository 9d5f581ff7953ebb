"""What the demonstration prints: the settings, the table, the figure in a sentence."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import kfac_core as kc
from kfac_core.cli.demo import kfac
from kfac_core.cli.demo.autoencoder import WIDTHS
from kfac_core.cli.demo.data import pixel_entropy
from kfac_core.cli.demo.search import Search
from kfac_core.cli.demo.training import (
    BATCH_SIZE,
    EVALUATE_EVERY,
    METHODS,
    Problem,
    Run,
)

__all__ = [
    "as_json",
    "reconstruction_error",
    "settings",
    "steps_ratio",
    "table",
    "verdict",
]


def settings(problem: Problem, grids: dict[str, tuple[float, ...]], /) -> str:
    """Describe what is run, before it is run.

    Parameters
    ----------
    problem : Problem
        What is trained on.
    grids : dict
        The learning rates of each method.

    Returns
    -------
    str
        A few lines.
    """
    selection = kc.selected_backend(problem.backend)
    digits = problem.digits
    rates = "\n".join(
        f"  {method:6}" + ", ".join(f"{rate:g}" for rate in grids[method])
        for method in METHODS
    )
    return (
        f"Autoencoder {'-'.join(map(str, WIDTHS))}, sigmoid units, Bernoulli pixels,"
        f" on {len(digits.train)} digits; {len(digits.held_out)} are held out.\n"
        f"Backend {selection.spec} ({selection.reason}), {problem.dtype},"
        f" seed {problem.seed}.\n"
        f"Every run: {problem.steps} steps on the same batches of {BATCH_SIZE}, from"
        f" the same parameters.\n"
        f"Training loss: over all training digits, every {EVALUATE_EVERY} steps, off"
        f" the clock; BLAS of NumPy and SciPy: one thread.\n"
        f"Held-out error: squared error of a reconstruction, summed over pixels.\n"
        f"Learning rates tried, each for a whole run; the least training loss wins:\n"
        f"{rates}\n"
        f"Fixed: Nesterov momentum 0.9 (SGD); decays 0.9, 0.999 (Adam); first damping"
        f" {kfac.INITIAL_DAMPING:g}, adapted every {kfac.ADAPT_EVERY} steps,\n"
        f"inverses every {kfac.REFRESH_EVERY} steps, averages with decay {kfac.DECAY:g}"
        f" (K-FAC)."
    )


def reconstruction_error(run: Run, held_out: np.ndarray[Any, Any], /) -> float:
    """Return the squared error of an image, summed over pixels, mean over images."""
    return float(np.mean(np.sum((run.reconstructions - held_out) ** 2, axis=1)))


def table(search: Search, problem: Problem, /) -> Any:
    """Make the table of the best run of each method.

    Parameters
    ----------
    search : Search
        Every run.
    problem : Problem
        What was trained on.

    Returns
    -------
    rich.table.Table
        One row a method.
    """
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD)
    made.add_column("method")
    for header in (
        "learning\nrate",
        "training\nloss",
        "held-out\nerror",
        "steps to\ntarget",
        "seconds to\ntarget",
        "seconds\nin all",
    ):
        made.add_column(header, justify="right", no_wrap=True)
    for method in METHODS:
        run = search.best(method)
        reached = run.reached(search.target)
        made.add_row(
            method,
            f"{run.learning_rate:g}",
            f"{run.losses[-1]:.3f}",
            f"{reconstruction_error(run, problem.digits.held_out):.3f}",
            "not reached" if reached is None else str(run.steps[reached]),
            "" if reached is None else f"{run.seconds[reached]:.2f}",
            f"{run.seconds[-1]:.2f}",
        )
    return made


def verdict(search: Search, problem: Problem, /) -> str:
    """Say how K-FAC compares with Adam, whatever the answer is.

    Parameters
    ----------
    search : Search
        Every run.
    problem : Problem
        What was trained on.

    Returns
    -------
    str
        A few sentences.
    """
    adam, own = search.best("Adam"), search.best("K-FAC")
    reached = own.reached(search.target)
    if reached is None:
        answer = (
            f"K-FAC did not reach it in {own.steps[-1]} steps: its best is"
            f" {own.losses[own.best]:.3f}."
        )
    else:
        seconds = own.seconds[reached] / max(adam.seconds[adam.best], 1e-9)
        answer = (
            f"K-FAC reached it at step {own.steps[reached]}: in"
            f" {steps_ratio(search):.2f} of Adam's steps and {seconds:.2f} of its"
            " seconds."
        )
    return (
        f"The target is Adam's best training loss of its whole run,"
        f" {search.target:.3f}, at step {adam.steps[adam.best]}.\n"
        f"No model of these gray pixels can be below"
        f" {pixel_entropy(problem.digits.train):.3f}, their entropy.\n{answer}"
    )


def steps_ratio(search: Search, /) -> float:
    """Return K-FAC's steps to Adam's best training loss, as a part of Adam's steps.

    Parameters
    ----------
    search : Search
        Every run.

    Returns
    -------
    float
        Infinity where K-FAC did not reach it.
    """
    adam, own = search.best("Adam"), search.best("K-FAC")
    reached = own.reached(search.target)
    if reached is None:
        return math.inf
    return own.steps[reached] / max(adam.steps[adam.best], 1)


def as_json(search: Search, problem: Problem, /) -> dict[str, Any]:
    """Gather every number of the demonstration, for a file in JSON.

    Parameters
    ----------
    search : Search
        Every run.
    problem : Problem
        What was trained on.

    Returns
    -------
    dict
        The settings, the target, and for each method its runs; a number that is not
        finite is None.
    """
    return {
        "seed": problem.seed,
        "steps": problem.steps,
        "dtype": problem.dtype,
        "backend": kc.selected_backend(problem.backend).spec,
        "widths": list(WIDTHS),
        "batch_size": BATCH_SIZE,
        "pixel_entropy": pixel_entropy(problem.digits.train),
        "target": search.target,
        "kfac_steps_over_adam_steps": _finite(steps_ratio(search)),
        "chosen": {m: search.best(m).learning_rate for m in METHODS},
        "runs": {
            method: [_run_as_json(run, problem.digits.held_out) for run in runs]
            for method, runs in search.runs.items()
        },
    }


def _run_as_json(run: Run, held_out: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {
        "learning_rate": run.learning_rate,
        "diverged": run.diverged,
        "held_out_squared_error": _finite(reconstruction_error(run, held_out)),
        "steps": run.steps,
        "seconds": run.seconds,
        "training_losses": [_finite(loss) for loss in run.losses],
        "batch_losses": [_finite(loss) for loss in run.batch_losses],
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
