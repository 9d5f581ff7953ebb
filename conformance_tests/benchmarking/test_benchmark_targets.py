"""The benchmark's results, on runs whose figures are written by hand."""

from __future__ import annotations

import re

import pytest

from ..builders.benchmark_folder import import_benchmarks

import_benchmarks()

from benchmarks.growth import growth  # noqa: E402
from benchmarks.libraries import LIBRARIES  # noqa: E402
from benchmarks.report import print_results  # noqa: E402
from benchmarks.targets import results  # noqa: E402
from benchmarks.workloads import SWEEPS  # noqa: E402


def run_of(figures, *, threads=1, device="cpu", memory=None, sweeps=()):
    """Return a run with ``{(workload, stage, library): figures}``."""
    workloads = {}
    for (workload, stage, library), said in figures.items():
        of = workloads.setdefault(
            workload,
            {
                "name": workload,
                "sweep": "",
                "factor_bytes": 1000,
                # Weights that the eye can check.
                "flops": {
                    "statistics": 1.0,
                    "refresh-inverse": 2.0,
                    "refresh-eigen": 2.0,
                    "precondition-inverse": 1.0,
                    "precondition-eigen": 1.0,
                },
                "stages": {},
                "memory": memory or {},
            },
        )
        of["stages"].setdefault(stage, {})[library] = said
    of_libraries = {
        name: {"title": entry.title, "core": entry.core, "kernels": entry.kernels}
        for name, entry in LIBRARIES.items()
    }
    return {
        "threads": threads,
        "device": device,
        "libraries": of_libraries,
        "gemm": {"numpy": 100.0 * threads},
        "workloads": [*workloads.values(), *sweeps],
        "growth": growth(sweeps),
    }


def one(runs, target, where, library, threads=None):
    """Return the result of which the target begins so."""
    [found] = [
        v
        for v in results(runs)
        if v.target.startswith(target)
        and (v.where, v.library) == (where, library)
        and threads in (None, v.threads)
    ]
    return found


@pytest.mark.parametrize(
    ("stage", "target", "greatest"),
    [
        ("statistics", "statistics with moving average, over the roofline", 1.25),
        ("refresh-inverse", "refresh, inverses, over", 1.7),
        ("refresh-cholesky", "refresh, factorization only, over", 0.55),
    ],
)
def test_multiples_of_the_roofline(stage, target, greatest):
    """At the number a target is met, above it not, and the kernels are named."""
    where = "autoencoder"

    def judged(rooflines):
        figures = {"numpy": rooflines, "lapack": 0.91}
        said = {(where, stage, n): {"rooflines": x} for n, x in figures.items()}
        return one([run_of(said)], target, where, "numpy")

    met, missed = judged(greatest), judged(greatest + 0.01)
    assert met.met
    assert not missed.met
    assert missed.greatest == greatest
    assert missed.bound == f"{LIBRARIES['lapack'].title}: 0.91"


def test_the_cycle_is_compared_with_recorded_stages_and_with_curvlinops():
    """Recorded multiples are weighted by rooflines; the faster way of solving counts."""
    place = "autoencoder"
    said = {
        (place, "cycle", "numpy"): {"rooflines": 1.5},
        (place, "cycle-triangular", "numpy"): {"rooflines": 1.25},
        (place, "cycle", "curvlinops"): {"rooflines": 2.0},
    }
    runs = [run_of(said)]
    lu = (2.7 * 1 + 6.1 * 2 + 1.14 * 1) / 4
    eigen = (2.7 * 1 + 8.7 * 2 + 2.4 * 1) / 4

    recorded = one(runs, "whole cycle, how many times as fast as kfac", place, "numpy")
    measured = one(runs, "whole cycle, how many times as fast as curv", place, "numpy")

    assert recorded.figure == pytest.approx(lu / 1.25)
    assert recorded.least == 2.5
    assert "by triangular solves" in recorded.bound
    assert f"{eigen / 1.25:.2f} over its default" in recorded.bound
    assert measured.figure == pytest.approx(2.0 / 1.25)
    assert measured.met


@pytest.mark.parametrize(
    ("exponent", "met"), [(2.69, False), (3.0, True), (3.31, False)]
)
def test_growth_is_judged_by_whole_sweeps(exponent, met):
    """A part of a sweep, such as a quick run's, has no result."""
    widths = [w.size for w in SWEEPS if w.sweep == "width"]
    points = [
        {
            "name": f"width {n}",
            "sweep": "width",
            "size": n,
            "stages": {"refresh-inverse": {"numpy": {"median": n**exponent}}},
        }
        for n in widths
    ]
    target = "refresh, inverses, the exponent in width"
    place = f"{widths[0]} to {widths[-1]}"

    whole = one([run_of({}, sweeps=points)], target, place, "numpy")
    part = one([run_of({}, sweeps=points[:-1])], target, place, "numpy")

    assert whole.figure == pytest.approx(exponent)
    assert whole.met == met
    assert part.figure is None
    assert not part.met


def test_the_table_says_what_is_met_and_what_was_not_measured(capsys):
    """In words, with the limit, and a tilde where samples were disturbed."""
    said = {
        ("autoencoder", "statistics", "numpy"): {"rooflines": 1.2},
        ("autoencoder", "statistics", "torch"): {"rooflines": 1.61, "noisy": True},
    }

    print_results(results([run_of(said)]))

    lines = capsys.readouterr().out.splitlines()
    text = " ".join(lines)
    assert re.search(r" numpy .* 1\.20 +≤ 1\.25 +met ", text)
    assert re.search(r" torch .* ~1\.61 .* NOT ", text)
    assert any("1 are met, 1 are not" in line for line in lines)
    assert any("not measured: refresh, eigendecompositions" in line for line in lines)
