"""The pictures, one function each."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import roundoff, rules
from .fidelity import Fidelity
from .network import Seen

# Okabe and Ito's; green is this library, as in all figures that compare.
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"


def figure(panels: int) -> Any:
    """Return an empty figure and its axes, drawn without a display.

    A page is 740 pixels wide, and 370 on a telephone: two panels go beside each other,
    more below each other, narrow enough that their letters stay readable there.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if panels <= 2:
        size, grid = (4.6 * panels, 4.2), (1, panels)
    else:
        size, grid = (5.2, 3.3 * panels), (panels, 1)
    made = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(made)
    axes = list(made.subplots(*grid, squeeze=False).flat)
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(color="#e4e4e4", linewidth=0.6)
        one.set_axisbelow(True)
        one.tick_params(labelsize=9)
    return made, axes


def save(made: Any, path: Path) -> None:
    """Write a picture; without a date, so that equal pictures are equal files."""
    made.savefig(path, dpi=130, metadata={"Software": None})


def draw_fidelity(found: Sequence[tuple[Seen, Sequence[Fidelity]]], path: Path) -> None:
    """Draw both measures of each approximation, cheapest above; a panel a layer."""
    made, axes = figure(len(found))
    for one, (seen, rows) in zip(axes, found, strict=True):
        heights = range(len(rows))
        decreases = [row.decrease for row in rows]
        for height, row in zip(heights, rows, strict=True):
            ends = [row.decrease, row.block]
            if row.kept:
                one.plot(ends, [height] * 2, color="#cccccc", linewidth=0.8, zorder=1)
        blocks = [row.block if row.kept else np.nan for row in rows]
        one.scatter(decreases, heights, color=BLUE, s=26, label="decrease (1 is best)")
        one.scatter(
            blocks,
            heights,
            facecolor="white",
            edgecolor=RED,
            s=26,
            label="error of the block (0 is best)",
        )
        names = [f"{short(row.name)}   {row.kept:,}" for row in rows]
        one.set_yticks(list(heights), names, fontsize=9)
        one.invert_yaxis()
        one.set_xlim(-0.04, 1.04)
        one.set_title(f"{seen.title}, with the floats kept", fontsize=10)
        one.set_xlabel("share of the exact decrease; relative error", fontsize=9)
    made.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=9,
    )
    save(made, path)


def short(name: str) -> str:
    """Return a name for the picture."""
    plain = name.replace("Kronecker(", "Kronecker ").replace("(", " ").replace(")", "")
    for word in ("input=", "sharing=", "variant=", '"'):
        plain = plain.replace(word, "")
    return plain.strip()


def draw_rules(seen: Seen, path: Path) -> None:
    """Draw the rules of damping: error, length, and what is added."""
    dampings = np.logspace(-4, 2, 25)
    found = rules.compared(seen, dampings=dampings)
    made, axes = figure(3)
    colors = dict(zip(rules.RULES, (BLUE, ORANGE, "black"), strict=True))
    for rule in rules.RULES[:2]:
        chosen = [row for row in found if row.rule == rule]
        lengths = [row.length for row in chosen]
        axes[0].plot(dampings, [row.error for row in chosen], color=colors[rule])
        axes[1].plot(dampings, lengths, color=colors[rule], label=rule)
    axes[1].axhline(1.0, color=colors["exact"], label="exact")
    axes[0].set_ylim(0, 1.05)
    axes[1].set_yscale("log")
    for one in axes[:2]:
        one.set_xscale("log")
        one.set_xlabel("damping / mean eigenvalue", fontsize=9)
    axes[0].set_ylabel("relative error of the product", fontsize=9)
    axes[0].set_title(
        "error of the preconditioned gradient (exact: 1e-13)", fontsize=10
    )
    axes[1].set_ylabel("length / length by the exact rule", fontsize=9)
    axes[1].set_title("length of the preconditioned gradient", fontsize=10)
    axes[1].legend(frameon=False, fontsize=9)
    for rule, (eigenvalues, extra) in rules.added(seen, damping=0.1).items():
        axes[2].plot(eigenvalues, extra, ".", color=colors[rule], markersize=3)
    axes[2].set_xscale("log")
    axes[2].set_yscale("log")
    axes[2].set_xlim(3e-5, 1e2)
    axes[2].set_xlabel("eigenvalue of the block / mean eigenvalue", fontsize=9)
    axes[2].set_ylabel("added to it / damping", fontsize=9)
    axes[2].set_title("what is added to each eigenvalue (damping 0.1)", fontsize=10)
    save(made, path)


def draw_roundoff(path: Path) -> None:
    """Draw errors of inverses against the condition number."""
    conditions = np.logspace(1, 7.5, 27)
    found = [roundoff.inverted(float(c)) for c in conditions]
    made, axes = figure(2)
    styles = dict(zip(roundoff.WAYS, (BLUE, RED, BLUE, RED, GREEN), strict=True))
    for place, way in enumerate(roundoff.WAYS):
        rows = [made_at[place] for made_at in found]
        drawn = [(r.condition, r.error) for r in rows if r.error is not None]
        axes[0].plot(
            *zip(*drawn, strict=True),
            color=styles[way],
            linestyle="--" if "float64" in way else "-",
            linewidth=0.9 if "kfac" in way else 1.6,
            marker="." if "kfac" in way else None,
            markersize=4,
            label=way,
        )
    axes[0].set_title("against the inverse of the stored numbers", fontsize=9)
    wide = np.logspace(1, 12, 23)
    errors = [roundoff.stored(float(c)) for c in wide]
    for name, style in (("float32", "-"), ("float64", "--")):
        axes[1].plot(
            wide,
            [error[name] for error in errors],
            color=GREEN,
            linestyle=style,
            label=f"kept in {name}, inverted by the fallback chain",
        )
    axes[1].set_title("against the inverse before it was rounded", fontsize=9)
    for one in axes:
        one.set_xscale("log")
        one.set_yscale("log")
        one.set_ylim(1e-17, 3.0)
        one.set_xlabel("1 / damping, about the condition number", fontsize=9)
        one.legend(frameon=False, fontsize=8.5, loc="upper left")
    axes[0].set_ylim(1e-17, 1e3)
    axes[1].set_ylim(1e-17, 1e3)
    axes[0].set_ylabel("relative error of the inverse", fontsize=9)
    save(made, path)
