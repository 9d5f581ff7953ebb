"""The command ``kfac-core demo``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import kfac_core as kc
from kfac_core.cli.demo import figure, report
from kfac_core.cli.demo.search import GRIDS, QUICK_GRIDS, Search, search
from kfac_core.cli.demo.training import METHODS, Problem
from kfac_core.cli.options import add_json, not_negative, positive
from kfac_core.cli.screen import Progress, complain, print_json

__all__ = ["EXAMPLES", "EXIT_CODES", "SUMMARY", "add_arguments", "run"]

SUMMARY = "train a deep autoencoder with K-FAC, SGD and Adam"
EXAMPLES = (
    "kfac-core demo --quick",
    "KFAC_CORE_BACKEND=torch kfac-core demo --json > demo.json",
)
EXIT_CODES = {
    0: "all methods were run",
    2: "a package is missing, or the backend cannot be used",
}

STEPS = 300
QUICK_STEPS = 60
# What is imported, and what it is called where it is installed from.
REQUIREMENTS = {"sklearn": "scikit-learn", "rich": "rich", "matplotlib": "matplotlib"}


def add_arguments(parser: argparse.ArgumentParser, /) -> None:
    """Add the options of the demonstration to a parser.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        The parser of the command.
    """
    parser.add_argument(
        "--steps",
        type=positive,
        help=f"steps of a run (default {STEPS}, or {QUICK_STEPS} with --quick)",
    )
    parser.add_argument(
        "--seed",
        type=not_negative,
        default=0,
        help="decides everything that is random (default 0)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("."),
        metavar="DIR",
        help="where the picture is written (default: here)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer steps, and three learning rates a method instead of five",
    )
    parser.add_argument(
        "--dtype",
        choices=("float64", "float32"),
        default="float64",
        help="the precision of all arithmetic (default float64)",
    )
    add_json(parser)


def run(args: argparse.Namespace, /) -> int:
    """Run the demonstration.

    Parameters
    ----------
    args : argparse.Namespace
        The options that `add_arguments` declares.

    Returns
    -------
    int
        The exit status: 0, or 2 where something must be installed first.
    """
    missing = [
        name for module, name in REQUIREMENTS.items() if not _is_installed(module)
    ]
    if missing:
        names = ", ".join(missing)
        return complain("demo", f"needs {names}: pip install 'kfac-core[demo]'")
    # Before minutes of work, and not after them.
    args.output.mkdir(parents=True, exist_ok=True)
    if args.dtype == "float64":
        kc.enable_float64()
    steps = args.steps or (QUICK_STEPS if args.quick else STEPS)
    problem = Problem(seed=args.seed, steps=steps, dtype=args.dtype)
    grids = QUICK_GRIDS if args.quick else GRIDS
    if not args.json:
        print(report.settings(problem, grids), flush=True)
    with _one_blas_thread():
        found = _search_with_progress(problem, grids)
    picture = args.output / "kfac_demo.png"
    figure.draw(found, problem, picture)
    if args.json:
        print_json({**report.as_json(found, problem), "picture": str(picture)})
    else:
        _show(found, problem)
        print(f"Picture: {picture}")
    return 0


def _search_with_progress(
    problem: Problem, grids: dict[str, tuple[float, ...]]
) -> Search:
    """Run everything under a progress bar, which only a terminal shows."""
    with Progress(problem.steps * sum(len(grids[m]) for m in METHODS)) as progress:
        return search(
            problem,
            grids=grids,
            begin=lambda method, rate: progress.begin(
                f"{method}, learning rate {rate:g}"
            ),
            advance=progress.advance,
        )


def _one_blas_thread() -> AbstractContextManager[Any]:
    """Keep BLAS to one thread: steadier seconds, and on few cores often fewer.

    NumPy and SciPy each bring a BLAS with threads of its own, which go on waiting in a
    busy loop after a product.  Where calls of the two alternate on two cores, they made
    the steps of K-FAC three times slower than one thread does.
    """
    # scikit-learn depends on threadpoolctl, so it is there.
    threadpoolctl = importlib.import_module("threadpoolctl")
    limits: AbstractContextManager[Any] = threadpoolctl.threadpool_limits(
        limits=1, user_api="blas"
    )
    return limits


def _show(found: Search, problem: Problem) -> None:
    from rich.console import Console

    # Asked of the stream, as rich takes a variable's word for what a terminal is.
    pretty = sys.stdout.isatty()
    console = Console() if pretty else Console(width=100, force_terminal=False)
    console.print(report.table(found, problem))
    print(report.verdict(found, problem))


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
