"""The command: what was asked for, run, shown and written."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.growth import growth
from benchmarks.libraries import LIBRARIES
from benchmarks.options import Options
from benchmarks.run import run
from benchmarks.stages import chosen_stages
from benchmarks.targets import results
from benchmarks.threads import processors
from benchmarks.workloads import chosen_workloads
from kfac_core.cli.options import add_json, positive
from kfac_core.cli.screen import complain, print_json

QUICK_REPETITIONS = 3
REPETITIONS = 9
QUICK_SECONDS = 0.5
SECONDS = 60.0


# Flags, and what argparse is told of each; all that follows from them is in `_options`.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "quick": {"action": "store_true", "help": "small workloads, in about a minute"},
    "workloads": {"nargs": "+", "help": "workloads, or all, quick, sweeps, large"},
    "stages": {"nargs": "+", "help": "only these stages of the workloads"},
    "libraries": {"nargs": "+", "help": "default: all that are installed"},
    "threads": {
        "nargs": "+",
        "type": positive,
        "default": [1],
        "help": "of each library (default: 1); several make a run each",
    },
    "repetitions": {"type": positive, "help": "samples of each stage"},
    "device": {
        "choices": ("cpu", "cuda"),
        "default": "cpu",
        "help": "where the libraries compute (default: cpu)",
    },
    "no-memory": {"action": "store_true", "help": "leave peak memory unmeasured"},
    "patience": {
        "type": positive,
        "default": 600,
        "metavar": "SECONDS",
        "help": "how long one library may take for one answer (default: 600)",
    },
    "python": {
        "action": "append",
        "metavar": "LIBRARY=PATH",
        "help": "the interpreter of one library, where it is not this one",
    },
    "output": {
        "type": Path,
        "default": Path("."),
        "metavar": "DIR",
        "help": "where numbers and picture are written (default: here)",
    },
}


def add_arguments(parser: argparse.ArgumentParser, /) -> None:
    """Declare the options of the command."""
    for name, settings in ARGUMENTS.items():
        parser.add_argument(f"--{name}", **settings)
    add_json(parser)


def main(arguments: argparse.Namespace, /) -> int:
    """Run the benchmark and show what came of it.

    Parameters
    ----------
    arguments : argparse.Namespace
        As `add_arguments` declares them.

    Returns
    -------
    int
        0; 1 where a library's answers differ from what is right; 2 for a call that
        cannot be run.
    """
    try:
        several = [
            _options(arguments, threads, say=_say)
            for threads in dict.fromkeys(arguments.threads)
        ]
    except ValueError as error:
        return complain("bench", error)
    # Before minutes of work, and not after them.
    arguments.output.mkdir(parents=True, exist_ok=True)
    runs = [run(options) for options in several]
    if all("error" in said for said in runs[0]["libraries"].values()):
        missing = " (no GPU was found)" if arguments.device == "cuda" else ""
        return complain("bench", f"no library could be started{missing}")
    for plain in runs:
        plain["growth"] = growth(plain["workloads"])
    _show(runs, arguments)
    differing = [
        name
        for plain in runs
        for workload in plain["workloads"]
        for of_stage in workload["agreement"].values()
        for name, figures in of_stage.items()
        if not figures.get("agrees", True)
    ]
    return 1 if differing else 0


def _say(doing: str) -> None:
    print(doing, file=sys.stderr)


def _options(
    arguments: argparse.Namespace, threads: int, say: Callable[[str], None]
) -> Options:
    quick = arguments.quick
    if threads > processors():
        raise ValueError(
            f"expected at most {processors()} for --threads, the processors that this "
            f"process may use, got {threads}"
        )
    libraries = tuple(arguments.libraries or _installed(arguments.device, quick))
    unknown = [name for name in libraries if name not in LIBRARIES]
    if unknown:
        raise ValueError(f"no library {unknown[0]!r}; there are {', '.join(LIBRARIES)}")
    elsewhere = [n for n in libraries if arguments.device not in LIBRARIES[n].devices]
    if elsewhere:
        raise ValueError(f"{elsewhere[0]} does not run on {arguments.device}")
    pythons: dict[str, str] = {}
    for text in arguments.python or ():
        name, equals, path = text.partition("=")
        if not equals or name not in LIBRARIES:
            raise ValueError(f"expected LIBRARY=PATH for --python, got {text!r}")
        pythons[name] = path
    return Options(
        chosen_workloads(arguments.workloads or ("quick" if quick else "all",)),
        libraries,
        sys.executable,
        stages=chosen_stages(arguments.stages or ()),
        threads=threads,
        repetitions=arguments.repetitions
        or (QUICK_REPETITIONS if quick else REPETITIONS),
        seconds=QUICK_SECONDS if quick else SECONDS,
        patience=arguments.patience,
        device=arguments.device,
        memory=not (quick or arguments.no_memory),
        pythons=pythons,
        say=say,
    )


def _installed(device: str, quick: bool) -> list[str]:
    """Return the libraries that this environment has, for a device.

    Compiling the stages takes JAX longer than the whole of a quick run.
    """
    return [
        name
        for name, entry in LIBRARIES.items()
        if device in entry.devices
        and not (quick and "jax" in entry.needs)
        and all(importlib.util.find_spec(module) for module in entry.needs)
    ]


def _show(runs: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    from benchmarks.report import print_report, print_results

    judged = results(runs)
    everything = {"runs": runs, "targets": [result.to_plain() for result in judged]}
    folder: Path = arguments.output
    numbers = folder / "benchmarks.json"
    numbers.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
    if arguments.json:
        print_json(everything)
    else:
        for plain in runs:
            print_report(plain)
        if not arguments.quick:
            print_results(judged)
    written = [f"Numbers: {numbers}", *map("Picture: {}".format, _drawn(runs, folder))]
    if not arguments.json:
        print("\n".join(written))


def _drawn(runs: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw each run's growth curves, and return the files."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    from benchmarks.plot import draw

    pictures = []
    for plain in runs:
        if plain["growth"]:
            titles = {k: said["title"] for k, said in plain["libraries"].items()}
            more = "" if plain is runs[0] else f"-{plain['threads']}-threads"
            path = folder / f"benchmarks{more}.png"
            draw(plain["growth"], titles, path)
            pictures.append(path)
    return pictures
