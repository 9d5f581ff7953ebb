"""The search for the strength of the factored damping."""

import math

import numpy as np
import pytest

from kfac_core.steps import (
    curvature_of_products,
    gamma_candidates,
    linear_combination,
    quadratic_model,
    search_gamma,
)

from ..builders import reference
from ..builders.tolerances import assert_close

nan, inf = math.nan, math.inf
n = 3


def test_the_candidates_are_the_papers(backend, dtype):
    """gamma, omega gamma, gamma / omega, for numbers and arrays."""
    expected = [0.4, 0.2, 0.8]

    assert_close(gamma_candidates(0.4, factor=0.5), expected, "roundoff", dtype)
    got = gamma_candidates(backend.asarray(0.4, dtype), factor=0.5)
    assert all(gamma.dtype == backend.dtype(dtype) for gamma in got)
    assert_close([float(gamma) for gamma in got], expected, "roundoff", dtype)


def test_the_candidates_stay_within_bounds(backend):
    """Each is clipped, the present one too."""
    options = {"factor": 0.5, "minimum": 0.3, "maximum": 0.5}

    assert gamma_candidates(0.4, **options) == (0.4, 0.3, 0.5)
    assert gamma_candidates(9.0, **options) == (0.5, 0.5, 0.5)
    got = gamma_candidates(backend.asarray(0.4, "float64"), **options)
    assert [float(gamma) for gamma in got] == [0.4, 0.3, 0.5]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([-1.0, -2.0, -3.0], 2.0),
        ([-1.0, -2.0, -1.0], 0.5),
        ([-2.0, -2.0, -2.0], 1.0),
        ([nan, -2.0, -1.0], 0.5),
        ([-1.0, nan, -inf], 1.0),
        ([nan, nan, 5.0], 2.0),
        ([nan, inf, nan], 1.0),
    ],
)
def test_the_least_finite_change_wins(backend, changes, expected):
    """The first of equals; the present gamma where nothing is finite."""
    one = backend.asarray(1.0, "float64")
    numbers = iter([(change, None) for change in changes])
    arrays = iter([(backend.asarray(x, "float64"), one) for x in changes])

    assert search_gamma(lambda g: next(numbers), 1.0, factor=0.5).gamma == expected
    assert (
        float(search_gamma(lambda g: next(arrays), 1.0, factor=0.5).gamma) == expected
    )


@pytest.fixture
def layer(rng):
    """Factors, a gradient and an exact curvature of one layer, dense."""
    A, G = reference.spd(rng, n), reference.spd(rng, n)
    noise = rng.normal(size=(n * n, n * n))
    F = np.kron(A, G) + 0.001 * noise @ noise.T
    return A, G, F, rng.normal(size=(n, n))


LAM = 0.01


def direction_of(A, G, V, gamma):
    """Return the direction of a factored damping, by the formula."""
    pi = np.sqrt(np.trace(A) / np.trace(G))
    half = np.linalg.solve(A + pi * gamma * np.eye(n), -V)
    return np.linalg.solve(G + gamma / pi * np.eye(n), half.T).T


def dense_attempt(A, G, F, V, gamma):
    """Return the model's change and the step with the best learning rate."""
    D = direction_of(A, G, V, gamma)
    d, g = D.ravel(), V.ravel()
    alpha = -(g @ d) / (d @ (F + LAM * np.eye(n * n)) @ d)
    return 0.5 * alpha * g @ d, alpha * D


@pytest.mark.parametrize("gamma", [0.01, 0.3, 3.0])
def test_the_search_finds_the_best_of_three(backend, dtype, layer, gamma):
    """Three steps, each with the learning rate that is best for it; the best is kept."""
    A, G, F, V = layer

    def on(x):
        return backend.asarray(x, dtype)

    gradient = {"fc": {"weight": on(V)}}

    def attempt(g):
        D = direction_of(A, G, V, g)
        direction = {"fc": {"weight": on(D)}}
        product = F @ D.ravel()
        products = [{"fc": {"weight": on(product.reshape(n, n))}}]
        curvature = curvature_of_products([direction], products)
        model = quadratic_model(gradient, [direction], curvature=curvature, damping=LAM)
        c = model.minimize().coefficients
        return model.change(c, damped=True), linear_combination(c, [direction])

    found = search_gamma(attempt, gamma, factor=0.3)

    tried = [dense_attempt(A, G, F, V, g) for g in (gamma, 0.3 * gamma, gamma / 0.3)]
    best = int(np.argmin([change for change, _ in tried]))
    expected = (gamma, 0.3 * gamma, gamma / 0.3)[best]
    assert_close(float(found.gamma), expected, "roundoff", dtype)
    assert_close(backend.to_numpy(found.change), tried[best][0], "inverse", dtype)
    step = backend.to_numpy(found.step["fc"]["weight"])
    assert_close(step, tried[best][1], "inverse", dtype)


def test_the_search_moves_both_ways(layer):
    """From below it goes up, from above down, and at the best it stays."""
    best = [
        np.argmin([dense_attempt(*layer, g)[0] for g in (x, 0.3 * x, x / 0.3)])
        for x in (0.01, 0.3, 3.0)
    ]

    assert best == [2, 0, 1]


def test_steps_may_be_anything_where_changes_are_numbers():
    """A caller with floats keeps what it likes beside them."""
    trial = search_gamma(lambda g: (abs(g - 0.25), f"at {g}"), 0.5, factor=0.5)

    assert trial == (0.25, 0.0, "at 0.25")
