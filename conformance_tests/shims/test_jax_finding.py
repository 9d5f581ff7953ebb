"""Layers that the JAX shim finds, against dense references in NumPy.

The captured batches are handed to an estimator on NumPy, whose blocks other tests hold to
their formulas; here the question is which rows a layer saw, and whose.
"""

from __future__ import annotations

import numpy as np
import pytest

import kfac_core as kc

jax = pytest.importorskip("jax")
jnp = jax.numpy
checkpoint_name = pytest.importorskip("jax.ad_checkpoint").checkpoint_name
shim = pytest.importorskip("kfac_core_shims.jax")

LAMBDA = 0.1


pytestmark = pytest.mark.usefixtures("jax_float64")


def solved(F, *parts):
    """Return ``(F + LAMBDA I)^-1`` times the parts, flattened and joined."""
    v = flat(*parts)
    return np.linalg.solve(F + LAMBDA * np.eye(len(v)), v)


def flat(*parts):
    return np.concatenate([np.ravel(part) for part in parts])


def nll(z, y):
    """Return the summed negative log-likelihood of each row's label."""
    return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(z), y[..., None], axis=-1))


def captured_by(function, params, *inputs, y, reduction="sum", **options):
    """Return the network, and what one compiled pass captures, as NumPy arrays."""
    network = shim.Network(function, params, *inputs, **options)

    @jax.jit
    def capture(params, inputs):
        z, pull = network.vjp(params, *inputs)
        cotangent = jax.grad(nll)(z, y) / (len(z) if reduction == "mean" else 1)
        return pull(cotangent, reduction=reduction)

    gradients, captured = capture(params, inputs)
    numpy = jax.tree.map(np.asarray, (gradients, captured))
    return network, *numpy


def directions(network, captured, vectors, reduction="sum"):
    """Return ``(F + LAMBDA I)^-1`` times vectors, by an estimator on NumPy."""
    estimator = kc.Estimator(
        network.blocks, reduction=reduction, damping=LAMBDA, damping_rule="exact"
    )
    estimator.update(captured.batches)
    estimator.refresh()
    return estimator.precondition(vectors)


# ------------------------------------------------- one layer, written in many ways

N, T, D, H = 4, 3, 2, 3
LABELS = np.array([0, 1, 1, 0])


def tapped_flat(params, x):
    return shim.dense("W", x.reshape(N * T, D), params["W"], params["b"]).reshape(
        N, T, H
    )


def over_time(params, x):
    def turn(count, xt):
        return count + 1, xt @ params["W"] + params["b"]

    _, h = jax.lax.scan(turn, 0, x.swapaxes(0, 1))
    return h.swapaxes(0, 1)


def marked_over_time(params, x):
    def turn(count, xt):
        return count + 1, shim.dense("W", xt, params["W"], params["b"])

    _, h = jax.lax.scan(turn, 0, x.swapaxes(0, 1))
    return h.swapaxes(0, 1)


def time_first(params, x):
    h = x.swapaxes(0, 1).reshape(-1, D) @ params["W"] + params["b"]
    return h.reshape(T, -1, H).swapaxes(0, 1)


WAYS = {
    "as it is": lambda p, x: x @ p["W"] + p["b"],
    "flattened": lambda p, x: (x.reshape(-1, D) @ p["W"] + p["b"]).reshape(-1, T, H),
    "time first": time_first,
    "mapped": lambda p, x: jax.vmap(jax.vmap(lambda r: p["W"].T @ r + p["b"]))(x),
    "einsum": lambda p, x: (
        jnp.einsum("ntd,de->ent", x, p["W"]).transpose(1, 2, 0) + p["b"]
    ),
    "jit": lambda p, x: jax.jit(lambda x: x @ p["W"] + p["b"])(x),
    "remat": jax.checkpoint(lambda p, x: x @ p["W"] + p["b"]),
    "remat, named": jax.checkpoint(
        lambda p, x: checkpoint_name(x @ checkpoint_name(p["W"], "W"), "xW") + p["b"]
    ),
    "remat, closed over": lambda p, x: jax.checkpoint(lambda x: x @ p["W"] + p["b"])(x),
    "scan": over_time,
    "marked, flattened": tapped_flat,
    "marked, mapped": lambda p, x: jax.vmap(
        lambda r: shim.dense("W", r, p["W"], p["b"])
    )(x),
    "marked, in a scan": marked_over_time,
}


@pytest.fixture(scope="module")
def shared():
    """Parameters, inputs and the dense curvature of a layer that T positions share."""
    rng = np.random.default_rng(7)
    params = {
        k: rng.normal(size=s) for k, s in {"W": (D, H), "b": H, "V": (H, 2)}.items()
    }
    x = rng.normal(size=(N, T, D))
    h = np.tanh(x @ params["W"] + params["b"])
    p = np.exp(h.mean(1) @ params["V"])
    p /= p.sum(1, keepdims=True)
    e = p - np.eye(2)[LABELS]
    g = (e @ params["V"].T)[:, None] / T * (1 - h**2)
    rows = np.concatenate([x, np.ones((N, T, 1))], axis=2).reshape(-1, D + 1)
    g = g.reshape(-1, H)
    F = T * np.kron(rows.T @ rows / (N * T), g.T @ g / (N * T))
    return jax.tree.map(jnp.asarray, params), jnp.asarray(x), F, rows.T @ g / N


@pytest.mark.parametrize("way", WAYS)
def test_one_layer_in_many_ways_is_one_block(shared, way):
    """N comes from the outputs; positions are expanded, however a network is written."""
    params, x, F, gradient = shared

    def function(params, x):
        return jnp.tanh(WAYS[way](params, x)).mean(axis=1) @ params["V"]

    reduction = "mean" if way in ("flattened", "marked, flattened") else "sum"
    network, gradients, captured = captured_by(
        function, params, x, y=LABELS, reduction=reduction
    )
    assert {name: block.layer.kind for name, block in network.blocks.items()} == {
        "W": "dense",
        "V": "dense",
    }
    scale = 1 if reduction == "mean" else N
    np.testing.assert_allclose(
        flat(gradients["W"], gradients["b"]) / scale, np.ravel(gradient), rtol=1e-9
    )
    shapes = network.blocks["W"].layer.parameter_shapes
    V = {"weight": gradient[:-1].reshape(shapes["weight"]), "bias": gradient[-1]}
    found = directions(network, captured, {"W": V}, reduction)["W"]
    np.testing.assert_allclose(
        flat(found["weight"], found["bias"]), solved(F, gradient), rtol=1e-7
    )


def test_outputs_of_all_tokens_are_rows(shared):
    """Outputs (N T, C): the mean is over tokens, and so is the curvature of each layer."""
    params, x, _, _ = shared
    y = np.arange(N * T) % 2

    def function(params, x):
        h = jnp.tanh(x @ params["W"] + params["b"])
        return (h @ params["V"]).reshape(N * T, 2)

    h = np.tanh(x @ params["W"] + params["b"]).reshape(-1, H)
    p = np.exp(h @ params["V"])
    e = p / p.sum(1, keepdims=True) - np.eye(2)[y]
    F = np.kron(h.T @ h / len(h), e.T @ e / len(e))
    v = np.arange(6.0).reshape(H, 2)
    for reduction in ("sum", "mean"):
        network, _, captured = captured_by(
            function, params, x, y=y, reduction=reduction
        )
        found = directions(network, captured, {"V": {"weight": v}}, reduction)
        np.testing.assert_allclose(flat(found["V"]["weight"]), solved(F, v), rtol=1e-7)


def test_a_mask_leaves_padding_out(shared):
    """A mask of unequal lengths counts in every layer that has the axis of time."""
    params, x, _, _ = shared
    lengths = np.array([3, 1, 2, 3])
    mask = np.arange(T) < lengths[:, None]

    def function(params, x):
        h = jnp.tanh(x @ params["W"] + params["b"])
        h = jnp.where(mask[:, :, None], h, 0.0).sum(1) / lengths[:, None]
        return h @ params["V"]

    network = shim.Network(function, params, x)
    z, pull = network.vjp(params, x, mask=jnp.asarray(mask))
    captured = jax.tree.map(
        np.asarray, pull(jax.grad(nll)(z, LABELS), reduction="sum")[1]
    )
    h = np.tanh(x @ params["W"] + params["b"])
    p = np.exp((h * mask[:, :, None]).sum(1) / lengths[:, None] @ params["V"])
    e = p / p.sum(1, keepdims=True) - np.eye(2)[LABELS]
    g = (e @ params["V"].T / lengths[:, None])[:, None] * (1 - h**2)
    rows = np.concatenate([x, np.ones((N, T, 1))], axis=2)[mask]
    g, count = g[mask], mask.sum()
    # The mean over examples of as many positions as there are on average.
    F = count / N * np.kron(rows.T @ rows / count, g.T @ g / count)
    v = np.arange(9.0).reshape(3, 3)
    found = directions(network, captured, {"W": {"weight": v[:2], "bias": v[2]}})["W"]
    np.testing.assert_allclose(
        flat(found["weight"], found["bias"]), solved(F, v), rtol=1e-7
    )


@pytest.mark.parametrize("shape", [(T, N), (N * T,), (N, T + 1)])
def test_a_mask_that_fits_no_layer_is_refused(shared, shape):
    """It left nothing out, without a word."""
    params, x, _, _ = shared

    def function(params, x):
        return jnp.tanh(x @ params["W"] + params["b"]).sum(1) @ params["V"]

    network = shim.Network(function, params, x)
    z, pull = network.vjp(params, x, mask=jnp.ones(shape, bool))
    with pytest.raises(kc.ConventionError, match="`mask`, of shape"):
        pull(jax.grad(nll)(z, LABELS), reduction="sum")


def test_a_mask_of_reordered_rows_raises(shared):
    """A layer that merged the mask's axes after sorting them would keep its padding."""
    params, x, _, _ = shared

    def function(params, x):
        rows = x.reshape(-1, 2)
        rows = rows[jnp.argsort(rows[:, 0])]
        h = jnp.tanh(rows @ params["W"] + params["b"]).reshape(len(x), T, 3)
        return h.sum(1) @ params["V"]

    network = shim.Network(function, params, x)
    z, pull = network.vjp(params, x, mask=jnp.ones((N, T), bool))
    with pytest.raises(kc.ConventionError, match="in an unknown order"):
        pull(jax.grad(nll)(z, LABELS), reduction="sum")


@pytest.mark.parametrize("move", ["roll", "take"])
def test_masks_of_rows_reordered_by_a_call_raise(shared, move):
    """`jnp.roll` and `jnp.take` are calls, whose insides counted as nothing."""
    params, x, _, _ = shared
    order = np.roll(np.arange(N * T), 1)

    def function(params, x):
        rows = x.reshape(-1, D)
        rows = jnp.roll(rows, 1, 0) if move == "roll" else jnp.take(rows, order, 0)
        h = jnp.tanh(rows @ params["W"] + params["b"]).reshape(len(x), T, H)
        return h.sum(1) @ params["V"]

    assert set(shim.Network(function, params, x).blocks) == {"W", "V"}
    with pytest.raises(kc.ConventionError, match="12 rows for 4 examples"):
        shim.Network(function, params, x, approximation=lambda *_: kc.Full())


def turned(x, way):
    """Return an array with its times from the end, as networks are written."""
    return {
        "flip": lambda: jnp.flip(x, 1),
        "slice": lambda: x[:, ::-1],
        "twice": lambda: jnp.flip(x[:, ::-1], 1),
        "scan": lambda: x,
    }[way]()


@pytest.mark.parametrize("flip", ["flip", "slice", "twice", "scan"])
def test_a_mask_is_not_of_rows_that_are_reversed(shared, flip):
    """It left out the wrong times of the backward half of a bidirectional network."""
    params, x, _, _ = shared
    mask = jnp.asarray(np.arange(T) < np.array([1, 2, 3, 3])[:, None])

    def function(params, x, mask):
        def turn(count, xt):
            return count + 1, jnp.tanh(xt @ params["W"] + params["b"])

        times = turned(x, flip).swapaxes(0, 1)
        _, h = jax.lax.scan(turn, 0, times, reverse=flip == "scan")
        h = turned(h.swapaxes(0, 1), flip) * mask[..., None]
        return h.sum(1) @ params["V"]

    network = shim.Network(function, params, x, mask)
    z, pull = network.vjp(params, x, mask, mask=mask)
    cotangent = jax.grad(nll)(z, LABELS)
    if flip in ("flip", "slice"):
        with pytest.raises(kc.ConventionError, match="length 3 reversed"):
            pull(cotangent, reduction="sum")
        _, pull = network.vjp(params, x, mask)  # without a mask every row counts
        pull(cotangent, reduction="sum")
        return
    gradients, captured = pull(cotangent, reduction="sum")
    batch = captured.batches["W"]
    rows, g = np.asarray(batch.inputs), np.asarray(batch.output_grads)
    assert not np.any(g[~np.asarray(batch.mask)])
    np.testing.assert_allclose(np.einsum("ntd,nth->dh", rows, g), gradients["W"])


@pytest.mark.parametrize("first", ["examples", "times"])
def test_ambiguous_example_axes_are_resolved_or_raise(rng, first):
    """A network of one size of batch had the first axis of two of one length."""
    params = {"W": rng.normal(size=(D, H)), "s": rng.normal(size=H)}
    x = jnp.asarray(rng.normal(size=(T, T, D)))
    times = jnp.arange(float(T))
    mask = jnp.asarray(np.arange(T) < np.arange(1, T + 1)[:, None])

    def hidden(params, x, times):
        x = x if first == "examples" else x.swapaxes(0, 1)
        shape = (1, -1, 1) if first == "examples" else (-1, 1, 1)
        h = (x + times.reshape(shape)) @ params["W"] * params["s"]
        return h if first == "examples" else h.swapaxes(0, 1)

    def any_size(params, x, times):
        return hidden(params, x, times).sum(1)

    def one_size(params, x, times):
        return (hidden(params, x, times) * mask[..., None]).sum(1)

    network = shim.Network(any_size, params, x, times)
    z, pull = network.vjp(params, x, times)
    _, captured = pull(jnp.cos(z), reduction="sum")
    h = np.asarray(x + times[None, :, None]) @ params["W"]
    np.testing.assert_allclose(captured.batches["s"].inputs, h)

    with pytest.raises(kc.ConventionError, match="'s': several axes have the length 3"):
        shim.Network(one_size, params, x, times)
    dense = lambda name, _: kc.Kronecker() if name == "W" else None  # noqa: E731
    network = shim.Network(
        one_size, params, x, times, approximation=dense, uncovered="keep"
    )
    z, pull = network.vjp(params, x, times)
    pull(jnp.cos(z), reduction="sum")  # each row counts alike, whosoever it is
    _, pull = network.vjp(params, x, times, mask=mask)
    with pytest.raises(kc.ConventionError, match="the examples of `mask`"):
        pull(jnp.cos(z), reduction="sum")


def test_cotangents_must_match_the_output_tree(rng):
    """Vectors of one of two losses ended in `'dict' object has no attribute 'dtype'`."""
    params = {"W": rng.normal(size=(D, H)), "V": rng.normal(size=(D, 2))}
    x = jnp.asarray(rng.normal(size=(N, D)))

    def function(params, x):
        return {"one": x @ params["W"], "other": x @ params["V"]}

    network = shim.Network(function, params, x)
    z, pull = network.vjp(params, x)
    made = kc.losses.vectors(kc.losses.Gaussian(variance=1.0), z["one"], mode="exact")
    with pytest.raises(kc.ArgumentError, match="tree like the outputs"):
        pull(made)
    with pytest.raises(kc.ArgumentError, match="tree like the outputs"):
        pull(z["one"], reduction="sum")
    pull({"one": z["one"], "other": jnp.zeros_like(z["other"])}, reduction="sum")


def test_rows_that_a_later_batch_merges_are_refused(shared):
    """With one time in each example, a roll of merged rows was one of the examples."""
    params, x, _, _ = shared

    def function(params, x):
        rows = jnp.roll(x.reshape(-1, D), 1, axis=0)
        h = jnp.tanh(rows @ params["W"] + params["b"])
        return h.reshape(*x.shape[:2], H).sum(1) @ params["V"]

    network = shim.Network(
        function, params, x[:, :1], approximation=lambda *_: kc.Full()
    )
    with pytest.raises(kc.ConventionError, match="12 rows for 4 examples"):
        network.vjp(params, x)


@pytest.mark.parametrize("kind", [bool, np.uint8, np.int32])
def test_inputs_need_not_be_floats(rng, kind):
    """A product takes counts and flags as they are, and so do the statistics."""
    x = rng.integers(0, 2, size=(N, D)).astype(kind)
    params = {"W": jnp.asarray(rng.normal(size=(D, H)))}
    network, gradients, captured = captured_by(
        lambda params, x: x @ params["W"], params, jnp.asarray(x), y=LABELS
    )
    p = np.exp(x @ np.asarray(params["W"]))
    e = p / p.sum(1, keepdims=True) - np.eye(H)[LABELS]
    F = np.kron(x.T.astype(float) @ x / N, e.T @ e / N)
    v = x.T @ e / N
    np.testing.assert_allclose(gradients["W"] / N, v, rtol=1e-9)
    found = directions(network, captured, {"W": {"weight": v}})["W"]
    np.testing.assert_allclose(flat(found["weight"]), solved(F, v), rtol=1e-7)


@pytest.mark.parametrize("vectors", ["sum", "mean", "exact"])
def test_an_embedding_may_make_logits_too(rng, vectors):
    """One block with a diagonal input factor; the output layer swaps its two sides."""
    V, d = 5, 3
    W, b = rng.normal(size=(V, d)), rng.normal(size=V)
    ids, y = rng.integers(0, V, size=(N, T)), rng.integers(0, V, size=N)
    params = {"W": jnp.asarray(W), "b": jnp.asarray(b)}

    def function(params, ids):
        h = jnp.tanh(params["W"][ids]).mean(axis=1)
        return h @ params["W"].T + params["b"]

    h = np.tanh(W[ids]).mean(1)
    p = np.exp(h @ W.T + b)
    p /= p.sum(1, keepdims=True)
    errors = [p - np.eye(V)[y]]
    if vectors == "exact":
        errors = [np.sqrt(p[:, [k]]) * (p - np.eye(V)[k]) for k in range(V)]
    one_hot = np.eye(V)[ids.ravel()]
    back = [
        ((e @ W)[:, None] / T * (1 - np.tanh(W[ids]) ** 2)).reshape(-1, d)
        for e in errors
    ]
    R = N * T + N
    A = np.diag(((one_hot**2).sum(0) + sum((e**2).sum(0) for e in errors)) / R)
    G = (sum(g.T @ g for g in back) + h.T @ h) / R
    gradient = (one_hot.T @ back[0] + errors[0].T @ h) / N

    if vectors == "exact":
        network = shim.Network(function, params, jnp.asarray(ids))
        z, pull = network.vjp(params, jnp.asarray(ids))
        likelihood = kc.losses.Categorical()
        captured = pull(kc.losses.vectors(likelihood, z, mode="exact"))
        captured = jax.tree.map(np.asarray, captured)
    else:
        network, gradients, captured = captured_by(
            function, params, jnp.asarray(ids), y=jnp.asarray(y), reduction=vectors
        )
        scale = N if vectors == "sum" else 1
        np.testing.assert_allclose(gradients["W"] / scale, gradient, rtol=1e-9)
    assert set(network.blocks) == {"W", "b"}
    reduction = "mean" if vectors == "mean" else "sum"
    found = directions(network, captured, {"W": {"weight": gradient}}, reduction)["W"]
    expected = solved(R / N * np.kron(A, G), gradient)
    np.testing.assert_allclose(flat(found["weight"]), expected, rtol=1e-7)
    with pytest.raises(kc.ConventionError, match="both embeds ids and makes logits"):
        shim.Network(
            function, params, jnp.asarray(ids), approximation=lambda *_: kc.EKFAC()
        )


# -------------------------------------------------------------------------- refusals


def test_uses_outside_of_layers_are_refused_by_name(rng):
    """A weight used once more; one in a `cond`; a table that is of no example."""
    W = {name: jnp.asarray(rng.normal(size=(2, 2))) for name in "WV"}
    x = jnp.asarray(rng.normal(size=(8, 2)))
    pairs = {
        "dot_general": lambda p, x: shim.dense("a", x, p["W"]) @ (p["W"] @ p["W"]),
        "cond": lambda p, x: jax.lax.cond(
            x.sum() > 0, lambda: x @ p["W"], lambda: x - p["W"].sum()
        ),
        "reduce_sum": lambda p, x: x @ p["W"] + p["W"].sum(),
        "concatenate": lambda p, x: x @ jnp.concatenate([p["W"], p["W"]], axis=1),
        "in different forms": lambda p, x: (
            x @ jnp.concatenate([p["W"], p["V"]], axis=1) @ jnp.ones((4, 2)) @ p["V"]
        ),
        r"rows \[7\].*8 examples": lambda p, x: (
            x @ (jnp.ones((7, 2)) @ p["W"]).T[:, :2]
        ),
    }
    for match, function in pairs.items():
        with pytest.raises(kc.UnsupportedError, match=match):
            shim.Network(function, W, x)
    with pytest.raises(kc.ConventionError, match=r"'a'.*rows \[7\].*8 examples"):
        shim.Network(
            lambda p, x: x + shim.dense("a", jnp.ones((7, 2)), p["W"]).sum(), W, x
        )

    def before_the_mark(params, x):
        y = x @ params["W"]
        layer = kc.Dense(in_features=2, out_features=2, bias=False, weight_layout="io")
        return shim.tap("a", layer, x, y, weight=params["W"]) + y

    with pytest.raises(kc.ConventionError, match="counted twice"):
        shim.Network(before_the_mark, W, x)
    # A second use that is a layer is a second use of the block.
    network = shim.Network(lambda p, x: shim.dense("a", x, p["W"]) @ p["W"], W, x)
    _, captured = network.vjp(W, x)[1](jnp.ones((8, 2)), reduction="sum")
    first, second = captured.batches["a"]
    matrix, ones = np.asarray(W["W"]), np.ones((8, 2))
    for use, inputs, grads in (
        (first, np.asarray(x), ones @ matrix.T),
        (second, x @ matrix, ones),
    ):
        np.testing.assert_allclose(use.inputs, inputs, rtol=1e-12)
        np.testing.assert_allclose(use.output_grads, grads, rtol=1e-12)


def test_a_use_that_is_left_out_leaves_out_the_others(rng):
    """A kernel is used twice: a block would have the rows of one use only."""
    params = {"k": jnp.asarray(rng.normal(size=(3, 2, 2))), "b": jnp.ones(2)}
    params["c"] = jnp.ones(2)
    x = jnp.asarray(rng.normal(size=(5, 4, 2)))

    def function(p, x):
        for bias in "bc":
            layout = ("NWC", "WIO", "NWC")
            x = jax.lax.conv_general_dilated(
                x, p["k"], (1,), "SAME", dimension_numbers=layout
            )
            x = jnp.tanh(x + p[bias])
        return x.sum(axis=1) + p["c"].sum()

    network = shim.Network(function, params, x, uncovered="keep")
    assert not network.blocks
    assert {*network.uncovered} == {"['k']", "['b']", "['c']"}


def test_merged_rows_are_refused_where_examples_must_be_known(shared):
    """A convolution of frames merged with examples: K-FAC can, a full matrix cannot."""
    params = {"k": jnp.ones((3, 3, 1, 2))}
    x = jnp.ones((4, 2, 5, 5, 1))

    def function(params, x):
        y = jax.lax.conv_general_dilated(
            x.reshape(-1, 5, 5, 1),
            params["k"],
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return jnp.tanh(y).reshape(4, -1, 2).mean(1)

    assert set(shim.Network(function, params, x).blocks) == {"k"}
    with pytest.raises(kc.ConventionError, match="8 rows for 4 examples"):
        shim.Network(function, params, x, approximation=lambda *_: kc.Full())


# ------------------------------------------------------ trees, axes, steps without rows


@pytest.fixture(scope="module")
def trained(shared):
    """A network of one layer, its transformation, and a compiled step."""
    params, x, _, _ = shared
    x = x[:, 0]

    def function(params, x):
        return jnp.tanh(x @ params["W"] + params["b"]) @ params["V"]

    network = shim.Network(function, params, x)
    options = {"reduction": "sum", "damping": LAMBDA, "kl_clip": None}
    return network, params, x, options


@pytest.fixture(scope="module")
def stepped(trained):
    """The direction, the state and the gradients after a step on one device."""
    network, params, x, options = trained
    kfac = shim.KFAC(network, refresh_every=1, **options)
    step = jax.jit(step_of(network, kfac))
    return kfac, step(params, kfac.init(params), x, LABELS)


def step_of(network, kfac, axis_name=None):
    def step(params, state, x, y):
        z, pull = network.vjp(params, x)
        gradients, captured = pull(jax.grad(nll)(z, y), reduction="sum")
        gradients = jax.tree.map(lambda g: g / len(x), gradients)
        if axis_name is not None:
            gradients = jax.lax.pmean(gradients, axis_name)
        return *kfac.update(gradients, state, captured=captured), gradients

    return step


def test_gradients_are_matched_by_path(stepped):
    """A masked tree gives each block its own gradients; half a block is refused."""
    optax = pytest.importorskip("optax")
    kfac, (direction, state, gradients) = stepped
    masked = optax.MaskedNode()
    some = {"W": masked, "b": masked, "V": gradients["V"]}
    found, _ = kfac.update(some, state, captured=None)
    assert isinstance(found["W"], optax.MaskedNode)
    np.testing.assert_allclose(found["V"], direction["V"], rtol=1e-12)
    with pytest.raises(kc.ConventionError, match=r"'W'.*\['b'\]"):
        kfac.update(gradients | {"b": masked}, state, captured=None)
    with pytest.raises(kc.ConventionError, match="structure"):
        kfac.update(list(gradients.values()), state, captured=None)
    with pytest.raises(kc.ShapeError, match=r"\['V'\]"):
        kfac.update(gradients | {"V": gradients["V"].T}, state, captured=None)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_takes_a_damping_for_each_block(trained, compiled):
    """It was refused as no number, though the constructor's was not."""
    network, params, x, options = trained
    given = {"W": 0.5, "V": 2.0}
    z, pull = network.vjp(params, x)
    gradients, captured = pull(jax.grad(nll)(z, LABELS), reduction="sum")
    kfac = shim.KFAC(network, **options)

    def update(damping):
        state = kfac.init(params)
        return kfac.update(gradients, state, captured=captured, damping=damping)[0]

    found = (jax.jit(update) if compiled else update)(given)
    own = shim.KFAC(network, **{**options, "damping": given})
    expected = own.update(gradients, own.init(params), captured=captured)[0]
    for name, leaf in expected.items():
        np.testing.assert_allclose(found[name], leaf, rtol=1e-9)
    with pytest.raises(kc.DampingError, match=r"missing \['V'\]"):
        update({"W": 0.5})
    with pytest.raises(kc.UnknownBlockError, match="'Z'"):
        update({**given, "Z": 1.0})


def test_a_step_before_statistics_raises_or_is_flagged(trained):
    """Where values are read it raises; a compiled one is flagged, its direction zero."""
    network, params, _, options = trained
    kfac = shim.KFAC(network, **options)
    state = kfac.init(params)
    with pytest.raises(kc.NotReadyError, match="captured"):
        kfac.update(params, state, captured=None)
    found, after = jax.jit(lambda p, s: kfac.update(p, s, captured=None))(params, state)
    assert not bool(after.is_good())
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(found))
    for every in (0, -1, 1.5):
        with pytest.raises(kc.ConventionError, match="refresh_every"):
            shim.KFAC(network, refresh_every=every, **options)
    with pytest.raises(TypeError, match="dampng"):
        kfac.update(params, state, captured=None, dampng=1.0)


def test_a_mapped_step_has_the_statistics_of_all_devices(trained, stepped):
    """With `axis_name` as one device would; without it, or with another, refused."""
    network, params, x, options = trained
    kfac = shim.KFAC(network, refresh_every=1, axis_name="i", **options)
    _, (expected, state, _) = stepped
    parts = x.reshape(2, 2, D), jnp.asarray(LABELS).reshape(2, 2)

    def mapped(kfac):
        step = step_of(network, kfac)
        return jax.vmap(step, (None, None, 0, 0), axis_name="i")(
            params, kfac.init(params), *parts
        )

    directions, states, _ = jax.jit(lambda: mapped(kfac))()
    for found, one in zip(
        jax.tree.leaves((directions, states)),
        jax.tree.leaves((expected, state)),
        strict=True,
    ):
        np.testing.assert_allclose(found[0], one, rtol=1e-9, atol=1e-12)
        np.testing.assert_array_equal(found[0], found[1])
    with pytest.raises(kc.ConventionError, match="no axis"):
        step_of(network, kfac)(params, kfac.init(params), x, LABELS)


def test_shard_map_checks_replication(trained, stepped):
    """`shard_map` with its check of replication: state and directions are replicated."""
    network, params, x, options = trained
    kfac = shim.KFAC(network, refresh_every=1, axis_name="i", **options)
    P = jax.sharding.PartitionSpec
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("i",))
    types = []

    def local(*given):
        found = step_of(network, kfac)(*given)
        # Gradients that do not vary were summed over the devices.
        types.extend(str(jax.typeof(leaf)) for leaf in jax.tree.leaves(found[2]))
        return found

    step = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(), P(), P("i"), P("i")),
        out_specs=(P(), P(), P("i")),
    )
    arguments = params, kfac.init(params), x, jnp.asarray(LABELS)
    direction, _, _ = jax.jit(step)(*arguments)
    kfac.axis_name = None
    with pytest.raises(kc.ConventionError, match="each device would keep"):
        jax.eval_shape(lambda *given: step(*given), *arguments)
    assert len(types) == 3
    assert all("V:i" in kind for kind in types)
    expected = stepped[1][0]
    for name, one in expected.items():
        np.testing.assert_allclose(direction[name], one, rtol=1e-9)


def whole_runs(network, kfac, axis_name=None):
    """Return a function that starts a run and takes two steps; as for an axis of data."""
    step = step_of(network, kfac, axis_name)

    def run(params, x):
        def moved(carry, _):
            params, state = carry
            direction, state, _ = step(params, state, x, LABELS)
            return (jax.tree.map(jnp.subtract, params, direction), state), None

        start = params, kfac.init(params)
        return jax.lax.scan(moved, start, None, length=2)[0][0]

    return run


@pytest.fixture
def seeds(trained):
    """Parameters and batches of two runs."""
    _, params, x, _ = trained
    several = jax.tree.map(lambda p: jnp.stack([p, 2.0 * p]), params)
    return several, jnp.stack([x, x[::-1]])


@pytest.mark.skipif(jax.__version_info__ < (0, 8), reason="pmap looks like vmap")
@pytest.mark.parametrize("inner", [lambda run: run, jax.jit], ids=["plain", "jit"])
def test_a_vmap_is_of_independent_runs(trained, seeds, inner):
    """Also around a `jit` and a `scan`, and from one first state for all."""
    network, _, _, options = trained
    kfac = shim.KFAC(network, refresh_every=1, **options)
    run = whole_runs(network, kfac)
    together = jax.jit(jax.vmap(inner(run), axis_name="seed"))(*seeds)
    for i in range(2):
        alone = jax.jit(run)(*jax.tree.map(lambda leaf, i=i: leaf[i], seeds))
        for name, one in alone.items():
            np.testing.assert_allclose(together[name][i], one, rtol=1e-9)


def test_runs_that_differ_by_their_random_vectors_share_gradients(trained):
    """Nothing is averaged there: parameters and data are the same."""
    network, params, x, options = trained
    kfac = shim.KFAC(network, refresh_every=1, **options)

    def step(state, scale):
        z, pull = network.vjp(params, x)
        gradients, _ = pull(jax.grad(nll)(z, LABELS) / len(x), reduction="mean")
        _, captured = pull(scale * jnp.ones_like(z), reduction="sum")
        return kfac.update(gradients, state, captured=captured)[0]

    states = jax.vmap(lambda _: kfac.init(params))(jnp.arange(2))
    runs = jax.vmap(jax.jit(step), axis_name="seed")
    assert jax.eval_shape(runs, states, jnp.ones(2))["W"].shape[0] == 2


@pytest.mark.skipif(jax.__version_info__ < (0, 8), reason="pmap looks like vmap")
@pytest.mark.parametrize("inner", [lambda run: run, jax.jit], ids=["plain", "jit"])
def test_averaged_gradients_of_statistics_that_are_not_are_refused(
    trained, seeds, inner
):
    """Each index would precondition the one gradient by a curvature of its own."""
    network, params, _, options = trained
    copies = jax.tree.map(lambda p: jnp.stack([p, p]), params)

    def mapped(name):
        kfac = shim.KFAC(network, refresh_every=1, axis_name=name, **options)
        run = inner(whole_runs(network, kfac, "i"))
        return jax.eval_shape(jax.vmap(run, axis_name="i"), copies, seeds[1])

    with pytest.raises(kc.ConventionError, match="averaged over the axis, and"):
        mapped(None)
    for name in ("i", ()):
        mapped(name)
    within = shim.KFAC(network, axis_name="i", **options)
    run = jax.vmap(whole_runs(network, within, "i"), axis_name="i")
    jax.eval_shape(
        jax.vmap(run, axis_name="seed"), *jax.tree.map(pair, (copies, seeds[1]))
    )


def pair(leaf):
    return jnp.stack([leaf, leaf])
