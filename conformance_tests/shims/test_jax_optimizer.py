"""The JAX optimizer against dense NumPy: direction, quadratic model and damping."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest

import kfac_core as kc

jax = pytest.importorskip("jax")
jnp = jax.numpy
shim = pytest.importorskip("kfac_core_shims.jax")

N, D, P = 6, 3, 2
DECAY, AVERAGING, L2 = 0.5, 0.9, 0.01


pytestmark = pytest.mark.usefixtures("jax_float64")


def function(params, x):
    return x @ params["W"] + params["b"]


class Dense:
    """The same optimizer in NumPy, with matrices of all parameters."""

    def __init__(self, theta, damping):
        self.theta, self.damping = theta, damping
        self.last, self.A, self.G, self.weight = np.zeros_like(theta), 0.0, 0.0, 0.0

    def objective(self, theta, rows, y):
        z = rows @ theta.reshape(D + 1, P)
        logs = np.log(np.exp(z).sum(1)) - z[np.arange(N), y]
        return logs.mean() + 0.5 * L2 * theta @ theta

    def step(self, x, y, *, adapt):
        """Return alpha, mu and the loss before; move theta."""
        rows = np.concatenate([x, np.ones((N, 1))], axis=1)
        z = rows @ self.theta.reshape(D + 1, P)
        p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        H = np.array([np.diag(q) - np.outer(q, q) for q in p])
        g = (rows.T @ (p - np.eye(P)[y])).ravel() / N + L2 * self.theta
        F = sum(np.kron(np.outer(r, r), h) for r, h in zip(rows, H, strict=True)) / N
        self.A = AVERAGING * self.A + rows.T @ rows / N
        self.G = AVERAGING * self.G + H.mean(0)
        self.weight = AVERAGING * self.weight + 1
        approximate = np.kron(self.A, self.G) / self.weight**2
        identity = np.eye(len(g))
        direction = -np.linalg.solve(approximate + (self.damping + L2) * identity, g)
        C = F + (L2 + self.damping) * identity
        span = [direction] if not self.last.any() else [direction, self.last]
        matrix = np.array([[a @ C @ b for b in span] for a in span])
        slope = np.array([g @ a for a in span])
        found = -np.linalg.solve(matrix, slope)
        predicted = slope @ found + 0.5 * found @ matrix @ found
        before = self.objective(self.theta, rows, y)
        delta = sum(c * a for c, a in zip(found, span, strict=True))
        self.theta, self.last = self.theta + delta, delta
        used = self.damping
        if adapt:
            rho = (self.objective(self.theta, rows, y) - before) / predicted
            factor = DECAY**2
            self.damping *= factor if rho > 0.75 else 1 / factor if rho < 0.25 else 1
        return found[0], found[1] if len(found) > 1 else 0.0, before, used


def test_steps_are_those_of_dense_matrices():
    """Rate, momentum, damping and parameters of four steps; then a batch of NaN."""
    rng = np.random.default_rng(3)
    start = rng.normal(size=(D + 1, P))
    params = {"W": jnp.asarray(start[:-1]), "b": jnp.asarray(start[-1])}
    optimizer = shim.KFACOptimizer(
        function,
        params,
        jnp.zeros((N, D)),
        likelihood="categorical",
        fisher="exact",
        damping=0.3,
        damping_rule="exact",
        adapt_factor=DECAY,
        adapt_every=2,
        update_every=1,
        refresh_every=1,
        decay=AVERAGING,
        l2=L2,
    )
    state, dense = optimizer.init(params), Dense(start.ravel(), 0.3)
    for i in range(4):
        x, y = rng.normal(size=(N, D)), rng.integers(0, P, size=N)
        alpha, mu, loss, damping = dense.step(x, y, adapt=i % 2 == 1)
        params, state, progress = optimizer.step(
            params, state, jnp.asarray(x), jnp.asarray(y), jax.random.key(i)
        )
        np.testing.assert_allclose(progress.loss, loss, rtol=1e-10)
        np.testing.assert_allclose(progress.damping, damping, rtol=1e-10)
        np.testing.assert_allclose(progress.learning_rate, alpha, rtol=1e-6)
        np.testing.assert_allclose(progress.momentum, mu, rtol=1e-6, atol=1e-10)
        theta = np.concatenate([np.ravel(params["W"]), params["b"]])
        np.testing.assert_allclose(theta, dense.theta, rtol=1e-7)
        assert bool(progress.is_good)
    assert dense.damping != 0.3
    kept = np.array(params["W"])
    x = np.full((N, D), np.nan)
    params, state, progress = optimizer.step(
        params, state, jnp.asarray(x), jnp.asarray(y), jax.random.key(9)
    )
    assert not bool(progress.is_good)
    np.testing.assert_array_equal(params["W"], kept)
    np.testing.assert_allclose(state.damping, dense.damping, rtol=1e-10)
    # A first state that was bound to its device made the second step another program.
    assert optimizer.step._cache_size() == 1


def test_a_given_rate_is_clipped_and_statistics_have_an_interval():
    """``nu = sqrt(kappa / (eta^2 grad . P grad))``, whatever the loss is a mean over."""
    rng = np.random.default_rng(4)
    x, y = rng.normal(size=(N, D)), rng.normal(size=(N, P))
    W, b = rng.normal(size=(D, P)), np.zeros(P)
    params = {"W": jnp.asarray(W), "b": jnp.asarray(b)}
    mean = kc.integration.RowLoss(
        likelihood=kc.losses.Gaussian(variance=0.5), mean_over_outputs=True
    )
    optimizer = shim.KFACOptimizer(
        function,
        params,
        jnp.zeros((N, D)),
        likelihood=mean,
        fisher="exact",
        learning_rate=0.5,
        momentum=0.0,
        damping=0.1,
        adapt_every=None,
        kl_clip=1e-3,
        damping_rule="exact",
        update_every=2,
        refresh_every=1,
    )
    state = optimizer.init(params)
    inputs = jnp.asarray(x), jnp.asarray(y), jax.random.key(0)
    params, state, progress = optimizer.step(params, state, *inputs)
    rows = np.concatenate([x, np.ones((N, 1))], axis=1)
    # A row's loss is 1 / P of |z - y|^2, whose Hessian is 2 I.
    g = (rows.T @ (2.0 * (x @ W + b - y)) / N).ravel()
    F = np.kron(rows.T @ rows / N, 2.0 * np.eye(P))
    step = np.linalg.solve(F + 0.1 * np.eye(len(g)), g)
    rate = 0.5 * min(1.0, np.sqrt(1e-3 / (0.25 * g @ step)))
    np.testing.assert_allclose(progress.learning_rate, rate, rtol=1e-8)
    theta = np.concatenate([np.ravel(params["W"]), params["b"]])
    np.testing.assert_allclose(
        theta, np.concatenate([W.ravel(), b]) - rate * step, rtol=1e-8, atol=1e-12
    )
    _, state, _ = optimizer.step(params, state, *inputs)
    assert int(state.curvature["W"].updates) == 1
    assert int(state.steps) == 2


def test_examples_that_the_network_mixes_are_right_in_expectation():
    """Each output less the mean over the batch: rows of one source must not add up."""
    rng = np.random.default_rng(5)
    x, y = jnp.asarray(rng.normal(size=(3, D))), jnp.array([0, 1, 0])
    params = {"W": jnp.asarray(rng.normal(size=(D, P)))}

    def centered(params, x):
        z = x @ params["W"]
        return z - z.mean(0)

    optimizer = shim.KFACOptimizer(
        centered, params, x, likelihood="categorical", fisher="exact"
    )
    z, pull = optimizer.network.vjp(params, x)

    def squares(key):
        g = optimizer._captured(pull, z, y, key).batches["W"].output_grads
        return jnp.einsum("mni,mnj->ij", g, g)

    found = jax.vmap(squares)(jax.random.split(jax.random.key(0), 200)).mean(0)
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    H = np.array([np.diag(q) - np.outer(q, q) for q in p])
    expected = np.einsum("nij,nm->ij", H, (np.eye(3) - 1 / 3) ** 2)
    assert np.linalg.norm(found - expected) < 0.15 * np.linalg.norm(expected)


@pytest.mark.parametrize("way", ["pickle", "orbax"])
def test_a_state_is_kept_to_the_bit(way, tmp_path):
    """As the page says: a run that is resumed from a file goes on as the other does."""
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(N, D)), rng.integers(P, size=N)
    params = {"W": jnp.zeros((D, P)), "b": jnp.zeros(P)}
    optimizer = shim.KFACOptimizer(function, params, x, likelihood="categorical")
    first = optimizer.init(params)
    params, state, _ = optimizer.step(params, first, x, y, jax.random.key(0))
    if way == "pickle":
        kept = pickle.loads(pickle.dumps(jax.device_get((params, state))))
    else:
        orbax = pytest.importorskip("orbax.checkpoint")
        with orbax.StandardCheckpointer() as files:
            files.save(tmp_path / "kept", (params, state))
            files.wait_until_finished()
            zeros = jax.tree.map(jnp.zeros_like, (params, state))
            kept = files.restore(tmp_path / "kept", target=zeros)
    ends = [
        optimizer.step(*held, x, y, jax.random.key(1))[:2]
        for held in (kept, (params, state))
    ]
    for own, other in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_array_equal(own, other)


def test_outputs_of_one_number_a_row_need_no_axis(rng):
    """One step of a linear model, with a damping of its exact curvature, solves it."""
    x, y, w = rng.normal(size=(N, D)), rng.normal(size=N), rng.normal(size=D)
    params = {"w": jnp.asarray(w)}
    optimizer = shim.KFACOptimizer(
        lambda params, x: x @ params["w"],
        params,
        jnp.asarray(x),
        likelihood="gaussian",
        fisher="exact",
        damping=0.3,
        damping_rule="exact",
        learning_rate=1.0,
        momentum=0.0,
        kl_clip=None,
    )
    batch = jnp.asarray(x), jnp.asarray(y), jax.random.key(0)
    params, _, progress = optimizer.step(params, optimizer.init(params), *batch)
    error = x @ w - y
    direction = np.linalg.solve(x.T @ x / N + 0.3 * np.eye(D), x.T @ error / N)
    np.testing.assert_allclose(params["w"], w - direction, rtol=1e-9)
    loss = 0.5 * np.mean(error**2) + 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(progress.loss, loss, rtol=1e-12)


def test_options_are_refused_by_name():
    """Intervals, rates, and outputs without an axis of their own."""
    params = {"W": jnp.ones((D, P))}

    def made(function=lambda p, x: x @ p["W"], **options):
        options = {"likelihood": "categorical"} | options
        return shim.KFACOptimizer(function, params, jnp.ones((N, D)), **options)

    for error, match, options in (
        (kc.KFACError, "adapt_every", {"adapt_every": 0}),
        (kc.KFACError, "update_every", {"update_every": 0}),
        (kc.KFACError, "kl_clip", {"kl_clip": -1.0}),
        (kc.KFACError, "momentum", {"momentum": -1.0}),
        (kc.KFACError, "l2", {"l2": -1.0}),
        (kc.KFACError, "max_damping", {"max_damping": "large"}),
        (kc.ConventionError, "likelihood", {"likelihood": "softmax"}),
        (kc.ConventionError, "`fisher`", {"fisher": "Fisher"}),
        (kc.DampingError, "`min_damping` <= `max_damping`", {"min_damping": 1e5}),
        (TypeError, "dampng", {"dampng": 1.0}),
    ):
        with pytest.raises(error, match=match):
            made(**options)
    optimizer = made(lambda p, x: (x @ p["W"]).sum(1))
    with pytest.raises(kc.ShapeError, match="outputs"):
        jax.eval_shape(
            optimizer.transition,
            params,
            optimizer.init(params),
            jnp.ones((N, D)),
            jnp.ones(N),
            jax.random.key(0),
        )


class Pair(NamedTuple):
    """A batch of two arrays, which a network takes as one input."""

    left: Any
    right: Any


def test_a_named_tuple_is_one_input():
    """It was taken apart, and the network called with one argument too many."""
    params = {"W": jnp.ones((D, P))}
    pair, y = Pair(jnp.ones((N, D)), jnp.arange(N)[:, None] / N), jnp.arange(N) % P

    def product(params, pair):
        return (pair.left * pair.right) @ params["W"]

    optimizer = shim.KFACOptimizer(product, params, pair, likelihood="categorical")
    key = jax.random.key(0)
    progress = optimizer.step(params, optimizer.init(params), pair, y, key)[2]
    np.testing.assert_allclose(progress.loss, np.log(P), rtol=1e-9)
