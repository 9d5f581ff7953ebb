"""Print the tables of measurements that are kept here, or keep those of a run.

``python -m benchmarks.pages`` prints all tables, and ``python -m benchmarks.pages NAME
FILE`` keeps the measurements of a run: ``FILE`` is its ``benchmarks.json``, and ``NAME``
one of `NAMES`; or what ``--output`` of `benchmarks.torch_training` or
`benchmarks.jax_training` wrote, and ``NAME`` one of `TRAINING`. They go to
``measured_here`` beside this file, rounded and without what no table shows. ``python
docs/tables.py --write`` then writes the tables of pages, and ``--check`` compares them. A
tilde marks disturbed samples. ``--picture docs/benchmarks_growth.png`` draws the page's
picture.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.limits import EXPONENTS
from benchmarks.measured import Run, with_unit
from benchmarks.result import Result
from benchmarks.stages import MEMORY_LIMITS, OPTIMIZER_STAGES, TITLES
from benchmarks.targets import results
from benchmarks.workloads import SWEEPS

FOLDER = Path(__file__).resolve().parent / "measured_here"

NAMES = ("autoencoder", "activations", "transformer", "small", "growth")
"""What can be kept: one file for each command of the page."""

TRAINING = ("torch_training", "jax_training")
"""The programs of whole training steps, of which all is kept."""

PLAIN = "lapack", "torch-kernels", "numpy", "torch", "curvlinops"
HEADS = {
    "lapack": "plain LAPACK",
    "torch-kernels": "plain PyTorch",
    "numpy": "numpy",
    "torch": "torch",
    "curvlinops": "curvlinops",
}
SHORT = {
    "statistics": "statistics",
    "refresh-driver": "the fastest driver alone",
    "precondition-eigen": "precondition, eigenbases",
    "cycle-triangular": "whole cycle, by triangular solves",
}
FIGURES = ("median", "rooflines", "noisy")
CALLS = {
    "statistics": "update",
    "refresh-inverse": "refresh",
    "precondition-inverse": "product",
}

TORCH_NETWORKS = {
    "mlp": "MLP 784-512-512-10, 128 rows",
    "convolutions": "three convolutions of 3x16x16, 64 images",
    "gpt": "GPT of width 64, two layers, 16x32",
}
TORCH_METHODS = {
    "sgd": "SGD alone",
    "kfac-pytorch, inverse": "kfac-pytorch, `inverse`",
    "kfac-core": '`KFAC(fisher="empirical")`',
    "kfac-core, all layers": "the same, embeddings and norms too",
    "kfac-core, gradients": "`KFAC()`: a second backward pass",
    "kfac-core, all, gradients": "the same, embeddings and norms too",
    "kfac-pytorch, eigen": "kfac-pytorch, `eigen`",
    "kfac-core, exact": '`fisher="empirical"`, exact',
    "kfac-core, exact, gradients": "`KFAC()`, exact",
}
JAX_NETWORKS = {
    "mlp": "784-256-256-256-256-10, batches of 256",
    "autoencoder": "autoencoder of kfac-jax's examples, 512",
    "conv": "convolutional classifier of kfac-jax's examples, 256",
}
JAX_FIGURES = {
    "first call, CPU s": "first call, CPU seconds",
    "first six calls, CPU s": "first six calls, CPU seconds",
    "step, CPU ms": "a step, CPU milliseconds",
    "peak memory, MiB": "peak memory, MiB",
}

Plain = dict[str, Any]


def keep(name: str, path: Path, /) -> Path:
    """Keep what the tables need of a run.

    Parameters
    ----------
    name : str
        One of `NAMES` or `TRAINING`.
    path : pathlib.Path
        A ``benchmarks.json``, or the output of a program of training steps.

    Returns
    -------
    pathlib.Path
        The file that was written.
    """
    everything = json.loads(path.read_text(encoding="utf-8"))
    if name in TRAINING:
        kept = _rounded(everything)
    else:
        kept = [_less(run) for run in everything["runs"]]
    FOLDER.mkdir(exist_ok=True)
    found = FOLDER / f"{name}.json"
    found.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return found


def table(name: str, /) -> str:
    """Return a table of the page.

    Parameters
    ----------
    name : str
        A key of `TABLES`.

    Returns
    -------
    str
        In Markdown.
    """
    return TABLES[name]()


def _less(run: Plain) -> Plain:
    """Return a run without what no table shows."""
    less = {key: run[key] for key in ("device", "threads", "clock", "gemm")}
    machine = ("processor", "processors", "system", "python", "load", "load after")
    less["machine"] = {key: run["machine"][key] for key in machine}
    less["libraries"] = {
        library: {
            key: said.get(key) for key in ("title", "core", "kernels", "versions")
        }
        for library, said in run["libraries"].items()
        if "error" not in said
    }
    less["workloads"] = [_less_workload(workload) for workload in run["workloads"]]
    keys = ("sweep", "stage", "library", "points", "exponent", "last")
    less["growth"] = [{key: curve[key] for key in keys} for curve in run["growth"]]
    return _rounded(less)


def _less_workload(workload: Plain) -> Plain:
    stages = {
        stage: {
            library: {key: figures[key] for key in FIGURES if key in figures}
            for library, figures in of_stage.items()
            if "median" in figures
        }
        for stage, of_stage in workload["stages"].items()
    }
    keys = ("name", "sweep", "size", "layers", "factor_bytes", "memory", "flops")
    return {key: workload[key] for key in keys} | {"stages": stages}


def _rounded(found: Any) -> Any:
    """Return the same structure with four digits of each number that is no integer."""
    if isinstance(found, dict):
        return {key: _rounded(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [_rounded(value) for value in found]
    return float(f"{found:.4g}") if isinstance(found, float) else found


def _kept(name: str) -> list[Plain]:
    path = FOLDER / f"{name}.json"
    found: list[Plain] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _first(name: str) -> Run:
    return Run(_kept(name)[0])


def _marked(text: str, noisy: bool) -> str:
    return f"~{text}" if noisy else text


def _rooflines(name: str, stages: Sequence[str], libraries: Sequence[str]) -> str:
    """Return multiples of the roofline: a row for each stage."""
    run = _first(name)
    rows = []
    for stage in stages:
        cells = [SHORT.get(stage, TITLES[stage])]
        for library in libraries:
            figure = run.figure(name, stage, library, "rooflines")
            shown = "" if figure is None else f"{figure:.2f}"
            cells.append(_marked(shown, run.noisy(name, stage, library)))
        if any(cells[1:]):
            rows.append(cells)
    return _markdown(["stage", *(HEADS[library] for library in libraries)], rows)


def _autoencoder(name: str) -> str:
    stages = (
        *("statistics", "refresh-inverse", "refresh-cholesky", "precondition-inverse"),
        *("precondition-solve", "cycle", "cycle-triangular", "refresh-eigen"),
        *("refresh-driver", "precondition-eigen", *OPTIMIZER_STAGES),
    )
    return _rooflines(name, stages, PLAIN)


def _transformer() -> str:
    stages = (
        *("statistics", "refresh-inverse", "refresh-cholesky", "precondition-inverse"),
        *("precondition-solve", "cycle", "cycle-triangular"),
    )
    return _rooflines("transformer", stages, PLAIN)


def _small() -> str:
    """Return milliseconds for 200 equal layers."""
    run = _first("small")
    rows = []
    for size in (1, 16, 64):
        workload = f"200 of {size}"
        for stage in CALLS:
            cells = [f"{size}x{size}", SHORT.get(stage, TITLES[stage])]
            for library in PLAIN:
                figure = run.figure(workload, stage, library)
                shown = "" if figure is None else f"{1e3 * figure:.1f}"
                cells.append(_marked(shown, run.noisy(workload, stage, library)))
            rows.append(cells)
    heads = [HEADS[library] for library in PLAIN]
    return _markdown(["200 layers of", "milliseconds of", *heads], rows)


def _looped() -> str:
    """Return how many times as fast one call for all layers is as one for each."""
    run = _first("small")
    rows = []
    for size in (16, 64):
        workload = f"200 of {size}"
        for stage in ("refresh", "precondition"):
            cells = [f"{size}x{size}", TITLES[f"{stage}-inverse"]]
            for library in ("numpy", "torch"):
                whole = run.figure(workload, f"{stage}-inverse", library)
                looped = run.figure(workload, f"{stage}-looped", library)
                shown = f"{looped / whole:.1f} times" if whole and looped else ""
                noisy = run.noisy(workload, f"{stage}-inverse", library)
                cells.append(_marked(shown, noisy))
            rows.append(cells)
    return _markdown(["200 layers of", "stage", "numpy", "torch"], rows)


def _calls() -> str:
    """Return microseconds a layer of 1x1, alone and among 200."""
    run = _first("small")
    libraries = "lapack", "numpy", "torch", "curvlinops"
    rows = []
    for stage, word in CALLS.items():
        for workload, layers, place in (
            ("one by one", 1, "alone"),
            ("200 of 1", 200, "among 200"),
        ):
            cells = [f"{word}, {place}"]
            for library in libraries:
                figure = run.figure(workload, stage, library)
                shown = "" if figure is None else f"{1e6 * figure / layers:.0f}"
                cells.append(_marked(shown, run.noisy(workload, stage, library)))
            rows.append(cells)
    heads = [HEADS[library] for library in libraries]
    return _markdown(["microseconds for a layer of 1x1", *heads], rows)


def _memory() -> str:
    """Return what a call adds to the memory held, over the factors' bytes."""
    run = _first("autoencoder")
    libraries = "lapack", "numpy", "torch", "curvlinops"
    rows = []
    for stage in MEMORY_LIMITS:
        cells = [SHORT.get(stage, TITLES[stage])]
        for library in libraries:
            added = run.memory("autoencoder", stage, library)
            cells.append("" if added is None else f"{added:.2f}")
        rows.append(cells)
    return _markdown(["stage", *(HEADS[library] for library in libraries)], rows)


def _growth() -> str:
    """Return the exponent of every sweep and stage."""
    run = _first("growth")
    libraries = "lapack", "numpy", "torch", "curvlinops"
    kinds = dict.fromkeys(
        (workload.sweep, stage) for workload in SWEEPS for stage in workload.stages
    )
    rows = []
    for sweep, stage in kinds:
        sizes = [workload.size for workload in SWEEPS if workload.sweep == sweep]
        found = [run.exponent(sweep, stage, library, sizes) for library in libraries]
        shown = ["" if slope is None else f"{slope:.2f}" for slope in found]
        expected = [power for *of, power in EXPONENTS if of == [stage, sweep]]
        target = f"{expected[0]} within 10%" if expected else ""
        rows.append([sweep, SHORT.get(stage, TITLES[stage]), *shown, target])
    heads = [HEADS[library] for library in libraries]
    return _markdown(["grows with", "stage", *heads, "target"], rows)


def _draw_growth(path: Path) -> None:
    """Draw the picture of the page: statistics and inverses against the width."""
    from benchmarks.plot import draw

    runs = json.loads((FOLDER / "growth.json").read_text(encoding="utf-8"))
    shown = [("width", "statistics"), ("width", "refresh-inverse")]
    curves = [c for c in runs[0]["growth"] if (c["sweep"], c["stage"]) in shown]
    draw(curves, HEADS, path)


def _training(name: str) -> Plain:
    path = FOLDER / f"{name}.json"
    found: Plain = json.loads(path.read_text(encoding="utf-8"))
    return found


def _torch_steps() -> str:
    """Return milliseconds of a step on PyTorch, and quotients to kfac-pytorch's."""
    found = _training("torch_training")
    rows = []
    for method, label in TORCH_METHODS.items():
        cells = [label]
        for of_network in found.values():
            seconds = of_network["seconds"]
            own, other = seconds.get(method), seconds[_peer_of(method)]
            shown = "" if own is None else f"{1e3 * own:.1f}"
            ours = own is not None and method.startswith("kfac-core")
            cells.append(f"{shown} ({own / other:.2f})" if ours else shown)
        rows.append(cells)
    return _markdown(["method", *(TORCH_NETWORKS[network] for network in found)], rows)


def _torch_memory() -> str:
    """Return the peak of a process of each method, above that of SGD alone."""
    held = _training("torch_training")["gpt"]["bytes"]
    rows = [
        [label, f"{(held[method] - held['sgd']) / 2**20:.1f}"]
        for method, label in TORCH_METHODS.items()
        if method != "sgd"
    ]
    return _markdown(["method", "MiB above SGD"], rows)


def _peer_of(method: str) -> str:
    eigen = "exact" in method or "eigen" in method
    return "kfac-pytorch, eigen" if eigen else "kfac-pytorch, inverse"


def _three_digits(figure: float) -> str:
    """Return a number with three digits, or with all before the point."""
    return f"{figure:.0f}" if figure >= 100 else f"{figure:#.3g}"


def _jax_steps() -> str:
    """Return ours, kfac-jax's and the quotient, of medians over processes."""
    found = _training("jax_training")
    rows = []
    for name, label in JAX_FIGURES.items():
        cells = [label]
        for runs in found.values():
            ours, theirs = (
                statistics.median(run[name] for run in runs[method])
                for method in ("kfac-core", "kfac-jax")
            )
            shown = _three_digits(ours), _three_digits(theirs), f"{ours / theirs:.2f}"
            cells.append(", ".join(shown))
        rows.append(cells)
    return _markdown(["", *(JAX_NETWORKS[network] for network in found)], rows)


def _judged() -> Iterable[Result]:
    """Yield the targets that were measured."""
    for name in NAMES:
        for result in results(_kept(name)):
            if result.figure is not None:
                yield result


def _not_met() -> str:
    """Return the targets that a run missed, with what bounds them."""
    rows = []
    for result in _judged():
        if result.met:
            continue
        assert result.figure is not None
        limit = result.greatest if result.least is None else result.least
        if result.least is not None and result.greatest is not None:
            nearest = (result.least, result.greatest)
            limit = min(nearest, key=lambda x: abs(x - (result.figure or 0.0)))
        assert limit is not None
        figure = with_unit(result.figure, result.unit)
        rows.append(
            [
                *(result.target, result.where, result.library),
                _marked(figure, result.noisy),
                *(with_unit(limit, result.unit), result.bound),
            ]
        )
    heads = ["target", "of", "library", "result", "should be", "what bounds it"]
    return _markdown(heads, rows)


def counted() -> str:
    """Return how many of the measured targets are met, in words."""
    found = list(_judged())
    return f"{sum(result.met for result in found)} of {len(found)}"


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


TABLES: dict[str, Callable[[], str]] = {
    "autoencoder": partial(_autoencoder, "autoencoder"),
    "activations": partial(_autoencoder, "activations"),
    "transformer": _transformer,
    "small layers": _small,
    "one call": _looped,
    "calls": _calls,
    "memory": _memory,
    "growth": _growth,
    "targets not met": _not_met,
    "training on PyTorch": _torch_steps,
    "memory of training on PyTorch": _torch_memory,
    "training on JAX": _jax_steps,
}
"""The tables of the page, by name."""


def main() -> None:
    """Print all tables, or keep one run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", choices=(*NAMES, *TRAINING))
    parser.add_argument("file", nargs="?", type=Path, help="a run's measurements")
    parser.add_argument("--picture", type=Path, help="draw growth with width into it")
    arguments = parser.parse_args()
    if arguments.picture:
        _draw_growth(arguments.picture)
        return
    if arguments.file is None:
        for name, program in TABLES.items():
            print(f"{name}\n\n{program()}\n")
        return
    print(keep(arguments.name, arguments.file))


if __name__ == "__main__":
    main()
