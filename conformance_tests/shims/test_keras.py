"""The Keras shim against dense computations by NumPy, on whichever backend runs here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras")
BACKEND = keras.backend.backend()
pytest.importorskip(BACKEND)
if BACKEND not in ("torch", "jax"):
    pytest.skip(f"KERAS_BACKEND={BACKEND}", allow_module_level=True)

import kfac_core as kc  # noqa: E402
from kfac_core_shims.keras import KFAC  # noqa: E402

from ..builders.reference import damped_inverse  # noqa: E402

# Keras asks PyTorch for arrays in the way of NumPy 1.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ impl:DeprecationWarning"),
    # Keras traces a loss of NumPy's class numbers with JAX 0.11.
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning"),
]

layers = keras.layers
# On JAX Keras compiles the step.
COMPILED = BACKEND == "jax"
LOSS = {"likelihood": kc.losses.Categorical(), "reduction": "mean"}
SETTINGS = {
    **LOSS,
    "damping": 0.1,
    "decay": 0.9,
    "kl_clip": None,
    "damping_rule": "factored",
    "update_every": 5,
    "refresh_every": 1,
}


def host(x):
    return np.asarray(keras.ops.convert_to_numpy(x), np.float64)


def network(*inside, shape, classes=3, dtype="float32"):
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input(shape, dtype=dtype), *inside])


def softmax(z):
    p = np.exp(z - z.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def roots_of_fisher(z):
    """Return the columns of ``B`` with ``B B^T = diag(p) - p p^T``, shape (M, ..., P)."""
    p = softmax(z)
    B = np.eye(p.shape[-1]) * np.sqrt(p)[..., None, :]
    B = B - p[..., :, None] * np.sqrt(p)[..., None, :]
    return np.moveaxis(B, -1, 0)


def gradients_of(model, seed=0):
    rng = np.random.default_rng(seed)
    return [
        keras.ops.convert_to_tensor(rng.normal(size=v.shape).astype("float32"))
        for v in model.trainable_variables
    ]


def directions(model, x, *, fisher="exact", y=None, **options):
    """Return the shim, gradients that it was given, and what it made of them, by path."""
    kfac = KFAC(model, fisher=fisher, **{**SETTINGS, **options})
    kfac.observe(x, y)
    given = gradients_of(model)
    made = kfac.precondition(given)
    names = [v.path.split("/")[-2:] for v in model.trainable_variables]
    assert len(names) == len(made)
    return kfac, [host(g) for g in given], [host(g) for g in made]


def close(actual, expected, atol=2e-4):
    scale = np.abs(expected).max()
    np.testing.assert_allclose(actual / scale, expected / scale, atol=atol)


def matrix(arrays, first=0):
    """Return the weight and the bias of a layer as one matrix."""
    return np.concatenate([arrays[first], arrays[first + 1][None]])


def moment(x):
    """Return the mean of ``x x^T`` over rows with a last entry of one."""
    rows = with_ones(x)
    return rows.T @ rows / len(rows)


def with_ones(x):
    return np.concatenate([x, np.ones_like(x[..., :1])], axis=-1)


def test_dense_layers_are_those_of_a_dense_computation():
    """Two layers: g before the activation, and the Jacobian of what is above it."""
    model = network(layers.Dense(5, activation="tanh"), layers.Dense(3), shape=(4,))
    x = np.random.default_rng(0).normal(size=(7, 4)).astype("float32")

    _, given, made = directions(model, x)

    U, c, W, b = (host(v.value) for v in model.trainable_variables)
    h = np.tanh(x @ U + c)
    g2 = roots_of_fisher(h @ W + b)
    g1 = (g2 @ W.T) * (1 - h**2)
    for i, (inputs, g) in enumerate(((x, g1), (h, g2))):
        G = np.einsum("mni,mnj->ij", g, g) / 7
        expected = damped_inverse(moment(inputs), G, matrix(given, 2 * i))
        close(matrix(made, 2 * i), expected)


@pytest.mark.parametrize("mask_zero", [False, True], ids=["plain", "masked"])
def test_embeddings_and_shared_positions(mask_zero):
    """Ids, positions as rows (N, T), and the mean over rows of a loss in each of them.

    Keras's mask goes through to the outputs, and the loss is the mean over what it keeps.
    """
    embedding = layers.Embedding(6, 4, mask_zero=mask_zero)
    model = network(embedding, layers.Dense(3), shape=(5,), dtype="int32")
    ids = np.random.default_rng(4).integers(0, 6, size=(4, 5)).astype("int32")

    _, given, made = directions(model, ids)

    E, W, b = (host(v.value) for v in model.trainable_variables)
    kept = ids != 0 if mask_zero else np.ones(ids.shape, bool)
    x, R = E[ids[kept]], kept.sum()
    assert int(R) in (19, 20)
    g2 = roots_of_fisher(x @ W + b)
    g1 = g2 @ W.T
    # The curvature of the mean over R rows, each row an example with one position.
    A, V = moment(x), matrix(given, 1)
    G = np.einsum("mni,mnj->ij", g2, g2) / R
    # Keras's blocks are S A (x) G of the N examples, with g scaled by sqrt(N / R).
    S = R / 4
    close(matrix(made, 1), damped_inverse(A, G / S, V, S=S))
    counts = np.bincount(ids[kept], minlength=6) / R
    G = np.einsum("mni,mnj->ij", g1, g1) / R / S
    close(made[0], damped_inverse(np.diag(counts), G, given[0], S=S))


def test_padding_that_is_left_out_counts_for_nothing():
    """Of an average over what is not padding; the divisor is the number of other ids."""
    embedding = layers.Embedding(6, 4, mask_zero=True)
    pooled = layers.GlobalAveragePooling1D()
    model = network(embedding, pooled, layers.Dense(3), shape=(5,), dtype="int32")
    ids = np.asarray([[1, 2, 0, 0, 0], [3, 1, 5, 0, 0], [4, 4, 2, 1, 0]], "int32")

    kfac, _, _ = directions(model, ids)

    averages = kfac.estimator.state["Embedding_0"].statistics.averages
    counts = host(averages["input"].sum) / host(averages["input"].weight)
    np.testing.assert_allclose(counts, np.asarray([0, 3, 2, 1, 2, 1]) / 9, rtol=1e-5)


@pytest.mark.parametrize("kind", ["LayerNormalization", "BatchNormalization"])
def test_normalizations(kind):
    """The diagonal of scale and shift; the moving averages stay as they were."""
    norm = getattr(layers, kind)(epsilon=1e-3)
    model = network(norm, layers.Dense(3), shape=(4,))
    rng = np.random.default_rng(5)
    norm.gamma.assign(rng.normal(size=4).astype("float32"))
    norm.beta.assign(rng.normal(size=4).astype("float32"))
    x = rng.normal(size=(6, 4)).astype("float32")
    before = [host(v.value) for v in model.non_trainable_variables]

    _, given, made = directions(model, x)

    axis = 1 if kind == "LayerNormalization" else 0
    mean, var = x.mean(axis, keepdims=True), x.var(axis, keepdims=True)
    normal = (x - mean) / np.sqrt(var + 1e-3)
    gamma, beta, W, b = (host(v.value) for v in model.trainable_variables)
    g = roots_of_fisher((normal * gamma + beta) @ W + b) @ W.T
    squares = (normal * g) ** 2, g**2
    for i, square in enumerate(squares):
        close(made[i], given[i] / (square.sum(axis=0).mean(axis=0) + 0.1))
    after = [host(v.value) for v in model.non_trainable_variables]
    assert all(map(np.array_equal, before, after))


def test_a_normalization_of_padded_sequences():
    """Of each example the gradients of positions that count are summed."""
    table, norm = layers.Embedding(6, 4, mask_zero=True), layers.LayerNormalization()
    model = network(
        *(table, norm, layers.GlobalAveragePooling1D(), layers.Dense(3)),
        shape=(5,),
        dtype="int32",
    )
    ids = np.asarray([[1, 2, 0, 0, 0], [3, 1, 5, 0, 0], [4, 4, 2, 1, 0]], "int32")

    _, given, made = directions(model, ids)

    E, gamma, beta, W, b = (host(v.value) for v in model.trainable_variables)
    kept = (ids != 0)[..., None]
    x = E[ids]
    spread = np.sqrt(x.var(2, keepdims=True) + norm.epsilon)
    normal = (x - x.mean(2, keepdims=True)) / spread
    share = kept / kept.sum(axis=1, keepdims=True)
    h = ((normal * gamma + beta) * share).sum(axis=1)
    g = (roots_of_fisher(h @ W + b) @ W.T)[:, :, None] * share
    squares = (normal * g).sum(axis=2) ** 2, g.sum(axis=2) ** 2
    for i, square in enumerate(squares, start=1):
        close(made[i], given[i] / (square.sum(axis=0).mean(axis=0) + 0.1))


def test_a_layer_that_is_used_twice_is_one_block():
    """Its uses are shared positions of one weight."""
    shared, head = layers.Dense(4, activation="tanh"), layers.Dense(3)
    inputs = keras.Input((4,))
    model = keras.Model(inputs, head(shared(shared(inputs))))
    x = np.random.default_rng(6).normal(size=(5, 4)).astype("float32")

    _, given, made = directions(model, x)

    U, c, W, b = (host(v.value) for v in model.trainable_variables)
    h1 = np.tanh(x @ U + c)
    h2 = np.tanh(h1 @ U + c)
    above = (roots_of_fisher(h2 @ W + b) @ W.T) * (1 - h2**2)
    below = (above @ U.T) * (1 - h1**2)
    A = moment(np.concatenate([x, h1]))
    G = sum(np.einsum("mni,mnj->ij", g, g) for g in (above, below)) / 10
    close(matrix(made), damped_inverse(A, G, matrix(given), S=2.0))


def test_a_layer_that_is_computed_for_nothing_stays_as_it_is():
    """Its output gradients are zero, and PyTorch gives it no gradient at all."""

    class Wasteful(keras.Model):
        def __init__(self):
            super().__init__()
            self.used, self.unused = layers.Dense(3), layers.Dense(2)

        def call(self, x):
            self.unused(x)
            return self.used(x)

    model = Wasteful()
    x = np.random.default_rng(6).normal(size=(4, 3)).astype("float32")
    model(x)
    kfac = KFAC(model, fisher="exact", **SETTINGS)
    kfac.observe(x)
    gradients = [*gradients_of(model)[:2], None, None]

    made = kfac.precondition(gradients)

    assert made[2:] == [None, None]
    assert np.abs(host(made[0]) - host(gradients[0])).max() > 0.1


def test_bad_input_changes_nothing():
    """NaN in a batch or in a gradient; a step before any statistics."""
    model = network(layers.Dense(3), shape=(4,))
    x = np.random.default_rng(9).normal(size=(6, 4)).astype("float32")
    clean, other = (KFAC(model, fisher="exact", **SETTINGS) for _ in range(2))
    bad = x.copy()
    bad[2, 1] = np.nan
    gradients = gradients_of(model)
    broken = [gradients[0], gradients[1] * np.nan]

    with pytest.raises(kc.NotReadyError):
        other.precondition(gradients)
    clean.observe(x)
    other.observe(bad)
    with pytest.raises(kc.NotFiniteError):
        other.precondition(gradients)
    other.observe(x)
    with pytest.raises(kc.NotFiniteError):
        other.precondition(broken)
    other.observe(x)

    assert other.steps == 0
    for a, b in zip(*(k.precondition(gradients) for k in (clean, other)), strict=True):
        assert np.array_equal(host(a), host(b))


def fitted(model, kfac, x, y, **options):
    model.fit(x, y, batch_size=8, verbose=0, shuffle=False, **options)
    kfac.remove()
    return [host(v.value) for v in model.trainable_variables]


def compiled_model(seed=3, momentum=0.9):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(5, activation="tanh"), layers.Dense(3)]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.1, momentum=momentum),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=COMPILED,
    )
    return model


def test_fit_gives_natural_gradients_to_the_optimizer(tmp_path):
    """As a loop by hand does; and a run that was saved goes on as if it never stopped."""
    rng = np.random.default_rng(10)
    x, y = rng.normal(size=(24, 4)).astype("float32"), rng.integers(0, 3, size=24)
    settings = {
        **SETTINGS,
        "fisher": "gradients",
        "update_every": kc.integration.Widening(1, 2, until=3),
        "refresh_every": 2,
        "kl_clip": kc.integration.PerOutput(1e-5),
    }

    model = compiled_model()
    whole = fitted(model, KFAC(model, **settings), x, y, epochs=2)
    first = compiled_model()
    kfac = KFAC(first, **settings)
    first.fit(x, y, batch_size=8, verbose=0, shuffle=False)
    kfac.save(tmp_path / "k.npz")
    first.save(tmp_path / "m.keras")
    again = keras.models.load_model(tmp_path / "m.keras")
    again.compile(optimizer=again.optimizer, loss=first.loss, jit_compile=COMPILED)
    kfac = KFAC(again, **settings)
    kfac.load(tmp_path / "k.npz")
    assert kfac.operator_age == 1
    resumed = fitted(again, kfac, x, y, epochs=1)

    assert kfac.steps == 6
    for a, b in zip(whole, resumed, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert "call" not in vars(model.layers[0])


@pytest.mark.skipif(BACKEND == "jax", reason="JAX compiles the step")
def test_fit_refuses_a_compiled_step_on_pytorch():
    model = compiled_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="sgd", loss=loss, jit_compile=True)
    with pytest.raises(kc.UnsupportedError, match="jit_compile=False"):
        KFAC(model, fisher="exact", **SETTINGS)


def true_gradients(model, x, y, loss):
    """Return the backend's own gradients of a loss of the outputs, in training mode."""
    values = [v.value for v in model.trainable_variables]
    rest = [v.value for v in model.non_trainable_variables]

    def objective(values):
        outputs, _ = model.stateless_call(values, rest, x, training=True)
        return loss(y, outputs)

    if BACKEND == "jax":
        import jax

        return [host(g) for g in jax.grad(objective)(values)]
    import torch

    leaves = [v.detach().clone().requires_grad_() for v in values]
    return [host(g) for g in torch.autograd.grad(objective(leaves), leaves)]


def attention(inputs):
    h = layers.MultiHeadAttention(2, 3)(inputs, inputs)
    return layers.GlobalAveragePooling1D()(h)


def flat(conv):
    return lambda x: layers.Flatten()(conv(x))


SEQUENCE = (4, 2)
ZOO = {
    "lstm": (SEQUENCE, lambda x: layers.LSTM(3)(x)),
    "lstm, backwards, of sequences": (
        SEQUENCE,
        lambda x: layers.GlobalAveragePooling1D()(
            layers.LSTM(3, return_sequences=True, go_backwards=True, use_bias=False)(x)
        ),
    ),
    "gru": (SEQUENCE, lambda x: layers.GRU(3)(x)),
    "simple": (SEQUENCE, lambda x: layers.SimpleRNN(3)(x)),
    "both ways": (SEQUENCE, lambda x: layers.Bidirectional(layers.GRU(3))(x)),
    "masked": (SEQUENCE, lambda x: layers.LSTM(3)(layers.Masking()(x))),
    "attention": (SEQUENCE, attention),
    "causal": (
        (7, 2),
        lambda x: flat(layers.Conv1D(3, 3, padding="causal", dilation_rate=2))(x),
    ),
    "strides and groups": (
        (6, 5, 2),
        lambda x: flat(layers.Conv2D(4, (3, 2), padding="same", strides=2, groups=2))(
            x
        ),
    ),
    "dilation": (
        (6, 5, 2),
        lambda x: flat(
            layers.Conv2D(3, 2, padding="valid", dilation_rate=(2, 1), use_bias=False)
        )(x),
    ),
    "volumes": (
        (4, 3, 4, 2),
        lambda x: flat(layers.Conv3D(3, 2, padding="same", activation="tanh"))(x),
    ),
}


@pytest.mark.parametrize("name", ZOO)
def test_rows_give_the_gradient_that_keras_gives(name, monkeypatch):
    """``sum x g^T`` of each block is the gradient of its variables, and none is left."""
    shape, inside = ZOO[name]
    keras.utils.set_random_seed(1)
    inputs = keras.Input(shape)
    model = keras.Model(inputs, layers.Dense(3)(inside(inputs)))
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(5, *shape)).astype("float32"), rng.integers(0, 3, 5)
    x[2, 2:] = 0.0  # padding, where the model has a mask
    kfac, fed = KFAC(model, **{**SETTINGS, "fisher": "empirical"}), {}
    monkeypatch.setattr(kfac.estimator, "update", fed.update)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    kfac.observe(x, y)
    with pytest.raises(kc.NotReadyError):  # nothing was updated
        kfac.precondition(gradients_of(model))

    expected = true_gradients(model, x, y, loss)
    assert kfac.skipped == {}
    found = {}
    for block_name in kfac.sites:
        block = kfac.estimator.blocks[block_name]
        conventions = kfac.estimator.conventions
        matrix = block.mean_gradient(fed[block_name], conventions=conventions)
        found[block_name] = block.matrix_to_parameters(matrix)
    zeros = [keras.ops.zeros(v.shape) for v in model.trainable_variables]
    for actual, wanted in zip(kfac._replaced(zeros, found), expected, strict=True):
        np.testing.assert_allclose(host(actual), wanted, rtol=1e-4, atol=1e-6)


def compiled_with(loss, outputs=None, **options):
    """Return a model of two dense layers with a compiled loss."""
    keras.utils.set_random_seed(5)
    inputs = keras.Input((4,))
    h = layers.Dense(5, activation="tanh")(inputs)
    model = keras.Model(inputs, (outputs or layers.Dense(3))(h))
    model.compile(optimizer="sgd", loss=loss, **options)
    return model


def factors(kfac, name):
    """Return A and G of a block, as averages."""
    averages = kfac.estimator.state[name].statistics.averages
    return [
        host(averages[side].value(debias=True).array) for side in ("input", "output")
    ]


def captured(kfac, *batch):
    """Return the factors of the last layer of a batch."""
    kfac.observe(*batch)
    kfac.precondition(gradients_of(kfac.model))
    return factors(kfac, list(kfac.sites)[-1])


@pytest.mark.parametrize(
    ("activation", "loss"),
    [
        ("softmax", "sparse_categorical_crossentropy"),
        ("softmax", keras.losses.CategoricalCrossentropy()),
        (None, keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
        ("sigmoid", "binary_crossentropy"),
        (None, keras.losses.BinaryCrossentropy(from_logits=True)),
        (None, "mse"),
    ],
    ids=["softmax", "one-hot", "logits", "sigmoid", "binary logits", "squares"],
)
def test_the_curvature_is_that_of_the_compiled_loss(activation, loss):
    """Of a row's likelihood: probabilities or logits, squares; no mean over outputs."""
    model = compiled_with(loss, layers.Dense(3, activation=activation))
    x = np.random.default_rng(11).normal(size=(7, 4)).astype("float32")
    kfac = KFAC(model, fisher="exact", kl_clip=None, damping=0.1)

    _, G = captured(kfac, x)

    head = model.layers[-1]
    z = np.tanh(x @ host(model.layers[1].kernel) + host(model.layers[1].bias))
    z = z @ host(head.kernel) + host(head.bias)
    binary = "binary" in str(getattr(loss, "name", loss))
    p = 1 / (1 + np.exp(-z)) if binary else softmax(z)
    if loss == "mse":
        expected = np.eye(3)
    elif binary:
        expected = np.diag((p * (1 - p)).mean(axis=0))
    else:
        expected = np.mean([np.diag(row) - np.outer(row, row) for row in p], axis=0)
    np.testing.assert_allclose(G, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "reduction", ["sum_over_batch_size", "sum", "mean_with_sample_weight"]
)
def test_sample_weights_and_reductions(reduction):
    """The block is ``sum w x x^T / sum w`` times ``sum w F / D``; 0 counts nowhere."""
    loss = keras.losses.SparseCategoricalCrossentropy(True, reduction=reduction)
    model = compiled_with(loss)
    rng = np.random.default_rng(12)
    x, w = rng.normal(size=(6, 4)).astype("float32"), rng.uniform(0.1, 3, 6)
    w[4:], x[4:] = 0.0, 100.0
    options = {"damping": 0.1, "damping_rule": "factored", "refresh_every": 1}
    kfac = KFAC(model, fisher="exact", kl_clip=None, **options)

    A, G = captured(kfac, x, None, w.astype("float32"))

    U, c, W, b = (host(v.value) for v in model.trainable_variables)
    h = np.tanh(x @ U + c)
    p = softmax(h @ W + b)
    F = np.einsum("ni,ij->nij", p, np.eye(3)) - np.einsum("ni,nj->nij", p, p)
    D = w.sum() if reduction == "mean_with_sample_weight" else 6
    expected = np.einsum("n,nij->ij", w, F) / D
    np.testing.assert_allclose(G, expected, rtol=1e-4, atol=1e-6)
    for name, inputs in zip(kfac.sites, (x, h), strict=True):
        rows = with_ones(np.float64(inputs))
        expected = (rows.T * w) @ rows / w.sum()
        np.testing.assert_allclose(factors(kfac, name)[0], expected, rtol=1e-4)
    given = gradients_of(model)
    kfac.observe(x, None, w.astype("float32"))
    made = [host(g) for g in kfac.precondition(given)]
    V = matrix([host(g) for g in given], 2) / (6 if reduction == "sum" else 1)
    close(matrix(made, 2), damped_inverse(A, G, V))
    # A batch of weight 0, or of no rows, takes its step and leaves the statistics, also as
    # the first.
    kfac.remove()
    twin = KFAC(model, fisher="exact", kl_clip=None, update_every=2, **options)
    for rows, weight in ((6, 0 * w), (6, w), (0, w), (6, w), (6, 0 * w), (0, w)):
        weights = None if rows == 0 else weight.astype("float32")
        twin.observe(x[:rows], None, weights)
        step = [host(g) for g in twin.precondition(given)]
        if twin.steps == 1:
            assert all(map(np.array_equal, step, map(host, given)))
    factor = 6 if reduction == "sum" else 1
    for one, other in zip(step, made, strict=True):
        close(one, factor * other)


def input_factors(model, x, sample_weight):
    """Return the input factors of a model whose outputs are logits, by block."""
    kfac = KFAC(model, fisher="exact", **SETTINGS)
    kfac.observe(x, None, sample_weight.astype("float32"))
    kfac.precondition(gradients_of(model))
    averages = {
        name: kfac.estimator.state[name].statistics.averages["input"].value(debias=True)
        for name in kfac.sites
    }
    return {name: host(getattr(x, "array", x)) for name, x in averages.items()}


@pytest.mark.parametrize("kind", ["positions", "recurrent"])
def test_weights_of_positions_are_those_of_rows(kind):
    """Of a layer of each position; a loop's positions have the mean of their example."""
    table = layers.Embedding(6, 4)
    inside = [layers.LSTM(3, return_sequences=True)] if kind == "recurrent" else []
    model = network(table, *inside, layers.Dense(3), shape=(3,), dtype="int32")
    ids = np.random.default_rng(4).integers(0, 6, size=(4, 3)).astype("int32")
    # A loop passes position 0 on to the loss of position 2, which has a weight.
    w = np.array([[0.0, 1.0, 2.0], [0.5, 1.0, 1.0], [0.0, 0.0, 0.0], [0.0, 3.0, 0.5]])

    found = input_factors(model, ids, w)

    mixed = np.broadcast_to(w.mean(axis=1, keepdims=True), w.shape)
    below = mixed if kind == "recurrent" else w
    counts = np.bincount(ids.ravel(), below.ravel(), minlength=6) / below.sum()
    np.testing.assert_allclose(found["Embedding_0"], counts, rtol=1e-5, atol=1e-7)
    E = host(table.embeddings.value)[ids]
    rows = with_ones(E).reshape(-1, 5)
    if kind == "recurrent":
        expected = (rows.T * mixed.ravel()) @ rows / mixed.sum()
        A = found["LSTM_1/kernel"]
    else:
        expected, A = (rows.T * w.ravel()) @ rows / w.sum(), found["Dense_1"]
    np.testing.assert_allclose(A, expected, rtol=1e-4, atol=1e-6)


def test_options_must_agree_with_the_compiled_loss():
    """Another reduction or likelihood than the compiled one is refused by name."""
    summed = keras.losses.SparseCategoricalCrossentropy(True, reduction="sum")
    for options, name in (
        ({"reduction": "mean"}, "reduction='sum'"),
        ({"likelihood": "gaussian"}, "likelihood"),
    ):
        kfac = KFAC(compiled_with(summed), **options)
        with pytest.raises(kc.ConventionError, match=name):
            kfac.observe(np.ones((5, 4), "float32"))
    kfac = KFAC(compiled_with(keras.losses.Huber()))
    with pytest.raises(kc.UnsupportedError, match="Huber"):
        kfac.observe(np.ones((5, 4), "float32"))


def test_examples_that_a_batch_norm_mixes_are_right_in_expectation():
    """One source is of all rows, whose products have signs: without, they add up."""
    keras.utils.set_random_seed(2)
    model = network(
        layers.Dense(4),
        layers.BatchNormalization(epsilon=1e-3),
        layers.Activation("tanh"),
        layers.Dense(3),
        shape=(4,),
    )
    x = np.random.default_rng(2).normal(size=(3, 4)).astype("float32")
    kfac = KFAC(model, fisher="exact", **LOSS)
    found = 0.0
    for step in range(150):
        kfac._steps = step
        kfac.observe(x)
        (first, *_) = kfac._calls
        g = np.stack([host(g) for g in first.output_grads])
        found = found + np.einsum("mni,mnj->ij", g, g) / 150

    dense, norm, _, head = model.layers
    y = x @ host(dense.kernel) + host(dense.bias)
    deviation = np.sqrt(y.var(axis=0) + 1e-3)
    unit = (y - y.mean(axis=0)) / deviation
    t = np.tanh(unit * host(norm.gamma) + host(norm.beta))
    z = t @ host(head.kernel) + host(head.bias)
    # What comes back from row n to the norm, and from there to row m.
    back = np.einsum("cno,io,ni->cni", roots_of_fisher(z), host(head.kernel), 1 - t**2)
    mixing = np.eye(3)[:, :, None] - 1 / 3 - unit[:, None] * unit[None] / 3
    g = np.einsum("cni,nmi->cnmi", back, mixing) * host(norm.gamma) / deviation
    expected = np.einsum("cnmi,cnmj->ij", g, g)
    assert np.linalg.norm(found - expected) < 0.15 * np.linalg.norm(expected)


@pytest.mark.parametrize("method", ["compute_loss", "train_step", "instance"])
def test_a_custom_loss_needs_a_likelihood(method):
    """Of which a compiled loss, as Keras's own example has one, says nothing."""

    class Own(keras.Model):
        if method == "compute_loss":

            def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
                return squares(y, y_pred)

        if method == "train_step":

            def train_step(self, *given):
                return super().train_step(*given)

    def squares(y, y_pred):
        return 0.5 * keras.ops.mean(keras.ops.sum((y - y_pred) ** 2, axis=-1))

    x = np.random.default_rng(12).normal(size=(6, 4)).astype("float32")

    def made():
        inputs = keras.Input((4,))
        model = Own(inputs, layers.Dense(3, activation="softmax")(inputs))
        model.compile(optimizer="sgd", loss="categorical_crossentropy")
        if method == "instance":
            model.compute_loss = lambda x, y, y_pred, *_, **__: squares(y, y_pred)
        return model

    with pytest.raises(kc.ConventionError, match=r"overrides.*likelihood="):
        KFAC(made())
    kfac = KFAC(made(), likelihood="gaussian", fisher="exact")
    kfac.observe(x)
    model = kfac.model
    p = softmax(x @ host(model.layers[1].kernel) + host(model.layers[1].bias))
    J = np.einsum("ni,ij->nij", p, np.eye(3)) - np.einsum("ni,nj->nij", p, p)
    (call,) = kfac._calls
    g = np.stack([host(g) for g in call.output_grads])
    np.testing.assert_allclose(
        np.einsum("mni,mnj->ij", g, g),
        np.einsum("nij,nkj->ik", J, J),
        rtol=1e-4,
        atol=1e-6,
    )


def two_outputs():
    keras.utils.set_random_seed(6)
    inputs = keras.Input((4,))
    h = layers.Dense(5, activation="tanh")(inputs)
    outputs = {"a": layers.Dense(3, name="a")(h), "b": layers.Dense(2, name="b")(h)}
    model = keras.Model(inputs, outputs)
    model.compile(
        optimizer=keras.optimizers.SGD(0.1),
        loss={
            "a": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "b": "mse",
        },
        loss_weights={"a": 1.0, "b": 0.5},
    )
    return model


@pytest.mark.parametrize(
    "weights", [None, np.ones(6, "float32")], ids=["plain", "ones"]
)
def test_several_outputs(weights):
    """The curvature of a shared layer is the sum of the outputs' own."""
    model = two_outputs()
    rng = np.random.default_rng(13)
    x = rng.normal(size=(6, 4)).astype("float32")
    y = {"a": rng.integers(0, 3, 6), "b": rng.normal(size=(6, 2)).astype("float32")}
    kfac = KFAC(model, fisher="exact", kl_clip=None, damping=0.1)
    model.train_on_batch(x, y)  # builds the losses
    values = {v.path: host(v.value) for v in model.trainable_variables}
    kfac.steps = 0
    kfac.estimator.decay = 0.0

    kfac.observe(x, y, weights)
    kfac.precondition(gradients_of(model))

    shared = [v for path, v in values.items() if not path.startswith(("a/", "b/"))]
    h = np.tanh(x @ shared[0] + shared[1])
    slope = 1 - h**2
    B = roots_of_fisher(h @ values["a/kernel"] + values["a/bias"])
    g = (B @ values["a/kernel"].T) * slope
    G = np.einsum("mni,mnj->ij", g, g) / 6
    # Half of the squares' mean over two outputs: its Fisher matrix is 0.5 * 2 / 2 I.
    J = values["b/kernel"].T[:, None, :] * slope
    G = G + 0.5 * np.einsum("mni,mnj->ij", J, J) / 6
    np.testing.assert_allclose(factors(kfac, "Dense_0")[1], G, rtol=1e-4, atol=1e-6)


def test_half_precision():
    """Layers and outputs in float16, parameters and statistics in float32."""
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(5, activation="tanh", dtype="mixed_float16"),
            layers.Dense(3, dtype="mixed_float16"),
        ]
    )
    x = np.random.default_rng(14).normal(size=(8, 4)).astype("float32")

    _, given, made = directions(model, x)

    U, c, W, b = (host(v.value) for v in model.trainable_variables)
    h = np.tanh(x @ U + c)
    g = roots_of_fisher(h @ W + b)
    G = np.einsum("mni,mnj->ij", g, g) / 8
    close(matrix(made, 2), damped_inverse(moment(h), G, matrix(given, 2)), atol=5e-3)


def test_an_overflow_that_keras_skips_changes_nothing(tmp_path):
    """``LossScaleOptimizer`` halves its scale; the step counts for K-FAC neither."""
    model = compiled_model()
    inner = keras.optimizers.SGD(0.1)
    scaled = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**60)
    model.compile(optimizer=scaled, loss=model.loss, jit_compile=COMPILED)
    rng = np.random.default_rng(15)
    x, y = rng.normal(size=(8, 4)).astype("float32"), rng.integers(0, 3, size=8)
    kfac = KFAC(model, fisher="exact", **SETTINGS)
    plain = compiled_model()
    plain.compile(optimizer=keras.optimizers.SGD(0.1), loss=plain.loss)
    reference = KFAC(plain, fisher="exact", **SETTINGS)

    before = [host(v.value) for v in model.trainable_variables]
    huge = x.copy()
    huge[0, 0] = np.inf
    model.train_on_batch(huge, y)
    after = [host(v.value) for v in model.trainable_variables]
    assert all(map(np.array_equal, before, after))
    # Nothing is in the curvature so far, and it is saved like any other.
    kfac.save(tmp_path / "k.npz")
    kfac.load(tmp_path / "k.npz")
    assert "0 steps" in repr(kfac)
    kc.save_checkpoint(tmp_path / "e.npz", kfac.estimator)
    with pytest.raises(kc.StateError, match=r"KFAC\.save"):
        kfac.load(tmp_path / "e.npz")
    for _ in range(2):
        model.train_on_batch(x, y)
        plain.train_on_batch(x, y)

    assert {int(b.updates) for b in kfac.estimator.state.blocks.values()} == {1}
    model.train_on_batch(huge, y)
    assert {int(b.updates) for b in kfac.estimator.state.blocks.values()} == {1}
    kfac.remove()
    reference.remove()
    assert kfac.steps == reference.steps == 2
    for one, other in zip(
        model.trainable_variables, plain.trainable_variables, strict=True
    ):
        np.testing.assert_allclose(
            host(one.value), host(other.value), rtol=1e-4, atol=1e-6
        )


@pytest.mark.skipif(COMPILED, reason="Keras refuses it itself on JAX")
def test_a_layer_that_is_frozen_after_compile_keeps_its_weights():
    """Keras gives no gradients of it; the other layer's direction is as by hand."""
    model = network(layers.Dense(5, activation="tanh"), layers.Dense(3), shape=(4,))
    model.compile(keras.optimizers.SGD(1.0), keras.losses.CategoricalCrossentropy(True))
    options = {"damping": 0.1, "damping_rule": "factored", "kl_clip": None}
    KFAC(model, fisher="exact", **options)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(7, 4)).astype("float32"), np.eye(3)[rng.integers(0, 3, 7)]
    model.layers[0].trainable = False
    U, c, W, b = before = [host(w) for w in model.get_weights()]
    model.fit(x, y, batch_size=7, shuffle=False, verbose=0)
    after = [host(w) for w in model.get_weights()]

    h = np.tanh(x @ U + c)
    z, h1 = h @ W + b, with_ones(h)
    g = roots_of_fisher(z)
    G = np.einsum("mni,mnj->ij", g, g) / 7
    direction = damped_inverse(moment(h), G, h1.T @ (softmax(z) - y) / 7)
    changes = [old - new for old, new in zip(before, after, strict=True)]
    assert not np.any(changes[0])
    assert not np.any(changes[1])
    close(matrix(changes, 2), direction)


@pytest.mark.skipif(COMPILED, reason="Keras has one order of the variables on JAX")
@pytest.mark.parametrize("order", [[2, 3, 0, 1], [1, 0, 3, 2], [2, 3]])
def test_a_training_step_may_apply_variables_in_any_order(order):
    """Directions are those of the loop by hand, where gradients have the model's order."""
    import torch

    class Own(keras.Model):
        def train_step(self, data):
            self.zero_grad()
            self.compute_loss(data[0], data[1], self(data[0])).backward()
            some = [self.trainable_variables[i] for i in order]
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in some], some)
            return {}

    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(2, 8, 4)).astype("float32")
    options = {"fisher": "exact", "likelihood": "gaussian", "kl_clip": None}

    def made():
        keras.utils.set_random_seed(3)
        inputs = keras.Input((4,))
        inside = layers.Dense(4, activation="tanh")(inputs)
        model = Own(inputs, layers.Dense(4)(inside))
        model.compile(keras.optimizers.SGD(1.0), "mean_squared_error")
        return model

    model, again = made(), made()
    KFAC(model, **options)
    before = [host(w) for w in model.get_weights()]
    model.train_on_batch(x, y)
    changes = [b - host(w) for b, w in zip(before, model.get_weights(), strict=True)]

    kfac = KFAC(again, **options)
    kfac.observe(x)
    inputs, targets = torch.asarray(x), torch.asarray(y)
    again.compute_loss(inputs, targets, again(inputs)).backward()
    expected = kfac.precondition([v.value.grad for v in again.trainable_variables])
    for i, (change, direction) in enumerate(zip(changes, expected, strict=True)):
        if i in order:
            close(change, host(direction))
        else:
            assert not np.any(change)


def test_layers_that_are_computed_again_in_the_backward_pass():
    """Steps of ``fit`` are those of the same network without rematerialization."""
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(2, 8, 4)).astype("float32")
    found = []
    for mode in (None, "full"):
        keras.utils.set_random_seed(3)
        with keras.RematScope(mode=mode):
            model = network(
                layers.Dense(5, activation="tanh"), layers.Dense(4), shape=(4,)
            )
        model.compile(keras.optimizers.SGD(0.1), "mean_squared_error")
        KFAC(model, fisher="exact")
        model.fit(x, y, epochs=2, batch_size=8, shuffle=False, verbose=0)
        found.append(model.get_weights())
    for plain, again in zip(*found, strict=True):
        close(again, plain)


@pytest.mark.parametrize("kind", [layers.GRU, layers.SimpleRNN])
def test_an_initial_state_by_itself_is_that_of_a_list(kind):
    sequences, states = keras.Input((3, 2)), keras.Input((4,))
    outputs = layers.Dense(3)(kind(4)(sequences, initial_state=states))
    model = keras.Model([sequences, states], outputs)
    kfac = KFAC(model, fisher="exact", **SETTINGS)
    rng = np.random.default_rng(2)
    x = [rng.normal(size=shape).astype("float32") for shape in ((5, 3, 2), (5, 4))]
    kfac.observe(x)
    [use] = [call for call in kfac._calls if "recurrent" in call.block]
    assert use.inputs.shape == (5, 3, 4)
    np.testing.assert_array_equal(host(use.inputs)[:, 0], x[1])


class Cell(layers.Layer):
    state_size = output_size = 4

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4)

    def build(self, shape):
        self.dense.build((None, shape[-1] + 4))

    def call(self, x, states):
        h = self.dense(keras.ops.concatenate([x, states[0]], -1))
        return h, [h]


class Within(layers.Layer):
    """A dense layer within a function of `keras.ops`."""

    def __init__(self, function):
        super().__init__()
        self.dense, self.function = layers.Dense(4), function

    def build(self, shape):
        self.dense.build((None, shape[-1]))

    def call(self, x):
        if self.function == "cond":
            return keras.ops.cond(
                keras.ops.sum(x) > 0, lambda: self.dense(x), lambda: x
            )
        return getattr(keras.ops, self.function)(self.dense, x)


OF_JAX = pytest.mark.skipif(
    not COMPILED, reason="PyTorch runs loops as they are written"
)


@pytest.mark.parametrize(
    "called",
    [
        "vectorized_map",
        *(pytest.param(k, marks=OF_JAX) for k in ("cell", "map", "cond")),
    ],
)
def test_a_layer_within_a_function_that_is_traced_by_itself_is_refused(called):
    """Inputs cannot leave such a trace, and a branch not taken must not count as rows."""
    inputs = keras.Input((3, 4))
    inside = layers.RNN(Cell()) if called == "cell" else Within(called)
    model = keras.Model(inputs, layers.Dense(4)(inside(inputs)))
    model.compile(keras.optimizers.SGD(0.1), "mean_squared_error")
    kfac = KFAC(model, fisher="exact")
    x = np.ones((5, 3, 4), "float32")
    with pytest.raises(kc.UnsupportedError, match="RNN's cell"):
        kfac.observe(x)
    y = np.zeros(model.compute_output_shape(x.shape), "float32")
    with pytest.raises(kc.UnsupportedError, match="RNN's cell"):
        model.fit(x, y, verbose=0)


def test_the_other_backend():
    """A few of these tests on JAX, in a process of its own; `--thorough` runs them all."""
    pytest.importorskip("jax")
    if BACKEND == "jax":
        pytest.skip("this is it")
    chosen = (
        "step_of_fit or sum_over_batch_size or its_last_batch or gives_natural or go_on"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k"]
    here = Path(__file__)
    run = subprocess.run(
        [*command, chosen, str(here)],
        cwd=here.parents[2],
        env={
            **os.environ,
            "KERAS_BACKEND": "jax",
            "PYTEST_ADDOPTS": "",
            # Each program runs once or twice.
            "XLA_FLAGS": os.environ.get(
                "XLA_FLAGS", "--xla_backend_optimization_level=0"
            ),
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )

    assert run.returncode == 0, run.stdout + run.stderr
    assert "6 passed" in run.stdout


def test_after_fit_the_curvature_is_that_of_its_last_batch():
    """Also where the steps were compiled: the counter, factors, schedule, report."""
    rng = np.random.default_rng(17)
    x, y = rng.normal(size=(24, 4)).astype("float32"), rng.integers(0, 3, size=24)
    model = compiled_model()
    settings = {"decay": 0.0, "update_every": 1, "damping": lambda step: 1 / (1 + step)}
    kfac = KFAC(model, **{**SETTINGS, **settings})

    for batches in (3, 6):
        model.fit(x, y, batch_size=8, verbose=0, shuffle=False)

        assert kfac.steps == batches
        name = next(iter(kfac.estimator.blocks))
        close(factors(kfac, name)[0], moment(np.float64(x[16:])))
        report = kfac.estimator.report()
        assert set(report) == set(kfac.estimator.blocks)
        np.testing.assert_allclose(report[name].damping, 1 / batches, rtol=1e-6)
    assert "6 steps" in repr(kfac)


def test_fit_and_a_loop_go_on_from_each_other():
    """Two steps of each in turn are eight steps of `fit`; the loop puts variables back."""
    rng = np.random.default_rng(18)
    x, y = rng.normal(size=(64, 4)).astype("float32"), rng.integers(0, 3, size=64)
    settings = {
        **SETTINGS,
        "fisher": "exact",
        "kl_clip": 1e-3,
        "update_every": 2,
        "refresh_every": 4,
    }
    seen = []
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    class Reading(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(kfac.steps)

    def fit(model, kfac, x, y):
        options = {"batch_size": 8, "shuffle": False, "verbose": 0}
        model.fit(x, y, callbacks=[Reading()], **options)

    def loop(model, kfac, x, y):
        before = [host(v.value) for v in model.optimizer.variables]
        for batch in (slice(0, 8), slice(8, 16)):
            if kfac.wants_statistics:
                kfac.observe(x[batch])
            gradients = true_gradients(model, x[batch], y[batch], loss)
            gradients = [keras.ops.convert_to_tensor(g, "float32") for g in gradients]
            natural = kfac.precondition(gradients)
            for v, g in zip(model.trainable_variables, natural, strict=True):
                v.assign(v.value - 0.1 * g)
        for v, value in zip(model.optimizer.variables, before, strict=True):
            v.assign(value)

    results = []
    for turns in ([fit] * 4, [loop, fit, loop, fit]):
        model = compiled_model(momentum=0.0)
        kfac = KFAC(model, **settings)
        seen.clear()
        for i, turn in enumerate(turns):
            part = slice(16 * i, 16 * (i + 1))
            turn(model, kfac, x[part], y[part])
        assert kfac.steps == 8
        assert {int(b.updates) for b in kfac.estimator.state.blocks.values()} == {4}
        results.append([host(v.value) for v in model.trainable_variables])
        expected = [2 * i + k for i, f in enumerate(turns) if f is fit for k in (1, 2)]
        assert seen == expected
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip", [1e-3, kc.integration.PerOutput(1e3)])
def test_a_step_of_fit_is_the_loop_by_hand(clip):
    """Gradients by the backend, `observe`, `precondition` and a step by hand.

    Batches of weight zero count nothing, also as the first.
    """
    model, other = compiled_model(), compiled_model()
    rng = np.random.default_rng(16)
    x, y = rng.normal(size=(8, 4)).astype("float32"), rng.integers(0, 3, size=8)
    settings = {**SETTINGS, "kl_clip": clip, "fisher": "exact", "update_every": 2}
    attached, kfac = KFAC(model, **settings), KFAC(other, **settings)
    kfac.remove()
    kfac.learning_rate = 0.1
    none = np.zeros(8, "float32")

    model.train_on_batch(x, y, sample_weight=none)
    model.train_on_batch(x, y)

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    gradients = true_gradients(other, x, y, loss)
    kfac.observe(x)
    found = kfac.precondition(
        [keras.ops.convert_to_tensor(g, "float32") for g in gradients]
    )
    for v, after, g in zip(
        other.trainable_variables, model.trainable_variables, found, strict=True
    ):
        expected = host(v.value) - 0.1 * host(g)
        np.testing.assert_allclose(host(after.value), expected, rtol=1e-4, atol=1e-6)
    model.train_on_batch(x, y, sample_weight=none)
    assert {int(b.updates) for b in attached.estimator.state.blocks.values()} == {1}
    # The step of a classifier is lengthened where it is below a bound for each output.
    assert (float(host(kfac.clip.scale)) < 1.0) == (clip == 1e-3)
