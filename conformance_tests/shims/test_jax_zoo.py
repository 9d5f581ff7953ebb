"""Programs of JAX, each against its own Jacobian.

The rows that a network captures give each block of ``J^T J / N`` exactly (`Full`), with J
by ``jax.jacrev`` of the program in float64, or they are of another layer, or of another
example.  A new program is one entry of `ZOO`.
"""

from __future__ import annotations

import numpy as np
import pytest

import kfac_core as kc

jax = pytest.importorskip("jax")
jnp = jax.numpy
shim = pytest.importorskip("kfac_core_shims.jax")

LAMBDA = 0.1
N, T, D, H = 5, 3, 4, 3
ORDER = np.array([2, 0, 1, 4, 3])


pytestmark = pytest.mark.usefixtures("jax_float64")


def u(p, x):
    """Return a network of two inputs and one output, of a batch or of one example."""
    h = jnp.tanh(x @ p["W0"] + p["b0"])
    return jnp.tanh(h @ p["W1"] + p["b1"]) @ p["W2"]


def point(p, x):
    """Return u at one point."""
    return u(p, x)[0]


def along(f, x, axis):
    """Return the derivative of a function of the batch along one of its inputs."""
    tangent = jnp.zeros_like(x).at[..., axis].set(1.0)
    return jax.jvp(f, (x,), (tangent,))[1]


def laplacian(p, x):
    second = [
        along(lambda x, i=i: along(lambda x: u(p, x), x, i), x, i) for i in (0, 1)
    ]
    return second[0] + second[1]


def attention(p, x):
    q, k, v = (jnp.einsum("ntd,dhk->nthk", x, p[name]) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("nthk,nshk->nhts", q, k))
    mixed = jnp.einsum("nhts,nshk->nthk", weights, v)
    return jnp.einsum("nthk,hkd->ntd", mixed, p["o"]).mean(axis=1)


def conv(p, x, padding, strides=(1,), dilation=(1,)):
    layout = ("NWC", "WIO", "NWC")
    y = jax.lax.conv_general_dilated(
        x, p["k"], strides, padding, lhs_dilation=dilation, dimension_numbers=layout
    )
    return jnp.tanh(y + p["b"]).sum(axis=1)


def stacked(p, x):
    def turn(h, layer):
        return jnp.tanh(h @ layer["W"] + layer["b"]), None

    return jax.lax.scan(jax.checkpoint(turn), x, p["layers"])[0]


def concatenated(p, x):
    """Return attention with one product for queries, keys and values."""
    names = ("q", "k", "v")
    weight = jnp.concatenate([p[name]["w"] for name in names], axis=-1)
    bias = jnp.concatenate([p[name]["b"] for name in names])
    q, k, v = jnp.split(x @ weight + bias, [H, 2 * H], axis=-1)
    weights = jax.nn.softmax(jnp.einsum("ntk,nsk->nts", q, k))
    return jnp.einsum("nts,nsk->ntk", weights, v).mean(axis=1) @ p["o"]


def stacked_by_the_network(p, x):
    return stacked({"layers": jax.tree.map(lambda *each: jnp.stack(each), *p)}, x)


def concatenated_in_a_scan(p, x):
    def turn(h, layer):
        weight = jnp.concatenate([layer["a"], layer["b"]], axis=1)
        return jnp.tanh(h @ weight), None

    return jax.lax.scan(turn, x, p)[0]


def time_first(p, x):
    h = x.swapaxes(0, 1).reshape(-1, D) @ p["W"] + p["b"]
    return jnp.tanh(h.reshape(T, -1, H).swapaxes(0, 1)).sum(axis=1) @ p["V"]


def expected_energy(p, x):
    """Return outputs (N,), as of the logarithm of a wave function."""
    return (jnp.tanh(x @ p["W"]) @ p["V"]).sum(axis=-1)


PINN = {"W0": (2, 5), "b0": 5, "W1": (5, 4), "b1": 4, "W2": (4, 1)}
ONE, TWO = {"W": (D, H)}, {"W": (D, H), "V": (H, 2)}
DENSE = {**TWO, "b": H}
FEATURES, TOKENS, POINTS = (N, D), (N, T, D), (N, 2)

ZOO = {
    "tied by transposition": (
        ONE,
        FEATURES,
        lambda p, x: jnp.tanh(x @ p["W"]) @ p["W"].T,
    ),
    "tied, square": (
        {"W": (D, D)},
        FEATURES,
        lambda p, x: jnp.tanh(x @ p["W"].T) @ p["W"],
    ),
    "tied, of tokens, with biases": (
        {**ONE, "b": H, "c": D},
        TOKENS,
        lambda p, x: (jnp.tanh(x @ p["W"] + p["b"]) @ p["W"].T + p["c"]).sum(axis=1),
    ),
    "used twice, once with a bias": (
        {"W": (D, D), "b": D},
        FEATURES,
        lambda p, x: jnp.tanh(x @ p["W"] + p["b"]) @ p["W"],
    ),
    "two biases of one weight": (
        {"W": (D, D), "b": D, "c": D},
        FEATURES,
        lambda p, x: jnp.tanh(x @ p["W"] + p["b"]) @ p["W"] + p["c"],
    ),
    "learned positions": (
        {**TWO, "pos": (6, H)},
        TOKENS,
        lambda p, x: jnp.tanh(x @ p["W"] + p["pos"][:T]).sum(axis=1) @ p["V"],
    ),
    "learned positions from the second": (
        {**TWO, "pos": (1, 6, H)},
        TOKENS,
        lambda p, x: jnp.tanh(x @ p["W"] + p["pos"][:, 1 : T + 1]).sum(axis=1) @ p["V"],
    ),
    "a fixed order": (
        TWO,
        FEATURES,
        lambda p, x: jnp.tanh(x[jnp.array(ORDER)] @ p["W"]) @ p["V"],
    ),
    "outputs (N,)": (TWO, FEATURES, expected_energy),
    "time first, merged": (DENSE, TOKENS, time_first),
    "attention": (
        dict.fromkeys("qkv", (D, 2, 3)) | {"o": (2, 3, D)},
        TOKENS,
        attention,
    ),
    "a convolution": (
        {"k": (2, D, 2), "b": 2},
        TOKENS,
        lambda p, x: conv(p, x, "SAME"),
    ),
    "a transposed convolution": (
        {"k": (2, D, 2), "b": 2},
        TOKENS,
        lambda p, x: conv(p, x, [(1, 1)], dilation=(2,)),
    ),
    "negative padding": (
        {"k": (2, D, 2), "b": 2},
        TOKENS,
        lambda p, x: conv(p, x, [(-1, 1)]),
    ),
    "a scan over layers": (
        {"layers": {"W": (3, D, D), "b": (3, D)}},
        FEATURES,
        stacked,
    ),
    "concatenated queries, keys and values": (
        {"q": {"w": (D, H), "b": H}, "k": {"w": (D, H), "b": H}}
        | {"v": {"w": (D, 2), "b": 2}, "o": (2, 3)},
        TOKENS,
        concatenated,
    ),
    "concatenated, of shape (out, in)": (
        {"a": (2, D), "b": (H, D), "V": (2 + H, 2)},
        FEATURES,
        lambda p, x: jnp.tanh(x @ jnp.concatenate([p["a"], p["b"]]).T) @ p["V"],
    ),
    "concatenated along the inputs, with one bias": (
        {"a": (1, H), "c": (D - 1, H), "b": H, "V": (H, 2)},
        TOKENS,
        lambda p, x: (
            jnp.tanh(x @ jnp.concatenate([p["a"], p["c"]]) + p["b"]).sum(axis=1)
            @ p["V"]
        ),
    ),
    "a stack of heads": (
        {"a": (D, 2), "b": (D, 2), "V": (4, 2)},
        FEATURES,
        lambda p, x: (
            jnp.tanh(jnp.einsum("nd,hde->nhe", x, jnp.stack([p["a"], p["b"]]))).reshape(
                -1, 4
            )
            @ p["V"]
        ),
    ),
    "a scan over layers that the network stacks": (
        [{"W": (D, D), "b": D}] * 3,
        FEATURES,
        stacked_by_the_network,
    ),
    "a scan over layers of two concatenated weights": (
        {"a": (3, D, 1), "b": (3, D, D - 1)},
        FEATURES,
        concatenated_in_a_scan,
    ),
    "concatenated twice, used twice": (
        {"a": (D, 1), "b": (D, 1), "c": (D, D - 2)},
        FEATURES,
        lambda p, x: (
            jnp.tanh(x @ jnp.hstack([jnp.hstack([p["a"], p["b"]]), p["c"]]))
            @ jnp.hstack([jnp.hstack([p["a"], p["b"]]), p["c"]]).T
        ),
    ),
    "concatenated positions": (
        {**TWO, "first": (1, H), "pos": (T - 1, H)},
        TOKENS,
        lambda p, x: (
            jnp.tanh(x @ p["W"] + jnp.concatenate([p["first"], p["pos"]])).sum(axis=1)
            @ p["V"]
        ),
    ),
    "names as of boxes": (
        {"head": {"value": (D, H), "raw_value": (H, 2)}},
        FEATURES,
        lambda p, x: jnp.tanh(x @ p["head"]["value"]) @ p["head"]["raw_value"],
    ),
    "u": (PINN, POINTS, u),
    "u and a parameter that it does not use": (PINN | {"c": 1}, POINTS, u),
    "u_x + u_y, forward": (
        PINN,
        POINTS,
        lambda p, x: along(lambda x: u(p, x), x, 0) + along(lambda x: u(p, x), x, 1),
    ),
    "u_x + u_y, backward": (
        PINN,
        POINTS,
        lambda p, x: jax.grad(lambda x: u(p, x).sum())(x).sum(axis=1),
    ),
    "u and its gradient": (
        PINN,
        POINTS,
        lambda p, x: jnp.concatenate(
            [u(p, x), jax.grad(lambda x: u(p, x).sum())(x)], axis=1
        ),
    ),
    "the Laplacian": (PINN, POINTS, laplacian),
    "the Laplacian of each, by its Hessian": (
        PINN,
        POINTS,
        jax.vmap(lambda p, x: jnp.trace(jax.hessian(point, 1)(p, x)), (None, 0)),
    ),
    "the Laplacian of each, by two Jacobians": (
        PINN,
        POINTS,
        jax.vmap(
            lambda p, x: jnp.trace(jax.jacrev(jax.jacrev(point, 1), 1)(p, x)), (None, 0)
        ),
    ),
    "u_x + u_y of each": (
        PINN,
        POINTS,
        jax.vmap(lambda p, x: jax.grad(point, 1)(p, x).sum(), (None, 0)),
    ),
    "a derivative along a constant": (
        PINN,
        POINTS,
        jax.vmap(
            lambda p, x: jax.jvp(lambda x: point(p, x), (x,), (jnp.ones(2),))[1],
            (None, 0),
        ),
    ),
    "a mixed residual": (
        PINN,
        POINTS,
        jax.vmap(
            lambda p, x: jnp.stack(
                [
                    point(p, x) * jax.grad(point, 1)(p, x)[0],
                    jax.hessian(point, 1)(p, x)[0, 1] + point(p, x) ** 2,
                ]
            ),
            (None, 0),
        ),
    ),
}


def drawn(shapes, rng):
    """Return parameters of normal entries."""
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape)),
        shapes,
        is_leaf=lambda shape: isinstance(shape, int | tuple),
    )


def assert_blocks_are_those_of_the_jacobian(
    function, params, x, *, empirical=False, made_with=None
):
    """Compare each block with the columns of J; return the network."""
    first = x if made_with is None else made_with
    network = shim.Network(function, params, first, approximation=lambda *_: kc.Full())
    likelihood = kc.losses.Gaussian(variance=1.0)
    weights = np.random.default_rng(9).normal(size=(64, 8))

    @jax.jit
    def capture(params, x):
        J = jax.tree.leaves(jax.jacrev(lambda params: function(params, x))(params))
        z, pull = network.vjp(params, x)
        J = [part.reshape(*z.shape, -1) for part in J]
        if empirical:
            c = jnp.asarray(weights[: z.shape[0], : z.shape[1]])
            captured = pull(c / len(z), reduction="mean")[1]
            J = [jnp.einsum("nc,ncp->np", c, part) for part in J]
        else:
            rows = z if z.ndim > 1 else z[:, None]
            captured = pull(kc.losses.vectors(likelihood, rows, mode="exact"))
        return captured.batches, [part.reshape(-1, part.shape[-1]) for part in J], z

    batches, J, z = jax.tree.map(np.asarray, capture(params, x))
    estimator = kc.Estimator(
        network.blocks,
        reduction="mean" if empirical else "sum",
        sources="sum",
        damping=LAMBDA,
        damping_rule="exact",
    )
    estimator.update(batches)
    estimator.refresh()
    # Which column of J each entry of a block's matrix is.
    _, unraveled = jax.flatten_util.ravel_pytree(params)
    J = np.concatenate(J, axis=1)
    numbered = unraveled(jnp.arange(float(J.shape[1])))
    places = network.leaves.vectors(numbered, network.wiring)
    same = network.leaves.replaced(numbered, places, network.wiring)
    jax.tree.map(np.testing.assert_array_equal, same, numbered)
    for name, block in network.blocks.items():
        own = np.asarray(block.parameters_to_matrix(places[name]))
        part = J[:, own.ravel().astype(int)]
        expected = part.T @ part / len(z) + LAMBDA * np.eye(part.shape[1])
        found = estimator.operator(name).to_dense()
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-10, err_msg=name)
    covered = np.concatenate(
        [v.ravel() for own in places.values() for v in own.values()]
    )
    unused = np.setdiff1d(np.arange(J.shape[1]), covered.astype(int))
    assert not np.any(J[:, unused])
    return network


@pytest.mark.parametrize("name", ZOO)
def test_blocks_are_those_of_the_jacobian(name, rng):
    """Rows of every use of every weight, and whose they are."""
    shapes, inputs, function = ZOO[name]
    x = jnp.asarray(rng.normal(size=inputs))
    assert_blocks_are_those_of_the_jacobian(function, drawn(shapes, rng), x)


@pytest.mark.parametrize("name", ["tied, of tokens, with biases", "u and its gradient"])
def test_gradients_of_a_mean_loss_are_rows_too(name, rng):
    """With one vector, and the unit of a mean."""
    shapes, inputs, function = ZOO[name]
    x, params = jnp.asarray(rng.normal(size=inputs)), drawn(shapes, rng)
    assert_blocks_are_those_of_the_jacobian(function, params, x, empirical=True)


@pytest.mark.parametrize("made_with", [(N, 1), (1, 1), (1, T)])
def test_axes_of_length_one_are_rechecked_with_the_next_batch(made_with, rng):
    """Time merged in front of the examples is not seen where there is one time."""
    x, params = jnp.asarray(rng.normal(size=TOKENS)), drawn(DENSE, rng)
    first = x[: made_with[0], : made_with[1]]

    def function(p, x):
        h = x.swapaxes(0, 1).reshape(-1, D) @ p["W"] + p["b"]
        return jnp.tanh(h.reshape(x.shape[1], -1, H)).sum(axis=0) @ p["V"]

    assert_blocks_are_those_of_the_jacobian(function, params, x, made_with=first)


def test_learned_positions_of_another_length_are_the_same_block(rng):
    """Rows have zeros where nothing was added."""
    shapes, inputs, _ = ZOO["learned positions"]
    x, params = jnp.asarray(rng.normal(size=inputs)), drawn(shapes, rng)

    def function(p, x):
        h = jnp.tanh(x @ p["W"] + p["pos"][: x.shape[1]])
        return h.sum(axis=1) @ p["V"]

    assert_blocks_are_those_of_the_jacobian(function, params, x, made_with=x[:, :2])


@pytest.mark.parametrize("shape", [(4, 3, 12), (4, 12, 3)])
def test_examples_are_identified_among_equal_axes(shape, rng):
    """Times first, with as many examples as features, or times."""
    x = jnp.asarray(rng.normal(size=shape))
    params = drawn({"W": (shape[-1], 2)}, rng)
    assert_blocks_are_those_of_the_jacobian(
        lambda p, x: jnp.tanh(x @ p["W"]).sum(axis=0), params, x
    )


# ------------------------------------------------------------- every library's modules


def linen(x):
    nn = pytest.importorskip("flax.linen")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel = nn.with_partitioning(nn.initializers.ones, (None, None, None))
            x = x.reshape(len(x), 2, D // 2, 1)
            x = nn.Conv(2, (2, 3), strides=(2, 1), padding=((0, 1), (1, 0)))(x)
            x = nn.LayerNorm()(jnp.tanh(x)).reshape(len(x), -1)
            x = jnp.tanh(nn.DenseGeneral((1, 3), kernel_init=kernel)(x))
            return nn.DenseGeneral(3, axis=(-2, -1), use_bias=False)(x)

    model = Model()
    params = model.init(jax.random.key(0), x)["params"]
    return (
        params,
        lambda p, x: model.apply({"params": p}, x),
        "Conv_0 LayerNorm_0 DenseGeneral_0 DenseGeneral_1",
    )


def lstm(x):
    nn = pytest.importorskip("flax.linen")
    model = nn.RNN(nn.OptimizedLSTMCell(2, param_dtype=x.dtype))
    params = model.init(jax.random.key(0), x[..., None])

    def function(p, x):
        return model.apply(p, x[..., None]).sum(axis=1)

    return params, function, "params/cell/hi params/cell/ii"


def nnx_model(x):
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.one = nnx.Linear(x.shape[1], 4, rngs=rngs)
            self.norm = nnx.LayerNorm(4, rngs=rngs)
            self.two = nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x):
            return self.two(self.norm(jnp.tanh(self.one(x))))

    graph, params = nnx.split(Model(nnx.Rngs(0)))
    return params, lambda p, x: nnx.merge(graph, p)(x), "one norm two"


def equinox(x):
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0), 2)
    layers = [
        eqx.nn.Linear(x.shape[1], 4, key=keys[0]),
        eqx.nn.Lambda(jnp.tanh),
        eqx.nn.LayerNorm(4),
        eqx.nn.Linear(4, 3, key=keys[1]),
    ]
    params, static = eqx.partition(eqx.nn.Sequential(layers), eqx.is_array)
    names = "layers/0 layers/2 layers/3"
    return params, lambda p, x: jax.vmap(eqx.combine(p, static))(x), names


def haiku(x):
    hk = pytest.importorskip("haiku")

    def model(x):
        x = hk.LayerNorm(-1, True, True)(jnp.tanh(hk.Linear(4)(x)))
        return hk.Linear(3)(x)

    model = hk.without_apply_rng(hk.transform(model))
    return model.init(jax.random.key(0), x), model.apply, "linear layer_norm linear_1"


@pytest.mark.parametrize("library", [linen, lstm, nnx_model, equinox, haiku])
def test_models_of_all_libraries_need_no_marks(library, rng):
    """Blocks have the names of modules, and the rows of their layers."""
    x = jnp.asarray(rng.normal(size=FEATURES))
    params, function, names = library(x)
    params = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape)), params)
    network = assert_blocks_are_those_of_the_jacobian(function, params, x)
    assert list(network.blocks) == names.split()


def test_the_factors_of_a_tied_weight_are_balanced(rng):
    """Uses are positions, ``2 A (x) G``, with one ratio of the traces in both roles."""
    x, W = rng.normal(size=FEATURES), rng.normal(size=(D, H))

    def function(p, x):
        return jnp.tanh(x @ p["W"]) @ p["W"].T

    params = {"W": jnp.asarray(W)}
    network = shim.Network(function, params, jnp.asarray(x))
    c = rng.normal(size=(N, D))
    _, captured = network.vjp(params, jnp.asarray(x))[1](
        jnp.asarray(c), reduction="sum"
    )
    options = {"reduction": "sum", "damping": LAMBDA, "damping_rule": "exact"}
    estimator = kc.Estimator(network.blocks, **options)
    estimator.update(jax.tree.map(np.asarray, captured.batches))
    estimator.refresh()

    h = np.tanh(x @ W)
    g = (c @ W) * (1 - h**2)
    A, G = [x.T @ x, c.T @ c], [g.T @ g, h.T @ h]
    ratios = [np.trace(a) / np.trace(b) for a, b in zip(A, G, strict=True)]
    scale = np.sqrt(ratios[0] / ratios[1])
    A, G = A[0] + scale * A[1], G[0] + G[1] / scale
    F = 2 * np.kron(A, G) / (2 * N) ** 2
    np.testing.assert_allclose(
        estimator.operator("W").to_dense(), F + LAMBDA * np.eye(D * H), rtol=1e-9
    )
    each = np.trace(x.T @ x) * np.trace(g.T @ g) + np.trace(c.T @ c) * np.trace(h.T @ h)
    assert 0.5 * each <= N**2 * np.trace(F) <= each


ORDERS = {
    "fixed": lambda h: h[jnp.array(ORDER)],
    "reversed": lambda h: h[::-1],
    "rolled": lambda h: jnp.roll(h, 1, axis=0),
    "sorted": lambda h: jnp.sort(h, axis=0),
}


@pytest.mark.parametrize("order", ORDERS)
def test_uses_in_another_order_are_matched_by_no_example(order, rng):
    """A use before a permutation of the batch is of another example than one behind it."""
    params, x = {"W": jnp.asarray(rng.normal(size=(D, D)))}, jnp.ones(FEATURES)

    def function(p, x):
        return ORDERS[order](jnp.tanh(x @ p["W"])) @ p["W"]

    assert [*shim.Network(function, params, x).blocks] == ["W"]
    with pytest.raises(kc.ConventionError, match="in another order in each use"):
        shim.Network(function, params, x, approximation=lambda *_: kc.Full())


def test_features_may_be_in_any_order(rng):
    """Uses of one weight around a roll, a flip and a slice of features."""

    def function(p, x):
        h = jnp.roll(jnp.tanh(x @ p["W"]), 1, axis=1)[:, ::-1]
        return jnp.concatenate([h[:, :2], h[:, :2]], axis=1) @ p["W"]

    x = jnp.asarray(rng.normal(size=FEATURES))
    assert_blocks_are_those_of_the_jacobian(function, drawn({"W": (D, D)}, rng), x)
