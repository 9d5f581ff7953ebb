"""What the library is meant to reach, and whether a run shows that it does.

Conventions.  Every target is a number with a least or a greatest value, or both; a
figure is made of the medians of one run alone, but for the gain of two cores, which
compares the wall time of two runs.  "The kernels" are `KERNELS`: the array library's own
calls for the same stage in the same run, with nothing around them, so that they show
what bounds a figure.  What was not measured has no figure, and is not met.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.call_targets import calls, loops
from benchmarks.limits import (
    CYCLE_OVER,
    DRIVER,
    EXPONENTS,
    OVER_THE_ROOFLINE,
    TOLERANCE,
    TWO_CORES,
)
from benchmarks.measured import CORES, KERNELS, PLACES, Run, ratio
from benchmarks.recorded import RECORDED
from benchmarks.result import Result
from benchmarks.stages import MEMORY_LIMITS, TITLES
from benchmarks.workloads import SWEEPS


def results(runs: Sequence[dict[str, Any]], /) -> list[Result]:
    """Judge some runs of one benchmark.

    Parameters
    ----------
    runs : sequence of dict
        As `benchmarks.run.run` gives them, with ``"growth"``; each on another number of
        threads.

    Returns
    -------
    list of Result
        All targets, a run after the other, whether they were measured or not.
    """
    views = [Run(plain) for plain in runs]
    found: list[Result] = []
    for run in views:
        for judge in (
            *(_rooflines, _peers, _drivers, _cycles),
            *(loops, calls, _growth, _memory, _synchronizations),
        ):
            found += judge(run)
    return found + list(_two_cores(views))


def _rooflines(run: Run) -> Iterator[Result]:
    for stage, by_core in OVER_THE_ROOFLINE.items():
        for place, where in enumerate(PLACES):
            for core, greatest in by_core.items():
                # On one thread PyTorch's matrices go through LAPACK's routines too.
                bounds = (
                    run.by_kernels(
                        by, run.figure(where, stage, KERNELS[by], "rooflines")
                    )
                    for by in dict.fromkeys((core, "numpy"))
                )
                yield Result(
                    f"{TITLES[stage]}, over the roofline",
                    *(where, core, run.threads),
                    run.figure(where, stage, core, "rooflines"),
                    greatest=greatest[place],
                    bound="; ".join(filter(None, bounds)),
                    noisy=run.noisy(where, stage, core),
                )


def _peers(run: Run) -> Iterator[Result]:
    """Judge the statistics against the fastest peer, measured or recorded."""
    for where in PLACES:
        times = {
            run.title(peer): run.figure(where, "statistics", peer, "rooflines")
            for peer in run.peers
        }
        measured = {name: time for name, time in times.items() if time is not None}
        recorded = RECORDED[where]["statistics"]
        named = {f"{name}, recorded": time for name, time in recorded.items()}
        every = measured | named
        fastest = min(every, key=every.__getitem__)
        for core in CORES:
            own = run.figure(where, "statistics", core, "rooflines")
            yield Result(
                "statistics, how many times as fast as the fastest peer",
                *(where, core, run.threads),
                # Of recorded figures alone it would say nothing of this machine.
                every[fastest] / own if own and measured else None,
                least=1.0,
                bound=f"{fastest} takes {every[fastest]:.2f} rooflines",
                noisy=run.noisy(where, "statistics", core),
            )


def _drivers(run: Run) -> Iterator[Result]:
    stage, driver = "refresh-eigen", "refresh-driver"
    for where in PLACES:
        for core, kernels in KERNELS.items():
            own = run.figure(where, stage, core)
            alone = run.figure(where, driver, kernels)
            plain = run.figure(where, stage, kernels)
            noisy = run.noisy(where, stage, core) or run.noisy(where, driver, kernels)
            yield Result(
                f"{TITLES[stage]}, over the fastest driver's own time",
                *(where, core, run.threads),
                ratio(own, alone),
                greatest=DRIVER,
                bound=run.by_kernels(core, ratio(plain, alone)),
                noisy=noisy,
            )


def _cycles(run: Run) -> Iterator[Result]:
    """Judge the whole cycle, by whichever way of solving is the faster."""
    ways = ("cycle", "cycle-triangular")
    for place, where in enumerate(PLACES):
        lu, eigen = (run.recorded_cycle(where, kind) for kind in ("inverse", "eigen"))
        others = {
            "kfac-pytorch": ("kfac-pytorch's recorded one by LU", lu),
            "curvlinops": (
                "curvlinops'",
                run.figure(where, "cycle", "curvlinops", "rooflines"),
            ),
        }
        for core in KERNELS:
            way, own = run.fastest(where, ways, core)
            alone = {
                by: run.fastest(where, ways, KERNELS[by])[1]
                for by in dict.fromkeys((core, "numpy"))
            }
            for other, (name, rooflines) in others.items():
                notes = [
                    *(
                        run.by_kernels(by, ratio(rooflines, x))
                        for by, x in alone.items()
                    ),
                    TITLES[way],
                ]
                if other == "kfac-pytorch" and own and eigen:
                    notes += [
                        f"{eigen / own:.2f} over its default, eigendecompositions"
                    ]
                yield Result(
                    f"whole cycle, how many times as fast as {name}",
                    *(where, core, run.threads),
                    ratio(rooflines, own),
                    least=CYCLE_OVER[other][place],
                    bound="; ".join(filter(None, notes)),
                    noisy=run.noisy(where, way, core),
                )


def _growth(run: Run) -> Iterator[Result]:
    """Judge exponents, where the whole of a sweep was measured."""
    for stage, sweep, exponent in EXPONENTS:
        sizes = [workload.size for workload in SWEEPS if workload.sweep == sweep]
        for core, kernels in KERNELS.items():
            own = run.exponent(sweep, stage, core, sizes)
            alone = run.exponent(sweep, stage, kernels, sizes)
            yield Result(
                f"{TITLES[stage]}, the exponent in {sweep}",
                *(f"{sizes[0]} to {sizes[-1]}", core, run.threads),
                own,
                least=(1.0 - TOLERANCE) * exponent,
                greatest=(1.0 + TOLERANCE) * exponent,
                unit="",
                bound=run.by_kernels(core, alone, unit=""),
            )


def _memory(run: Run) -> Iterator[Result]:
    """Judge what a call adds to the memory that is held; one run is enough."""
    if run.threads != "1":
        return
    for stage, greatest in MEMORY_LIMITS.items():
        for where in PLACES:
            for core, kernels in KERNELS.items():
                yield Result(
                    f"{TITLES[stage]}, memory added over the factors' bytes",
                    *(where, core, run.threads),
                    run.memory(where, stage, core),
                    greatest=greatest,
                    bound=run.by_kernels(core, run.memory(where, stage, kernels)),
                )


def _synchronizations(run: Run) -> Iterator[Result]:
    """Judge how often a step synchronizes with a GPU."""
    if not run.on_gpu:
        return
    for where in PLACES:
        for core in run.cores:
            waits, launches = run.counts(where, "cycle-status", core)
            yield Result(
                "host-device synchronizations in a step",
                *(where, core, run.threads),
                waits,
                greatest=0.0,
                unit="",
                bound="" if launches is None else f"{launches:.0f} launches",
            )


def _two_cores(runs: list[Run]) -> Iterator[Result]:
    by_threads = {run.threads: run for run in runs}
    one, two = by_threads.get("1"), by_threads.get("2")
    if any(run.on_gpu for run in runs):
        return
    stage = "refresh-inverse"
    for where in PLACES:
        for core, kernels in KERNELS.items():
            figure: float | None = None
            bound, noisy = "", False
            if one is not None and two is not None:
                figure = one.gain(two, where, stage, core)
                product = one.product_gain(two)
                alone = one.by_kernels(core, one.gain(two, where, stage, kernels))
                bound = "; ".join(filter(None, [alone, product]))
                noisy = any(run.noisy(where, stage, core) for run in (one, two))
            yield Result(
                f"{TITLES[stage]}, how many times as fast on two cores",
                *(where, core, "1, 2"),
                figure,
                least=TWO_CORES,
                bound=bound,
                noisy=noisy,
            )
