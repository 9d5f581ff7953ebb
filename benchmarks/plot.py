"""Time against width, rows and layers, on logarithmic scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.stages import TITLES

# Okabe and Ito's colors, which people with any color vision can tell apart: one for each
# library, green for this one as in all figures, with a line for each of its backends.
STYLES = {
    "numpy": ("#009E73", "-"),
    "torch": ("#009E73", "--"),
    "jax": ("#009E73", "-."),
    "cupy": ("#009E73", ":"),
    "lapack": ("#000000", "-"),
    "torch-kernels": ("#000000", "--"),
    "curvlinops": ("#E69F00", "-"),
    "kfac-jax": ("#CC79A7", "-"),
    "kfac-jax-cholesky": ("#CC79A7", "--"),
}
AXES = {
    "width": "width of the layer",
    "rows": "rows of a batch",
    "layers": "layers of 128x128",
}
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
    columns = 1 if len(panels) <= 2 else 2
    rows = -(-len(panels) // columns)
    figure: Any = Figure(
        figsize=(4.8 * columns, 3.2 * rows + 0.6), layout="constrained"
    )
    FigureCanvasAgg(figure)
    grid = [*figure.subplots(rows, columns, squeeze=False).flat]
    for axes, (sweep, stage) in zip(grid, panels, strict=False):
        of_panel = [c for c in curves if (c["sweep"], c["stage"]) == (sweep, stage)]
        for curve in of_panel:
            color, line = STYLES[curve["library"]]
            axes.loglog(
                *zip(*curve["points"], strict=True),
                marker="o",
                markersize=3,
                color=color,
                linestyle=line,
                label=titles[curve["library"]],
            )
        _draw_slope(axes, of_panel, STEEPNESS.get((sweep, stage), 1))
        axes.set_title(TITLES[stage], fontsize=11)
        sizes = [size for size, _ in of_panel[0]["points"]]
        axes.set_xticks(sizes, [str(size) for size in sizes], fontsize=10)
        axes.set_xticks([], minor=True)
        axes.set_xlabel(AXES.get(sweep, sweep))
        axes.set_ylabel("seconds a call")
        axes.grid(True, which="major", color="0.9")
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    shown: dict[str, Any] = {}
    for axes in grid[: len(panels)]:
        handles, names = axes.get_legend_handles_labels()
        shown |= dict(zip(names, handles, strict=True))
    figure.legend(
        shown.values(),
        shown.keys(),
        loc="outside upper center",
        ncols=2,
        frameon=False,
        fontsize=10,
    )
    figure.savefig(path, dpi=150)


def _draw_slope(axes: Any, curves: list[dict[str, Any]], exponent: int) -> None:
    """Draw a line of the slope that theory gives, below all curves, and name the slope."""
    ends = [curves[0]["points"][0][0], curves[0]["points"][-1][0]]
    last = min(curve["points"][-1][1] for curve in curves) / 2.0
    heights = [last * (size / ends[1]) ** exponent for size in ends]
    axes.loglog(ends, heights, color="0.6", linestyle=":")
    axes.annotate(
        f"slope {exponent}",
        (ends[1], heights[1]),
        xytext=(0, -30),
        textcoords="offset points",
        fontsize=10,
        color="0.4",
        ha="right",
        va="top",
    )
