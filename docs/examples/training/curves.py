"""What a run left: its curve, the table of several, and their picture."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

# Okabe and Ito's colors, which people with any color vision can tell apart.
COLORS = {"K-FAC": "#009E73", "Adam": "#E69F00", "SGD": "#0072B2", "EKFAC": "#56B4E9"}
OTHER_COLORS = ("#CC79A7", "#000000", "#D55E00", "#999999")


@dataclass
class Curve:
    """One run of one method with one seed.

    `losses` are of the same training examples each time, at `steps`, after `seconds` of
    training (measuring and compiling left out); `test` is the figure on test
    examples at the end.  Runs of one name are one method with several seeds.
    """

    name: str
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    test: float = math.nan

    def add(self, step: int, seconds: float, loss: float) -> None:
        """Append a point."""
        self.steps.append(step)
        self.seconds.append(seconds)
        self.losses.append(loss)

    def reached(self, target: float) -> tuple[float, float]:
        """Return the first step and second at which the loss is at most a target."""
        for step, second, loss in zip(
            self.steps, self.seconds, self.losses, strict=True
        ):
            if loss <= target:
                return step, second
        return math.inf, math.inf


def grouped(curves: list[Curve]) -> dict[str, list[Curve]]:
    """Return the runs of each name, in the order of their first."""
    groups: dict[str, list[Curve]] = {}
    for curve in curves:
        groups.setdefault(curve.name, []).append(curve)
    return groups


def best(runs: dict[float, list[Curve]]) -> float:
    """Return the learning rate with the least median of last training losses.

    The rule of every example here, the same for each method.  A loss that is not a
    number counts as infinite.
    """

    def score(rate: float) -> float:
        last = [run.losses[-1] for run in runs[rate]]
        return statistics.median(x if math.isfinite(x) else math.inf for x in last)

    return min(runs, key=score)


def table(
    curves: list[Curve],
    *,
    test: str = "test error",
    baseline: str = "Adam",
    loss: str = ".3g",
    error: str = ".4f",
) -> str:
    """Return a Markdown table: medians over seeds, one row a method.

    `loss` and `error` are the formats of losses and of test figures, with as many digits
    as hold.

    The last two columns say when a method reached the least loss that every run of
    `baseline`, the first method whose name begins so, came to.
    """
    groups = grouped(curves)
    runs = next(r for name, r in groups.items() if name.startswith(baseline))
    target = max(min(run.losses) for run in runs)
    heads = ["method", "training loss", test, "steps", "seconds"]
    heads += [f"steps to {target:{loss}}", f"seconds to {target:{loss}}"]
    lines = [heads, ["---"] * len(heads)]
    for name, runs in groups.items():
        reached = [run.reached(target) for run in runs]
        lines.append(
            [
                name,
                f"{statistics.median(run.losses[-1] for run in runs):{loss}}",
                f"{statistics.median(run.test for run in runs):{error}}",
                f"{statistics.median(run.steps[-1] for run in runs):g}",
                f"{statistics.median(run.seconds[-1] for run in runs):.1f}",
                number(statistics.median(steps for steps, _ in reached), "g"),
                number(statistics.median(seconds for _, seconds in reached), ".1f"),
            ]
        )
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def number(value: float, form: str) -> str:
    """Return a number, or words where there is none."""
    return format(value, form) if math.isfinite(value) else "not reached"


def colors_of(names: Iterable[str]) -> dict[str, str]:
    """Return a color for each name; a method has the same color in all figures."""
    others = iter(OTHER_COLORS)
    colors = {}
    for name in names:
        starts = [start for start in COLORS if name.startswith(start)]
        colors[name] = COLORS[starts[0]] if starts else next(others)
    return colors


def plot(
    curves: list[Curve], path: str | Path, *, title: str = "", steps: str = "steps"
) -> None:
    """Draw the training loss against steps and against seconds, a line a run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    colors = colors_of(grouped(curves))
    figure = Figure(figsize=(10.0, 4.0), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    by_steps, by_seconds = figure.subplots(1, 2, sharey=True)
    for axes, against in (by_steps, "steps"), (by_seconds, "seconds"):
        for name, runs in grouped(curves).items():
            for number_of_run, run in enumerate(runs):
                axes.semilogy(
                    getattr(run, against),
                    run.losses,
                    color=colors[name],
                    linewidth=1.6,
                    alpha=1.0 if number_of_run == 0 else 0.4,
                    label=name if number_of_run == 0 else None,
                )
        axes.set_xlabel(steps if against == "steps" else "seconds")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    by_steps.set_ylabel("training loss")
    by_seconds.legend(frameon=False)
    if title:
        figure.suptitle(title, fontsize=11)
    figure.savefig(path)
