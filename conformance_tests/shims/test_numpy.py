"""The NumPy shim against dense computations of its layers by hand."""

from __future__ import annotations

import numpy as np
import pytest

import kfac_core as kc
from kfac_core_shims.numpy import KFAC

DAMPING = 0.1
SETTINGS = {"learning_rate": 1.0, "damping": DAMPING, "decay": 0.9, "reduction": "sum"}


def damped_inverse(A, G, V, *, S=1.0):
    """Return ``(S A' (x) G')^-1 V`` of the factored rule, by dense solves."""
    pi = np.sqrt((np.trace(A) / len(A)) / (np.trace(G) / len(G)))
    root = np.sqrt(DAMPING / S)
    A, G = A + pi * root * np.eye(len(A)), G + root / pi * np.eye(len(G))
    return np.linalg.solve(A, np.linalg.solve(G, V.T).T) / S


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def dense_parameters():
    return {"fc": {"weight": random(4, 3), "bias": random(3, seed=1)}}


def dense_case(n=8, seed=2):
    """Return inputs and output gradients of the dense layer."""
    return random(n, 4, seed=seed), random(n, 3, seed=seed + 1)


def dense_gradient(seed=9):
    return {"fc": {"weight": random(4, 3, seed=seed), "bias": random(3, seed=seed + 1)}}


def dense_direction(x, g, gradient):
    """Return what the dense layer's step should be, as its matrix."""
    x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    V = np.concatenate([gradient["weight"], gradient["bias"][None]])
    return damped_inverse(x.T @ x / len(x), g.T @ g / len(x), V)


def matrix(arrays):
    return np.concatenate([arrays["weight"], arrays["bias"][None]])


def test_a_dense_step():
    """The parameters move in place, by the preconditioned gradient of the mean loss."""
    parameters, gradient, (x, g) = dense_parameters(), dense_gradient(), dense_case()
    before, held = matrix(parameters["fc"]), parameters["fc"]["weight"]
    optimizer = KFAC(parameters, **SETTINGS)
    optimizer.observe("fc", kc.Batch(x, g))

    change = optimizer.step(gradient)

    expected = -dense_direction(x, g, gradient["fc"])
    np.testing.assert_allclose(matrix(change["fc"]), expected, rtol=1e-9)
    np.testing.assert_allclose(matrix(parameters["fc"]), before + expected, rtol=1e-9)
    assert parameters["fc"]["weight"] is held


def test_a_layout_of_out_in_and_memory_of_fortran():
    """A transposed view of a column-major array is written to where it lies."""
    owner = np.asfortranarray(random(3, 4))
    parameters, gradient = {"fc": {"weight": owner}}, random(3, 4, seed=5)
    x, g = dense_case()
    layer = kc.Dense(in_features=4, out_features=3, bias=False, weight_layout="oi")
    before = owner.copy()
    optimizer = KFAC(parameters, layers={"fc": layer}, **SETTINGS)
    optimizer.observe("fc", kc.Batch(x, g))

    optimizer.step({"fc": {"weight": gradient}})

    expected = damped_inverse(x.T @ x / 8, g.T @ g / 8, gradient.T).T
    np.testing.assert_allclose(owner, before - expected, rtol=1e-9)


def test_a_convolution_from_patches_by_hand():
    """Strided, zero-padded patches, in the order of the kernel's own axes."""
    kernel = random(3, 3, 2, 3)
    layer = kc.Conv(
        in_channels=2,
        out_channels=3,
        kernel_size=(3, 3),
        strides=(2, 2),
        padding=((1, 1), (1, 1)),
        bias=False,
        weight_layout="spatial_io",
        data_layout="channels_last",
    )
    x, g = random(2, 4, 4, 2, seed=1), random(2, 2, 2, 3, seed=2)
    gradient = random(3, 3, 2, 3, seed=3)
    before = kernel.copy()
    optimizer = KFAC({"conv": {"weight": kernel}}, layers={"conv": layer}, **SETTINGS)
    optimizer.observe("conv", kc.Batch(x, g))

    optimizer.step({"conv": {"weight": gradient}})

    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    rows = np.array(
        [
            padded[n, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3].ravel()
            for n in range(2)
            for i in range(2)
            for j in range(2)
        ]
    )
    g = g.reshape(8, 3)
    V = damped_inverse(rows.T @ rows / 8, g.T @ g / 8, gradient.reshape(18, 3), S=4.0)
    np.testing.assert_allclose(kernel, before - V.reshape(kernel.shape), rtol=1e-8)


def test_an_embedding_and_a_normalization():
    """Counts of ids as a diagonal factor; the diagonal of scale and shift."""
    table, norm = random(5, 3), {"scale": random(3, seed=1), "shift": random(3, seed=2)}
    ids, g = np.array([0, 2, 2, 4, 1, 2]), random(6, 3, seed=3)
    x = random(6, 3, seed=4)
    layer = kc.Embedding(num_embeddings=5, features=3, weight_layout="io")
    parameters = {"table": {"weight": table}, "norm": norm}
    gradient = {
        "table": {"weight": random(5, 3, seed=5)},
        "norm": {"scale": random(3, seed=6), "shift": random(3, seed=7)},
    }
    optimizer = KFAC(parameters, layers={"table": layer}, **SETTINGS)
    optimizer.observe("table", kc.Batch(ids, g))
    optimizer.observe("norm", kc.Batch(x, g))

    change = optimizer.step(gradient)

    A = np.diag(np.bincount(ids, minlength=5) / 6)
    V = damped_inverse(A, g.T @ g / 6, gradient["table"]["weight"])
    np.testing.assert_allclose(change["table"]["weight"], -V, rtol=1e-8)
    for name, vectors in (("scale", x * g), ("shift", g)):
        expected = -gradient["norm"][name] / ((vectors**2).mean(axis=0) + DAMPING)
        np.testing.assert_allclose(change["norm"][name], expected, rtol=1e-8)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_parts_of_a_batch_are_the_whole(reduction):
    """Of any sizes, each with a loss of its own."""
    x, g = dense_case(n=10)
    gradient = dense_gradient()
    parameters = dense_parameters()
    optimizer = KFAC(parameters, **{**SETTINGS, "reduction": reduction})
    for part in (slice(0, 3), slice(3, 10)):
        n = part.stop - part.start
        given = g[part] / n if reduction == "mean" else g[part]
        optimizer.observe("fc", kc.Batch(x[part], given))

    change = optimizer.step(gradient)

    expected = -dense_direction(x, g, gradient["fc"])
    np.testing.assert_allclose(matrix(change["fc"]), expected, rtol=1e-9)
    assert optimizer.estimator.state["fc"].updates == 1


def test_momentum_clipping_and_decay():
    """Three steps, as the formula of the class has them."""
    lr, momentum, eta, kappa = 0.3, 0.8, 0.01, 0.02
    parameters = dense_parameters()
    theta, velocity = matrix(parameters["fc"]), 0.0
    optimizer = KFAC(
        parameters,
        **{**SETTINGS, "learning_rate": lambda step: lr / (step + 1)},
        momentum=momentum,
        kl_clip=kappa,
        weight_decay=eta,
        decayed=lambda layer, name: name == "weight",
    )
    x, g = dense_case()
    optimizer.observe("fc", kc.Batch(x, g))
    for step in range(3):
        gradient, rate = dense_gradient(seed=20 + step), lr / (step + 1)
        V = matrix(gradient["fc"])
        d = dense_direction(x, g, gradient["fc"])
        nu = min(1.0, np.sqrt(kappa / (rate**2 * np.sum(V * d))))
        velocity = momentum * velocity + nu * d
        decayed = theta * np.array([[1.0]] * 4 + [[0.0]])
        theta = theta - rate * (velocity + eta * decayed)

        optimizer.step(gradient)

        assert nu < 1
        np.testing.assert_allclose(matrix(parameters["fc"]), theta, rtol=1e-8)


def test_schedules_of_statistics_and_refreshes():
    """New statistics count from the next refresh on."""
    optimizer = KFAC(dense_parameters(), **SETTINGS, update_every=2, refresh_every=3)
    wanted, batches, gradient = [], [], dense_gradient()
    for step in range(4):
        wanted.append(optimizer.wants_statistics)
        x, g = dense_case(seed=30 + 2 * step)
        if optimizer.wants_statistics:
            optimizer.observe("fc", kc.Batch(x, g))
            batches.append((x, g))
        change = optimizer.step(gradient)
        if step == 2:
            expected = -dense_direction(*batches[0], gradient["fc"])
            np.testing.assert_allclose(matrix(change["fc"]), expected, rtol=1e-9)

    assert wanted == [True, False, True, False]
    A = [np.concatenate([x, np.ones((8, 1))], axis=1) for x, _ in batches]
    A = (0.9 * A[0].T @ A[0] + A[1].T @ A[1]) / 8 / 1.9
    G = (0.9 * batches[0][1].T @ batches[0][1] + batches[1][1].T @ batches[1][1]) / 8
    expected = -damped_inverse(A, G / 1.9, matrix(gradient["fc"]))
    np.testing.assert_allclose(matrix(change["fc"]), expected, rtol=1e-9)


def run(optimizer, steps):
    """Make some steps, the batches of which the number of the step decides."""
    for _ in range(steps):
        seed = 40 + 3 * optimizer.steps
        optimizer.observe("fc", kc.Batch(*dense_case(seed=seed)))
        optimizer.step(dense_gradient(seed=seed))


def test_a_run_that_was_saved_goes_on_where_it_was(tmp_path):
    """To the bit, velocity, statistics and number of steps."""
    options = {**SETTINGS, "momentum": 0.9, "refresh_every": 2}
    whole, first = dense_parameters(), dense_parameters()
    run(KFAC(whole, **options), 5)
    optimizer = KFAC(first, **options)
    run(optimizer, 3)

    optimizer.save(tmp_path / "state.npz")
    resumed = KFAC(first, **options)
    resumed.load(tmp_path / "state.npz")
    run(resumed, 2)

    assert np.array_equal(matrix(whole["fc"]), matrix(first["fc"]))
    assert [path.name for path in tmp_path.iterdir()] == ["state.npz"]


def test_files_that_do_not_fit_change_nothing(tmp_path):
    """Cut off, of another network, or no file of ours."""
    optimizer = KFAC(dense_parameters(), **SETTINGS)
    run(optimizer, 2)
    path = tmp_path / "state.npz"
    optimizer.save(path)
    good = path.read_bytes()
    other = KFAC({"fc": {"weight": random(4, 2), "bias": random(2)}}, **SETTINGS)

    with pytest.raises(kc.StateError):
        other.load(path)
    assert other.steps == 0
    for bad in (good[: len(good) // 2], b"", b"PK" + good[100:]):
        path.write_bytes(bad)
        with pytest.raises(kc.StateError, match="damaged"):
            optimizer.load(path)
    assert optimizer.steps == 2


def test_bad_input_changes_nothing():
    """After each rejected call the run is, to the bit, that of the accepted ones."""
    clean, other = dense_parameters(), dense_parameters()
    a = KFAC(clean, **SETTINGS, momentum=0.5)
    rate = [1.0]
    options = {**SETTINGS, "learning_rate": lambda step: rate[0]}
    b = KFAC(other, **options, momentum=0.5)
    x, g = dense_case()
    gradient = dense_gradient()
    nan = {"fc": {**gradient["fc"], "bias": gradient["fc"]["bias"] * np.nan}}

    with pytest.raises(kc.NotReadyError):
        b.step(gradient)
    for step in range(2):
        a.observe("fc", kc.Batch(x, g))
        b.observe("fc", kc.Batch(x, g))
        for batch in (
            kc.Batch(x[:, 1:], g),
            kc.Batch(x * np.inf, g),
            kc.Batch(x, g[1:]),
        ):
            with pytest.raises(kc.KFACError), np.errstate(invalid="ignore"):
                b.observe("fc", batch)
        with pytest.raises(kc.UnknownBlockError):
            b.observe("other", kc.Batch(x, g))
        for wrong in ({}, {"fc": {"weight": x}}, nan):
            with pytest.raises(kc.KFACError):
                b.step(wrong)
        rate[0] = np.inf
        with pytest.raises(kc.ConventionError):
            b.step(gradient)
        rate[0] = 1.0
        a.step(gradient)
        b.step(gradient)
        assert b.steps == step + 1
        assert np.array_equal(matrix(clean["fc"]), matrix(other["fc"]))


def test_bad_descriptions_are_refused():
    """A shape that says nothing, a layer of other shapes, a name, memory to read only."""
    layer = kc.Dense(in_features=5, out_features=3, bias=False, weight_layout="io")
    frozen = random(4, 3)
    frozen.flags.writeable = False
    for parameters, layers, error in (
        ({"c": {"weight": random(3, 3, 1, 2)}}, {}, kc.ShapeError),
        ({"fc": {"weight": random(4, 3)}}, {"fc": layer}, kc.ShapeError),
        ({"fc": {"weight": random(5, 3)}}, {"cf": layer}, kc.UnknownBlockError),
        ({"fc": {"weight": frozen}}, {}, kc.UnsupportedError),
    ):
        with pytest.raises(error):
            KFAC(parameters, layers=layers, **SETTINGS)
    assert not frozen.flags.writeable
