"""Time against width, rows and layers, on logarithmic scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.stages import TITLES

__all__ = ["draw"]

# Okabe and Ito's colors, which people with any color vision can tell apart.
COLORS = ("#009E73", "#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#CC79A7", "#000000")
STEEPNESS = {
    ("width", "statistics"): 2,
    ("width", "refresh-inverse"): 3,
    ("width", "precondition-inverse"): 3,
}


def draw(curves: list[dict[str, Any]], titles: dict[str, str], path: Path, /) -> None:
    """Draw a panel for each sweep and stage, and write them to a file.

    Parameters
    ----------
    curves : list of dict
        As `benchmarks.growth.growth` gives them; at least one.
    titles : dict of str to str
        What to call the libraries.
    path : pathlib.Path
        The file; its suffix decides the format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((curve["sweep"], curve["stage"]) for curve in curves))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure: Any = Figure(figsize=(4.2 * columns, 3.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = [*figure.subplots(rows, columns, squeeze=False).flat]
    libraries = list(titles)
    for axes, (sweep, stage) in zip(grid, panels, strict=False):
        of_panel = [c for c in curves if (c["sweep"], c["stage"]) == (sweep, stage)]
        for curve in of_panel:
            number = libraries.index(curve["library"])
            axes.loglog(
                *zip(*curve["points"], strict=True),
                marker="o",
                markersize=3,
                color=COLORS[number % len(COLORS)],
                linestyle="-" if number < len(COLORS) else "--",
                label=f"{titles[curve['library']]} ({curve['exponent']:.2f})",
            )
        _draw_slope(axes, of_panel, STEEPNESS.get((sweep, stage), 1))
        axes.set_title(TITLES[stage], fontsize=9)
        sizes = [size for size, _ in of_panel[0]["points"]]
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_xticks([], minor=True)
        axes.set_xlabel(sweep)
        axes.set_ylabel("seconds a call")
        axes.legend(fontsize=6, frameon=False)
        axes.grid(True, which="major", color="0.9")
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    figure.savefig(path, dpi=150)


def _draw_slope(axes: Any, curves: list[dict[str, Any]], exponent: int) -> None:
    """Draw a line of the slope that theory gives, below all curves."""
    ends = [curves[0]["points"][0][0], curves[0]["points"][-1][0]]
    last = min(curve["points"][-1][1] for curve in curves) / 2.0
    heights = [last * (size / ends[1]) ** exponent for size in ends]
    axes.loglog(ends, heights, color="0.6", linestyle=":", label=f"slope {exponent}")
