"""Tables of the runs of a file: medians over seeds, of the best rate of a grid."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.tasks.methods import METHODS
from benchmarks.tasks.problems import TASKS

ADAM = "adam", "adamw"

NAMED = {
    "classifier": "kfac",
    "recurrent": "kfac",
    "transformer": "kfac-core-soap",
    "fit": "kfac-core-soap",
    "equation": "gauss-newton",
}
"""The optimizer that the recipes name first for a kind of task."""


@dataclass(frozen=True)
class Result:
    """What a method did on a task, at its best rate; medians over seeds."""

    rate: float
    seeds: int
    final: float
    test: float
    steps: int
    spread: float
    curve: list[tuple[float, float]]


def read_runs(path: Path, /) -> list[dict[str, Any]]:
    """Return the runs of a file; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def median_of(done: Mapping[tuple[float, int], float], rate: float, /) -> float:
    """Return the median loss of a rate over the seeds that were run."""
    losses = [loss for (other, _), loss in done.items() if other == rate]
    return statistics.median(losses) if losses else math.inf


def results(runs: list[dict[str, Any]], /) -> dict[tuple[str, str], Result]:
    """Return the result of each task and method: that of the rate with the least loss.

    Among the rates that were run with the most seeds.
    """
    groups: dict[tuple[str, str], dict[float, list[dict[str, Any]]]] = {}
    for r in runs:
        of_method = groups.setdefault((r["task"], r["method"]), {})
        of_method.setdefault(r["rate"], []).append(r)
    found = {}
    for key, by_rate in groups.items():
        most = max(map(len, by_rate.values()))
        finals = {
            rate: statistics.median(r["final"] for r in group)
            for rate, group in by_rate.items()
            if len(group) == most
        }
        rate = min(finals, key=lambda rate: finals[rate])
        group = by_rate[rate]
        losses = [r["final"] for r in group]
        middle = sorted(group, key=lambda r: r["final"])[(len(group) - 1) // 2]
        found[key] = Result(
            rate=rate,
            seeds=most,
            final=finals[rate],
            test=statistics.median(r["test"] for r in group),
            steps=middle["steps"],
            spread=max(losses) / max(min(losses), 1e-12),
            curve=[(s, loss) for s, loss in middle["curve"]],
        )
    return found


def seconds_to(curve: list[tuple[float, float]], loss: float, /) -> float:
    """Return when a curve first reached a loss, between the times it was measured at."""
    before = (0.0, math.inf)
    for seconds, value in curve:
        if value <= loss:
            start, high = before
            if not math.isfinite(high) or value <= 0 or loss <= 0:
                return seconds
            share = math.log(high / loss) / math.log(high / value)
            return start + share * (seconds - start)
        before = seconds, value
    return math.inf


def tables(runs: list[dict[str, Any]], /) -> dict[str, str]:
    """Return the tables by name, in Markdown."""
    found = results(runs)
    names = [m for m in METHODS if any(key[1] == m for key in found)]
    chosen = [t for t in TASKS if not TASKS[t].aside]
    aside = [t for t in TASKS if TASKS[t].aside]
    return {
        "tasks losses": _table(found, chosen, names, lambda r: number(r.final)),
        "tasks losses aside": _table(found, aside, names, lambda r: number(r.final)),
        "tasks tests": _table(
            found, [*chosen, *aside], names, lambda r: number(r.test)
        ),
        "tasks long": _table(
            found,
            [*chosen, *aside],
            names,
            lambda r: f"{number(r.final)} ({number(r.test)})",
        ),
        "tasks seconds": _seconds(found, [*chosen, *aside], names),
        "tasks verdict": _verdict(found, chosen, aside, names),
        "tasks named": _named(found, [*chosen, *aside]),
    }


def _table(found: Any, tasks: list[str], names: list[str], cell: Any) -> str:
    rows = []
    for task in tasks:
        own = [found.get((task, name)) for name in names]
        if any(own):
            rows.append([TASKS[task].title, *(cell(r) if r else "" for r in own)])
    return markdown(["task", *(METHODS[n].title for n in names)], rows)


def _seconds(found: Any, tasks: list[str], names: list[str]) -> str:
    """Seconds to a useful loss, and to Adam's final one."""
    rows = []
    for task in tasks:
        adam = found.get((task, "adam"))
        if adam is None:
            continue
        cells = []
        for name in names:
            r = found.get((task, name))
            times = [
                seconds_to(r.curve, loss) if r else math.inf
                for loss in (TASKS[task].useful, adam.final)
            ]
            cells.append(" / ".join(f"{s:.2f}" if s < math.inf else "–" for s in times))
        rows.append([TASKS[task].title, f"{TASKS[task].seconds:g}", *cells])
    return markdown(
        [
            "seconds to a useful loss / to Adam's",
            "budget",
            *(METHODS[n].title for n in names),
        ],
        rows,
    )


def _verdict(found: Any, chosen: list[str], aside: list[str], names: list[str]) -> str:
    """On how many tasks a method ends below others."""
    ours = [n for n in names if not METHODS[n].rates and n != "lbfgs"]
    rows = []
    for name in ours:
        for label, tasks in (("chosen on", chosen), ("set aside", aside)):
            own = [t for t in tasks if (t, name) in found]
            peers = [n for n in names if n not in ours]

            def wins(against: Any, own: list[str] = own, name: str = name) -> str:
                won = sum(
                    found[t, name].final
                    < min(
                        (found[t, p].final for p in against if (t, p) in found),
                        default=math.inf,
                    )
                    for t in own
                )
                return f"{won} of {len(own)}"

            spread = max((found[t, name].spread for t in own), default=1.0)
            rows.append(
                [METHODS[name].title, label, wins(ADAM), wins(peers), f"{spread:.2g}"]
            )
    head = "tasks", "below Adam and AdamW", "below every peer", "largest ratio of seeds"
    return markdown(["method", *head], rows)


def _named(found: Any, tasks: list[str]) -> str:
    """Where the optimizer that the recipes name ends below every peer."""
    rows = []
    for kind, name in NAMED.items():
        own = [t for t in tasks if TASKS[t].kind == kind and (t, name) in found]
        behind = []
        for task in own:
            others = [
                r.final
                for (t, m), r in found.items()
                if t == task and (METHODS[m].rates or m == "lbfgs")
            ]
            loss, lowest = found[task, name].final, min(others, default=math.inf)
            if loss >= lowest:
                ratio = f"{loss / lowest:.2g}" if lowest > 0 else "–"
                behind.append(f"{TASKS[task].title} ({ratio})")
        won = f"{len(own) - len(behind)} of {len(own)}"
        rows.append([kind, METHODS[name].title, won, "; ".join(behind)])
    head = "named", "below every peer", "not on (times the best peer's loss)"
    return markdown(["kind of task", *head], rows)


def number(x: float, /) -> str:
    """Return a loss as tables show it."""
    return f"{x:.2g}" if math.isfinite(x) else "diverged"


def markdown(head: list[str], rows: list[list[str]], /) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
