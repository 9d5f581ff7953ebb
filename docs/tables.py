"""Write the tables of pages by the programs that compute them, or compare them.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``, in a page of `docs`
or in the README.

    python docs/tables.py --write [NAME ...]
    python docs/tables.py --check [NAME ...]
    python docs/tables.py --check --quick

``--check`` recomputes every table and fails where a number differs by more than its last
digit.  Columns of seconds and milliseconds are not compared: they are another machine's.
A table whose libraries are not installed is left out, and named.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [
    *(str(DOCS / "examples"), str(DOCS / "examples" / "training"), str(ROOT)),
]

NUMBER = re.compile(r"[-−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
CLOCKS = ("second", "ms a step")  # heads of columns that are not compared


@dataclass(frozen=True)
class Table:
    """A table of a page.

    Parameters
    ----------
    page : str
        The page, from the top of the source tree.
    program : callable
        What computes it.
    seconds : int
        About how long that takes on one core; ``--quick`` leaves out what takes a minute.
    needs : tuple of str
        Modules that must be installed.
    """

    page: str
    program: Callable[[], str]
    seconds: int = 10
    needs: tuple[str, ...] = ()


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


def sklearn_digits() -> str:
    """Return the classifiers of the NumPy quick start."""
    return _sklearn("digits")


def sklearn_regression() -> str:
    """Return the regressions of the NumPy quick start."""
    return _sklearn("regression")


def _sklearn(name: str) -> str:
    import warnings

    example = importlib.import_module("sklearn_pair")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return example.markdown(name, example.runs(name))


def jax_digits() -> str:
    """Return the classifier of the JAX quick start."""
    example = importlib.import_module("jax_digits")
    curves = example.runs(steps=120, seeds=2)
    return importlib.import_module("curves").table(curves, loss=".1g", error=".2f")


def keras_digits() -> str:
    """Return the classifier of the Keras quick start."""
    example = importlib.import_module("keras_digits")
    curves = example.runs(steps=150, seeds=3)
    return importlib.import_module("curves").table(curves, loss=".2g")


def fidelity_of(layer: str) -> str:
    """Return the measures of every approximation for a layer."""
    network = importlib.import_module("figures.network")
    fidelity = importlib.import_module("figures.fidelity")
    seen = getattr(network, layer)()
    rows = fidelity.fidelities(seen)
    return str(importlib.import_module("figures.table").markdown(seen, rows))


def drift() -> str:
    """Return the ratios and errors of a basis that follows a matrix."""
    heads = [
        "spectrum, share",
        "$r$ before",
        "$r$ after",
        r"error, $\lambda = 0.1 w_1$",
    ]
    heads += ["$0.01 w_1$", "$0.001 w_1$", "$r$, ascending"]
    heads += ["error, ascending, $0.01 w_1$"]
    return _markdown(heads, importlib.import_module("drift").rows())


def influence() -> str:
    """Return the rank correlations with retraining: means over five seeds."""
    import numpy as np

    example = importlib.import_module("influence")
    runs = [example.correlations(examples=60, queries=40, seed=s) for s in range(5)]
    decay, mean = "the weight decay", "0.1 of the mean eigenvalue"
    names = {
        "Gauss-Newton, whole network": ("Gauss-Newton, whole network, dense", decay),
        "Gauss-Newton, layer by layer": ("Gauss-Newton, layer by layer, dense", decay),
        "EKFAC": ("EKFAC", decay),
        "K-FAC": ("K-FAC", decay),
        "EKFAC, 0.1 of the mean": ("EKFAC", mean),
        "K-FAC, 0.1 of the mean": ("K-FAC", mean),
        "gradients alone": ("none, gradients alone", ""),
    }
    rows = []
    for key, cells in names.items():
        rho, slope = np.mean([run[key] for run in runs], axis=0)
        rows.append([*cells, f"{rho:.3f}", f"{slope:.2f}"])
    heads = ["curvature", "damping", "rank correlation", "actual / predicted"]
    return _markdown(heads, rows)


def methods_on(problem: str) -> str:
    """Return the comparison of all methods on a problem; ``METHODS_JSON`` is read."""
    command = importlib.import_module("methods.command")
    if recorded := os.environ.get("METHODS_JSON"):
        result = json.loads(Path(recorded).read_text(encoding="utf-8"))
    else:
        result = command.compared(command.parser().parse_args(["--problem", problem]))
    part = result["problems"][problem]
    return str(importlib.import_module("methods.table").table(part))


def conformance() -> str:
    """Return the results of the adapters; a peer that is not installed keeps its row."""
    kit = importlib.import_module("kfac_core_conformance")
    records = sorted((ROOT / "conformance_tests" / "records").glob("*.safetensors"))
    checks = [
        *kit.identity_checks(),
        *(c for path in records for c in kit.record_checks(path)),
    ]
    lines = _parts("conformance")[1].splitlines()
    for place, (adapter, module) in enumerate(_ADAPTERS, start=2):
        if importlib.util.find_spec(module) is None:
            continue
        library = kit.load_adapter(adapter)
        statuses = [kit.run_check(library, check).status for check in checks]
        counts = [
            f"{statuses.count(s):,}"
            for s in ("holds", "differs", "raised", "not offered")
        ]
        name = lines[place].split("|")[1].strip()
        lines[place] = f"| {' | '.join([name, *counts])} |"
    return "\n".join(lines)


def of_benchmark(name: str) -> str:
    """Return the table of a program of `benchmarks`."""
    return str(importlib.import_module(f"benchmarks.{name}").table())


def benchmark(name: str) -> str:
    """Return a table of the benchmark page, from the measurements that are kept."""
    return str(importlib.import_module("benchmarks.pages").table(name))


def tasks(name: str) -> str:
    """Return a table of the suite of tasks, from the runs that are kept."""
    module = importlib.import_module("benchmarks.tasks.tables")
    file = "tasks_long.jsonl" if name == "tasks long" else "tasks.jsonl"
    path = ROOT / "benchmarks" / "measured_here" / file
    return str(module.tables(module.read_runs(path))[name])


def least_squares(problem: str) -> str:
    """Return a table of the least-squares benchmark, from the runs that are kept."""
    module = importlib.import_module("benchmarks.least_squares")
    path = ROOT / "benchmarks" / "measured_here" / "least_squares.jsonl"
    return str(module.table(module.read(path), problem))


_EXAMPLES = "docs/examples/adapters/"
_ADAPTERS = (
    ("kfac_core_conformance.own:Own", "kfac_core"),
    (f"{_EXAMPLES}curvlinops_adapter.py:Curvlinops", "curvlinops"),
    (f"{_EXAMPLES}kfac_jax_adapter.py:KfacJax", "kfac_jax"),
    (f"{_EXAMPLES}kfac_jax_adapter.py:Unmasked", "kfac_jax"),
)

_BENCHMARKS = ("autoencoder", "calls", "training on PyTorch")

TABLES = {
    "laplace evidence": Table("docs/posteriors.md", laplace_evidence),
    "laplace deviations": Table("docs/posteriors.md", laplace_deviations),
    "numpy_digits": Table("docs/quickstart_numpy.md", numpy_digits, 60),
    "sklearn digits": Table("docs/quickstart_numpy.md", sklearn_digits, 60),
    "sklearn regression": Table("docs/quickstart_numpy.md", sklearn_regression, 60),
    "jax_digits": Table("docs/guide_jax.md", jax_digits, 60, ("jax", "flax", "optax")),
    "keras_digits": Table(
        "docs/quickstart_keras.md", keras_digits, 60, ("keras", "torch")
    ),
    "tuning": Table("docs/tuning.md", tuning, 100),
    "dense layer": Table("docs/choosing.md", partial(fidelity_of, "dense")),
    "convolution": Table("docs/choosing.md", partial(fidelity_of, "convolution")),
    "recurrent layer": Table("docs/choosing.md", partial(fidelity_of, "recurrent")),
    "drift": Table("docs/roots.md", drift),
    "influence": Table("docs/influence.md", influence, 60),
    "autoencoder": Table("docs/methods.md", partial(methods_on, "autoencoder"), 300),
    "classifier": Table("docs/methods.md", partial(methods_on, "classifier"), 300),
    **{
        f"least squares {name}": Table(
            "docs/samples.md", partial(least_squares, name), 1, ("torch",)
        )
        for name in ("poisson", "burgers", "heat", "inverse", "products")
    },
    **{
        f"tasks {name}": Table(
            "docs/tasks.md", partial(tasks, f"tasks {name}"), 1, ("torch",)
        )
        for name in ("losses", "losses aside", "verdict", "tests", "seconds", "long")
    },
    "tasks named": Table(
        "docs/recipes.md", partial(tasks, "tasks named"), 1, ("torch",)
    ),
    "conformance": Table("docs/conformance.md", conformance, 20),
    **{
        f"benchmark {name}": Table("docs/benchmarks.md", partial(benchmark, name), 1)
        for name in _BENCHMARKS
    },
    "benchmark training on JAX": Table(
        "docs/guide_jax.md", partial(benchmark, "training on JAX"), 1
    ),
    "traffic": Table(
        "docs/distributed.md", partial(of_benchmark, "traffic"), needs=("torch",)
    ),
    "overlap": Table(
        "docs/distributed.md", partial(of_benchmark, "overlap"), 20, ("torch",)
    ),
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
        if any(clock in head for clock in CLOCKS):
            continue
        if NUMBER.sub("", mine) != NUMBER.sub("", theirs):
            return False
        for a, b in zip(NUMBER.findall(mine), NUMBER.findall(theirs), strict=True):
            if abs(_value(a) - _value(b)) > 1.001 * _last_digit(a):
                return False
    return True


def _last_digit(number: str) -> float:
    """Return what one more in the last digit of a number adds."""
    mantissa, _, exponent = number.partition("e")
    return 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


def _value(number: str) -> float:
    return float(number.replace("−", "-").replace(",", ""))


def _minus(number: str) -> str:
    return number.replace("-", "−")


def _markdown(heads: list[str], rows: list[list[str]]) -> str:
    table = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def _page(name: str) -> Path:
    return ROOT / TABLES[name].page


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
    parser.add_argument("--quick", action="store_true", help="those of a few seconds")
    parser.add_argument("names", nargs="*", help="default: all")
    options = parser.parse_args()
    wrong = 0
    for name in options.names or TABLES:
        entry = TABLES[name]
        if options.quick and entry.seconds >= 60:
            continue
        missing = [m for m in entry.needs if importlib.util.find_spec(m) is None]
        if missing:
            print(f"{name}: left out, needs {', '.join(missing)}")
            continue
        table = entry.program()
        if options.write:
            write(name, table)
            continue
        found = differences(table, shown(name))
        wrong += bool(found)
        print(
            "\n".join([f"{name}: {'differs' if found else 'agrees'}", *found]),
            flush=True,
        )
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(), 1))
