"""The demo: one curve on every backend, and what the command prints and writes."""

import sys

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.cli import main
from kfac_core.cli.demo.training import Problem, make_optimizer

from ..builders.tolerances import assert_close


def kfac_losses(*, steps, seed, backend):
    """Return the losses of the batches in the first steps of K-FAC, in float64."""
    kc.enable_float64(backend=backend)
    problem = Problem(seed=seed, steps=steps, dtype="float64", backend=backend)
    optimizer = make_optimizer("K-FAC", problem, 1.0)
    return [
        optimizer.step(problem.to_backend(problem.digits.train[batch]))
        for batch in problem.batches
    ]


def test_the_first_twenty_steps_are_the_same_on_every_backend(backend):
    """K-FAC's losses agree with NumPy's to 1e-8 in float64, with one seed."""
    expected = kfac_losses(steps=20, seed=3, backend="numpy")

    spec = backend.spec.replace("strict", "array_api_strict", 1)
    got = kfac_losses(steps=20, seed=3, backend=spec)

    assert len(got) == 20
    assert np.all(np.isfinite(got))
    assert got[-1] < got[0]
    assert_close(np.array(got), np.array(expected), "trajectory", "float64")


def test_another_seed_is_another_run():
    """The seed decides the run."""
    one = kfac_losses(steps=2, seed=0, backend="numpy")
    other = kfac_losses(steps=2, seed=1, backend="numpy")

    assert one != other


def test_the_command_prints_a_table_and_writes_a_picture(tmp_path, capsys):
    """A short run names its grids, prints a row a method and leaves a PNG."""
    pytest.importorskip("sklearn", reason="the demo needs its extra")
    options = ["--quick", "--steps", "10", "--output", str(tmp_path)]

    code = main(["demo", *options])

    printed = capsys.readouterr().out
    assert code == 0
    for word in ("SGD", "Adam", "K-FAC", "Learning rates tried", "held-out"):
        assert word in printed
    (picture,) = tmp_path.glob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_its_extra_the_demo_says_what_to_install(monkeypatch, capsys):
    """A missing package is one line that names the extra, and exit code 2."""
    monkeypatch.setitem(sys.modules, "rich", None)

    code = main(["demo", "--quick"])

    assert code == 2
    assert "kfac-core[demo]" in capsys.readouterr().err
