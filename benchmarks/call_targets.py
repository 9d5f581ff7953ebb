"""The targets of small layers, which are made of calls: see `benchmarks.targets`."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.limits import CALL, LOOPED
from benchmarks.measured import KERNELS, Run, ratio
from benchmarks.result import Result
from benchmarks.stages import TITLES

STAGES = ("statistics", "refresh-inverse", "precondition-inverse")


def loops(run: Run, /) -> Iterator[Result]:
    """Judge what equal layers gain by being computed together.

    Parameters
    ----------
    run : Run
        On one number of threads.

    Yields
    ------
    Result
        For each stage, size and core.
    """
    for where, least in LOOPED.items():
        for stage in ("refresh", "precondition"):
            for core, kernels in KERNELS.items():
                whole = run.figure(where, f"{stage}-inverse", core)
                looped = run.figure(where, f"{stage}-looped", core)
                alone = run.figure(where, f"{stage}-inverse", kernels)
                bound = ""
                if whole and alone:
                    share = f"{alone / whole:.2f} of the one call"
                    bound = f"{run.title(kernels)} in a loop takes {share}"
                yield Result(
                    f"{stage}, a call a layer over one call for all",
                    *(where, core, run.threads),
                    ratio(looped, whole),
                    least=least,
                    bound=bound,
                    noisy=run.noisy(where, f"{stage}-inverse", core),
                )


def calls(run: Run, /) -> Iterator[Result]:
    """Judge what a layer costs where there is nothing in it to compute.

    Parameters
    ----------
    run : Run
        On one number of threads.

    Yields
    ------
    Result
        For each stage and core, of one layer alone and of one among 200.
    """
    for where, layers in (("one by one", 1), ("200 of 1", 200)):
        for stage in STAGES:
            for core, kernels in KERNELS.items():
                own = run.figure(where, stage, core)
                alone = run.figure(where, stage, kernels)
                yield Result(
                    f"{TITLES[stage]}, a layer of 1x1",
                    *(where, core, run.threads),
                    None if own is None else own / layers,
                    greatest=CALL,
                    unit="s",
                    bound=run.by_kernels(
                        core, None if alone is None else alone / layers, unit="s"
                    ),
                    noisy=run.noisy(where, stage, core),
                )
