"""Gauss-Newton on JAX: programs as users write them, against dense Jacobians."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import kfac_core as kc

from ..builders.tolerances import assert_close

jax = pytest.importorskip("jax")
jnp = jax.numpy
shim = pytest.importorskip("kfac_core_shims.jax")

DAMPING, RATE = 0.01, 0.5


pytestmark = pytest.mark.usefixtures("jax_float64")


def array(*shape, seed=0):
    """Float64, whatever JAX has when this module is read."""
    return np.asarray(np.random.default_rng(seed).normal(size=shape))


def mlp(*sizes):
    """Nested as libraries have it: dicts of dicts."""
    return {
        f"layer_{i}": {
            "w": array(n, m, seed=i) / n**0.5,
            "b": 0.3 * array(m, seed=10 + i),
        }
        for i, (n, m) in enumerate(itertools.pairwise(sizes))
    }


def net(params, x):
    *hidden, last = params.values()
    for layer in hidden:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ last["w"] + last["b"]


def u(params, x):
    """The value at one point."""
    return net(params, x[None])[0, 0]


def value(params, x):
    return net(params, x)[:, 0]


def slopes(params, x):
    return jax.vmap(jax.grad(u, 1), (None, 0))(params, x).sum(axis=1)


def poisson(params, x, edge):
    """The Laplacian, and a boundary term with a weight."""
    second = jax.vmap(jax.hessian(u, 1), (None, 0))(params, x)
    return jnp.trace(second, axis1=1, axis2=2) - 1.0, 5.0 * net(params, edge)[:, 0]


def value_and_slopes(params, x):
    """Outputs of which one is the network's, and others are derivatives."""
    gradient = jax.vmap(jax.grad(u, 1), (None, 0))(params, x)
    return jnp.concatenate([net(params, x), gradient], axis=1)


def images_and_words(params, images, ids):
    layout = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(
        images, params["kernel"], (1, 1), "VALID", dimension_numbers=layout
    )
    x = jnp.tanh(x).reshape(len(x), -1) + params["words"][ids].sum(axis=1)
    return x @ params["w"]


def nothing_of_some_terms(params, x):
    """Conditions that hold of no point: of values, and of slopes."""
    return value(params, x)[:0], value(params, x) - 1.0, slopes(params, x)[len(x) :]


def outside_of_layers(params, x):
    outputs = (net(params["net"], x) * params["c"])[:, 1]
    return outputs * jnp.sin(params["shift"]).sum() + params["c"] ** 2


def reverse_only(params, x):
    """Through a function without forward derivatives."""
    return outside_of_layers({**params, "c": _doubled(params["c"])}, x)


@jax.custom_vjp
def _doubled(x):
    return 2.0 * x


_doubled.defvjp(lambda x: (2.0 * x, None), lambda _, g: (2.0 * g,))


def mixes_examples(params, x):
    """Batch norm in training: each residual depends on all examples."""
    first, last = params.values()
    h = x @ first["w"] + first["b"]
    h = jnp.tanh((h - h.mean(axis=0)) / (h.std(axis=0) + 0.1))
    return (h @ last["w"] + last["b"])[:, 0]


def attention(params, x):
    """The bias of the keys has no influence, but in roundoff; a bare parameter has."""
    tokens = x.reshape(-1, 3, 2)
    layers = (params["qkv"][name] for name in "qkv")
    q, k, v = (tokens @ layer["w"] + layer["b"] for layer in layers)
    weights = jax.nn.softmax(q @ jnp.swapaxes(k, 1, 2), axis=-1)
    return params["c"] * (weights @ v).mean(axis=1)


def concatenated(params, x):
    """One product for queries, keys and values."""
    q, k, v = params["qkv"].values()
    fused = {n: jnp.concatenate([q[n], k[n], v[n]], axis=-1) for n in ("w", "b")}
    h = jnp.tanh(x @ fused["w"] + fused["b"]).reshape(-1, 3, 2)
    return params["c"] * h.sum(axis=2)


def qkv():
    # Matrices of one layer each, from the same inputs.
    layers = {name: mlp(2, 2)["layer_0"] for name in "qkv"}
    layers["k"] = {"w": array(2, 2, seed=6), "b": array(2, seed=7)}
    return {"qkv": layers, "c": array(seed=5)}


def extra():
    return {"net": mlp(2, 4, 2), "shift": array(3, seed=4), "c": array(seed=5)}


def words():
    return {
        "kernel": array(2, 2, 1, 2, seed=1),
        "words": array(5, 8, seed=2),
        "w": array(8, 2, seed=3),
    }


X, EDGE = array(6, 2, seed=7), array(3, 2, seed=8)
IDS = np.array([[0, 1], [2, 2], [1, 3], [4, 0], [3, 3]])
PROGRAMS = {
    "slopes": (slopes, mlp(2, 5, 4, 1), (X,), set()),
    "Poisson": (poisson, mlp(2, 5, 4, 1), (X, EDGE), set()),
    "value and slopes": (value_and_slopes, mlp(2, 4, 1), (X,), set()),
    "conv, embedding": (images_and_words, words(), (array(5, 3, 3, 1), IDS), set()),
    "terms of no example": (nothing_of_some_terms, mlp(2, 5, 1), (X,), set()),
    "outside of layers": (outside_of_layers, extra(), (X,), {"['c']", "['shift']"}),
    "reverse only": (reverse_only, extra(), (X,), {"['c']", "['shift']"}),
    "attention": (attention, qkv(), (array(5, 6),), {"['c']"}),
    "concatenated weights": (concatenated, qkv(), (X,), {"['c']"}),
    "batch norm in training": (
        mixes_examples,
        mlp(2, 4, 1),
        (X,),
        {"['layer_0']['b']", "['layer_0']['w']"},
    ),
}


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def scaled_terms(residuals, params, data):
    """Return all residuals in one vector, each term in the unit of the mean."""
    terms = residuals(params, *data)
    terms = terms if isinstance(terms, tuple) else (terms,)
    R = sum(term.size for term in terms)
    return jnp.concatenate(
        [term.ravel() * (R / max(1, len(term))) ** 0.5 for term in terms]
    )


@jax.jit(static_argnums=0)
def dense_problem(residuals, params, data):
    r = scaled_terms(residuals, params, data)
    rows = jax.jacrev(lambda p: scaled_terms(residuals, p, data))(params)
    return r, [D.reshape(r.size, -1) for D in jax.tree.leaves(rows)]


def dense_direction(J, r, gram=None):
    F = J.T @ J / len(r) if gram is None else gram
    return np.linalg.solve(F + DAMPING * np.eye(len(F)), J.T @ r / len(r))


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_step_of_fixed_length_is_the_dense_solution(program):
    """By rows, of derivatives of the network too; formed for what layers do not cover."""
    residuals, params, data, formed = PROGRAMS[program]
    r, rows = dense_problem(residuals, params, data)
    J = np.concatenate(rows, axis=1)

    optimizer = shim.GaussNewton(
        residuals, learning_rate=RATE, damping=DAMPING, momentum=0.0
    )
    new, state, progress = optimizer.step(params, optimizer.init(params), *data)

    step = RATE * dense_direction(J, np.asarray(r))
    assert_close(flat(params) - flat(new), step, "inverse", "float64")
    assert_close(progress.loss, r @ r / (2 * len(r)), "roundoff", "float64")
    assert optimizer.formed.keys() == formed
    assert all(name in repr(optimizer) for name in formed)
    assert int(state.steps) == 1
    assert bool(progress.accepted)


def jets(weights, x):
    """The Laplacian less one by Taylor coefficients: values, slopes and Laplacians."""
    N, d = x.shape
    eye, zero = jnp.broadcast_to(jnp.eye(d), (N, d, d)), jnp.zeros((N, 1, d))
    jet = jnp.concatenate([x[:, None], eye, zero], axis=1)
    one = jnp.zeros((N, d + 2, 1)).at[:, 0].set(1.0)
    for i, weight in enumerate(weights):
        if i > 0:
            value = jnp.tanh(jet[:, :1])
            slope, first = 1.0 - value**2, jet[:, 1:-1]
            bend = -2.0 * value * jnp.sum(first**2, axis=1, keepdims=True)
            parts = [value, slope * first, slope * (jet[:, -1:] + bend)]
            jet = jnp.concatenate(parts, axis=1)
        jet = jnp.concatenate([jet, one], axis=-1) @ weight
    return jet[:, -1, 0] - 1.0


def test_the_first_direction_is_that_of_jets_by_hand():
    params, x = mlp(2, 16, 16, 1), array(40, 2)
    with_bias = [
        np.concatenate([layer["w"], layer["b"][None]]) for layer in params.values()
    ]
    directions = []
    for residuals, start in (
        (lambda params, x: poisson(params, x, x)[0], params),
        (jets, with_bias),
    ):
        optimizer = shim.GaussNewton(
            residuals, learning_rate=1.0, damping=1e-4, momentum=0.0
        )
        new, *_ = optimizer.step(start, optimizer.init(start), x)
        assert optimizer.formed == {}
        directions.append(jax.tree.map(lambda old, new: old - new, start, new))
    plain, by_jets = directions
    joined = [
        np.concatenate([layer["w"], layer["b"][None]]) for layer in plain.values()
    ]
    expected = flat(by_jets)
    difference = np.linalg.norm(flat(joined) - expected)
    assert difference < 1e-8 * np.linalg.norm(expected)


def test_the_laplacian_of_a_module_of_flax_is_covered():
    """Its layer norm has uses of unlike shapes: of the value, slopes and curvatures."""
    nn = pytest.importorskip("flax.linen")
    norm = nn.LayerNorm(epsilon=0.1)
    model = nn.Sequential([nn.Dense(4), jnp.tanh, norm, nn.Dense(1)])
    params = model.init(jax.random.key(0), X)
    params = jax.tree.map(lambda p: np.asarray(p, "float64") + 0.1, params)

    def residuals(params, x):
        second = jax.vmap(jax.hessian(lambda y: model.apply(params, y)[0]))(x)
        return jnp.trace(second, axis1=1, axis2=2)

    r, rows = dense_problem(residuals, params, (X,))
    options = {"learning_rate": RATE, "damping": DAMPING, "momentum": 0.0}
    optimizer = shim.GaussNewton(residuals, **options)
    new, _, _ = optimizer.step(params, optimizer.init(params), X)

    step = RATE * dense_direction(np.concatenate(rows, axis=1), np.asarray(r))
    assert_close(flat(params) - flat(new), step, "inverse", "float64")
    assert optimizer.formed == {}


def test_rows_of_a_program_that_mixes_examples_are_refused_inside_of_one():
    residuals, params, data, _ = PROGRAMS["batch norm in training"]
    optimizer = shim.GaussNewton(residuals, learning_rate=RATE)

    step = jax.jit(optimizer.transition)
    new, _, progress = step(params, optimizer.init(params), *data)

    assert np.array_equal(flat(new), flat(params))
    assert [bool(flag) for flag in progress.mixed] == [True, True, False, False]
    assert not progress.accepted


def test_a_step_in_which_data_begin_to_mix_examples_is_the_dense_solution():
    """At the third step, whose rows might be taken for granted."""
    params, data = mlp(2, 4, 1), array(7, 2, seed=3)

    def residuals(params, x, weight):
        y = net(params, x)
        return y + weight[:, None] * jnp.roll(y, 1, axis=0)

    optimizer = shim.GaussNewton(
        residuals, learning_rate=RATE, damping=DAMPING, momentum=0.0
    )
    state = optimizer.init(params)
    for step in range(4):
        weight = np.ones(7) * (step == 2)
        r, rows = dense_problem(residuals, params, (data, weight))
        new, state, _ = optimizer.step(params, state, data, weight)
        d = dense_direction(np.concatenate(rows, axis=1), np.asarray(r))
        assert_close(flat(params) - flat(new), RATE * d, "inverse", "float64")
        params = new


def test_one_example_whose_program_is_another_than_that_of_two_has_the_dense_step():
    """JAX broadcasts nothing along an axis of one; operations are as many by chance."""
    params, x = mlp(2, 3, 1), array(1, 2, seed=3)

    def value(params, x):
        first, last = params.values()
        h = x @ first["w"] + first["b"]
        h = h / (h.var(axis=-1, keepdims=True) + 0.1) ** 0.5
        return (h @ last["w"] + last["b"]).sum()

    def residuals(params, x):
        return jax.grad(value, 1)(params, x).sum(axis=1)

    r, rows = dense_problem(residuals, params, (x,))
    optimizer = shim.GaussNewton(
        residuals, learning_rate=RATE, damping=DAMPING, momentum=0.0
    )
    new, _, _ = optimizer.step(params, optimizer.init(params), x)

    d = dense_direction(np.concatenate(rows, axis=1), np.asarray(r))
    assert_close(flat(params) - flat(new), RATE * d, "inverse", "float64")


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
def test_a_likelihood_gives_the_dense_step_of_gauss_newton(likelihood):
    """With the Hessian and the gradient of the loss by JAX."""
    params = mlp(2, 4, 3)
    labels = np.array([0, 2, 1, 1, 0, 2])
    targets = labels if likelihood == "categorical" else jax.nn.one_hot(labels, 3)

    def loss(z):
        if likelihood == "categorical":
            return -jnp.sum(jax.nn.log_softmax(z) * jax.nn.one_hot(labels, 3))
        return jnp.sum(jax.nn.softplus(z) - targets * z)

    z = net(params, X)
    H = np.asarray(jax.hessian(loss)(z)).reshape(z.size, z.size) / len(z)
    rows = jax.jacrev(net)(params, X)
    J = np.concatenate([D.reshape(z.size, -1) for D in jax.tree.leaves(rows)], axis=1)
    g = np.asarray(jax.grad(loss)(z)).ravel() * (z.size / len(z))

    optimizer = shim.GaussNewton(
        lambda params, x, y: (net(params, x), y),
        likelihood=likelihood,
        learning_rate=RATE,
        damping=DAMPING,
        momentum=0.0,
    )
    new, _, progress = optimizer.step(params, optimizer.init(params), X, targets)

    step = RATE * dense_direction(J, g, J.T @ H @ J)
    assert_close(flat(params) - flat(new), step, "inverse", "float64")
    assert_close(progress.loss, loss(z) / len(z), "roundoff", "float64")


def test_momentum_is_that_of_spring():
    """Two steps in a program of the user's, with a rate that decays."""
    params, mu = mlp(2, 4, 1), 0.9
    optimizer = shim.GaussNewton(
        value,
        learning_rate=lambda steps: RATE / (1 + steps),
        damping=DAMPING,
        momentum=mu,
    )

    @jax.jit
    def two_steps(params, state):
        middle, state, _ = optimizer.transition(params, state, X)
        new, state, _ = optimizer.transition(middle, state, X)
        return middle, new

    middle, new = two_steps(params, optimizer.init(params))

    phi = (flat(params) - flat(middle)) / RATE
    r, rows = dense_problem(value, middle, (X,))
    J = np.concatenate(rows, axis=1)
    d = mu * phi + dense_direction(J, np.asarray(r) - mu * J @ phi)
    assert_close(flat(middle) - flat(new), RATE / 2 * d, "inverse", "float64")


def test_a_small_poisson_problem_is_solved():
    """Trained by a scan of searches, which no Python loop takes part in."""
    t = np.linspace(0.1, 0.9, 6)
    inside = jnp.asarray(np.stack(np.meshgrid(t, t), axis=-1).reshape(-1, 2))
    line = np.linspace(0.0, 1.0, 6)
    zero, one = np.zeros(6), np.ones(6)
    pairs = [(line, zero), (line, one), (zero, line), (one, line)]
    edge = jnp.asarray(np.concatenate([np.stack(pair, axis=1) for pair in pairs]))

    def exact(x):
        return jnp.sin(jnp.pi * x[:, 0]) * jnp.sin(jnp.pi * x[:, 1])

    def residuals(params, inside, edge):
        second = jax.vmap(jax.hessian(u, 1), (None, 0))(params, inside)
        laplacian = jnp.trace(second, axis1=1, axis2=2)
        force = 2 * jnp.pi**2 * exact(inside)
        return laplacian + force, 10.0 * net(params, edge)[:, 0]

    optimizer = shim.GaussNewton(residuals)
    params = mlp(2, 16, 1)

    @jax.jit
    def trained(params, state):
        def step(carry, _):
            params, state, progress = optimizer.transition(*carry, inside, edge)
            return (params, state), progress

        return jax.lax.scan(step, (params, state), length=60)

    (params, _), progress = trained(params, optimizer.init(params))

    error = jnp.linalg.norm(net(params, inside)[:, 0] - exact(inside))
    assert float(error / jnp.linalg.norm(exact(inside))) < 1e-3
    losses, taken = np.asarray(progress.loss), np.asarray(progress.accepted)
    assert np.all(np.diff(losses) <= 0)
    assert losses[-1] < 1e-6 * losses[0]
    assert np.all(progress.reached[taken] < losses[taken])
    assert optimizer.formed == {}


@pytest.mark.parametrize("wide", [False, True])
def test_float32_is_solved_or_the_damping_is_limited(wide):
    """The Gram matrix is in float64 where JAX has it: errors are then the rows'."""
    jax.config.update("jax_enable_x64", wide)
    try:
        t = np.linspace(-1, 1, 30, dtype=np.float32)[:, None]
        x, y = jnp.asarray(t), jnp.sin(3 * jnp.asarray(t))
        params = jax.tree.map(lambda p: jnp.asarray(p, "float32"), mlp(1, 8, 1))

        optimizer = shim.GaussNewton(lambda params, x, y: net(params, x) - y)
        state = optimizer.init(params)
        losses = []
        for _ in range(40):
            params, state, progress = optimizer.step(params, state, x, y)
            losses.append(float(progress.loss))
    finally:
        jax.config.update("jax_enable_x64", True)

    assert np.all(np.isfinite(flat(params)))
    assert np.all(np.diff(losses) <= 0)
    assert losses[-1] < 1e-5 * losses[0]
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}


def test_closed_over_points_form_derivatives():
    """Nothing tells their examples apart: derivatives are formed, and named."""
    params = mlp(2, 3, 1)
    optimizer = shim.GaussNewton(
        lambda params: value(params, X), learning_rate=RATE, damping=DAMPING, momentum=0
    )
    new, _, _ = optimizer.step(params, optimizer.init(params))

    r, rows = dense_problem(value, params, (X,))
    step = RATE * dense_direction(np.concatenate(rows, axis=1), np.asarray(r))
    assert_close(flat(params) - flat(new), step, "inverse", "float64")
    assert len(optimizer.formed) == 4
    assert all("as arguments" in why for why in optimizer.formed.values())


def test_errors_state_what_was_expected():
    params = mlp(2, 3, 1)
    with pytest.raises(kc.ConventionError, match="learning_rate"):
        shim.GaussNewton(value, momentum=0.9)
    with pytest.raises(kc.ConventionError, match="damping"):
        shim.GaussNewton(value, damping=-1.0)
    mean = kc.integration.RowLoss(
        likelihood=kc.losses.Bernoulli(), mean_over_outputs=True
    )
    with pytest.raises(kc.ConventionError, match="sum over outputs"):
        shim.GaussNewton(value, likelihood=mean)
    cube = shim.GaussNewton(lambda params, x: net(params, x)[None])
    with pytest.raises(kc.ShapeError, match=r"\(N,\) or \(N, C\)"):
        cube.step(params, cube.init(params), X)
    optimizer = shim.GaussNewton(value)
    with pytest.raises(kc.NotFiniteError, match="finite residuals"):
        optimizer.step(params, optimizer.init(params), X * np.nan)
    for likelihood, y, message in (
        (
            "categorical",
            np.array([0, 1, 2, -100, 3, 0]),
            "labels from 0 to 2.*got 3 of",
        ),
        ("bernoulli", np.full((6, 3), -1.0), "from 0 to 1, got .* of example 0"),
    ):
        fitted = shim.GaussNewton(lambda p, x, y: (net(p, x), y), likelihood=likelihood)
        start = mlp(2, 3)
        with pytest.raises(kc.ConventionError, match=f"`targets` to be .*{message}"):
            fitted.step(start, fitted.init(start), X, y)
    with pytest.raises(kc.DtypeError, match=r"real parameters, got \['c'\] of complex"):
        optimizer.init({**params, "c": np.ones(2, complex)})


def test_weakly_typed_parameters_take_the_dense_step():
    """As `jnp.full` makes them: their types change the trace, not the derivatives."""
    params = mlp(2, 4, 1)
    params = {
        name: {"w": jnp.asarray(layer["w"]), "b": jnp.full(layer["b"].shape, 0.1)}
        for name, layer in params.items()
    }
    assert params["layer_0"]["b"].weak_type
    data = array(5, 2), array(3, 2, seed=1)
    optimizer = shim.GaussNewton(
        poisson, learning_rate=1.0, damping=DAMPING, momentum=0.0
    )
    new, *_ = optimizer.step(params, optimizer.init(params), *data)
    r, rows = dense_problem(poisson, params, data)
    expected = dense_direction(np.concatenate(rows, axis=1), np.asarray(r))
    got = flat(params) - flat(new)
    np.testing.assert_allclose(got, expected, rtol=1e-8, atol=1e-12)
    assert not optimizer.formed


@pytest.mark.parametrize("likelihood", [None, "categorical", "gaussian"])
@pytest.mark.parametrize("options", [{}, {"minibatch": True}], ids=["search", "rate"])
def test_a_model_in_bfloat16_takes_the_steps_of_float32(likelihood, options):
    """Also with labels of examples that do not count, which float32 leaves out here."""
    rng, losses = np.random.default_rng(0), []
    x, W, V = (rng.normal(size=shape) for shape in ((40, 2), (2, 4), (4, 3)))
    labels = np.where(np.arange(40) % 7 == 0, -100, np.arange(40) % 3)
    for dtype in (jnp.float32, jnp.bfloat16):
        keep = slice(None)
        if likelihood == "categorical" and dtype == jnp.float32:
            keep = labels >= 0

        def residuals(params, keep=keep, dtype=dtype):
            z = jnp.tanh(jnp.asarray(x[keep], dtype) @ params["W"]) @ params["V"]
            if likelihood == "categorical":
                return z, jnp.asarray(labels[keep])
            return (z, jnp.ones_like(z)) if likelihood else z - 1

        params = {"W": jnp.asarray(W, dtype), "V": jnp.asarray(V, dtype)}
        optimizer = shim.GaussNewton(residuals, likelihood=likelihood, **options)
        state, of_run = optimizer.init(params), []
        for _ in range(3):
            params, state, progress = optimizer.step(params, state)
            of_run.append(float(progress.loss))
        losses.append(of_run)
    np.testing.assert_allclose(losses[0][0], losses[1][0], rtol=0.01)
    # Eight bits may choose another damping in a search.
    if options:
        np.testing.assert_allclose(*losses, rtol=0.05)
    assert losses[1][2] < 0.8 * losses[1][0]
