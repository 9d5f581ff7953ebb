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
from benchmarks.verdict import Verdict

__all__ = ["print_verdicts"]


def print_verdicts(found: Sequence[Verdict], /, console: Console) -> None:
    """Print the targets that were measured, and name the others.

    Parameters
    ----------
    found : sequence of Verdict
        As `benchmarks.targets.verdicts` gives them.
    console : rich.console.Console
        Where to.
    """
    order = list(dict.fromkeys(verdict.target for verdict in found))
    measured = [verdict for verdict in found if verdict.figure is not None]
    # One target's rows stand together, whichever run they are of.
    measured.sort(key=lambda verdict: order.index(verdict.target))
    if measured:
        console.print()
        console.print(_table(measured))
    met = sum(verdict.met for verdict in measured)
    absent = [verdict for verdict in found if verdict.figure is None]
    said = f"Of {len(found)} targets {met} are met, {len(measured) - met} are not"
    console.print(Text(f"{said}, and {len(absent)} were not measured in this run."))
    for target, where in _grouped(absent).items():
        console.print(Text(f"  not measured: {target}: {', '.join(where)}"))


def _table(measured: Sequence[Verdict]) -> Table:
    table = Table(title="targets: what this run shows")
    table.add_column("target")
    for column in ("where", "of", "threads"):
        table.add_column(column)
    for column in ("figure", "should be"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("what bounds it")
    before = measured[0].target
    for verdict in measured:
        if verdict.target != before:
            table.add_section()
            before = verdict.target
        assert verdict.figure is not None
        figure = with_unit(verdict.figure, verdict.unit)
        table.add_row(
            *(verdict.target, verdict.where, verdict.library, verdict.threads),
            f"~{figure}" if verdict.noisy else figure,
            _range(verdict),
            Text("met", style="green")
            if verdict.met
            else Text("NOT MET", style="bold red"),
            verdict.bound,
        )
    return table


def _range(verdict: Verdict) -> str:
    """Return what a figure should be."""
    least, greatest = (
        None if limit is None else with_unit(limit, verdict.unit)
        for limit in (verdict.least, verdict.greatest)
    )
    if least is None:
        return f"≤ {greatest}"
    return f"≥ {least}" if greatest is None else f"{least} – {greatest}"


def _grouped(absent: Sequence[Verdict]) -> dict[str, list[str]]:
    """Return where, and of which libraries, each target was not measured."""
    libraries: dict[tuple[str, str], list[str]] = {}
    for verdict in absent:
        of = libraries.setdefault((verdict.target, verdict.where), [])
        if verdict.library not in of:
            of.append(verdict.library)
    found: dict[str, list[str]] = {}
    for (target, where), of in libraries.items():
        found.setdefault(target, []).append(f"{where} of {' and '.join(of)}")
    return found
