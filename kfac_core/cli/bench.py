"""``kfac-core bench``: side by side with other libraries and with the machine's roofline.

The benchmark itself is the folder ``benchmarks`` of the source tree, beside this package,
and no part of an installation: it drives other libraries, in processes of their own.  It
is started as ``python -m benchmarks`` would start it, and imported by nothing here.
"""

from __future__ import annotations

import argparse
import os
import subprocess
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
    "as_options",
    "find_benchmarks",
    "run",
]

SUMMARY = "time it beside other libraries and the machine's roofline"
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
        "--quick",
        action="store_true",
        help="small workloads, on one screen, in about a minute",
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
    """Run the benchmark, in a process of its own.

    Parameters
    ----------
    arguments : argparse.Namespace
        Parsed arguments of `add_arguments`.

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
    paths = [str(folder.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    # -P: a folder of that name where the command is called is not meant.
    program = [sys.executable, "-P", "-m", folder.name, *as_options(arguments)]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(program, env=variables) as child:
        try:
            code = child.wait()
        except KeyboardInterrupt:
            # The child is interrupted too, and ends its own workers first.
            code = child.wait()
    return code if code >= 0 else 128 - code


def as_options(arguments: argparse.Namespace, /) -> list[str]:
    """Return the command line that `add_arguments` parses into these arguments."""
    options = []
    for name in ("quick", "no_memory", "json"):
        if getattr(arguments, name):
            options.append(_flag(name))
    for name in ("workloads", "stages", "libraries", "threads"):
        values = getattr(arguments, name)
        if values:
            options += [_flag(name), *map(str, values)]
    for name in ("repetitions", "device", "patience", "output"):
        value = getattr(arguments, name)
        if value is not None:
            options += [_flag(name), str(value)]
    for choice in arguments.python or ():
        options += ["--python", choice]
    return options


def find_benchmarks() -> Path | None:
    """Return the folder of the benchmark; None where only the package is installed."""
    folder = Path(kfac_core.__file__).resolve().parent.parent / "benchmarks"
    return folder if (folder / "__main__.py").is_file() else None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
