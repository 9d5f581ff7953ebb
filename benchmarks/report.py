"""What was measured, as plain tables.

Times are medians by the clock that counts; ×roofline is the median over what the stage's
flops take at the best rate of a matrix product in the same run (empty above 1000, where a
stage is all overhead).  "First" is the first call, compiling included.  "Recorded" are
multiples of another run's roofline, of libraries that do not install beside the others.
`benchmarks.json` has every figure, with quartiles and counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.measured import with_unit
from benchmarks.recorded import RECORDED
from benchmarks.result import Result
from benchmarks.stages import TITLES
from kfac_core.cli.screen import print_table

Run = dict[str, Any]
WIDTH = 120


def print_report(run: Run, /) -> None:
    """Print the figures of a run, as `benchmarks.run.run` returns it, with its growth."""
    print("\n".join(_heading(run)))
    titles = {name: said["title"] for name, said in run["libraries"].items()}
    cores = [name for name, said in run["libraries"].items() if said["core"]]
    for workload in run["workloads"]:
        if workload["sweep"]:
            continue
        name = workload["name"]
        for title, columns, rows in (
            (
                f"{name}: {workload['layers']} layer(s)",
                ("stage", "library", "median", "×roofline", "quiet", "first", "answer"),
                _times(workload, titles),
            ),
            (
                f"{name}: how many times as long the others take",
                ("stage", "library", "than", "times"),
                _against_peers(workload, titles, cores),
            ),
            (
                f"{name}: memory that a call adds, in the factors' bytes",
                ("stage", "library", "added"),
                _memory(workload, titles),
            ),
        ):
            if cells := list(rows):
                print()
                print_table(title, columns, cells, width=WIDTH)
        for library, error in workload["unprepared"].items():
            print(f"{titles[library]} could not be prepared: {error}")
    if run["growth"]:
        print()
        columns = ("stage", "in", "library", "exponent", "of the last two")
        rows = [
            (
                TITLES[curve["stage"]],
                curve["sweep"],
                titles[curve["library"]],
                f"{curve['exponent']:.2f}",
                f"{curve['last']:.2f}",
            )
            for curve in run["growth"]
        ]
        print_table("growth: the exponent of time", columns, rows, width=WIDTH)


def _heading(run: Run) -> Iterator[str]:
    machine = run["machine"]
    yield (
        f"{machine['processor']}, {machine['processors']} processors, "
        f"{machine['system']}, Python {machine['python']}; load before and after "
        f"{machine['load']}, {machine['load after']}"
    )
    yield f"{run['threads']} thread(s) a library; {run['clock']} time, medians"
    rates = ", ".join(f"{k} {v / 1e9:.1f}" for k, v in run["gemm"].items())
    yield f"float32 matrix product, GFLOP/s, best seen: {rates}"
    for name, said in run["libraries"].items():
        if "error" in said:
            yield f"{said['title']} ({name}): left out: {said['error']}"
            continue
        versions = ", ".join(f"{k} {v}" for k, v in said["versions"].items())
        yield f"{said['title']} ({name}): {versions}; {said['includes']}"


def _times(workload: Run, titles: dict[str, str]) -> Iterator[tuple[str, ...]]:
    for stage, of_stage in workload["stages"].items():
        answers = workload["agreement"].get(stage, {})
        for name, figures in of_stage.items():
            if "error" in figures:
                yield TITLES[stage], titles[name], "", "", "", "", figures["error"]
            if "median" not in figures:
                continue
            rooflines = figures.get("rooflines")
            answer = answers.get(name, {})
            yield (
                TITLES[stage],
                titles[name],
                with_unit(figures["median"], "s"),
                f"{rooflines:.2f}" if rooflines is not None and rooflines < 1e3 else "",
                f"{figures['quiet']}/{figures['samples']}"
                + " noisy" * figures["noisy"],
                with_unit(figures["first"], "s"),
                answer.get("error")
                or {True: "agrees", False: "DIFFERS"}.get(answer.get("agrees"), ""),
            )
        recorded = RECORDED.get(workload["name"], {}).get(stage, {})
        for name, rooflines in recorded.items():
            yield TITLES[stage], f"{name}, recorded", "", f"{rooflines:.2f}", "", "", ""


def _against_peers(
    workload: Run, titles: dict[str, str], cores: Sequence[str]
) -> Iterator[tuple[str, ...]]:
    for stage, of_stage in workload["stages"].items():
        medians = {n: f["median"] for n, f in of_stage.items() if "median" in f}
        for core in medians.keys() & set(cores):
            for peer in medians.keys() - set(cores):
                ratio = f"{medians[peer] / medians[core]:.2f}"
                yield TITLES[stage], titles[peer], titles[core], ratio


def _memory(workload: Run, titles: dict[str, str]) -> Iterator[tuple[str, ...]]:
    for stage, of_stage in workload["memory"].items():
        for name, sizes in of_stage.items():
            if "peak" in sizes:
                added = (sizes["peak"] - sizes["held"]) / workload["factor_bytes"]
                yield TITLES[stage], titles[name], f"{added:.2f}"


def print_results(results: Sequence[Result], /) -> None:
    """Print the targets that were measured, and name the others.

    Parameters
    ----------
    results : sequence of Result
        As `benchmarks.targets.results` returns them.
    """
    order = list(dict.fromkeys(result.target for result in results))
    measured = [result for result in results if result.figure is not None]
    # One target's rows stand together, whichever run they are of.
    measured.sort(key=lambda result: order.index(result.target))
    columns = ("target", "where", "of", "threads", "figure", "should be", "", "bound")
    rows = [
        (
            result.target,
            result.where,
            result.library,
            str(result.threads),
            "~" * result.noisy + with_unit(result.figure, result.unit),
            _range(result),
            "met" if result.met else "NOT MET",
            result.bound,
        )
        for result in measured
    ]
    print()
    print_table("targets: what this run shows", columns, rows, width=WIDTH)
    met = sum(result.met for result in measured)
    absent = [result for result in results if result.figure is None]
    counts = f"Of {len(results)} targets {met} are met, {len(measured) - met} are not"
    print(f"{counts}, and {len(absent)} were not measured in this run.")
    for result in absent:
        print(f"  not measured: {result.target}: {result.where} of {result.library}")


def _range(result: Result) -> str:
    """Return what a figure should be."""
    least, greatest = (
        None if limit is None else with_unit(limit, result.unit)
        for limit in (result.least, result.greatest)
    )
    if least is None:
        return f"≤ {greatest}"
    return f"≥ {least}" if greatest is None else f"{least} – {greatest}"
