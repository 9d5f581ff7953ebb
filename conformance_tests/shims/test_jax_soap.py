"""`soap` for JAX against a naive float64 program in NumPy."""

import functools

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402

import kfac_core as kc  # noqa: E402
from kfac_core_shims.jax import Network, soap  # noqa: E402

from ..builders import soap_reference  # noqa: E402

RATE, STEPS = 1e-1, 13


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def problem():
    rng = np.random.default_rng(0)
    params = {
        "a": rng.normal(size=(5, 6)) / 2,
        "b": np.zeros(6),
        "c": rng.normal(size=(6, 3)) / 2,
    }
    data = [(rng.normal(size=(32, 5)), rng.normal(size=(32, 3))) for _ in range(STEPS)]
    return params, data


def network_of(params, x):
    def function(p, x):
        p = concatenated(p)
        return jnp.tanh(x @ p["a"] + p["b"]) @ p["c"]

    return Network(function, jax.tree.map(jnp.asarray, params), jnp.asarray(x))


def trained(optimizer, network, params, data):
    params = jax.tree.map(jnp.asarray, params)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, x, y):
        z, pull = network.vjp(params, x)
        gradients, captured = pull((z - y) / len(x), reduction="mean")
        updates, state = optimizer.update(gradients, state, params, captured=captured)
        return optax.apply_updates(params, updates), state

    for x, y in data:
        params, state = step(params, state, x, y)
    return jax.tree.map(np.asarray, params), state


def concatenated(params):
    """Put together a weight and a bias that `parted` has cut."""
    join = functools.partial(jnp.concatenate, axis=-1)
    return {k: join(v) if isinstance(v, list) else v for k, v in params.items()}


def parted(params):
    return {k: v if k == "c" else np.split(v, [2], -1) for k, v in params.items()}


@pytest.mark.parametrize("is_parted", [False, True])
def test_steps_are_those_of_a_naive_program(is_parted):
    """Two dense layers, a bias without a basis, and three changes of bases."""
    params, data = problem()
    given = parted(params) if is_parted else params
    network = network_of(given, data[0][0])
    got, state = trained(soap(network, RATE), network, given, data)
    got = concatenated(got)
    p = {name: x.copy() for name, x in params.items()}
    naive = {name: soap_reference.Naive(p.get(name).shape) for name in "ac"}
    naive["b"], share = soap_reference.Naive((1, 6)), 1.0
    for t, (x, y) in enumerate(data, start=1):
        h = np.tanh(x @ p["a"] + p["b"])
        g = (h @ p["c"] - y) / len(x)
        back = g @ p["c"].T * (1 - h * h)
        parts = [
            naive["a"].rotated(x.T @ back, (x.T @ x, back.T @ back)),
            naive["c"].rotated(h.T @ g, (h.T @ h, g.T @ g)),
            naive["b"].rotated(back.sum(0)[None]),
        ]
        jump = soap_reference.jump_at(t, parts)
        for weight in naive.values():
            weight.direction(jump)
        share = soap_reference.share_at(t, share, naive.values(), jump)
        for name, weight in naive.items():
            p[name] -= share * RATE * weight.step(share).reshape(p[name].shape)
    assert 0 < share < 1
    for name, x in p.items():
        np.testing.assert_allclose(got[name], x, rtol=1e-8, atol=1e-10)
    assert int(state.steps) == STEPS
    assert all(float(r.max()) < 1 for pair in state.residual.values() for r in pair)


@pytest.mark.parametrize(("n", "factor"), [(32, 1.0), (128, 0.5)])
def test_the_first_step_has_the_rate_in_each_direction_of_the_basis(n, factor):
    """Signs of the gradient's coordinates; half as long for four times 32 inputs."""
    rng = np.random.default_rng(0)
    params, x = {"W": jnp.zeros((n, 4))}, jnp.asarray(rng.normal(size=(2 * n, n)))
    network = Network(lambda p, x: x @ p["W"], params, x)
    optimizer = soap(network, RATE)
    _, pull = network.vjp(params, x)
    cotangent = jnp.asarray(rng.normal(size=(2 * n, 4)))
    gradients, captured = pull(cotangent, reduction="sum")
    state = optimizer.init(params)
    step, _ = optimizer.update(gradients, state, params, captured=captured)
    length = float(jnp.linalg.norm(step["W"]))
    assert length == pytest.approx(RATE * factor * (4 * n) ** 0.5, rel=1e-4)


@pytest.mark.parametrize(("m", "factor"), [(32, 1.0), (128, 0.5)])
def test_steps_of_wide_embeddings_are_shorter(m, factor):
    """Four rows have four coordinates each that are not zero in their own basis."""
    params, ids = {"W": jnp.zeros((4, m))}, jnp.arange(4)
    network = Network(lambda p, x: p["W"][x], params, ids)
    optimizer = soap(network, RATE)
    _, pull = network.vjp(params, ids)
    cotangent = jnp.asarray(np.random.default_rng(0).normal(size=(4, m)))
    gradients, captured = pull(cotangent, reduction="sum")
    state = optimizer.init(params)
    step, _ = optimizer.update(gradients, state, params, captured=captured)
    length = float(jnp.linalg.norm(step["W"]))
    assert length == pytest.approx(RATE * factor * 4, rel=1e-4)


def test_parameters_divided_among_transformations_take_the_same_steps():
    """Also a weight and its bias; without a common share parameters are independent."""
    params, data = problem()
    network = network_of(params, data[0][0])
    whole = soap(network, RATE, gain=None, gradient_bound=None)
    parts = optax.partition(
        {"weights": whole, "others": whole},
        {"a": "weights", "b": "others", "c": "others"},
    )
    expected, _ = trained(whole, network, params, data)
    got, _ = trained(parts, network, params, data)
    for name, x in expected.items():
        np.testing.assert_allclose(got[name], x, rtol=1e-12)


def test_convolutions_and_embeddings_train():
    """Patches on both sides, and the output side of an embedding alone."""
    rng = np.random.default_rng(0)
    params = {
        "table": jnp.asarray(rng.normal(size=(7, 4))),
        "kernel": jnp.asarray(rng.normal(size=(3, 4, 5)) / 4),
        "head": jnp.asarray(rng.normal(size=(5, 7)) / 2),
    }
    ids = jnp.asarray(rng.integers(0, 7, size=(16, 6)))

    def function(p, ids):
        x = p["table"][ids]
        x = jax.lax.conv_general_dilated(
            x, p["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
        return jnp.tanh(x) @ p["head"]

    network = Network(function, params, ids)
    optimizer = soap(network, 1e-2, weight_decay=1e-3)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        z, pull = network.vjp(params, ids)

        def loss(z):
            return optax.softmax_cross_entropy_with_integer_labels(z, ids).mean()

        value, cotangent = jax.value_and_grad(loss)(z)
        gradients, captured = pull(cotangent, reduction="mean")
        updates, state = optimizer.update(gradients, state, params, captured=captured)
        return optax.apply_updates(params, updates), state, value

    losses = []
    for _ in range(40):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    left, right = state.bases["table"]
    assert left is None
    assert right.shape == (1, 4, 4)
    assert state.bases["kernel"][0].shape == (1, 12, 12)


def test_numbers_are_parameters():
    """Of no layer; weakly typed, as JAX takes them."""
    rng = np.random.default_rng(0)
    x, y = jnp.asarray(rng.normal(size=(16, 3))), rng.normal(size=(16, 2))
    trees = [{"a": jnp.ones((3, 2)), "shift": c} for c in (0.5, jnp.asarray(0.5))]

    results = []
    for params in trees:
        network = Network(
            lambda p, x: x @ p["a"] + p["shift"], params, x, uncovered="keep"
        )
        optimizer, tree = soap(network), params
        state = optimizer.init(tree)
        for _ in range(3):
            z, pull = network.vjp(tree, x)
            gradients, captured = pull((z - y) / 16, reduction="mean")
            updates, state = optimizer.update(gradients, state, tree, captured=captured)
            tree = optax.apply_updates(tree, updates)
        results.append(float(tree["shift"]))
    assert results[0] == pytest.approx(results[1], rel=1e-12)
    assert results[0] != 0.5


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"learning_rate": -1.0}, kc.ConventionError),
        ({"beta2": 1.5}, kc.DecayError),
        ({"weight_decay": -1.0}, kc.ConventionError),
        ({"update_every": 0}, kc.ConventionError),
        ({"decay": 2.0}, kc.DecayError),
        ({"block": 0}, kc.ConventionError),
    ],
)
def test_bad_options_raise(options, error):
    params, data = problem()
    with pytest.raises(error):
        soap(network_of(params, data[0][0]), **options)


def test_weight_decay_wants_the_parameters():
    """The transformations of optax may be called without."""
    params, data = problem()
    network = network_of(params, data[0][0])
    optimizer = soap(network, weight_decay=0.1)
    tree = jax.tree.map(jnp.asarray, params)
    z, pull = network.vjp(tree, data[0][0])
    gradients, captured = pull(z / len(z), reduction="mean")

    with pytest.raises(kc.ArgumentError, match=r"got None.*state, params, captured"):
        optimizer.update(gradients, optimizer.init(tree), captured=captured)
