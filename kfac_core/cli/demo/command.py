"""The command ``kfac-core demo``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import kfac_core as kc
from kfac_core.cli.demo import figure, report
from kfac_core.cli.demo.search import GRIDS, QUICK_GRIDS, Search, search
from kfac_core.cli.demo.training import METHODS, Problem

__all__ = ["add_arguments", "run"]

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
        type=_positive,
        help=f"steps of a run (default {STEPS}, or {QUICK_STEPS} with --quick)",
    )
    parser.add_argument(
        "--seed",
        type=_not_negative,
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
        "--json", type=Path, metavar="FILE", help="write every number to a file, too"
    )
    parser.add_argument(
        "--dtype",
        choices=("float64", "float32"),
        default="float64",
        help="the precision of all arithmetic (default float64)",
    )


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
        print(
            f"The demonstration needs {', '.join(missing)}:"
            " pip install 'kfac-core[demo]'",
            file=sys.stderr,
        )
        return 2
    if args.dtype == "float64":
        kc.enable_float64()
    steps = args.steps or (QUICK_STEPS if args.quick else STEPS)
    problem = Problem(seed=args.seed, steps=steps, dtype=args.dtype)
    grids = QUICK_GRIDS if args.quick else GRIDS
    print(report.settings(problem, grids), flush=True)
    with _one_blas_thread():
        found = _search_with_progress(problem, grids)
    _show(found, problem)
    _write(found, problem, output=args.output, json_path=args.json)
    return 0


def _search_with_progress(
    problem: Problem, grids: dict[str, tuple[float, ...]]
) -> Search:
    """Run everything under a progress bar, which only a terminal shows."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:32}"),
        BarColumn(),
        MofNCompleteColumn(),
        Elapsed(),
    )
    total = problem.steps * sum(len(grids[method]) for method in METHODS)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=total)
        return search(
            problem,
            grids=grids,
            begin=lambda method, rate: progress.update(
                task, description=f"{method}, learning rate {rate:g}"
            ),
            advance=lambda made: progress.advance(task, made),
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

    console = Console()
    if not console.is_terminal:
        console = Console(width=100)
    console.print(report.table(found, problem))
    print(report.verdict(found, problem))


def _write(
    found: Search, problem: Problem, *, output: Path, json_path: Path | None
) -> None:
    output.mkdir(parents=True, exist_ok=True)
    picture = output / "kfac_demo.png"
    figure.draw(found, problem, picture)
    print(f"Picture: {picture}")
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(
            json.dumps(report.as_json(found, problem), indent=1) + "\n"
        )
        print(f"Numbers: {json_path}")


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected one or more, got {number}")
    return number


def _not_negative(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"expected zero or more, got {number}")
    return number
