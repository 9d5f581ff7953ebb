"""What the demonstration shows: the record of a run, the table and the picture."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from kfac_core.cli.screen import print_table

__all__ = ["Images", "Run", "best", "draw", "pixel_entropy", "print_results"]

Images: TypeAlias = np.ndarray[Any, Any]

# Okabe and Ito's colors, which people with any color vision can tell apart.
COLORS = {"SGD": "#0072B2", "Adam": "#E69F00", "K-FAC": "#009E73"}
N_DIGITS = 14


@dataclass
class Run:
    """One run of one method.

    Attributes
    ----------
    steps, seconds, losses : list
        The loss over all training images, and when it was evaluated; the first is that
        of the initial parameters.
    test_error : float
        The squared error of a reconstruction of a test image, summed over pixels.
    reconstructions : numpy.ndarray
        Some of these reconstructions.
    """

    method: str
    learning_rate: float
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    test_error: float = math.nan
    reconstructions: Images = field(default_factory=lambda: np.empty(0), repr=False)

    @property
    def least(self) -> float:
        """The least loss."""
        return min((x for x in self.losses if math.isfinite(x)), default=math.inf)

    def reached(self, target: float, /) -> int | None:
        """Return the first place in `losses` at or below a target, or None."""
        return next((i for i, x in enumerate(self.losses) if x <= target), None)


def best(runs: list[Run], /) -> Run:
    """Return the run with the least training loss."""
    return min(runs, key=lambda run: run.least)


def pixel_entropy(images: Images, /) -> float:
    """Return the least loss that any model can have on some images.

    The likelihood of a gray pixel ``t`` is highest at ``p = t``, where its negative
    logarithm is the entropy of ``t``.
    """
    gray = images[(images > 0.0) & (images < 1.0)]
    entropies = -gray * np.log(gray) - (1.0 - gray) * np.log(1.0 - gray)
    return float(np.sum(entropies)) / len(images)


def print_results(runs: dict[str, list[Run]], /) -> None:
    """Print the best run of each method, and how soon it had Adam's least loss."""
    target = best(runs["Adam"]).least
    rows, steps_to_target = [], {}
    for method, tried in runs.items():
        run = best(tried)
        steps, seconds = "not reached", ""
        place = run.reached(target)
        if place is not None:
            steps_to_target[method] = run.steps[place]
            steps, seconds = str(run.steps[place]), f"{run.seconds[place]:.1f}"
        losses = f"{run.losses[-1]:.2f}", f"{run.test_error:.2f}"
        rows.append((method, f"{run.learning_rate:g}", *losses, steps, seconds))
    print_table(
        f"The best run of each method, and its way to Adam's least loss, {target:.2f}:",
        ("method", "learning rate", "training loss", "test error", "steps", "seconds"),
        rows,
    )
    if steps_to_target.get("K-FAC"):
        fewer = steps_to_target["Adam"] / steps_to_target["K-FAC"]
        print(f"K-FAC reaches Adam's least loss in {fewer:.1f} times fewer steps.")
    else:
        print("K-FAC does not reach Adam's least loss in this number of steps.")


def draw(
    runs: dict[str, list[Run]], path: Path, /, *, train: Images, test: Images
) -> None:
    """Draw the curves of all runs, and test images with their reconstructions."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(10.0, 7.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subfigures(2, 1, height_ratios=[1.35, 1.0])
    left, right = top.subplots(1, 2, sharey=True)
    _draw_curves(left, runs, against="steps", entropy=pixel_entropy(train))
    _draw_curves(right, runs, against="seconds", entropy=pixel_entropy(train))
    left.set_ylabel("training loss − pixel entropy (nats per digit)")
    right.legend(loc="upper right", frameon=False)
    top.suptitle(
        "Deep autoencoder on digits: the best learning rate of each method, and, thin,"
        " the others",
        fontsize=11,
    )
    rows = {"test digit": test}
    rows |= {method: best(tried).reconstructions for method, tried in runs.items()}
    all_axes = bottom.subplots(len(rows), 1)
    for axes, (label, images) in zip(all_axes, rows.items(), strict=True):
        # A column of white between one digit and the next.
        tiles = np.pad(images[:N_DIGITS].reshape(-1, 8, 8), ((0, 0), (0, 0), (0, 1)))
        axes.imshow(np.hstack(list(tiles)), cmap="gray_r", vmin=0.0, vmax=1.0)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        axes.set_ylabel(label, rotation=0, ha="right", va="center")
    figure.savefig(path)


def _draw_curves(
    axes: Any, runs: dict[str, list[Run]], *, against: str, entropy: float
) -> None:
    """Draw losses above their least possible value, on a logarithmic scale."""
    from matplotlib.ticker import LogFormatter

    target = best(runs["Adam"]).least
    for method, color in COLORS.items():
        for run in runs[method]:
            excess = np.asarray(run.losses) - entropy
            axes.semilogy(
                getattr(run, against), excess, color=color, lw=0.8, alpha=0.35
            )
        run = best(runs[method])
        x, y = getattr(run, against), np.asarray(run.losses) - entropy
        label = f"{method}, learning rate {run.learning_rate:g}"
        axes.semilogy(x, y, color=color, lw=2.2, zorder=3, label=label)
        place = run.reached(target)
        if place is not None:
            axes.plot(x[place], y[place], "o", color=color, zorder=4)
    axes.axhline(
        target - entropy, color="0.4", lw=0.9, ls="--", label="Adam's least loss"
    )
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.4)))
    axes.set_xlabel(against)
    axes.set_xlim(left=0)
    axes.grid(True, which="major", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
