"""The NumPy shim against dense computations of its layers by hand."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.distributed import Distributed, run_ranks
from kfac_core_shims.numpy import KFAC

DAMPING = 0.1
SETTINGS = {
    "learning_rate": 1.0,
    "momentum": 0.0,
    "kl_clip": None,
    "damping": DAMPING,
    "decay": 0.9,
    "refresh_every": 1,
}


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
    options = {"fisher": "empirical", "reduction": reduction}
    optimizer = KFAC(parameters, **SETTINGS, **options)
    for part in (slice(0, 3), slice(3, 10)):
        n = part.stop - part.start
        given = g[part] / n if reduction == "mean" else g[part]
        optimizer.observe("fc", kc.Batch(x[part], given))

    change = optimizer.step(gradient, rows=1)

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
        **SETTINGS
        | {
            "learning_rate": lambda step: lr / (step + 1),
            "momentum": momentum,
            "kl_clip": kappa,
        },
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
    optimizer = KFAC(
        dense_parameters(), **SETTINGS | {"update_every": 2, "refresh_every": 3}
    )
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
    a = KFAC(clean, **SETTINGS | {"momentum": 0.5})
    rate = [1.0]
    options = {"learning_rate": lambda step: rate[0], "momentum": 0.5}
    b = KFAC(other, **SETTINGS | options)
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


def test_a_step_that_fails_may_be_repeated():
    """It kept the statistics, which the next call would have counted once more."""
    clean, other = dense_parameters(), dense_parameters()
    a, b = KFAC(clean, **SETTINGS), KFAC(other, **SETTINGS)
    x, g = dense_case(n=2)
    gradient = dense_gradient()

    def curvature(directions):
        return np.eye(len(directions))

    def interrupted(directions):
        raise KeyboardInterrupt

    for step in range(2):
        for optimizer in (a, b):
            optimizer.observe("fc", kc.Batch((1 + step) * x, g))
        other["fc"]["bias"].flags.writeable = False
        with pytest.raises(kc.UnsupportedError, match="'bias' is read-only"):
            b.step(gradient, curvature=curvature)
        other["fc"]["bias"].flags.writeable = True
        with pytest.raises(KeyboardInterrupt):
            b.step(gradient, curvature=interrupted)
        with pytest.raises(kc.ShapeError, match="curvature"):
            b.step(gradient, curvature=lambda directions: np.eye(5))
        b.damping = 0.0
        with pytest.raises(kc.FactorizationError):
            b.step(gradient, curvature=curvature)
        b.damping = DAMPING
        a.step(gradient, curvature=curvature)
        b.step(gradient, curvature=curvature)
        assert np.array_equal(matrix(clean["fc"]), matrix(other["fc"]))
    assert b.estimator.state["fc"].updates == 2


def test_steps_of_ekfac_are_in_its_bases():
    """Of squared errors, where the block is exactly ``A (x) I`` in every basis.

    Second moments were taken in the coordinates, and added to those in the bases.
    """
    x, y = random(12, 4), random(12, 3, seed=1)
    parameters = dense_parameters()
    layer = kc.Dense(in_features=4, out_features=3, bias=True, weight_layout="io")
    optimizer = KFAC(
        parameters,
        **SETTINGS | {"update_every": 1},
        likelihood="gaussian",
        fisher="exact",
        layers={"fc": kc.Block(layer, kc.Eigen())},
        damping_rule="exact",
    )
    X = np.concatenate([x, np.ones((12, 1))], axis=1)
    F = np.kron(X.T @ X / 12, np.eye(3)) + DAMPING * np.eye(15)
    for step in range(3):
        W = matrix(parameters["fc"])
        z = X @ W
        drawn = optimizer.vectors(z)
        optimizer.observe("fc", kc.Batch(x, drawn, sources=len(drawn)))
        if step != 1:
            optimizer.update()
            optimizer.estimator.rebase(moments="carried" if step else "kronecker")
        G = X.T @ (z - y) / 12

        optimizer.step({"fc": {"weight": G[:-1], "bias": G[-1]}})

        expected = W - np.linalg.solve(F, G.ravel()).reshape(5, 3)
        np.testing.assert_allclose(matrix(parameters["fc"]), expected, atol=1e-10)


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


def root_of_fisher(z):
    """Return ``B`` with ``B B^T = diag(p) - p p^T`` of each row, shape (..., P, P)."""
    p = np.exp(z) / np.exp(z).sum(axis=-1, keepdims=True)
    F = np.eye(z.shape[-1]) * p[..., None] - p[..., None] * p[..., None, :]
    values, vectors = np.linalg.eigh(F)
    return vectors * np.sqrt(np.clip(values, 0, None))[..., None, :]


@pytest.mark.parametrize(
    "view",
    [lambda W: W, lambda W: W.T, lambda W: W[1:]],
    ids=["the same", "transposed", "a part"],
)
def test_an_array_of_two_layers_is_refused(view):
    """It would move twice in each step; a tied layer is one that is observed twice."""
    parameters = dense_parameters()
    parameters["again"] = {"weight": view(parameters["fc"]["weight"])}
    with pytest.raises(kc.UnsupportedError, match=r"'fc' \(weight\) and 'again'"):
        KFAC(parameters, **SETTINGS)


def test_examples_that_the_network_mixes_are_right_in_expectation():
    """Each output less the mean over the batch: rows of one source must not add up."""
    parameters = dense_parameters()
    z = random(3, 3, seed=4)
    optimizer = KFAC(parameters, likelihood="categorical", fisher="exact", **SETTINGS)
    found = 0.0
    for _ in range(200):
        drawn = optimizer.vectors(z)
        g = drawn - drawn.mean(axis=1, keepdims=True)
        found = found + np.einsum("mni,mnj->ij", g, g) / 200

    B = root_of_fisher(z)
    centering = np.eye(3) - 1 / 3
    g = np.einsum("nic,nm->ncmi", B, centering)
    expected = np.einsum("ncmi,ncmj->ij", g, g)
    assert np.linalg.norm(found - expected) < 0.15 * np.linalg.norm(expected)


def test_an_array_in_the_place_of_a_parameter_is_refused():
    """The step would move the old one; what is written into it is the next step's start."""
    parameters, gradient, (x, g) = dense_parameters(), dense_gradient(), dense_case()
    optimizer = KFAC(parameters, **SETTINGS)
    new, old = parameters["fc"]["weight"] + 1.0, parameters["fc"]["weight"]
    before = old.copy()
    for replaced in ("array", "layer"):
        if replaced == "array":
            parameters["fc"]["weight"] = new
        else:
            parameters["fc"] = {**parameters["fc"], "weight": new}
        optimizer.observe("fc", kc.Batch(x, g))
        with pytest.raises(kc.UnsupportedError, match=r"\[\.\.\.\] = new"):
            optimizer.step(gradient)
        assert np.array_equal(old, before)
        assert optimizer.steps == 0
        parameters["fc"]["weight"] = old

    old[...] = new
    start = matrix(parameters["fc"])
    optimizer.step(gradient)
    expected = start - dense_direction(x, g, gradient["fc"])
    np.testing.assert_allclose(matrix(parameters["fc"]), expected, rtol=1e-10)


def test_a_copy_goes_on_with_parameters_of_its_own():
    parameters, gradient, (x, g) = dense_parameters(), dense_gradient(), dense_case()
    optimizer = KFAC(parameters, **SETTINGS)
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        start = matrix(copied.parameters["fc"])
        copied.observe("fc", kc.Batch(x, g))
        copied.step(gradient)
        expected = start - dense_direction(x, g, gradient["fc"])
        np.testing.assert_allclose(
            matrix(copied.parameters["fc"]), expected, rtol=1e-10
        )
    assert np.array_equal(matrix(parameters["fc"]), matrix(dense_parameters()["fc"]))


def test_views_of_one_memory_may_be_layers_of_their_own():
    """Every other column of a matrix, and parts of one vector."""
    flat = np.arange(24.0)
    both = flat[:12].reshape(3, 4)
    weights = both[:, ::2], both[:, 1::2], flat[12:].reshape(4, 3)
    KFAC({str(i): {"weight": W} for i, W in enumerate(weights)}, **SETTINGS)


@pytest.mark.parametrize("form", ["kept", "flattened"])
def test_rows_of_outputs_at_several_positions(form):
    """The curvature is that of the mean over R rows, however a layer's axes are kept."""
    x, z, gradient = random(4, 5, 4), random(4, 5, 3, seed=1), dense_gradient()
    likelihood = kc.losses.Categorical()
    optimizer = KFAC(
        dense_parameters(), likelihood=likelihood, fisher="gradients", **SETTINGS
    )
    vectors = optimizer.vectors(z)
    assert vectors.shape == (1, 4, 5, 3)
    if form == "flattened":
        batch = kc.Batch(x.reshape(20, 4), vectors.reshape(1, 20, 3), sources=1)
    else:
        batch = kc.Batch(x, vectors, sources=1)

    optimizer.observe("fc", batch)
    change = optimizer.step(gradient)

    rows, g = x.reshape(20, 4), vectors.reshape(20, 3)
    expected = -dense_direction(rows, g, gradient["fc"])
    np.testing.assert_allclose(matrix(change["fc"]), expected, rtol=1e-9)


def test_vectors_of_the_exact_fisher():
    """Their outer products sum to the Fisher matrix of each row's outputs."""
    z = random(6, 3)
    options = {"likelihood": kc.losses.Categorical(), "fisher": "exact"}
    optimizer = KFAC(dense_parameters(), **options, **SETTINGS)

    g = optimizer.vectors(z)

    B = root_of_fisher(z)
    expected = B @ np.swapaxes(B, -1, -2)
    np.testing.assert_allclose(
        np.einsum("mni,mnj->nij", g, g), expected, atol=1e-12, rtol=1e-10
    )


def test_a_mean_over_outputs_has_the_curvature_of_the_mean():
    """A row's loss ``|z - y|^2 / (2 P)`` has the Fisher matrix ``I / P``."""
    likelihood = kc.integration.RowLoss(
        likelihood=kc.losses.Gaussian(variance=1.0), mean_over_outputs=True
    )
    optimizer = KFAC(
        dense_parameters(), likelihood=likelihood, fisher="exact", **SETTINGS
    )

    g = optimizer.vectors(random(6, 3))

    expected = np.broadcast_to(np.eye(3) / 3, (6, 3, 3))
    np.testing.assert_allclose(np.einsum("mni,mnj->nij", g, g), expected, atol=1e-12)


def test_options_are_checked():
    with pytest.raises(kc.ConventionError, match="fisher"):
        KFAC(dense_parameters(), **SETTINGS, fisher="sampled")
    for wrong in (
        {"reduction": "average"},
        {"likelihood": "softmax"},
        {"refresh_every": 0},
        {"kl_clip": -1.0},
        {"samples": 0},
        {"positions": "both"},
        {"learning_rate": -1.0},
        {"momentum": 2.0},
        {"weight_decay": float("nan")},
        {"decayed": 3},
        {"layers": 3},
    ):
        with pytest.raises(kc.KFACError, match=next(iter(wrong))):
            KFAC(dense_parameters(), **SETTINGS | wrong)
    optimizer = KFAC(dense_parameters(), **SETTINGS)
    with pytest.raises(kc.ConventionError, match="likelihood"):
        optimizer.vectors(random(6, 3))


def test_the_same_step_draws_the_same_labels():
    """Parts of one batch draw labels of their own, a resumed run those it drew."""
    options = {"likelihood": kc.losses.Categorical(), **SETTINGS}
    z = np.zeros((50, 3))
    one, other = (KFAC(dense_parameters(), **options) for _ in range(2))
    first = one.vectors(z), one.vectors(z)
    again = other.vectors(z), other.vectors(z)

    assert np.array_equal(first, again)
    assert not np.array_equal(*first)


def test_a_summed_loss_says_over_how_many():
    """A sum over R rows gives the direction of the mean."""
    x, g = dense_case()
    gradient = dense_gradient()
    summed = {
        "fc": {
            "weight": gradient["fc"]["weight"] * 8,
            "bias": gradient["fc"]["bias"] * 8,
        }
    }
    optimizer = KFAC(dense_parameters(), **SETTINGS, reduction="sum")
    optimizer.observe("fc", kc.Batch(x, g))
    with pytest.raises(kc.ConventionError, match="rows"):
        optimizer.step(summed)

    change = optimizer.step(summed, rows=8)

    expected = -dense_direction(x, g, gradient["fc"])
    np.testing.assert_allclose(matrix(change["fc"]), expected, rtol=1e-9)


def test_the_step_of_the_quadratic_model():
    """Rate and momentum of two steps are those of a dense minimization."""
    rng = np.random.default_rng(3)
    W, x, y = random(4, 3), random(12, 4, seed=1), random(12, 3, seed=2)
    A = x.T @ x / 12
    F = np.kron(A, np.eye(3))
    optimizer = KFAC({"fc": {"weight": W}}, adapt_factor=0.5, **SETTINGS)
    last = None

    def mean_loss():
        return 0.5 * np.sum((x @ W - y) ** 2) / 12

    for _ in range(2):
        lam, before = optimizer.damping, W.copy()
        V = x.T @ (x @ W - y) / 12
        g = rng.normal(size=(12, 3))
        if last is None:
            first = g
        loss_before = mean_loss()
        optimizer.observe("fc", kc.Batch(x, first))
        change = optimizer.step(
            {"fc": {"weight": V}},
            curvature=lambda directions: kc.steps.curvature_of_outputs(
                changes := [x @ d["fc"]["weight"] for d in directions],
                changes,
                examples=12,
            ),
            loss=mean_loss,
        )
        loss_after, ratio = mean_loss(), optimizer.reduction_ratio

        # The same rows at each step: the statistics stay what they are.
        pi_damped = damped_by(A, first.T @ first / 12, V, lam)
        span = [-pi_damped.ravel()] + ([] if last is None else [last])
        D = np.stack(span, axis=1)
        H = F + lam * np.eye(12)
        c = -np.linalg.solve(D.T @ H @ D, D.T @ V.ravel())
        delta = D @ c
        np.testing.assert_allclose(
            change["fc"]["weight"].ravel(), delta, rtol=1e-8, atol=1e-12
        )
        promised = V.ravel() @ delta + 0.5 * delta @ H @ delta
        np.testing.assert_allclose(ratio, (loss_after - loss_before) / promised)
        np.testing.assert_allclose(W, before + change["fc"]["weight"])
        assert optimizer.damping == (lam * 0.5 if ratio > 0.75 else lam)
        last = delta


def damped_by(A, G, V, damping):
    """Return ``damped_inverse`` with another damping."""
    pi = np.sqrt((np.trace(A) / len(A)) / (np.trace(G) / len(G)))
    root = np.sqrt(damping)
    A, G = A + pi * root * np.eye(len(A)), G + root / pi * np.eye(len(G))
    return np.linalg.solve(A, np.linalg.solve(G, V.T).T)


def test_a_loss_is_compared_with_a_model_only():
    optimizer = KFAC(dense_parameters(), **SETTINGS)
    optimizer.observe("fc", kc.Batch(*dense_case()))
    with pytest.raises(kc.ConventionError, match="curvature"):
        optimizer.step(dense_gradient(), loss=lambda: 1.0)


def test_a_step_that_makes_the_loss_worse_is_damped_until_it_does_not():
    """The curvature is a hundredth of the true one, so that steps are far too long."""
    x, y, W = random(12, 4, seed=1), random(12, 3, seed=2), random(4, 3)
    optimizer = KFAC({"fc": {"weight": W}}, **{**SETTINGS, "damping": 1e-6})

    def mean_loss():
        return 0.5 * np.sum((x @ W - y) ** 2) / 12

    def curvature(directions):
        changes = [0.1 * x @ d["fc"]["weight"] for d in directions]
        return kc.steps.curvature_of_outputs(changes, changes, examples=12)

    before, start = mean_loss(), W.copy()
    optimizer.observe("fc", kc.Batch(x, random(12, 3, seed=4)))
    gradient = x.T @ (x @ W - y) / 12
    change = optimizer.step(
        {"fc": {"weight": gradient}}, curvature=curvature, loss=mean_loss
    )

    np.testing.assert_array_equal(W, start + change["fc"]["weight"])
    assert mean_loss() < before
    # By hand: the step to the wrong model's minimum, and the first quarter of a quarter of
    # it that lowers the loss.
    g = random(12, 3, seed=4)
    D = damped_by(x.T @ x / 12, g.T @ g / 12, gradient, 1e-6)
    wrong = 0.01 * np.sum((x @ D) ** 2) / 12 + 1e-6 * np.sum(D**2)
    step = -np.sum(gradient * D) / wrong * D
    losses = [
        0.5 * np.sum((x @ (start + 0.25**k * step) - y) ** 2) / 12 for k in range(5)
    ]
    k = int(np.argmax(np.array(losses) < before))
    assert k > 0
    np.testing.assert_allclose(change["fc"]["weight"], 0.25**k * step, rtol=1e-8)
    assert optimizer.damping in (1e-6 * 4.0**k, 1e-6 * 4.0**k / 0.95)

    def failing():
        if not np.array_equal(W, before_failure):
            raise KeyError("after")
        return mean_loss()

    before_failure, damping = W.copy(), optimizer.damping
    optimizer.observe("fc", kc.Batch(x, random(12, 3, seed=4)))
    with pytest.raises(KeyError, match="after"):
        optimizer.step({"fc": {"weight": gradient}}, curvature=curvature, loss=failing)
    np.testing.assert_array_equal(W, before_failure)
    assert optimizer.damping == damping


def test_masked_arrays_are_refused():
    """NumPy would leave their mask out: as parameters, rows and gradients."""
    x, g = dense_case()
    masked = np.ma.masked_array(x, mask=x > 1)
    optimizer = KFAC(dense_parameters(), **SETTINGS)
    with pytest.raises(kc.KFACError, match=r"[Mm]asked"):
        optimizer.observe("fc", kc.Batch(masked, g))
    with pytest.raises(kc.KFACError, match=r"[Mm]asked"):
        KFAC({"fc": {"weight": np.ma.masked_array(random(4, 3))}}, **SETTINGS)
    optimizer.observe("fc", kc.Batch(x, g))
    gradient = {
        name: np.ma.masked_array(v) for name, v in dense_gradient()["fc"].items()
    }
    with pytest.raises(kc.KFACError, match=r"[Mm]asked"):
        optimizer.step({"fc": gradient})


def test_statistics_without_a_step_and_several_draws():
    """Parts of a data set become one update; no parameter moves, and nothing is counted."""
    parameters = dense_parameters()
    W, b = (parameters["fc"][key].copy() for key in ("weight", "bias"))
    options = SETTINGS | {"decay": 1.0, "refreshing": kc.Refreshing()}
    kfac = KFAC(parameters, likelihood="categorical", samples=3, **options)
    x = random(10, 4, seed=5)
    seen = []
    for part in (x[:6], x[6:]):
        vectors = kfac.vectors(part @ W + b)
        assert vectors.shape == (3, len(part), 3)
        kfac.observe("fc", kc.Batch(part, vectors, sources=3))
        seen.append(vectors)
    kfac.update()
    kfac.estimator.refresh()

    assert kfac.steps == 0
    assert np.array_equal(parameters["fc"]["weight"], W)
    ones = np.concatenate([x, np.ones((10, 1))], axis=1)
    g = np.concatenate(seen, axis=1)
    A, G = ones.T @ ones / 10, np.einsum("mni,mnj->ij", g, g) / (3 * 10)
    got = kfac.estimator.operator("fc").to_dense(damped=False)
    np.testing.assert_allclose(got, np.kron(A, G), rtol=1e-11, atol=1e-13)
    with pytest.raises(kc.NotReadyError, match="observe"):
        kfac.update()


def test_processes_that_divide_the_rows():
    """A step of all is that of the joined batch; each draws labels of its own."""
    x, g = dense_case()
    gradient, cuts = dense_gradient(), [0, 5, 7, 8]
    expected = dense_direction(x, g, gradient["fc"])

    def on_a_rank(communicator):
        execution = Distributed(communicator=communicator)
        options = {"execution": execution, "reduction": "sum", "fisher": "empirical"}
        optimizer = KFAC(dense_parameters(), **options, **SETTINGS)
        own = slice(*cuts[communicator.rank : communicator.rank + 2])
        optimizer.observe("fc", kc.Batch(x[own], g[own]))
        return matrix(optimizer.step(gradient, rows=1)["fc"])

    for change in run_ranks(3, on_a_rank):
        np.testing.assert_allclose(change, -expected, rtol=1e-10)

    def drawn(communicator):
        execution = Distributed(communicator=communicator)
        own = {"likelihood": "categorical", "execution": execution}
        return KFAC(dense_parameters(), **own).vectors(np.zeros((32, 3)))

    one, other = run_ranks(2, drawn)
    assert not np.array_equal(one, other)

    def refused(communicator):
        with pytest.raises(kc.UnsupportedError, match="rows of all processes"):
            KFAC(
                dense_parameters(),
                fisher="empirical",
                execution=Distributed(communicator=communicator),
            )

    run_ranks(2, refused)


def test_an_empty_batch_is_refused_by_name():
    """Also after the vectors of its outputs, of which there are none."""
    optimizer = KFAC(dense_parameters(), likelihood="categorical", **SETTINGS)
    drawn = optimizer.vectors(np.zeros((0, 3)))
    with pytest.raises(kc.ShapeError, match="at least one row"):
        optimizer.observe("fc", kc.Batch(np.zeros((0, 4)), drawn, sources=1))
