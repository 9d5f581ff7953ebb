"""The demonstration: one run on every backend, its derivatives, what it shows."""

import json
import sys

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.cli import main
from kfac_core.cli.demo.network import Pass, initial_parameters
from kfac_core.cli.demo.optimizers import Adam, NesterovSGD

from ..builders.tolerances import assert_close


@pytest.fixture
def digits():
    """The training and the test images."""
    pytest.importorskip("sklearn", reason="the demo needs its extra")
    from kfac_core.cli.demo.command import load_digits

    return load_digits(0)


def losses_of(method, digits, *, rate, steps, seed=0):
    """Return the training losses of a run on the selected backend."""
    from kfac_core.cli.demo.command import train

    options = {"learning_rate": rate, "steps": steps, "seed": seed}
    return np.array(train(method, *digits, **options).losses)


def test_the_first_twenty_steps_are_the_same_on_every_backend(backend, digits):
    """K-FAC's losses agree with NumPy's in float64, with one seed."""
    with kc.use_backend("numpy"):
        expected = losses_of("K-FAC", digits, rate=1.0, steps=20, seed=3)

    with kc.use_backend(backend.selection):
        got = losses_of("K-FAC", digits, rate=1.0, steps=20, seed=3)

    assert len(got) == 5
    assert got[-1] < got[0]
    assert_close(got, expected, "trajectory", "float64")


def test_kfac_gets_below_adam_in_a_short_run(digits):
    """Forty steps of K-FAC beat forty of Adam with any of its learning rates."""
    from kfac_core.cli.demo.command import LEARNING_RATES

    with kc.use_backend("numpy"):
        kfac = losses_of("K-FAC", digits, rate=1.0, steps=40)
        adam = [
            losses_of("Adam", digits, rate=rate, steps=40)
            for rate in LEARNING_RATES["Adam"]
        ]

    assert np.all(np.isfinite(kfac))
    for losses in adam:
        assert losses[-1] < losses[0]
        assert kfac[-1] < losses.min() - 1.0


def test_gradient_and_jvp_are_derivatives(digits):
    """Central differences of the loss and of the logits, along a random direction."""
    rng = np.random.default_rng(0)
    with kc.use_backend("numpy"):
        parameters = initial_parameters(rng)
        images = digits[0][:50]
        direction = moved(parameters, rng=rng)
        here = Pass(parameters, images)
        above, below = (
            Pass(moved(parameters, direction, step), images) for step in (1e-5, -1e-5)
        )

    slope = sum(
        np.sum(g * direction[layer][name])
        for layer, arrays in here.gradient().items()
        for name, g in arrays.items()
    )
    np.testing.assert_allclose(
        slope, (above.loss() - below.loss()) / 2e-5, rtol=1e-6, atol=1e-8
    )
    np.testing.assert_allclose(
        here.jvp(direction),
        (above.logits - below.logits) / 2e-5,
        rtol=1e-5,
        atol=1e-6,
    )


def moved(parameters, direction=None, step=1.0, *, rng=None):
    """Return parameters a step along a direction, or a random direction itself."""
    return {
        layer: {
            name: rng.standard_normal(array.shape)
            if direction is None
            else array + step * direction[layer][name]
            for name, array in arrays.items()
        }
        for layer, arrays in parameters.items()
    }


class Slope:
    """A batch of which only the gradient is asked for: the identity's, or a given one."""

    def __init__(self, value):
        self.value = value

    def gradient(self):
        return {"fc": {"weight": np.array([self.value])}}


@pytest.mark.parametrize("method", ["SGD", "Adam"])
def test_first_order_steps_are_the_published_ones(method):
    """Three steps on given gradients, beside scalar recurrences from the papers."""
    rate, gradients = 0.1, (2.0, -1.0, 0.5)
    made = {"SGD": NesterovSGD, "Adam": Adam}[method]
    start = {"fc": {"weight": np.array([0.0])}}
    optimizer = made(start, learning_rate=rate)
    expected, v, m, s = [], 0.0, 0.0, 0.0
    for step, g in enumerate(gradients, start=1):
        if method == "SGD":
            v = 0.9 * v - rate * g
            expected.append(0.9 * v - rate * g)
        else:
            m, s = 0.9 * m + 0.1 * g, 0.999 * s + 0.001 * g**2
            root = (s / (1 - 0.999**step)) ** 0.5
            expected.append(-rate * m / (1 - 0.9**step) / (root + 1e-8))

    got = [optimizer.change(Slope(g))["fc"]["weight"][0] for g in gradients]

    assert_close(np.array(got), np.array(expected), "roundoff", "float64")


def test_another_seed_is_another_run(digits):
    with kc.use_backend("numpy"):
        one = losses_of("SGD", digits, rate=0.04, steps=2, seed=0)
        other = losses_of("SGD", digits, rate=0.04, steps=2, seed=1)

    assert np.all(one != other)


def test_a_run_that_diverges_is_ended(digits):
    """The record ends with the loss that is not finite; the least loss is finite."""
    from kfac_core.cli.demo.command import train

    with kc.use_backend("numpy"), np.errstate(all="ignore"):
        run = train("SGD", *digits, learning_rate=1e300, steps=50, seed=0)

    assert run.steps[-1] < 50
    assert not np.isfinite(run.losses[-1])
    assert run.least == run.losses[0]


def test_the_command_prints_a_table_and_writes_a_picture(tmp_path, capsys):
    """A line for each run, a row for each method, and a PNG."""
    pytest.importorskip("matplotlib", reason="the demo needs its extra")
    options = ["--quick", "--steps", "20", "--output", str(tmp_path)]

    code = main(["demo", *options])

    printed = capsys.readouterr().out
    assert code == 0
    assert printed.count("at step 20") == 6
    _, _, table = printed.partition("The best run of each method")
    for method in ("SGD", "Adam", "K-FAC"):
        assert table.count(f"\n  {method} ") == 1
    assert "times fewer steps" in printed
    (picture,) = tmp_path.glob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_json_has_every_run_and_kfac_is_below_adam(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the demo needs its extra")
    options = ["--quick", "--steps", "25", "--output", str(tmp_path), "--json"]

    assert main(["demo", *options]) == 0

    found = json.loads(capsys.readouterr().out)
    least = {
        method: min(
            loss
            for run in found["runs"]
            if run["method"] == method
            for loss in run["losses"]
        )
        for method in ("SGD", "Adam", "K-FAC")
    }
    assert [len(run["steps"]) for run in found["runs"]] == [6] * 6
    assert least["K-FAC"] < least["Adam"] - 0.5
    assert set(found["best_learning_rates"]) == set(least)


@pytest.mark.parametrize("module", ["sklearn", "rich", "matplotlib"])
def test_without_its_extra_the_demo_says_what_to_install(module, monkeypatch, capsys):
    """A missing package is one line that names the extra, and exit code 2."""
    monkeypatch.setitem(sys.modules, module, None)

    assert main(["demo", "--quick"]) == 2
    assert "kfac-core[demo]" in capsys.readouterr().err


def test_an_unknown_backend_is_an_error_before_anything_runs(
    monkeypatch, tmp_path, capsys
):
    for name in ("sklearn", "rich", "matplotlib"):
        pytest.importorskip(name, reason="the demo needs its extra")
    monkeypatch.setenv("KFAC_CORE_BACKEND", "nonsense")

    assert main(["demo", "--quick", "--output", str(tmp_path)]) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert "nonsense" in err
