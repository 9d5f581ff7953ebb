"""What was measured, as tables for people.

A table's numbers are medians by the clock that counts, with the least and the quartiles;
×roofline is the median over what the stage's flops take at the best rate of a matrix
product in the same run (empty above 1000, where a stage is all overhead).  "First" is
the first call, compiling included.  "Recorded" are multiples of another run's roofline,
of libraries that do not install beside the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.measured import with_unit
from benchmarks.recorded import RECORDED
from benchmarks.stages import TITLES

__all__ = ["print_report"]

Found = dict[str, Any]


def print_report(found: Found, /, console: Console) -> None:
    """Print everything.

    Parameters
    ----------
    found : dict
        As `benchmarks.run.run` gives it, with ``"growth"``.
    console : rich.console.Console
        Where to.
    """
    for line in _heading(found):
        console.print(Text(line))
    titles = {name: said["title"] for name, said in found["libraries"].items()}
    cores = [name for name, said in found["libraries"].items() if said["core"]]
    for workload in found["workloads"]:
        if workload["sweep"]:
            continue
        console.print()
        console.print(_times(workload, titles))
        for line in _problems(workload, titles):
            console.print(Text(line, style="red"))
        for table in (
            _against_peers(workload, titles, cores),
            _looped(workload, titles),
            _agreement(workload, titles),
            _memory(workload, titles),
            _device(workload, titles),
        ):
            if table.row_count:
                console.print(table)
    if found["growth"]:
        console.print()
        console.print(_growth(found["growth"], titles))


def _heading(found: Found) -> Iterable[str]:
    machine = found["machine"]
    clock = {
        "cpu": "CPU time (of all threads of the process)",
        "wall": "wall time",
        "device": "the device's own time (wall time where a library has no events)",
    }
    yield (
        f"{machine['processor']}, {machine['processors']} processors, "
        f"{machine['system']}, Python {machine['python']}; load before and after "
        f"{machine['load']}, {machine['load after']}"
    )
    yield (
        f"{found['threads']} thread(s) a library; times are {clock[found['clock']]}, "
        "medians of interleaved samples"
    )
    rates = ", ".join(f"{k} {v / 1e9:.1f}" for k, v in found["gemm"].items())
    yield f"float32 matrix product, GFLOP/s, best seen: {rates}"
    for name, said in found["libraries"].items():
        if "error" in said:
            yield f"{said['title']} ({name}): left out: {said['error']}"
            continue
        versions = ", ".join(f"{k} {v}" for k, v in said["versions"].items())
        yield f"{said['title']} ({name}): {versions}; {said['includes']}"
    if found["device"] == "cpu":
        yield "This has not been run on a GPU; `--device cuda` does."


def _times(workload: Found, titles: dict[str, str]) -> Table:
    """Return the figures of every stage and library; the fastest of each is bold."""
    table = Table(title=f"{workload['name']}: {workload['layers']} layer(s)")
    table.add_column("stage and library", no_wrap=True)
    for column in ("median", "least", "quartiles", "×roofline", "quiet", "first"):
        table.add_column(column, justify="right", no_wrap=True)
    for stage, of_stage in workload["stages"].items():
        table.add_row(Text(TITLES[stage], style="bold"))
        medians = [f["median"] for f in of_stage.values() if "median" in f]
        for name, figures in of_stage.items():
            if "median" in figures:
                best = figures["median"] == min(medians)
                label = Text(f"  {titles[name]}", style="bold" if best else "")
                table.add_row(label, *_figures(figures))
        recorded = RECORDED.get(workload["name"], {}).get(stage, {})
        for name, rooflines in recorded.items():
            table.add_row(f"  {name}, recorded", "", "", "", f"{rooflines:.2f}", "", "")
        table.add_section()
    return table


def _figures(figures: Found) -> tuple[str, ...]:
    rooflines = figures.get("rooflines")
    noisy = " noisy" if figures["noisy"] else ""
    return (
        with_unit(figures["median"], "s"),
        with_unit(figures["least"], "s"),
        f"{with_unit(figures['lower'], 's')} – {with_unit(figures['upper'], 's')}",
        f"{rooflines:.2f}" if rooflines is not None and rooflines < 1000 else "",
        f"{figures['quiet']}/{figures['samples']}{noisy}",
        with_unit(figures["first"], "s"),
    )


def _problems(workload: Found, titles: dict[str, str]) -> Iterable[str]:
    """Yield what went wrong, a line a library and stage."""
    for name, error in workload["unprepared"].items():
        yield f"{titles[name]} could not be prepared: {error}"
    for stage, of_stage in workload["stages"].items():
        for name, figures in of_stage.items():
            if "error" in figures:
                yield f"{titles[name]}, {TITLES[stage]}: {figures['error']}"


def _against_peers(workload: Found, titles: dict[str, str], cores: list[str]) -> Table:
    """Return how many times longer each library takes than each core."""
    peers = [name for name in titles if name not in cores]
    table = Table(title=f"{workload['name']}: how many times as long the others take")
    for column in ("stage", "than"):
        table.add_column(column)
    for peer in peers:
        table.add_column(titles[peer], justify="right")
    for stage, of_stage in workload["stages"].items():
        for core in cores:
            own = of_stage.get(core, {}).get("median")
            others = [of_stage.get(peer, {}).get("median") for peer in peers]
            if own is None or not any(others):
                continue
            cells = ["" if t is None else f"{t / own:.2f}" for t in others]
            table.add_row(TITLES[stage], titles[core], *cells)
    return table


def _looped(workload: Found, titles: dict[str, str]) -> Table:
    """Return how many times longer a call a layer takes than one for all."""
    table = Table(title=f"{workload['name']}: a call a layer, over one call for all")
    for column in ("stage", "library", "times longer"):
        table.add_column(column)
    for looped, whole in (
        ("refresh-looped", "refresh-inverse"),
        ("precondition-looped", "precondition-inverse"),
    ):
        for name, figures in workload["stages"].get(looped, {}).items():
            other = workload["stages"].get(whole, {}).get(name, {})
            if "median" in figures and "median" in other:
                ratio = f"{figures['median'] / other['median']:.2f}"
                table.add_row(TITLES[whole], titles[name], ratio)
    return table


def _agreement(workload: Found, titles: dict[str, str]) -> Table:
    table = Table(title=f"{workload['name']}: do the answers agree?")
    for column in ("answer", "library", "residual in float64", "from the first", ""):
        table.add_column(column)
    for stage, of_stage in workload["agreement"].items():
        for name, figures in of_stage.items():
            if "error" in figures:
                table.add_row(TITLES[stage], titles[name], Text(figures["error"]))
                continue
            agrees = figures["agrees"]
            table.add_row(
                TITLES[stage],
                titles[name],
                f"{figures['residual']:.1e}",
                f"{figures['difference']:.1e}",
                Text(
                    "agrees" if agrees else "DIFFERS",
                    style="green" if agrees else "bold red",
                ),
            )
    return table


def _memory(workload: Found, titles: dict[str, str]) -> Table:
    """Return peak memory in factors' bytes: in all, and what a call adds."""
    size = workload["factor_bytes"]
    table = Table(
        title=f"{workload['name']}: memory, in the factors' {size / 1e6:.0f} MB"
    )
    for column in ("stage", "library"):
        table.add_column(column)
    for column in ("held with inputs", "peak", "added by the call"):
        table.add_column(column, justify="right")
    for stage, of_stage in workload["memory"].items():
        for name, bytes_ in of_stage.items():
            if "peak" not in bytes_:
                continue
            held = (bytes_["held"] - bytes_["before"]) / size
            peak = (bytes_["peak"] - bytes_["before"]) / size
            cells = (f"{held:.2f}", f"{peak:.2f}", f"{peak - held:.2f}")
            table.add_row(TITLES[stage], titles[name], *cells)
    return table


def _device(workload: Found, titles: dict[str, str]) -> Table:
    """Return what a GPU was asked to do; nothing is counted elsewhere."""
    table = Table(title=f"{workload['name']}: calls of the device in one call")
    for column in ("stage", "library", "launches", "host-device synchronizations"):
        table.add_column(column)
    for stage, of_stage in workload["stages"].items():
        for name, figures in of_stage.items():
            counts = figures.get("counts")
            if counts:
                cells = (str(counts["launches"]), str(counts["synchronizations"]))
                table.add_row(TITLES[stage], titles[name], *cells)
    return table


def _growth(curves: list[Found], titles: dict[str, str]) -> Table:
    table = Table(title="growth: the exponent of time")
    for column in ("stage", "in", "from", "to", "library"):
        table.add_column(column)
    for column in ("exponent", "of the last two"):
        table.add_column(column, justify="right")
    for curve in curves:
        sizes = [size for size, _ in curve["points"]]
        table.add_row(
            TITLES[curve["stage"]],
            curve["sweep"],
            str(sizes[0]),
            str(sizes[-1]),
            titles[curve["library"]],
            f"{curve['exponent']:.2f}",
            f"{curve['last']:.2f}",
        )
    return table
