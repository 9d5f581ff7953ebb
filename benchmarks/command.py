"""The command: what was asked for, run, shown and written."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.growth import growth
from benchmarks.libraries import LIBRARIES
from benchmarks.options import Options
from benchmarks.run import run
from benchmarks.stages import chosen_stages
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
            options = _options(arguments, say=progress.begin)
        except ValueError as error:
            return complain("bench", error)
        # Before minutes of work, and not after them.
        arguments.output.mkdir(parents=True, exist_ok=True)
        found = run(options)
    if all("error" in said for said in found["libraries"].values()):
        missing = " (no GPU was found)" if options.device == "cuda" else ""
        return complain("bench", f"no library could be started{missing}")
    found["growth"] = growth(found["workloads"])
    _show(found, arguments)
    differing = [
        name
        for workload in found["workloads"]
        for of_stage in workload["agreement"].values()
        for name, figures in of_stage.items()
        if not figures.get("agrees", True)
    ]
    return 1 if differing else 0


def _options(arguments: argparse.Namespace, say: Callable[[str], None]) -> Options:
    quick = arguments.quick
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
        threads=arguments.threads,
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


def _show(found: dict[str, object], arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from benchmarks.plot import draw
    from benchmarks.report import print_report

    if arguments.json:
        print_json(found)
    else:
        # Asked of the stream, as rich takes a variable's word for what a terminal is.
        pretty = sys.stdout.isatty()
        console = Console() if pretty else Console(width=120, force_terminal=False)
        print_report(found, console)
    folder: Path = arguments.output
    numbers = folder / "benchmarks.json"
    numbers.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    written = [f"Numbers: {numbers}"]
    curves: object = found["growth"]
    libraries: object = found["libraries"]
    assert isinstance(curves, list)
    assert isinstance(libraries, dict)
    if curves and importlib.util.find_spec("matplotlib") is not None:
        titles = {name: said["title"] for name, said in libraries.items()}
        draw(curves, titles, folder / "benchmarks.png")
        written.append(f"Picture: {folder / 'benchmarks.png'}")
    if not arguments.json:
        print("\n".join(written))
