"""Heads of different likelihoods on JAX, against derivatives of the user's loss."""

import numpy as np
import pytest

import kfac_core as kc

jax = pytest.importorskip("jax")
jnp = jax.numpy
shim = pytest.importorskip("kfac_core_shims.jax")

pytestmark = pytest.mark.usefixtures("jax_float64")

CLASSES, N = 3, 7
LAYERS = {"A": "a", "P": "p", "V": "v"}


def heads(params, x):
    h = jnp.tanh(x @ params["A"] + params["a"])
    return h @ params["P"] + params["p"], h @ params["V"] + params["v"]


def apply(params, x):
    return jnp.concatenate(heads(params, x), axis=-1)


def joint(weight):
    return kc.losses.Joint(
        losses=(kc.losses.Categorical(), kc.losses.Gaussian(variance=1.0)),
        sizes=(CLASSES, 1),
        weights=(1.0, weight),
    )


def loss_of_row(z, label, value, weight):
    """Return a cross-entropy plus ``weight / 2`` times a squared error."""
    squares = jnp.sum((z[CLASSES:] - value) ** 2)
    return -jax.nn.log_softmax(z[:CLASSES])[label] + weight / 2 * squares


def problem(rng, rows=N):
    shapes = {"A": (4, 5), "a": (5,), "P": (5, CLASSES), "p": (CLASSES,)}
    shapes |= {"V": (5, 1), "v": (1,)}
    params = {k: jnp.asarray(rng.normal(size=s)) for k, s in shapes.items()}
    x = rng.normal(size=(rows, 4))
    targets = jnp.asarray(x[:, :CLASSES].argmax(1)), jnp.asarray(x.sum(1)[:, None])
    return params, jnp.asarray(x), targets


def dense_blocks(params, x, weight):
    """Return the curvature of each layer, with matrices (in + 1, out) as vectors."""
    J = jax.vmap(jax.jacrev(apply), (None, 0))(params, x)
    H = jax.vmap(jax.hessian(lambda z: loss_of_row(z, 0, 0.0, weight)))(
        apply(params, x)
    )
    blocks = {}
    for W, b in LAYERS.items():
        rows = jnp.concatenate([J[W], J[b][:, :, None]], axis=2)
        rows = rows.reshape(len(x), CLASSES + 1, -1)
        blocks[W] = jnp.einsum("nci,ncd,ndj->ij", rows, H, rows) / len(x)
    return blocks


def test_a_step_has_the_hessian_and_the_gradient_of_both_losses(rng):
    """In a compiled step, whose targets are a tuple."""
    weight = 0.3
    params, x, targets = problem(rng)
    optimizer = shim.KFACOptimizer(
        apply,
        params,
        x,
        likelihood=joint(weight),
        approximation=lambda *_: kc.Full(),
        fisher="exact",
        damping=0.1,
        damping_rule="exact",
        refreshing=kc.Refreshing(keep_matrices=True),
        learning_rate=1.0,
        momentum=0.0,
        kl_clip=None,
    )

    def loss(params):
        rows = jax.vmap(loss_of_row, (0, 0, 0, None))
        return rows(apply(params, x), *targets, weight).mean()

    blocks, gradients = dense_blocks(params, x, weight), jax.grad(loss)(params)
    before = jax.tree.map(np.array, params)
    constant = weight * 0.5 * np.log(2 * np.pi)
    expected_loss = float(loss(params)) + constant

    params, state, progress = optimizer.step(
        params, optimizer.init(params), x, targets, jax.random.key(0)
    )

    np.testing.assert_allclose(progress.loss, expected_loss, rtol=1e-10)
    estimator = optimizer.kfac.estimator(state.curvature)
    found = [
        np.asarray(estimator.operator(n).to_dense(damped=False))
        for n in estimator.blocks
    ]
    for W, b in LAYERS.items():
        (same,) = [F for F in found if F.shape == blocks[W].shape]
        np.testing.assert_allclose(same, blocks[W], rtol=1e-9, atol=1e-12)
        V = jnp.concatenate([gradients[W], gradients[b][None]])
        damped = blocks[W] + 0.1 * jnp.eye(V.size)
        direction = jnp.linalg.solve(damped, V.ravel()).reshape(V.shape)
        np.testing.assert_allclose(before[W] - params[W], direction[:-1], rtol=1e-8)
        np.testing.assert_allclose(before[b] - params[b], direction[-1], rtol=1e-8)


def test_each_optimizer_trains_both_heads(rng):
    """Labels are drawn, rates are chosen; Gauss-Newton takes targets as a tuple."""
    params, x, targets = problem(rng, rows=64)

    def loss(params):
        rows = jax.vmap(loss_of_row, (0, 0, 0, None))
        return float(rows(apply(params, x), *targets, 0.3).mean())

    first = loss(params)
    optimizer = shim.KFACOptimizer(apply, params, x, likelihood=joint(0.3))
    trained = jax.tree.map(jnp.array, params)
    state = optimizer.init(trained)
    for key in jax.random.split(jax.random.key(0), 40):
        trained, state, progress = optimizer.step(trained, state, x, targets, key)
    assert bool(progress.is_good)
    assert loss(trained) < 0.05 * first
    gauss_newton = shim.GaussNewton(
        lambda params, x, y: (apply(params, x), y), likelihood=joint(0.3)
    )
    state = gauss_newton.init(params)
    for _ in range(20):
        params, state, _ = gauss_newton.step(params, state, x, targets)
    assert loss(params) < 0.01 * first


def test_a_data_set_has_the_curvature_of_both_losses(rng):
    """`collect` of outputs side by side."""
    params, x, _ = problem(rng)
    network = shim.Network(apply, params, x, approximation=lambda *_: kc.Full())
    factors = shim.collect(
        network,
        params,
        [x[:4], x[4:]],
        likelihood=joint(0.3),
        fisher="exact",
        ekfac=False,
    )
    blocks = dense_blocks(params, x, 0.3)
    for statistics in factors.statistics.values():
        (average,) = statistics.averages.values()
        found = np.asarray(average.value(debias=True).full())
        (same,) = [F for F in blocks.values() if F.shape == found.shape]
        np.testing.assert_allclose(found, same, rtol=1e-9, atol=1e-12)


def test_a_tuple_of_heads_and_squares_of_weights_are_refused(rng):
    """The messages say what to write."""
    params, x, targets = problem(rng)
    optimizer = shim.KFACOptimizer(heads, params, x, likelihood=joint(1.0))
    with pytest.raises(kc.ArgumentError, match="side by side"):
        optimizer.step(params, optimizer.init(params), x, targets, jax.random.key(0))
    with pytest.raises(kc.UnsupportedError, match="weights"):
        shim.KFACOptimizer(apply, params, x, likelihood=joint(0.5), fisher="empirical")
