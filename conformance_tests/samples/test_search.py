"""Levenberg-Marquardt with geodesic acceleration, against dense linear algebra."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.samples import Evaluation, Jacobian, sample_gram, search_step

from ..builders.tolerances import assert_close

N = 8
LAYER = kc.Dense(in_features=3, out_features=1, bias=False, weight_layout="io")


def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(N, 3)), rng.normal(size=N), 2.0 * rng.normal(size=3)


class Fit:
    """``sin(X theta) - y`` as the library sees it."""

    def __init__(self, backend):
        self.xp = xp = backend.xp
        self.X, self.y, self.theta = (backend.asarray(a, "float64") for a in data())
        slope = xp.cos(xp.matmul(self.X, self.theta))
        rows = kc.Batch(self.X, xp.reshape(slope, (N, 1)))
        self.J = Jacobian.of({"a": LAYER}, {"a": rows})
        self.start = self.at(self.theta)

    def at(self, theta):
        r = self.xp.sin(self.xp.matmul(self.X, theta)) - self.y
        return Evaluation(r, 0.5 * self.xp.sum(r * r))

    def evaluate(self, step):
        return self.at(self.theta - step["a"]["weight"][:, 0])

    def search(self, damping, **options):
        K = sample_gram(self.J)
        r = self.start.values
        options = {"start": self.start, "damping": damping} | options
        return search_step(self.J, K, r, self.evaluate, **options)


def dense_search(damping, trials):
    """Return the step of the method's paper, with its second derivative by hand."""
    X, y, theta = data()
    r = np.sin(X @ theta) - y
    for trial in range(1, trials + 1):
        J = np.cos(X @ theta)[:, None] * X
        F = J.T @ J / N + damping * np.eye(3)
        d = np.linalg.solve(F, J.T @ r / N)
        h = 0.1
        r_h = np.sin(X @ (theta - h * d)) - y
        a = np.linalg.solve(F, J.T @ (2 / h * ((r_h - r) / h + J @ d)) / N)
        step = d + a / 2
        lower = np.sum((np.sin(X @ (theta - step)) - y) ** 2) < np.sum(r**2)
        if np.linalg.norm(a) <= 0.75 * np.linalg.norm(d) and lower:
            return step, damping / (5 if trial == 1 else 1), trial
        damping *= 3
    raise AssertionError("the reference finds no step")


@pytest.fixture
def fit(backend):
    return Fit(backend)


@pytest.mark.parametrize("damping", [1e-3, 1e-2, 3.0])
def test_the_step_is_that_of_the_dense_search(fit, backend, damping):
    step, next_damping, trials = dense_search(damping, 20)

    searched = fit.search(damping)

    got = backend.to_numpy(searched.step["a"]["weight"])[:, 0]
    assert_close(got, step, "inverse", "float64")
    assert float(searched.damping) == pytest.approx(next_damping)
    assert (bool(searched.accepted), int(searched.trials)) == (True, trials)
    reached = fit.evaluate(searched.step).loss
    assert float(searched.loss) == float(reached) < float(fit.start.loss)


def test_some_dampings_are_too_small():
    """So that the cases above hold trials of each outcome."""
    assert {dense_search(damping, 20)[2] > 1 for damping in (1e-3, 3.0)} == {
        True,
        False,
    }


def test_a_search_without_success_goes_nowhere(fit, backend):
    """Every other place is worse; nothing is left of the trials."""
    worse = fit.start._replace(loss=2.0 * fit.start.loss)

    searched = search_step(
        fit.J,
        sample_gram(fit.J),
        fit.start.values,
        lambda step: worse,
        start=fit.start,
        damping=1.0,
    )

    assert not bool(searched.accepted)
    assert float(searched.damping) == 1.0
    assert not np.any(backend.to_numpy(searched.step["a"]["weight"]))


def test_no_damping_is_too_large_to_begin_with(fit):
    searched = fit.search(1e300)

    assert bool(searched.accepted)
    assert float(searched.damping) < 1e10


def test_factors_in_the_memory_of_the_gram_matrix_change_nothing(backend):
    """Also after trials that failed; LAPACK works in place above 64 rows."""
    rng = np.random.default_rng(1)
    shape = 80, 120
    arrays = (
        rng.normal(size=shape),
        rng.normal(size=shape[0]),
        rng.normal(size=120),
    )
    X, y, theta = (backend.asarray(a, "float64") for a in arrays)
    xp = backend.xp
    layer = kc.Dense(in_features=120, out_features=1, bias=False, weight_layout="io")

    def at(theta):
        r = xp.sin(xp.matmul(X, theta)) - y
        return Evaluation(r, xp.sum(r * r))

    start = at(theta)
    slope = xp.reshape(xp.cos(xp.matmul(X, theta)), (80, 1))
    J = Jacobian.of({"a": layer}, {"a": kc.Batch(X, slope)})

    def search(K, overwrite):
        return search_step(
            J,
            K,
            start.values,
            lambda step: at(theta - step["a"]["weight"][:, 0]),
            start=start,
            damping=1e-3,
            overwrite=overwrite,
        )

    K = sample_gram(J)
    before = backend.to_numpy(K.full())
    apart, in_place = search(K, False), search(sample_gram(J), True)

    assert int(apart.trials) == int(in_place.trials) > 2
    assert np.array_equal(backend.to_numpy(K.full()), before)
    got, expected = (backend.to_numpy(s.step["a"]["weight"]) for s in (in_place, apart))
    assert_close(got, expected, "inverse", "float64")


def test_a_traced_search_is_the_same(fit, backend):
    if backend.name != "jax":
        pytest.skip("only JAX traces loops")
    jax = pytest.importorskip("jax")
    eager = fit.search(1e-3)
    traced = jax.jit(lambda: fit.search(1e-3, while_loop=jax.lax.while_loop))()

    assert int(traced.trials) == int(eager.trials)
    got, expected = (backend.to_numpy(s.step["a"]["weight"]) for s in (traced, eager))
    assert_close(got, expected, "inverse", "float64")
