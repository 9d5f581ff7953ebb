"""Write the tables of pages by the programs that compute them, or compare them.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``.

    python docs/tables.py --write [NAME ...]
    python docs/tables.py --check [NAME ...]

``--check`` recomputes every table and fails where a number differs by more than its last
digit.  Columns of seconds are not compared: they are another machine's.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS / "examples"), str(DOCS / "examples" / "training")]

NUMBER = re.compile(r"[-−]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def laplace_evidence() -> str:
    """Return the log-marginal likelihoods of the page on posteriors."""
    found, taus = _laplace()
    heads = [r"log-marginal likelihood at $\tau =$", *(f"{tau:g}" for tau in taus)]
    rows = []
    for kind, values in zip(_LAPLACE_KINDS, found[2].values(), strict=True):
        cells = [_minus(f"{value:.2f}") for value in values]
        best = values.index(max(values))
        cells[best] = f"**{cells[best]}**"
        rows.append([kind, *cells])
    return _markdown(heads, rows)


def laplace_deviations() -> str:
    """Return the standard deviations of the page on posteriors."""
    import numpy as np

    (_, grid, _, bands), _ = _laplace()
    places = {-4.0: "−4", -1.25: "−1.25", 0.0: "0 (the gap)", 1.25: "1.25", 4.0: "4"}
    heads = ["standard deviation of the prediction at $x =$", *places.values()]
    rows = [
        [kind, *(f"{float(np.interp(x, grid, deviation)):.3f}" for x in places)]
        for kind, (_, _, deviation) in zip(_LAPLACE_KINDS, bands.values(), strict=True)
    ]
    return _markdown(heads, rows)


_LAPLACE_KINDS = (
    "K-FAC",
    "EKFAC",
    "whole block of each layer",
    "whole network, dense",
)


def _laplace():
    taus = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
    example = importlib.import_module("laplace")
    return example.run(examples=60, hidden=16, taus=taus), taus


def numpy_digits() -> str:
    """Return the comparison of the NumPy quick start."""
    example = importlib.import_module("numpy_digits")
    return importlib.import_module("curves").table(example.runs(steps=300, seeds=3))


def tuning() -> str:
    """Return the losses of the page on tuning."""
    example = importlib.import_module("tuning")
    found = {
        problem.name: example.measured(problem, example.STEPS)
        for problem in example.problems()
    }
    return example.table(found)


# Each table's page and program.
TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "laplace evidence": ("posteriors", laplace_evidence),
    "laplace deviations": ("posteriors", laplace_deviations),
    "numpy_digits": ("quickstart_numpy", numpy_digits),
    "tuning": ("tuning", tuning),
}


def shown(name: str) -> str:
    """Return the table that a page shows."""
    return _parts(name)[1]


def write(name: str, table: str) -> None:
    """Put a table into its page."""
    before, _, after = _parts(name)
    _page(name).write_text(f"{before}{table}\n{after}", encoding="utf-8")


def differences(table: str, printed: str) -> list[str]:
    """Return the lines of a page in which a number is not the computed one."""
    computed, on_page = table.splitlines(), printed.splitlines()
    if len(computed) != len(on_page):
        return [f"{len(on_page)} lines, computed {len(computed)}"]
    heads = [cell.strip() for cell in on_page[0].split("|")]
    return [
        f"{mine} != {theirs}"
        for mine, theirs in zip(on_page, computed, strict=True)
        if not _agree(mine, theirs, heads)
    ]


def _agree(line: str, other: str, heads: list[str]) -> bool:
    pairs = zip(line.split("|"), other.split("|"), heads, strict=True)
    for mine, theirs, head in pairs:
        if "second" in head:
            continue
        if NUMBER.sub("", mine) != NUMBER.sub("", theirs):
            return False
        for a, b in zip(NUMBER.findall(mine), NUMBER.findall(theirs), strict=True):
            decimals = len(a.partition(".")[2])
            if abs(_value(a) - _value(b)) > 1.001 * 10.0**-decimals:
                return False
    return True


def _value(number: str) -> float:
    return float(number.replace("−", "-"))


def _minus(number: str) -> str:
    return number.replace("-", "−")


def _markdown(heads: list[str], rows: list[list[str]]) -> str:
    table = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def _page(name: str) -> Path:
    return DOCS / f"{TABLES[name][0]}.md"


def _parts(name: str) -> tuple[str, str, str]:
    """Return the text of a page before a table, the table, and the text after it."""
    text = _page(name).read_text(encoding="utf-8")
    start, end = f"<!-- table: {name} -->\n", "<!-- end -->"
    before, _, rest = text.partition(start)
    table, _, after = rest.partition(end)
    return before + start, table.rstrip("\n"), end + after


def main() -> int:
    """Write or compare the chosen tables; return how many differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true")
    mode.add_argument("--check", action="store_true")
    parser.add_argument("names", nargs="*", help="default: all")
    options = parser.parse_args()
    wrong = 0
    for name in options.names or TABLES:
        table = TABLES[name][1]()
        if options.write:
            write(name, table)
            continue
        found = differences(table, shown(name))
        wrong += bool(found)
        print("\n".join([f"{name}: {'differs' if found else 'agrees'}", *found]))
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(), 1))
