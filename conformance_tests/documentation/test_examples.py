"""The example programs of the documentation train: their loss falls."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

import kfac_core as kc

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
PROGRAMS = ["shampoo", "soap", "kl_shampoo"]

pytestmark = pytest.mark.skipif(
    not EXAMPLES.is_dir(), reason="the documentation is not here"
)


@pytest.fixture
def example(monkeypatch):
    """A function that imports an example by name, as running it would."""
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module
    for name in ("digits", *PROGRAMS):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_trains(backend, example, capsys, request, name):
    """In 21 steps the loss on all digits falls from 2.3 to less than half of that."""
    if name != "shampoo":  # One of the programs is enough for a start.
        request.getfixturevalue("compiles_long")
    with kc.use_backend(f"{backend.name}:{backend.spec.partition(':')[2]}"):
        before, after = example(name).train(steps=21)

    assert 2.0 < before < 3.0
    assert after < 0.5 * before
    assert "step   20  loss" in capsys.readouterr().out


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_is_short(name):
    """A program that fits on a page."""
    lines = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()

    assert len(lines) < 60


def test_without_steps_nothing_is_learned(example, capsys):
    """The row that must differ: the loss before and after no step is the same."""
    before, after = example("shampoo").train(steps=0)

    assert before == after


@pytest.fixture
def tuning(monkeypatch):
    """The program of the page on tuning."""
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module("tuning")
    del sys.modules["tuning"]


def test_the_problems_of_the_page_on_tuning_are_trained(tuning):
    """By both methods, each loss stays above its floor, and gradients are derivatives."""
    for problem in tuning.problems():
        parameters = problem.initial()
        before = problem.mean_loss(parameters)
        rows = np.arange(len(problem.inputs))
        _, _, found = tuning.gradients(problem, parameters, rows)
        weight, gradient = parameters["layer0"]["weight"], found["layer0"]["weight"]
        place = np.unravel_index(np.argmax(np.abs(gradient)), gradient.shape)
        losses = []
        for change in (1e-5, -2e-5):
            weight[place] += change
            losses.append(problem.mean_loss(parameters))
        slope = (losses[0] - losses[1]) / 2e-5

        assert slope == pytest.approx(gradient[place], rel=1e-5)
        assert 0.0 < tuning.train_kfac(problem, 8, clip=1e-2) < before
        assert 0.0 < tuning.train_adam(problem, 8, 0.01) < before
