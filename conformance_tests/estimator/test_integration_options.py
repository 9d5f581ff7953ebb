"""What integrations share: schedules, likelihoods by name, the KL clip."""

from __future__ import annotations

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.integration import RowLoss, interval_at, row_loss, value_at
from kfac_core.losses import Bernoulli, Categorical, Gaussian, SquaredError

from ..builders.states import differences, frozen
from ..builders.tolerances import assert_close
from .test_natural_gradient import DAMPING, LAYER, call_of, dense_direction, natural


def test_schedules_are_numbers_or_functions_of_the_step():
    assert [value_at(0.5, step) for step in (0, 9)] == [0.5, 0.5]
    assert [value_at(lambda step: 1 / (1 + step), step) for step in (0, 3)] == [1, 0.25]
    assert interval_at("update_every", np.int64(3), 0) == 3
    assert interval_at("update_every", lambda step: 1 + step, 4) == 5
    for bad in (0, -1, 1.5, True, "3", None, lambda step: 0):
        with pytest.raises(kc.ConventionError, match="update_every"):
            interval_at("update_every", bad, 0)


def test_likelihoods_have_names():
    """A name, an object, or the loss of a row; nothing else, and no class."""
    assert row_loss("categorical").likelihood == Categorical()
    assert row_loss("bernoulli").likelihood == Bernoulli()
    assert row_loss("gaussian").likelihood == Gaussian(variance=1.0)
    assert row_loss(Categorical()).multiple(10) == 1.0
    mean = RowLoss(likelihood=Gaussian(variance=1.0), mean_over_outputs=True)
    assert row_loss(mean).multiple(10) == 0.1
    squares = row_loss(SquaredError(scale=1.0))
    assert squares == RowLoss(likelihood=Gaussian(variance=1.0), factor=2.0)
    with pytest.raises(kc.ConventionError, match="factor"):
        RowLoss(likelihood=Categorical(), factor=0.0)
    for bad in ("softmax", None, Categorical, 3.0):
        with pytest.raises(kc.ConventionError, match=r"'categorical'.*Gaussian"):
            row_loss(bad)


def test_bad_options_are_named():
    for name, bad in (
        ("update_every", 0),
        ("refresh_every", 1.5),
        ("bases_every", 0),
        ("kl_clip", -1.0),
        ("kl_clip", "large"),
        ("learning_rate", 0.0),
        ("learning_rate", None),
    ):
        with pytest.raises(kc.ConventionError, match=name):
            natural(**{name: bad})


@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_a_step_is_within_its_kl_bound(backend, rng, loss):
    """``nu = min(1, sqrt(kappa / (lr^2 grad . P grad)))``, of the mean's gradient."""
    x, g, V = (rng.normal(size=shape) for shape in ((6, 3), (2, 6, 2), (3, 2)))
    given = V * (6 if loss == "sum" else 1)
    plain = dense_direction(x, g, V, rows=6)
    size = float((V * plain).sum())
    for bound, rate in ((0.3 * size, 1.0), (size, 10.0), (2 * size, 1.0)):
        driver = natural(
            "exact", loss, kl_clip=bound, learning_rate=lambda step, rate=rate: rate
        )
        call = call_of(backend.asarray(x), *map(backend.asarray, g))
        gradients = {"one": {"weight": backend.asarray(given)}}
        found = driver.directions(gradients, [call], rows=6)["one"]["weight"]

        factor = min(1.0, (bound / (rate**2 * size)) ** 0.5)
        assert_close(backend.to_numpy(found), factor * plain, "inverse", "float64")
        assert driver.clip is not None
        assert float(driver.clip.scale) == pytest.approx(factor, rel=1e-12)


def test_dampings_and_decays_follow_their_schedules(backend, rng):
    """The damping of each refresh is the schedule's; an update has the decay's."""
    x, g, V = (rng.normal(size=shape) for shape in ((6, 3), (2, 6, 2), (3, 2)))
    driver = natural(damping=lambda step: DAMPING * 2.0**step, decay=lambda step: 0.0)
    gradients = {"one": {"weight": backend.asarray(V)}}
    for step in range(3):
        rows = x * (1 + step)
        call = call_of(backend.asarray(rows), *map(backend.asarray, g))
        found = driver.directions(gradients, [call], rows=6)["one"]["weight"]
        F = np.kron(rows.T @ rows / 6, np.einsum("mni,mnj->ij", g, g) / 6)
        expected = np.linalg.solve(F + DAMPING * 2.0**step * np.eye(6), V.reshape(-1))
        found = backend.to_numpy(found).reshape(-1)
        assert_close(found, expected, "inverse", "float64")


def test_bases_have_their_own_interval(backend, rng):
    """EKFAC's bases at the first step and every third; refreshes at each."""
    estimator = kc.Estimator(
        {"one": kc.Block(LAYER, kc.EKFAC())},
        damping=DAMPING,
        reduction="sum",
        mode="exact",
    )
    driver = kc.integration.NaturalGradient(estimator, reduction="mean", bases_every=3)
    V = backend.asarray(rng.normal(size=(3, 2)))
    ages = []
    for _ in range(5):
        x, g = rng.normal(size=(6, 3)), rng.normal(size=(6, 2))
        call = call_of(backend.asarray(x), backend.asarray(g))
        driver.directions({"one": {"weight": V}}, [call], rows=6)
        ages.append((estimator.state["one"].basis_age, estimator.state["one"].age))

    assert ages == [(0, 0), (1, 0), (2, 0), (0, 0), (1, 0)]


def test_a_step_that_fails_late_changes_nothing(backend, rng):
    """A damping that is negative only at the second step: statistics are as before."""
    x, g, V = (
        backend.asarray(rng.normal(size=shape)) for shape in ((6, 3), (6, 2), (3, 2))
    )
    driver = natural(damping=lambda step: DAMPING if step != 1 else -1.0)
    gradients = {"one": {"weight": V}}
    driver.directions(gradients, [call_of(x, g)], rows=6)
    before = frozen(driver.state_dict())
    with pytest.raises(kc.DampingError):
        driver.directions(gradients, [call_of(x, g)], rows=6)

    clipped = natural(kl_clip=lambda step: 1.0 if step != 1 else float("nan"))
    clipped.directions(gradients, [call_of(x, g)], rows=6)
    state = frozen(clipped.state_dict())
    with pytest.raises(kc.ConventionError, match="bound"):
        clipped.directions(gradients, [call_of(x, g)], rows=6)

    assert differences(frozen(driver.state_dict()), before) == []
    assert differences(frozen(clipped.state_dict()), state) == []
