"""``python -m benchmarks.tasks.search``: how far defaults are from the best of 30 settings.

Settings are drawn once, the same ones for all tasks, around the defaults; every one has a
task's CPU seconds and the first seed, and the defaults are the setting numbered 0.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import kfac_core as kc  # noqa: E402
import kfac_core_shims.torch as shims  # noqa: E402
from benchmarks.tasks.methods import Method, kfac  # noqa: E402
from benchmarks.tasks.problems import TASKS, Problem  # noqa: E402
from benchmarks.tasks.running import reference_of, run  # noqa: E402
from benchmarks.tasks.tables import markdown, number, read_runs  # noqa: E402

SETTINGS = 30


def _soap(problem: Problem, rate: float, **setting: Any) -> Any:
    return shims.SOAP(problem.network, **setting)


def _kfac(problem: Problem, rate: float, **setting: Any) -> Any:
    if not setting:
        return kfac(problem)
    falling = kc.integration.Falling
    first, after = setting.pop("clip"), setting.pop("after")
    falls = falling(first, after=after, power=setting.pop("power"))
    setting["kl_clip"] = kc.integration.PerOutput(falls)
    damping, after = setting.pop("damping"), setting.pop("damped")
    setting["damping"] = damping if after is None else falling(damping, after=after)
    return kfac(problem, setting.pop("lr"), **setting)


SEARCHED: dict[str, tuple[Callable[..., Any], str, dict[str, tuple[Any, ...]]]] = {
    "soap": (
        _soap,
        "loss",
        {
            "lr": (3e-3, 6e-3, 1e-2, 2e-2, 3e-2),
            "gradient_bound": (1.0, 1.5, 2.0, 4.0, None),
            "gain": (0.02, 0.05, 0.1, None),
            "beta2": (0.85, 0.9, 0.93, 0.97),
            "update_every": (5, 10, 20),
            "decay": (0.8, 0.9),
        },
    ),
    "kfac": (
        _kfac,
        "preconditioner",
        {
            "lr": (0.1, 0.3, 1.0, 3.0),
            "clip": (3e-5, 1e-4, 3e-4, 1e-3),
            "after": (60.0, 120.0, 250.0, 1000.0),
            "power": (1.0, 1.5, 2.0),
            "damping": (2e-3, 5e-3, 1e-2, 2e-2, 5e-2),
            "damped": (30.0, 50.0, 100.0, 300.0, None),
            "update_every": (5, 10, 20, 40),
            "refresh_every": (20, 60, 120),
            "decay": (0.5, 0.8, 0.95),
        },
    ),
}
"""What makes the optimizer, how it steps, and the values of each option."""


def settings_of(name: str) -> list[dict[str, Any]]:
    """Return the settings of a search: none, which is the defaults, and the drawn ones."""
    rng, choices = random.Random(0), SEARCHED[name][2]
    drawn = [
        {option: rng.choice(values) for option, values in choices.items()}
        for _ in range(SETTINGS)
    ]
    return [{}, *drawn]


def method_of(name: str, setting: dict[str, Any]) -> Method:
    """Return the optimizer with a setting."""
    make, uses, _ = SEARCHED[name]
    return Method(title=name, make=partial(make, **setting), uses=uses)


def table(runs: list[dict[str, Any]]) -> str:
    """Return for each task the defaults' loss beside the best setting's."""
    rows = []
    for name in SEARCHED:
        for task in TASKS:
            found = {
                r["index"]: r
                for r in runs
                if (r["task"], r["method"]) == (task, name) and "index" in r
            }
            if 0 not in found or len(found) < 2:
                continue
            default = found[0]["final"]
            best = min(found.values(), key=lambda r: r["final"])
            low = best["final"]
            ratio = default / low if low > 0 else math.inf if default > 0 else 1.0
            options = ", ".join(f"{k} {v}" for k, v in best["setting"].items())
            rows.append(
                [
                    TASKS[task].title + (" (aside)" if TASKS[task].aside else ""),
                    name,
                    str(len(found) - 1),
                    number(default),
                    number(low),
                    f"{ratio:.2g}",
                    f"{_in_logarithm(default, low):.0%}",
                    options or "defaults",
                ]
            )
    head = "task", "method", "settings", "defaults", "best", "ratio", "in the logarithm"
    return markdown([*head, "best setting"], rows)


def _in_logarithm(default: float, best: float) -> float:
    """Return how far the logarithm of a loss is from that of the best one."""
    if not 0 < best <= default < 1:
        return 0.0 if default == best else math.inf
    return 1.0 - math.log(default) / math.log(best)


def main() -> None:
    """Run what a file does not have yet, task after task, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tasks.search")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--methods", nargs="+", choices=SEARCHED, default=[*SEARCHED])
    parser.add_argument("--file", type=Path, default=Path("search.jsonl"))
    parser.add_argument("--tables", action="store_true", help="run nothing")
    options = parser.parse_args()
    runs = read_runs(options.file)
    if not options.tables:
        reference = reference_of(options.file, runs)
        done = {(r["task"], r["method"], r["index"]) for r in runs}
        for task in options.tasks:
            for name in options.methods:
                for index, setting in enumerate(settings_of(name)):
                    if (task, name, index) in done:
                        continue
                    measured = run(
                        task, method_of(name, setting), 0.0, 0, reference=reference
                    )
                    line = {
                        "task": task,
                        "method": name,
                        "index": index,
                        "setting": setting,
                        "final": measured["final"],
                        "test": measured["test"],
                        "steps": measured["steps"],
                        "reference": reference,
                    }
                    with options.file.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")
                    print(task, name, index, f"{measured['final']:.3g}", flush=True)
    print(table(read_runs(options.file)))


if __name__ == "__main__":
    main()
