"""The benchmark: its parts on problems that are too small to time.

No test here looks at a time: what is checked is that every library computes the same and
the right thing, and that what is written has the form that is read.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

import kfac_core as kc

from ..builders.benchmark_folder import import_benchmarks

import_benchmarks()

from benchmarks import (  # noqa: E402
    agreement,
    growth,
    report,
    workloads,
)
from benchmarks.libraries import LIBRARIES  # noqa: E402
from benchmarks.options import Options  # noqa: E402
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


@pytest.mark.parametrize(
    "change",
    [
        lambda U: 1.01 * U,
        lambda U: np.concatenate([U[:-1], 0 * U[-1:]]),
        lambda U: U[:-1],
    ],
    ids=["scaled", "without its bias", "too small"],
)
def test_wrong_answers_disagree(change, tmp_path):
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


def test_the_flops_of_optimizers():
    """Gram matrices and POTRF in float64; rotations, and a renewal of bases."""
    layers = (workloads.Layer(300, 4, True, 8), workloads.Layer(4, 5, False, 8))
    renewal = 3 * 100**3 + 4**3 + 4**3 + 5**3  # blocks of 100 for a side of 300
    pairs = 2 * 1200 * (100 + 4) + 2 * 20 * (4 + 5)
    grams = 8 * (3 * 100**2 + 4**2 + 4**2 + 5**2)

    assert stage_flops("samples-direction", layers) == pytest.approx(
        2 * (64 * (305 + 9) + 16 * (301 * 4 + 20) + 8**3 / 3)
    )
    assert stage_flops("soap-steps", layers) == pytest.approx(
        22 * pairs + renewal * 20 / 3 + grams + 32 * (1200 + 20)
    )


def test_plain_kernels_and_the_library_give_the_same_direction(backend, tmp_path):
    """Of Gauss-Newton in the space of samples, by two programs."""
    pytest.importorskip("scipy")
    if backend.name not in ("numpy", "torch"):
        pytest.skip("it is computed in float64")
    layers = (workloads.Layer(5, 3, True, 9), workloads.Layer(3, 2, False, 9))
    tiny = workloads.Workload("tiny", layers, ("samples-direction",)).to_plain()
    directions = []
    for name in (backend.name, "lapack"):
        worker = Worker(name, device="cpu", threads=1, clock="cpu")
        path = str(tmp_path / f"{name}.npz")
        worker.answer_to({"do": "prepare", "workload": tiny})
        request = {"do": "answer", "stage": "samples-direction", "path": path}
        assert worker.answer_to(request) == {}
        directions.append(np.load(path))

    for name, direction in directions[0].items():
        np.testing.assert_allclose(direction, directions[1][name], rtol=1e-5)


@pytest.mark.parametrize("library", ["torch", "torch-kernels"])
def test_steps_of_soap_run(library):
    """The stage is set up, and its steps give finite results."""
    torch = pytest.importorskip("torch")
    layers = (workloads.Layer(5, 3, True, 9), workloads.Layer(130, 2, False, 9))
    worker = Worker(library, device="cpu", threads=1, clock="cpu")
    tiny = workloads.Workload("tiny", layers, ("soap-steps",)).to_plain()
    worker.answer_to({"do": "prepare", "workload": tiny})

    assert worker.answer_to({"do": "setup", "stage": "soap-steps"})["calls"] >= 1

    steps = worker._call() or []
    assert all(bool(torch.isfinite(step).all()) for step in steps)


def test_resnet50_has_its_layers():
    """The 53 convolutions, with a ResNet-50's 23.5 million weights."""
    [resnet] = workloads.chosen_workloads(["resnet50"])

    assert len(resnet.layers) == 53
    assert sum(x.inputs * x.outputs for x in resnet.layers) == 23_454_912


def test_rows_of_passes_are_activations_and_gradients():
    """Each layer's are linear in the last one's, up to tanh and its derivative."""
    layers = (workloads.Layer(3, 5, True, 40), workloads.Layer(5, 4, True, 40))
    (x, g), (h, e) = workloads.Workload("w", layers, (), passes=True).batch(0)

    def residual(inputs, outputs):
        solution = np.linalg.lstsq(inputs, outputs)[0]
        return np.abs(inputs @ solution - outputs).max()

    assert residual(x, np.arctanh(h)) < 1e-5
    assert residual(e, g / (1.0 - h * h)) < 1e-5
    assert np.abs(e).max() < 1.0


def test_a_run_has_the_form_that_is_reported(capsys):
    """One process, two points of a sweep and a workload, into JSON and a table."""
    square = (workloads.Layer(3, 3, False, 4),)
    points = tuple(
        workloads.Workload(f"width {n}", square, ("statistics",), 1, "width", n)
        for n in (3, 6)
    )
    # A stage that NumPy's adapter does not have is left out of the report.
    stages = (*CORE_STAGES, "refresh-driver")
    small = workloads.Workload("small", LAYERS, stages)
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


@pytest.mark.parametrize(
    ("stage", "solving"), [("refresh-inverse", "inverse"), ("refresh-cholesky", "L")]
)
def test_benchmarks_run_with_checks_on(stage, solving):
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
