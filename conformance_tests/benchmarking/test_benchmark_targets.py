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
from benchmarks.workloads import SWEEPS, chosen_workloads  # noqa: E402


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
    ("stage", "where", "library", "greatest"),
    [
        ("statistics", "autoencoder", "numpy", 1.25),
        ("statistics", "transformer", "numpy", 1.15),
        ("statistics", "transformer", "torch", 1.45),
        ("refresh-inverse", "autoencoder", "numpy", 1.7),
        ("refresh-inverse", "transformer", "numpy", 1.2),
        ("refresh-inverse", "autoencoder", "torch", 2.2),
        ("refresh-inverse", "transformer", "torch", 1.9),
        ("refresh-cholesky", "autoencoder", "numpy", 0.55),
        ("refresh-cholesky", "transformer", "torch", 0.45),
        ("precondition-inverse", "transformer", "numpy", 1.1),
        ("precondition-solve", "autoencoder", "torch", 1.5),
    ],
)
def test_multiples_of_the_roofline(stage, where, library, greatest):
    """At the number a target is met, above it not, and the kernels are named."""
    kernels = {"numpy": "lapack", "torch": "torch-kernels"}[library]
    of_kernels = {(where, stage, kernels): {"rooflines": 0.91}}
    titles = {
        "statistics": "statistics with",
        "refresh-inverse": "refresh, inverses, over",
        "refresh-cholesky": "refresh, factorization only, over",
        "precondition-inverse": "precondition, inverses, over",
        "precondition-solve": "precondition, triangular",
    }
    target = titles[stage]
    if stage == "statistics":
        target = "statistics with moving average, over the roofline"

    def judged(rooflines):
        said = {(where, stage, library): {"rooflines": rooflines}}
        return one([run_of(said | of_kernels)], target, where, library)

    met, missed = judged(greatest), judged(greatest + 0.01)
    assert met.met
    assert not missed.met
    assert missed.greatest == greatest
    assert missed.bound == f"{LIBRARIES[kernels].title}: 0.91"


def test_the_fastest_peer_is_a_library_and_may_be_recorded():
    """Plain kernels are no peer, recorded figures count, and alone say nothing."""
    stage = ("autoencoder", "statistics")
    said = {
        (*stage, "numpy"): {"rooflines": 1.2},
        (*stage, "lapack"): {"rooflines": 1.0},
        (*stage, "kfac-jax"): {"rooflines": 3.0},
    }
    target = "statistics, how many"

    recorded = one([run_of(said)], target, "autoencoder", "numpy")
    said[(*stage, "curvlinops")] = {"rooflines": 1.1}
    measured = one([run_of(said)], target, "autoencoder", "numpy")
    alone = run_of({(*stage, "numpy"): {"rooflines": 1.2}})

    assert recorded.figure == pytest.approx(2.4 / 1.2)  # kronfluence's
    assert "kronfluence, recorded" in recorded.bound
    assert measured.figure == pytest.approx(1.1 / 1.2)
    assert not measured.met
    assert one([alone], target, "autoencoder", "numpy").figure is None


def test_eigendecompositions_are_put_over_the_driver_alone():
    """Of the array library that the core runs on."""
    said = {
        ("transformer", "refresh-eigen", "torch"): {"median": 1.06},
        ("transformer", "refresh-eigen", "torch-kernels"): {"median": 1.02},
        ("transformer", "refresh-driver", "torch-kernels"): {"median": 1.0},
        ("transformer", "refresh-driver", "lapack"): {"median": 9.0},
    }

    found = one(
        [run_of(said)], "refresh, eigendecompositions, over", "transformer", "torch"
    )

    assert found.figure == pytest.approx(1.06)
    assert not found.met
    assert found.bound == "plain PyTorch: 1.02"


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


def test_small_layers():
    """A call a layer over one for all; seconds a layer, of one and of 200."""
    said = {
        ("200 of 16", "refresh-inverse", "numpy"): {"median": 1.0, "noisy": True},
        ("200 of 16", "refresh-looped", "numpy"): {"median": 4.0},
        ("200 of 16", "refresh-inverse", "lapack"): {"median": 0.5},
        ("200 of 64", "precondition-inverse", "numpy"): {"median": 1.0},
        ("200 of 64", "precondition-looped", "numpy"): {"median": 1.29},
        ("200 of 1", "statistics", "numpy"): {"median": 200 * 49e-6},
        ("one by one", "statistics", "numpy"): {"median": 51e-6},
        ("one by one", "statistics", "lapack"): {"median": 2e-6},
    }
    runs = [run_of(said)]

    small = one(runs, "refresh, a call a layer", "200 of 16", "numpy")
    larger = one(runs, "precondition, a call a layer", "200 of 64", "numpy")
    of_many = one(runs, "statistics with", "200 of 1", "numpy")
    alone = one(runs, "statistics with", "one by one", "numpy")

    assert small.met
    assert small.noisy
    assert "0.50 of the one call" in small.bound
    assert not larger.met
    assert of_many.met
    assert of_many.figure == pytest.approx(49e-6)
    assert not alone.met
    assert alone.bound == "plain BLAS, LAPACK: 2 µs"


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


def test_memory_is_what_a_call_adds():
    """Over the factors' bytes, here 1000."""
    memory = {"statistics": {"numpy": {"before": 10, "held": 500, "peak": 1501}}}
    run = run_of({("autoencoder", "statistics", "numpy"): {}}, memory=memory)

    found = one([run], "statistics with moving average, memory", "autoencoder", "numpy")

    assert found.figure == pytest.approx(1.001)
    assert found.met
    # It is measured once, on one thread.
    assert not any("memory" in v.target for v in results([run | {"threads": 2}]))


def test_two_cores_are_compared_by_the_wall_clock():
    """Between a run on one thread and one on two; one alone says nothing."""
    key = ("autoencoder", "refresh-inverse", "numpy")
    first = run_of({key: {"wall": 1.7, "median": 9.0}})
    second = run_of({key: {"wall": 1.0, "median": 1.0, "noisy": True}}, threads=2)
    target = "refresh, inverses, how many times"

    found = one([first, second], target, "autoencoder", "numpy")

    assert found.figure == pytest.approx(1.7)
    assert found.met
    assert found.noisy
    assert found.bound == "a matrix product: 2.00"
    assert one([first], target, "autoencoder", "numpy").figure is None


@pytest.mark.parametrize(("waits", "met"), [(0, True), (1, False)])
def test_a_step_on_a_gpu_should_not_wait(waits, met):
    """Of every core; on a CPU there is no such target."""
    counts = {"counts": {"synchronizations": waits, "launches": 40}}
    said = {("autoencoder", "cycle-status", "cupy"): counts}

    found = one([run_of(said, device="cuda")], "host-device", "autoencoder", "cupy")

    assert found.met == met
    assert found.bound == "40 launches"
    assert not any(v.target.startswith("host-device") for v in results([run_of(said)]))


def test_the_stages_of_the_targets_are_timed():
    """Each result's figure comes from a stage that its workload has."""
    by_name = {w.name: w for w in chosen_workloads(["all"])}
    for where in ("autoencoder", "transformer"):
        assert by_name[where].memory
        assert set(by_name[where].stages) >= {
            *("statistics", "refresh-inverse", "refresh-cholesky", "refresh-eigen"),
            *("refresh-driver", "precondition-inverse", "precondition-solve"),
            *("precondition-eigen", "cycle", "cycle-triangular", "cycle-status"),
        }
    for where in ("200 of 16", "200 of 64"):
        assert set(by_name[where].stages) >= {"refresh-looped", "precondition-looped"}
    for where in ("200 of 1", "one by one"):
        assert set(by_name[where].stages) >= {
            *("statistics", "refresh-inverse", "precondition-inverse")
        }


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
