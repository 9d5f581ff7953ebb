"""Exactness: conjugate gradients on a quadratic (B17), least squares in one step (B16)."""

import numpy as np
import pytest

import kfac_core as kc

from ..builders import reference
from ..builders.layers import dense_layer
from ..builders.steps_reference import BLOCKS, SIZE, flat, put
from ..builders.tolerances import assert_close, assert_differs

STEPS = 6


@pytest.fixture
def quadratic(rng):
    """``h = 1/2 theta . H theta - b . theta``, and a preconditioner of its blocks."""
    H = reference.spd(rng, SIZE, condition=30.0)
    P = np.zeros_like(H)
    for block in BLOCKS:
        P[block, block] = np.linalg.inv(H[block, block])
    return H, rng.normal(size=SIZE), P


def objective(H, b, theta):
    """Return h, in float64."""
    return 0.5 * theta @ H @ theta - b @ theta


def conjugate_gradients(H, b, P):
    """Return the iterates of preconditioned CG from zero, as textbooks have them."""
    theta, r = np.zeros(SIZE), b
    z = P @ r
    p, iterates = z, []
    for _ in range(STEPS):
        curved = H @ p
        alpha = (r @ z) / (p @ curved)
        theta, previous, old = theta + alpha * p, r, z
        r = r - alpha * curved
        z = P @ r
        p = z + (r @ z) / (previous @ old) * p
        iterates.append(theta)
    return iterates


def run(backend, dtype, H, b, P, *, damping=0.0, fixed=None):
    """Make steps on the quadratic; return theta, rho and decreases of each."""
    theta, previous = put(backend, np.zeros(SIZE), dtype), None
    iterates, ratios, decreases = [], [], []
    for _ in range(STEPS):
        here = flat(backend, theta)
        gradient = put(backend, H @ here - b, dtype)
        direction = put(backend, -P @ (H @ here - b), dtype)
        directions = [direction] if previous is None else [direction, previous]
        products = [put(backend, H @ flat(backend, d), dtype) for d in directions]
        model = kc.steps.quadratic_model(
            gradient,
            directions,
            curvature=kc.steps.curvature_of_products(directions, products),
            damping=damping,
        )
        options = None if fixed is None else fixed[: len(directions)]
        c = model.minimize(fixed=options).coefficients
        previous = kc.steps.linear_combination(c, directions)
        theta = kc.steps.linear_combination([1.0, 1.0], [theta, previous])
        predicted = backend.to_numpy(model.change(c, damped=True))
        there = flat(backend, theta)
        iterates.append(there)
        losses = objective(H, b, here), objective(H, b, there)
        ratios.append(kc.steps.reduction_ratio(*losses, predicted=float(predicted)))
        half = 0.5 * backend.to_numpy(kc.steps.inner_product(gradient, previous))
        decreases.append((float(predicted), float(half)))
    return iterates, ratios, np.array(decreases)


def test_the_iterates_are_those_of_conjugate_gradients(backend, dtype, quadratic):
    """B17: (alpha, mu) of the exact model is preconditioned CG, step for step."""
    H, b, P = quadratic

    iterates, ratios, decreases = run(backend, dtype, H, b, P)

    expected = conjugate_gradients(H, b, P)
    assert_close(iterates, expected, "trajectory", dtype)
    first = 3 if dtype == "float32" else STEPS  # later decreases are roundoff of h
    assert_close(ratios[:first], np.ones(first), "inverse", dtype)
    assert_close(decreases[:, 0], decreases[:, 1], "identity", dtype)


def test_another_momentum_or_a_damping_is_something_else(backend, quadratic):
    """The rows that must differ: mu fixed, and a model that is not the objective."""
    H, b, P = quadratic
    expected = conjugate_gradients(H, b, P)

    fixed, _, _ = run(backend, "float64", H, b, P, fixed=(None, 0.9))
    damped, ratios, _ = run(backend, "float64", H, b, P, damping=0.1)

    assert_differs(fixed[-1], expected[-1])
    assert_differs(damped[-1], expected[-1])
    # The paper's ratio has the damping in the model, so that it predicts too little.
    assert all(ratio > 1.0 + 1e-6 for ratio in ratios)


@pytest.fixture
def regression(rng):
    """Inputs, targets and the least-squares solution with a bias, its last row."""
    x, n_out = rng.normal(size=(20, 3)), 2
    y = rng.normal(size=(20, n_out))
    X = np.concatenate([x, np.ones((20, 1))], axis=1)
    return x, y, np.linalg.lstsq(X, y, rcond=None)[0]


@pytest.mark.parametrize("loss", ["sum", "mean"])
@pytest.mark.parametrize("rule", ["factored", "exact"])
def test_linear_regression_takes_one_step(backend, dtype, regression, rng, loss, rule):
    """B16: without damping, one step of K-FAC is least squares, and alpha is one."""
    x, y, solution = regression
    layer = dense_layer(3, 2)
    estimator = kc.Estimator(
        {"fc": kc.Block(layer, kc.Kronecker())},
        decay=0.0,
        damping=0.0,
        damping_rule=rule,
        reduction=loss,
    )
    W = rng.normal(size=(4, 2))
    residual = np.concatenate([x, np.ones((20, 1))], axis=1) @ W - y
    inputs = backend.asarray(x, dtype)
    # The Hessian of the squared error is I: its root's columns are the unit vectors.
    vectors = np.broadcast_to(np.eye(2)[:, None, :], (2, 20, 2))
    vectors = vectors / 20 if loss == "mean" else vectors
    batch = kc.Batch(inputs, backend.asarray(vectors, dtype), sources=2)
    estimator.update({"fc": batch})
    estimator.refresh()
    gradient = np.concatenate([x, np.ones((20, 1))], axis=1).T @ residual / 20

    def on(V):
        weight, bias = backend.asarray(V[:-1], dtype), backend.asarray(V[-1], dtype)
        return {"fc": {"weight": weight, "bias": bias}}

    grad, theta = on(gradient), on(W)
    direction = kc.steps.linear_combination([-1.0], [estimator.precondition(grad)])
    weight, bias = direction["fc"]["weight"], direction["fc"]["bias"]
    change = backend.xp.matmul(inputs, weight) + bias
    model = kc.steps.quadratic_model(
        grad,
        [direction],
        curvature=kc.steps.curvature_of_outputs([change], [change], examples=20),
        damping=0.0,
    )
    found = model.minimize()
    after = kc.steps.linear_combination(
        [1.0, found.coefficients[0]], [theta, direction]
    )

    got = np.vstack([backend.to_numpy(after["fc"][n]) for n in ("weight", "bias")])
    assert_close(got, solution, "inverse", dtype)
    assert_close(backend.to_numpy(found.coefficients), [1.0], "inverse", dtype)
    assert_differs(0.5 * (W + got), solution)
