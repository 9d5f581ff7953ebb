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

# Keras asks PyTorch for arrays in the way of NumPy 1.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ impl:DeprecationWarning")

layers = keras.layers
LOSS = {"likelihood": kc.losses.Categorical(), "reduction": "mean"}
SETTINGS = {**LOSS, "damping": 0.1, "decay": 0.9}


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


def damped_inverse(A, G, V, *, S=1.0, damping=0.1):
    """Return ``(S A' (x) G')^-1 V`` of the factored rule, by dense solves."""
    pi = np.sqrt((np.trace(A) / len(A)) / (np.trace(G) / len(G)))
    root = np.sqrt(damping / S)
    A, G = A + pi * root * np.eye(len(A)), G + root / pi * np.eye(len(G))
    return np.linalg.solve(A, np.linalg.solve(G, V.T).T) / S


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


def close(actual, expected):
    scale = np.abs(expected).max()
    np.testing.assert_allclose(actual / scale, expected / scale, atol=2e-4)


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
        x1 = with_ones(inputs)
        A = x1.T @ x1 / 7
        G = np.einsum("mni,mnj->ij", g, g) / 7
        V = np.concatenate([given[2 * i], given[2 * i + 1][None]])
        expected = damped_inverse(A, G, V)
        close(np.concatenate([made[2 * i], made[2 * i + 1][None]]), expected)


@pytest.mark.parametrize(
    "conv",
    [
        lambda: layers.Conv1D(3, 3, padding="causal", dilation_rate=2),
        lambda: layers.Conv2D(4, (3, 2), padding="same", strides=2, groups=2),
        lambda: layers.Conv2D(
            3, 2, padding="valid", dilation_rate=(2, 1), use_bias=False
        ),
        lambda: layers.Conv3D(3, 2, padding="same", activation="tanh"),
    ],
    ids=["1d causal", "2d groups", "2d dilation", "3d"],
)
def test_rows_of_convolutions_give_the_gradient_that_keras_gives(conv, monkeypatch):
    """``sum x g^T`` of the rows is the kernel's gradient: padding, strides and layouts."""
    layer = conv()
    spatial = {1: (7,), 2: (6, 5), 3: (4, 3, 4)}[layer.rank]
    model = network(layer, layers.Flatten(), layers.Dense(3), shape=(*spatial, 2))
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(5, *spatial, 2)).astype("float32"), rng.integers(0, 3, 5)
    kfac, fed = KFAC(model, fisher="empirical", **SETTINGS), {}
    monkeypatch.setattr(kfac.estimator, "update", fed.update)

    kfac.observe(x, y)

    name = next(iter(kfac.sites))
    block, conventions = kfac.estimator.blocks[name], kfac.estimator.conventions
    matrix = block.mean_gradient(fed[name], conventions=conventions)
    found = block.matrix_to_parameters(matrix)
    expected = numerical_gradients(model, x, y, layer)
    for parameter, (analytic, places) in expected.items():
        actual = host(found[parameter])
        np.testing.assert_allclose(actual[places], analytic, rtol=2e-2, atol=2e-3)


def numerical_gradients(model, x, y, layer):
    """Return central differences of the mean loss in a few entries of each parameter."""
    rng, found = np.random.default_rng(2), {}
    for parameter, variable in (("weight", layer.kernel), ("bias", layer.bias)):
        if variable is None:
            continue
        value = host(variable.value).astype("float32")
        places = tuple(rng.integers(0, n, size=12) for n in value.shape)
        differences = []
        for place in zip(*places, strict=True):
            losses = []
            for sign in (1, -1):
                moved = value.copy()
                moved[place] += sign * 1e-2
                variable.assign(moved)
                z = host(model(x))
                losses.append(-np.log(softmax(z)[np.arange(len(y)), y]).mean())
            differences.append((losses[0] - losses[1]) / 2e-2)
        variable.assign(value)
        found[parameter] = np.asarray(differences), places
    return found


@pytest.mark.parametrize("mask_zero", [False, True], ids=["plain", "masked"])
def test_embeddings_and_shared_positions(mask_zero):
    """Ids, positions as rows (N, T), and the mean over rows of a loss in each of them.

    Also where 0 is called padding and no layer leaves it out: a gradient comes back, and
    an id that A does not count would be moved by a step of any size.
    """
    embedding = layers.Embedding(6, 4, mask_zero=mask_zero)
    model = network(embedding, layers.Dense(3), shape=(5,), dtype="int32")
    ids = np.random.default_rng(4).integers(0, 6, size=(4, 5)).astype("int32")

    _, given, made = directions(model, ids)

    E, W, b = (host(v.value) for v in model.trainable_variables)
    x = E[ids]
    g2 = roots_of_fisher(x @ W + b)
    g1 = g2 @ W.T
    R = 20
    # The curvature of the mean over R rows, each row an example with one position.
    rows = with_ones(x).reshape(R, -1)
    A = rows.T @ rows / R
    G = np.einsum("mnti,mntj->ij", g2, g2) / R
    V = np.concatenate([given[1], given[2][None]])
    # Keras's blocks are S A (x) G of the N examples, with g scaled by sqrt(N / R).
    close(
        np.concatenate([made[1], made[2][None]]),
        damped_inverse(A, G * 4 / 20, V, S=5.0),
    )
    counts = np.bincount(ids.ravel(), minlength=6) / R
    G = np.einsum("mnti,mntj->ij", g1, g1) / R * 4 / 20
    close(made[0], damped_inverse(np.diag(counts), G, given[0], S=5.0))


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
    rows = with_ones(np.concatenate([x, h1]))
    A = rows.T @ rows / 10
    G = sum(np.einsum("mni,mnj->ij", g, g) for g in (above, below)) / 10
    V = np.concatenate([given[0], given[1][None]])
    close(np.concatenate([made[0], made[1][None]]), damped_inverse(A, G, V, S=2.0))


def test_what_is_not_covered_stays_as_it_is():
    """A layer of another kind, and a subclass of a known one."""

    class Own(layers.Dense):
        pass

    model = network(layers.PReLU(), Own(4), layers.Dense(3), shape=(4,))
    x = np.ones((3, 4), "float32")

    kfac, given, made = directions(model, x)

    assert sorted(kfac.skipped.values()) == ["Own", "PReLU"]
    assert all(np.array_equal(a, b) for a, b in zip(given[:3], made[:3], strict=True))
    assert not np.allclose(given[3], made[3])


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


def test_the_summed_loss_is_that_of_the_mean():
    """Gradients of the sum over R rows give the same direction."""
    x = np.random.default_rng(7).normal(size=(8, 4)).astype("float32")
    model = network(layers.Dense(3), shape=(4,))
    _, _, mean = directions(model, x)
    kfac = KFAC(model, fisher="exact", **{**SETTINGS, "reduction": "sum"})
    kfac.observe(x)

    summed = kfac.precondition([8.0 * g for g in gradients_of(model)])

    for a, b in zip(mean, summed, strict=True):
        np.testing.assert_allclose(a, host(b), rtol=1e-5)


def test_sampled_labels_are_those_of_the_model():
    """Over many steps the sampled Fisher's mean is the exact one."""
    x = np.random.default_rng(8).normal(size=(64, 4)).astype("float32")
    model = network(layers.Dense(3), shape=(4,))
    drawn = KFAC(model, fisher="sampled", **{**SETTINGS, "decay": 1.0})
    for step in range(40):
        drawn.steps = step
        drawn.observe(x)
    exact = KFAC(model, fisher="exact", **SETTINGS)
    exact.observe(x)

    factors = [
        host(
            k.estimator.state["Dense_0"]
            .statistics.averages["output"]
            .value(debias=True)
            .array
        )
        for k in (drawn, exact)
    ]
    np.testing.assert_allclose(*factors, atol=0.03)


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
    other.observe(x)
    with pytest.raises(kc.KFACError):
        other.observe(bad)
    with pytest.raises(kc.NotFiniteError):
        other.precondition(broken)

    assert other.steps == 0
    for a, b in zip(*(k.precondition(gradients) for k in (clean, other)), strict=True):
        assert np.array_equal(host(a), host(b))


def test_arguments_are_checked():
    model = network(layers.Dense(3), shape=(4,))
    for wrong in ({"reduction": "average"}, {"fisher": "true"}):
        with pytest.raises(kc.ConventionError, match="Expected one of"):
            KFAC(model, **{"fisher": "exact", **SETTINGS, **wrong})
    with pytest.raises(kc.UnsupportedError, match="built"):
        KFAC(keras.Sequential([layers.Dense(3)]), fisher="exact", **SETTINGS)


def fitted(model, kfac, x, y, **options):
    with kfac.attached():
        model.fit(x, y, batch_size=8, verbose=0, shuffle=False, **options)
    return [host(v.value) for v in model.trainable_variables]


def compiled_model(seed=3):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(5, activation="tanh"), layers.Dense(3)]
    )
    model.compile(
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    return model


def test_fit_gives_natural_gradients_to_the_optimizer(tmp_path):
    """As a loop by hand does; and a run that was saved goes on as if it never stopped."""
    rng = np.random.default_rng(10)
    x, y = rng.normal(size=(24, 4)).astype("float32"), rng.integers(0, 3, size=24)
    settings = {**SETTINGS, "fisher": "sampled", "update_every": 2, "refresh_every": 2}

    model = compiled_model()
    whole = fitted(model, KFAC(model, **settings), x, y, epochs=2)
    first = compiled_model()
    kfac = KFAC(first, **settings)
    fitted(first, kfac, x, y, epochs=1)
    kc.save_checkpoint(tmp_path / "k.safetensors", kfac.estimator)
    first.save(tmp_path / "m.keras")
    again = keras.models.load_model(tmp_path / "m.keras")
    again.compile(optimizer=again.optimizer, loss=first.loss, jit_compile=False)
    kfac = KFAC(again, **settings)
    kc.load_checkpoint(tmp_path / "k.safetensors", kfac.estimator, backend=BACKEND)
    kfac.steps = int(again.optimizer.iterations)
    resumed = fitted(again, kfac, x, y, epochs=1)

    assert kfac.steps == 6
    for a, b in zip(whole, resumed, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert "call" not in vars(model.layers[0])


def test_fit_refuses_a_compiled_step():
    model = compiled_model()
    model.compile(optimizer="sgd", loss="mse", jit_compile=True)
    with (
        pytest.raises(kc.UnsupportedError, match="jit_compile"),
        KFAC(model, fisher="exact", **SETTINGS).attached(),
    ):
        pass


def test_the_other_backend():
    """A few of these tests on JAX, in a process of its own."""
    pytest.importorskip("jax")
    if BACKEND == "jax":
        pytest.skip("this is it")
    chosen = "dense_layers or masked or LayerNormalization or bad_input"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k"]
    here = Path(__file__)
    run = subprocess.run(
        [*command, chosen, str(here)],
        cwd=here.parents[2],
        env={**os.environ, "KERAS_BACKEND": "jax", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )

    assert run.returncode == 0, run.stdout + run.stderr
    assert "4 passed" in run.stdout
