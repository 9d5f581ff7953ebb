"""Run the programs of the gallery, and write the pictures that its pages show.

python docs/draw_gallery.py [NAME ...]
"""

import runpy
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent


def main() -> int:
    """Run all programs, or those that are named, such as ``pinn``."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    for path in sorted((DOCS / "gallery").glob("plot_*.py")):
        name = path.stem.removeprefix("plot_")
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        print(f"{name}:", flush=True)
        plt.close("all")
        runpy.run_path(str(path), run_name="__main__")
        if plt.get_fignums():
            target = DOCS / "gallery_pictures" / f"{name}.png"
            # A page is 740 pixels wide, and a telephone about 370.
            plt.savefig(target, dpi=110, bbox_inches="tight")
    return 0


if __name__ == "__main__":
    sys.exit(main())
