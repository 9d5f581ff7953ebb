"""``kfac-core bench``: side by side with other libraries and with the machine's floor.

The benchmark itself is the folder ``benchmarks`` of the source tree, beside this package,
and no part of an installation: it drives other libraries, in processes of their own.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path

import kfac_core
from kfac_core.cli.options import add_json, positive
from kfac_core.cli.screen import complain

__all__ = [
    "EXAMPLES",
    "EXIT_CODES",
    "SUMMARY",
    "add_arguments",
    "find_benchmarks",
    "run",
]

SUMMARY = "time it beside other libraries and the machine's floor"
EXAMPLES = (
    "kfac-core bench --quick",
    "kfac-core bench --workloads transformer --libraries numpy lapack --json",
)
EXIT_CODES = {
    0: "it ran, and all answers are right",
    1: "a library's answers are not right",
    2: "it cannot be run here",
}


def add_arguments(parser: argparse.ArgumentParser, /) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument(
        "--quick", action="store_true", help="small workloads, in less than a minute"
    )
    parser.add_argument(
        "--workloads",
        nargs="+",
        metavar="NAME",
        help="workloads, or all, quick, sweeps",
    )
    parser.add_argument(
        "--stages", nargs="+", metavar="NAME", help="only these stages of the workloads"
    )
    parser.add_argument(
        "--libraries", nargs="+", metavar="NAME", help="default: all that are installed"
    )
    parser.add_argument(
        "--threads",
        nargs="+",
        type=positive,
        default=[1],
        metavar="N",
        help="of each library (default: 1); several make a run each",
    )
    parser.add_argument(
        "--repetitions", type=positive, metavar="N", help="samples of each stage"
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the libraries compute (default: cpu)",
    )
    parser.add_argument(
        "--no-memory", action="store_true", help="leave peak memory unmeasured"
    )
    parser.add_argument(
        "--patience",
        type=positive,
        default=600,
        metavar="SECONDS",
        help="how long one library may take for one answer (default: 600)",
    )
    parser.add_argument(
        "--python",
        action="append",
        metavar="LIBRARY=PATH",
        help="the interpreter of one library, where it is not this one",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("."),
        metavar="DIR",
        help="where numbers and picture are written (default: here)",
    )
    add_json(parser)


def run(arguments: argparse.Namespace, /) -> int:
    """Run the benchmark.

    Parameters
    ----------
    arguments : argparse.Namespace
        As `add_arguments` declared.

    Returns
    -------
    int
        The exit code; see `EXIT_CODES`.
    """
    folder = find_benchmarks()
    if folder is None:
        return complain(
            "bench",
            "needs the source tree of kfac_core, in which it is the folder "
            "`benchmarks`; an installed wheel does not have it.",
        )
    if "benchmarks" not in sys.modules:
        _import_from(folder)
    code: int = importlib.import_module("benchmarks.command").main(arguments)
    return code


def find_benchmarks() -> Path | None:
    """Return the folder of the benchmark; None where only the package is installed."""
    folder = Path(kfac_core.__file__).resolve().parent.parent / "benchmarks"
    return folder if (folder / "command.py").is_file() else None


def _import_from(folder: Path) -> None:
    """Import the package `benchmarks` from a folder that is on no search path."""
    spec = importlib.util.spec_from_file_location(
        "benchmarks",
        folder / "__init__.py",
        submodule_search_locations=[str(folder)],
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["benchmarks"] = package
    spec.loader.exec_module(package)
