"""Steps on other data: their damping, their rate and their momentum, in plain NumPy."""

import numpy as np
import pytest

import kfac_core as kc

from ..builders.tolerances import assert_close

N = 6
LAYER = kc.Dense(in_features=3, out_features=1, bias=False, weight_layout="io")


def options(**given):
    unset = dict.fromkeys(("minibatch", "rate", "damping", "momentum"))
    return kc.samples.GaussNewtonOptions.of(**(unset | given))


@pytest.mark.parametrize("centered", [False, True])
def test_the_damping_follows_the_residuals(backend, centered):
    """Two steps, the second with the first's direction; least squares by dense solves."""
    rng = np.random.default_rng(0)
    phi, progress = None, None
    chosen = options(minibatch=True, centered=centered)
    for _ in range(2):
        X, r = rng.normal(size=(N, 3)), rng.normal(size=N)
        J_dense, e = X, r
        if centered:
            J_dense, e = X - X.mean(axis=0), r - r.mean()
        lam = 0.003 * np.sqrt(np.mean(e**2) * np.sum(J_dense**2) / N)
        if centered:
            lam = 0.1 * 0.3 * np.sqrt(np.mean(e**2)) + 1e-4
        F = J_dense.T @ J_dense / N + lam * np.eye(3)
        start = np.zeros(3) if phi is None else phi
        expected = np.linalg.solve(F, J_dense.T @ e / N + lam * 0.95 * start)

        rows = kc.Batch(backend.asarray(X, "float64"), backend.asarray(np.ones((N, 1))))
        J = kc.samples.Jacobian.of({"a": LAYER}, {"a": rows})
        residuals = backend.asarray(r, "float64")
        result = kc.samples.gauss_newton_step(
            J,
            kc.samples.sample_gram(J),
            residuals,
            None,
            options=chosen,
            start=kc.samples.Evaluation(residuals, None),
            damping=chosen.damping,
            rate=0.3,
            last=None if phi is None else {"a": backend.asarray(phi[:, None])},
            progress=progress,
        )

        host = backend.to_numpy
        direction = result.direction["a"]["weight"]
        assert_close(host(result.damping), lam, "inverse", "float64")
        assert_close(host(direction[:, 0]), expected, "inverse", "float64")
        phi, progress = expected, result.progress


def rates(losses, backend):
    progress = kc.samples.BatchProgress.start(backend.asarray(np.zeros(()), "float64"))
    shares = []
    for loss in losses:
        progress = progress.after(backend.asarray(np.asarray(loss), "float64"))
        shares.append(float(progress.share))
    return shares


def test_the_rate_stays_where_losses_fall(backend):
    assert set(rates(0.97 ** np.arange(100), backend)) == {1.0}


def test_the_rate_falls_where_losses_do_not(backend):
    shares = rates(np.ones(81), backend)

    # The first loss is a fall; each twenty after it are a wait.
    expected = [1.0] * 20 + [1 / 1.5] * 20 + [1 / 2] * 20 + [1 / 2.5] * 20 + [1 / 3]
    assert shares == pytest.approx(expected)


def test_a_progress_in_python_numbers_is_not_rounded(backend):
    """As an optimizer's state has it."""
    loss = backend.asarray(np.asarray(3.0), "float64")

    progress = kc.samples.BatchProgress(1.0, 1.0, 1.0, 5.0, 4.0).after(loss)

    assert 0.3 * float(progress.share) == 0.3 / 3
    assert float(progress.waited) == 6.0


def test_options_of_other_data_say_what_they_need():
    with pytest.raises(kc.ConventionError, match="minibatch=True"):
        options(minibatch=False, rate=0.1)
    with pytest.raises(kc.ConventionError, match="centered"):
        options(centered=True, likelihood="gaussian")
    assert options(rate=0.1).minibatch
    assert not options(rate=0.1).falls
    assert options(centered=True).falls
