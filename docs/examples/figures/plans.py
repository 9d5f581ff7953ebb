"""The times that the planner predicts, from one process to 1,024."""

from pathlib import Path

from benchmarks.plan.model import (
    MACHINES,
    chosen_step,
    known_networks,
    predicted_steps,
    read_shapes,
)

from .drawing import BLUE, ORANGE, RED, figure, save

RANKS = [2**k for k in range(11)]
INTERVAL, EXAMPLES = 20, 8


def plans(name: str) -> dict[str, list[float]]:
    """Return milliseconds a step without those of the statistics, for each strategy.

    Statistics of a process's own rows take as long on any number of processes.
    """
    shapes = read_shapes(name)
    network = shapes.network()
    found: dict[str, list[float]] = {}
    for ranks in RANKS:
        steps = predicted_steps(
            network,
            ranks,
            machine=MACHINES["h100"],
            examples=EXAMPLES,
            rows=shapes.rows,
            interval=INTERVAL,
        )
        chosen = {
            "owners send directions": steps[0],
            "everybody has operators": steps[-1],
            "holders='auto'": chosen_step(steps),
        }
        for label, step in chosen.items():
            milliseconds = 1e3 * (step.total - step.seconds["statistics"])
            found.setdefault(label, []).append(milliseconds)
    return found


def draw_plans(path: Path) -> None:
    """Draw the predicted times of the networks that come with the library."""
    made, axes = figure(len(known_networks()))
    for one, name in zip(axes, known_networks(), strict=True):
        colors = (BLUE, ORANGE, RED)
        for color, (label, times) in zip(colors, plans(name).items(), strict=True):
            style = "--" if color == RED else "-"
            one.plot(RANKS, times, style, marker="o", ms=4, color=color, label=label)
        one.set(xscale="log", yscale="log")
        low, high = one.get_ylim()
        times = [n * 10**k for k in range(5) for n in (1, 2, 5)]
        times = [time for time in times if low <= time <= high]
        one.set_yticks(times, [f"{time:,}" for time in times], fontsize=9)
        one.set_xticks(RANKS, [f"{ranks:,}" for ranks in RANKS], fontsize=9)
        one.minorticks_off()
        one.set_title(f"{read_shapes(name).name}: predicted", fontsize=10)
        one.set_xlabel("processes", fontsize=9)
        one.set_ylabel("milliseconds a step, without statistics", fontsize=9)
    made.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=9,
    )
    save(made, path)
