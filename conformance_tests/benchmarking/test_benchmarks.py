"""The benchmark: its parts on problems that are too small to time.

No test here looks at a time: what is checked is that every library computes the same and
the right thing, and that what is written has the form that is read.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys

import numpy as np
import pytest

import kfac_core as kc

from ..builders.benchmark_folder import import_benchmarks

import_benchmarks()

from benchmarks import (  # noqa: E402
    agreement,
    command,
    growth,
    report,
    timing,
    workloads,
)
from benchmarks.libraries import LIBRARIES  # noqa: E402
from benchmarks.options import Options  # noqa: E402
from benchmarks.process import Process  # noqa: E402
from benchmarks.run import run  # noqa: E402
from benchmarks.stages import (  # noqa: E402
    CORE_STAGES,
    EIGEN_STAGES,
    LOOPED_STAGES,
    MAIN_STAGES,
    stage_flops,
)
from benchmarks.worker import Worker  # noqa: E402

LAYERS = (workloads.Layer(5, 3, True, 12), workloads.Layer(4, 5, False, 8))
TINY = workloads.Workload("tiny", LAYERS, MAIN_STAGES + EIGEN_STAGES + LOOPED_STAGES)


def answers_of(library, workload, folder):
    """Return what a library answers to every stage that has an answer, and the files."""
    worker = Worker(library, device="cpu", threads=1, clock="cpu")
    assert worker.answer_to({"do": "prepare", "workload": workload.to_plain()}) == {}
    found = {}
    for stage in workload.stages:
        reply = worker.answer_to({"do": "setup", "stage": stage})
        if "absent" in reply:
            continue
        assert reply["calls"] >= 1, reply
        if stage.startswith("precondition"):
            path = folder / f"{library}-{stage}.npz"
            request = {"do": "answer", "stage": stage, "path": str(path)}
            assert worker.answer_to(request) == {}
            found[stage] = path
    return found


def check_answers(found, workload):
    reference = agreement.Reference(workload)
    for stage, path in found.items():
        [compared] = reference.compared(stage, {"it": path}).values()

        assert compared["residual"] < 1e-4, (stage, compared)
        assert compared["agrees"]


def test_every_stage_of_the_library_gives_the_right_answer(backend, tmp_path):
    """Statistics, damping, inverses, solves and bases, against factors in float64."""
    if backend.name not in LIBRARIES:
        pytest.skip(f"the benchmark has no adapter of {backend.name}")
    few = TINY
    if backend.name == "jax":  # which compiles every stage for a second and more
        stages = ("cycle", "precondition-inverse", "precondition-eigen")
        few = workloads.Workload("tiny", LAYERS[:1], stages)

    found = answers_of(backend.name, few, tmp_path)

    assert len(found) == sum(stage.startswith("precondition") for stage in few.stages)
    check_answers(found, few)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("peer", [n for n, e in LIBRARIES.items() if not e.core])
def test_every_peer_gives_the_same_answer(peer, tmp_path):
    """Nobody is timed on another computation."""
    missing = [m for m in LIBRARIES[peer].needs if not importlib.util.find_spec(m)]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")

    found = answers_of(peer, TINY, tmp_path)

    assert {"precondition-inverse", "precondition-eigen"} <= set(found)
    check_answers(found, TINY)


@pytest.mark.parametrize(
    "change",
    [
        lambda U: 1.01 * U,
        lambda U: np.concatenate([U[:-1], 0 * U[-1:]]),
        lambda U: U[:-1],
    ],
    ids=["scaled", "without its bias", "too small"],
)
def test_another_answer_is_told_from_the_right_one(change, tmp_path):
    """A scale off by a hundredth, a lost bias or a lost row does not agree."""
    pytest.importorskip("scipy")
    one = workloads.Workload("tiny", LAYERS, ("precondition-inverse",))
    path = answers_of("lapack", one, tmp_path)["precondition-inverse"]
    with np.load(path) as file:
        arrays = [change(file["arr_0"]), file["arr_1"]]
    np.savez(path, *arrays)
    reference = agreement.Reference(TINY)

    if arrays[0].shape != LAYERS[0].shape:
        assert reference._residual(0, arrays[0], "factored") == np.inf
        return
    compared = reference.compared("precondition-inverse", {"it": path})

    assert not compared["it"]["agrees"]


def test_the_flops_of_the_roofline():
    """SYRK, POTRF with POTRI, and two GEMMs, summed over the layers."""
    layers = LAYERS  # (6, 3) with 12 rows, (4, 5) with 8

    assert stage_flops("statistics", layers) == 12 * (36 + 9) + 8 * (16 + 25)
    assert stage_flops("refresh-cholesky", layers) == 216 + 27 + 64 + 125
    assert stage_flops("precondition-eigen", layers) == 2 * 18 * 9 + 2 * 20 * 9
    assert stage_flops("cycle", layers) == sum(
        stage_flops(s, layers) for s in ("statistics", "refresh", "precondition")
    )


def test_resnet50_has_its_layers():
    """The 53 convolutions, with a ResNet-50's 23.5 million weights."""
    [resnet] = workloads.chosen_workloads(["resnet50"])

    assert len(resnet.layers) == 53
    assert sum(x.inputs * x.outputs for x in resnet.layers) == 23_454_912


def test_noisy_samples_are_left_out_of_the_median():
    """Where three quiet ones remain; else all count, and it is said."""
    quiet = [timing.Sample(2.0, s, None, 1.0) for s in (1.0, 2.0, 3.0)]
    noisy = [timing.Sample(9.0, 9.0, None, 2.0)] * 3

    kept = timing.summary(quiet + noisy, clock="cpu")
    few = timing.summary(quiet[:2] + noisy, clock="cpu")

    assert (kept.median, kept.least, kept.quiet, kept.samples) == (2.0, 1.0, 3, 6)
    assert not kept.noisy
    assert few.median == 9.0
    assert few.noisy


def test_the_exponent_of_a_power():
    """Of ``3 n^2.5`` it is 2.5, whatever the constant."""
    points = [(n, 3.0 * n**2.5) for n in (10, 20, 50)]

    assert growth.slope(points) == pytest.approx(2.5)


def test_an_unknown_workload_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"no workload 'x'.*autoencoder"):
        workloads.chosen_workloads(["x"])


def test_a_run_has_the_form_that_is_reported(capsys):
    """One process, two points of a sweep and a workload, into JSON and a table."""
    square = (workloads.Layer(3, 3, False, 4),)
    points = tuple(
        workloads.Workload(f"width {n}", square, ("statistics",), 1, "width", n)
        for n in (3, 6)
    )
    small = workloads.Workload("small", LAYERS, CORE_STAGES)
    said = []
    options = Options(
        (small, *points),
        ("numpy", "lapack"),
        sys.executable,
        repetitions=3,
        patience=60.0,
        memory=False,
        gemm_sizes=(64,),
        pythons={"lapack": "no-such-python"},
        say=said.append,
    )

    found = run(options)

    assert json.loads(json.dumps(found)) == found
    assert any(line.startswith("lapack is left out: no-such-python") for line in said)
    first = found["workloads"][0]
    for stage in CORE_STAGES:
        figures = first["stages"][stage]["numpy"]
        assert figures["samples"] == 3
        assert 0 < figures["least"] <= figures["median"] <= figures["upper"]
        rate = max(found["gemm"].values())
        seconds = stage_flops(stage, LAYERS) / rate
        assert figures["rooflines"] == pytest.approx(figures["median"] / seconds)
    assert first["agreement"]["precondition-inverse"]["numpy"]["agrees"]
    found["growth"] = growth.growth(found["workloads"])
    assert [curve["sweep"] for curve in found["growth"]] == ["width"]
    report.print_report(found)
    page = capsys.readouterr().out
    for word in ("kfac_core numpy", "×roofline", "agrees", "growth"):
        assert word in page
    assert page.count("kfac_core numpy") > len(CORE_STAGES)


def test_a_library_that_takes_too_long_costs_its_own_figures_only():
    """It is ended, every later request says why, and nothing waits for it."""
    process = Process(
        "numpy",
        python=sys.executable,
        device="cpu",
        clock="cpu",
        threads=1,
        patience=0.01,
    )

    first, second = process.ask("hello"), process.ask("gemm", sizes=[8])
    process.close()

    assert first == second == {"error": "took longer than 0.01 s"}


@pytest.mark.parametrize(
    ("stage", "solving"), [("refresh-inverse", "inverse"), ("refresh-cholesky", "L")]
)
def test_guards_and_certificates_are_on_in_what_is_timed(stage, solving):
    """Each factor has a residual without a fallback, and rows of NaN are refused."""
    worker = Worker("numpy", device="cpu", threads=1, clock="cpu")
    worker.answer_to({"do": "prepare", "workload": TINY.to_plain()})
    worker.answer_to({"do": "setup", "stage": stage})
    estimator = worker._library._estimator

    for name, block in estimator.report().items():
        residuals = [factor.residual for factor in block.factors.values()]
        assert 0 < max(residuals) < 1e-5
        assert {factor.fallback for factor in block.factors.values()} == {"working"}
        part = estimator.operator(name).input
        assert (part.inverse is None) == (solving == "L")
    x, g = (rows.copy() for rows in TINY.rows(0, 0))
    x[0, 0] = np.nan
    with pytest.raises(kc.NotFiniteError, match="layer0"):
        estimator.update({"layer0": kc.Batch(x, g)})


def test_another_way_of_solving_keeps_the_statistics():
    """What a stage is timed on is what was fed, whichever stages came before."""
    worker = Worker("numpy", device="cpu", threads=1, clock="cpu")
    worker.answer_to({"do": "prepare", "workload": TINY.to_plain()})
    library = worker._library
    held = [library._estimator.state[name].statistics for name in library._blocks]

    for stage in ("refresh-cholesky", "precondition-eigen", "refresh-inverse"):
        library.stage(stage)

    for name, before in zip(library._blocks, held, strict=True):
        after = library._estimator.state[name].statistics
        for side in ("input", "output"):
            old, new = (
                held.averages[side].value(debias=True).full()
                for held in (before, after)
            )
            assert np.allclose(old, new, rtol=1e-6, atol=0.0)


def test_the_fastest_driver_is_timed_on_the_factors_themselves():
    """SYEVD or SYEVR, whose eigenvalues are those of float64."""
    pytest.importorskip("scipy")
    worker = Worker("lapack", device="cpu", threads=1, clock="cpu")
    worker.answer_to({"do": "prepare", "workload": TINY.to_plain()})

    found = worker._library.stage("refresh-driver")()

    reference = agreement.Reference(TINY)
    factors = [M for i in range(len(LAYERS)) for M in reference._factors[i]]
    for made, M in zip(found, factors, strict=True):
        expected = np.linalg.eigvalsh(M)
        assert np.allclose(np.sort(made[0]), expected, atol=1e-5 * expected[-1])


def test_the_command_writes_runs_and_targets(tmp_path, capsys, monkeypatch):
    """A run for each number of threads, and results over all; nothing else is said."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    arguments = parser.parse_args(
        ["--quick", "--json", "--threads", "1", "2", "--output", str(tmp_path)]
    )

    def measured(options):
        figures = {"median": 1.0, "wall": 2.0 / options.threads, "noisy": False}
        of_stage = {"refresh-inverse": {"numpy": figures}}
        workload = {"name": "transformer", "sweep": "", "stages": of_stage}
        return {
            "threads": options.threads,
            "device": "cpu",
            "libraries": {"numpy": {"title": "it", "core": True, "kernels": False}},
            "gemm": {},
            "workloads": [workload | {"agreement": {}, "memory": {}, "flops": None}],
        }

    monkeypatch.setattr(command, "run", measured)
    monkeypatch.setattr(command, "processors", lambda: 2)

    code = command.main(arguments)

    printed = json.loads(capsys.readouterr().out)
    assert code == 0
    assert printed == json.loads((tmp_path / "benchmarks.json").read_text())
    assert [run["threads"] for run in printed["runs"]] == [1, 2]
    [judged] = [t for t in printed["targets"] if t["figure"] is not None]
    assert judged["target"].endswith("how many times as fast on two cores")
    assert judged["figure"] == 2.0
    assert judged["met"]


def test_more_threads_than_processors_are_refused(capsys, monkeypatch):
    """They would share one, and nobody would see it."""
    monkeypatch.setattr(command, "run", lambda options: pytest.fail("it was run"))
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)

    code = command.main(parser.parse_args(["--quick", "--threads", "1", "100000"]))

    assert code == 2
    assert "processors" in capsys.readouterr().err


def test_the_command_refuses_what_it_does_not_know(capsys):
    """An unknown library is exit code 2 and a list, and nothing is run."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)

    code = command.main(parser.parse_args(["--quick", "--libraries", "x"]))

    assert code == 2
    assert "no library 'x'" in capsys.readouterr().err
