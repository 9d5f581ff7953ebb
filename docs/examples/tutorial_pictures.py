"""Run the tutorial's page, and draw its pictures from what it computed.

python docs/examples/tutorial_pictures.py --output docs
"""

import argparse
import os
import re
import tempfile
from pathlib import Path

PAGE = Path(__file__).parents[1] / "tutorial.md"
# The color of a method is the same in all figures.
KFAC, PLAIN = "#009E73", "#0072B2"


def computed():
    """Return the names of the page's program after its last line."""
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names = {}
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            exec("\n".join(blocks), names)
        finally:
            os.chdir(before)
    return names


def draw(names, folder):
    """Draw the three pictures."""
    axes, save = _figure()
    values = names["values"][::-1]
    nonzero = values > 1e-9 * values[0]
    axes.semilogy(range(1, nonzero.sum() + 1), values[nonzero], ".", color=KFAC)
    axes.set_xlabel("number of the eigenvalue")
    axes.set_ylabel("eigenvalue of the block")
    save(folder / "tutorial_eigenvalues.png")

    axes, save = _figure()
    axes.semilogy(names["plain_losses"], color=PLAIN, label="gradient descent")
    axes.semilogy(names["kfac_losses"], color=KFAC, label="K-FAC")
    axes.set_xlabel("steps")
    axes.set_ylabel("training loss")
    axes.legend(frameon=False)
    save(folder / "tutorial_training.png")

    axes, save = _figure()
    grid, mean = names["grid"][:, 0], names["mean"][:, 0]
    deviation = names["deviation"]
    axes.fill_between(
        grid,
        mean - 2 * deviation,
        mean + 2 * deviation,
        color=KFAC,
        alpha=0.25,
        label="two standard deviations",
    )
    axes.plot(grid, mean, color=KFAC, label="network")
    axes.plot(names["x"][:, 0], names["y"][:, 0], ".", color="black", label="data")
    axes.set_xlabel("x")
    axes.set_ylabel("y")
    axes.legend(frameon=False)
    save(folder / "tutorial_posterior.png")


def _figure():
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 3.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return axes, figure.savefig


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("."))
    draw(computed(), parser.parse_args().output)


if __name__ == "__main__":
    main()
