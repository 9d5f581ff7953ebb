"""The picture: the curves of every run, and held-out digits beside reconstructions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kfac_core.cli.demo.data import pixel_entropy
from kfac_core.cli.demo.search import Search
from kfac_core.cli.demo.training import BATCH_SIZE, METHODS, Problem

__all__ = ["draw"]

# Okabe and Ito's colors, which people with any color vision can tell apart.
COLORS = {"SGD": "#0072B2", "Adam": "#E69F00", "K-FAC": "#009E73"}
N_DIGITS = 14


def draw(search: Search, problem: Problem, path: Path, /) -> None:
    """Draw the curves and the reconstructions, and write them to a file.

    Parameters
    ----------
    search : Search
        Every run.
    problem : Problem
        What was trained on.
    path : pathlib.Path
        The file; its suffix decides the format.

    Raises
    ------
    ImportError
        Where matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(10.0, 7.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    curves, digits = figure.subfigures(2, 1, height_ratios=[1.35, 1.0])
    by_steps, by_seconds = curves.subplots(1, 2, sharey=True)
    _draw_curves(by_steps, search, problem, against="steps")
    _draw_curves(by_seconds, search, problem, against="seconds")
    by_steps.set_ylabel("training loss − pixel entropy  (nats per digit)")
    by_seconds.legend(loc="upper right", frameon=False)
    curves.suptitle(
        f"Deep autoencoder on digits: {problem.steps} steps on batches of {BATCH_SIZE};"
        " thin lines are the other learning rates of each grid",
        fontsize=11,
    )
    _draw_digits(digits, search, problem)
    figure.savefig(path)


def _draw_curves(axes: Any, search: Search, problem: Problem, *, against: str) -> None:
    """Draw the loss above its least possible value, on a logarithmic scale."""
    from matplotlib.ticker import LogFormatter

    floor = pixel_entropy(problem.digits.train)
    for method in METHODS:
        best = search.best(method)
        for run in search.runs[method]:
            chosen = run is best
            axes.semilogy(
                getattr(run, against),
                np.asarray(run.losses) - floor,
                color=COLORS[method],
                linewidth=2.2 if chosen else 0.8,
                alpha=1.0 if chosen else 0.35,
                zorder=3 if chosen else 2,
                label=f"{method}, learning rate {run.learning_rate:g}"
                if chosen
                else None,
            )
        reached = best.reached(search.target)
        if reached is not None:
            place = getattr(best, against)[reached]
            axes.plot(
                place, best.losses[reached] - floor, "o", color=COLORS[method], zorder=4
            )
    axes.axhline(
        search.target - floor,
        color="0.4",
        linewidth=0.9,
        linestyle="--",
        label="Adam's best, the target",
    )
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.4)))
    axes.set_xlabel(against)
    axes.set_xlim(left=0)
    axes.grid(True, which="major", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_digits(figure: Any, search: Search, problem: Problem) -> None:
    """Draw held-out digits in a row, and under it a row of each method's images."""
    held_out = problem.digits.held_out
    rows = {"held-out digit": held_out}
    for method in METHODS:
        rows[method] = search.best(method).reconstructions
    grid = figure.subplots(len(rows), 1)
    for axes, (label, images) in zip(grid, rows.items(), strict=True):
        tiles = images[:N_DIGITS].reshape(N_DIGITS, 8, 8)
        # A column of white between one digit and the next.
        strip = np.concatenate(
            [np.pad(tile, ((0, 0), (0, 1))) for tile in tiles], axis=1
        )
        axes.imshow(strip[:, :-1], cmap="gray_r", vmin=0.0, vmax=1.0)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
        axes.set_ylabel(label, rotation=0, ha="right", va="center")
