"""The targets, as the table that ends the output of a run.

One row a target: what was measured, what it should be, whether that is met, and what
bounds it.  A figure with a tilde is of samples that were disturbed.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.measured import with_unit
from benchmarks.result import Result

__all__ = ["print_results"]


def print_results(found: Sequence[Result], /, console: Console) -> None:
    """Print the targets that were measured, and name the others.

    Parameters
    ----------
    found : sequence of Result
        As `benchmarks.targets.results` gives them.
    console : rich.console.Console
        Where to.
    """
    order = list(dict.fromkeys(result.target for result in found))
    measured = [result for result in found if result.figure is not None]
    # One target's rows stand together, whichever run they are of.
    measured.sort(key=lambda result: order.index(result.target))
    if measured:
        console.print()
        console.print(_table(measured))
    met = sum(result.met for result in measured)
    absent = [result for result in found if result.figure is None]
    said = f"Of {len(found)} targets {met} are met, {len(measured) - met} are not"
    console.print(Text(f"{said}, and {len(absent)} were not measured in this run."))
    for target, where in _grouped(absent).items():
        console.print(Text(f"  not measured: {target}: {', '.join(where)}"))


def _table(measured: Sequence[Result]) -> Table:
    table = Table(title="targets: what this run shows")
    table.add_column("target")
    for column in ("where", "of", "threads"):
        table.add_column(column)
    for column in ("figure", "should be"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("what bounds it")
    before = measured[0].target
    for result in measured:
        if result.target != before:
            table.add_section()
            before = result.target
        assert result.figure is not None
        figure = with_unit(result.figure, result.unit)
        table.add_row(
            *(result.target, result.where, result.library, result.threads),
            f"~{figure}" if result.noisy else figure,
            _range(result),
            Text("met", style="green")
            if result.met
            else Text("NOT MET", style="bold red"),
            result.bound,
        )
    return table


def _range(result: Result) -> str:
    """Return what a figure should be."""
    least, greatest = (
        None if limit is None else with_unit(limit, result.unit)
        for limit in (result.least, result.greatest)
    )
    if least is None:
        return f"≤ {greatest}"
    return f"≥ {least}" if greatest is None else f"{least} – {greatest}"


def _grouped(absent: Sequence[Result]) -> dict[str, list[str]]:
    """Return where, and of which libraries, each target was not measured."""
    libraries: dict[tuple[str, str], list[str]] = {}
    for result in absent:
        of = libraries.setdefault((result.target, result.where), [])
        if result.library not in of:
            of.append(result.library)
    found: dict[str, list[str]] = {}
    for (target, where), of in libraries.items():
        found.setdefault(target, []).append(f"{where} of {' and '.join(of)}")
    return found
