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
from kfac_core.cli.screen import Progress, complain, print_json

__all__ = ["main"]

QUICK_REPETITIONS = 3
REPETITIONS = 9
QUICK_SECONDS = 0.5
SECONDS = 60.0


def main(arguments: argparse.Namespace, /) -> int:
    """Run the benchmark and show what came of it.

    Parameters
    ----------
    arguments : argparse.Namespace
        As `kfac_core.cli.bench.add_arguments` declares them.

    Returns
    -------
    int
        0; 1 where a library's answers differ from what is right; 2 for a call that
        cannot be run.
    """
    if importlib.util.find_spec("rich") is None:
        return complain("bench", "its tables need rich: pip install rich")
    with Progress() as progress:
        try:
            several = [
                _options(arguments, threads, say=progress.begin)
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
    for found in runs:
        found["growth"] = growth(found["workloads"])
    _show(runs, arguments)
    differing = [
        name
        for found in runs
        for workload in found["workloads"]
        for of_stage in workload["agreement"].values()
        for name, figures in of_stage.items()
        if not figures.get("agrees", True)
    ]
    return 1 if differing else 0


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
    from rich.console import Console

    from benchmarks.report import print_report
    from benchmarks.result_table import print_results
    from benchmarks.summary import summary

    judged = results(runs)
    everything = {"runs": runs, "targets": [result.to_plain() for result in judged]}
    if arguments.json:
        print_json(everything)
    elif arguments.quick:
        print("\n".join(line for found in runs for line in summary(found)))
        print("A run without --quick prints every figure, and compares with targets.")
    else:
        # Asked of the stream, as rich takes a variable's word for what a terminal is.
        pretty = sys.stdout.isatty()
        console = Console() if pretty else Console(width=120, force_terminal=False)
        for found in runs:
            print_report(found, console)
        print_results(judged, console)
    folder: Path = arguments.output
    numbers = folder / "benchmarks.json"
    numbers.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
    written = [f"Numbers: {numbers}", *map("Picture: {}".format, _drawn(runs, folder))]
    if not arguments.json:
        print("\n".join(written))


def _drawn(runs: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw each run's growth curves, and return the files."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    from benchmarks.plot import draw

    found = []
    for plain in runs:
        if plain["growth"]:
            titles = {k: said["title"] for k, said in plain["libraries"].items()}
            more = "" if plain is runs[0] else f"-{plain['threads']}-threads"
            path = folder / f"benchmarks{more}.png"
            draw(plain["growth"], titles, path)
            found.append(path)
    return found
