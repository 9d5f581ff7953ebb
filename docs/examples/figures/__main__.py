"""``python docs/examples/figures``: draw the figures, and print the tables."""

import argparse
import os
import sys
from pathlib import Path

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
EXAMPLES = Path(__file__).resolve().parent.parent
# The planner's predictions lie in `benchmarks/`, beside `docs/`.
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES.parent.parent)]

from figures import network, pictures  # noqa: E402
from figures.drawing import draw_fidelity, draw_roundoff, draw_rules  # noqa: E402
from figures.fidelity import fidelities  # noqa: E402
from figures.plans import draw_plans  # noqa: E402
from figures.table import markdown  # noqa: E402


def main() -> int:
    """Draw into a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(), help="the folder")
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    layers = [network.dense(), network.convolution(), network.recurrent()]
    found = [(seen, fidelities(seen)) for seen in layers]
    for seen, rows in found:
        print(f"{markdown(seen, rows)}\n")
    draw_fidelity(found, folder / "approximations.png")
    draw_rules(layers[0], folder / "damping.png")
    draw_roundoff(folder / "precision.png")
    draw_plans(folder / "plan.png")
    pictures.draw_valley(folder / "valley.png")
    pictures.draw_factors(layers[0], folder / "factors.png")
    pictures.draw_blocks(layers[0], folder / "blocks.png")
    pictures.draw_damping(layers[0], folder / "share.png")
    pictures.draw_step(folder / "step.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
