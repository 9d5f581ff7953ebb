"""The NumPy shim against dense computations of its layers by hand."""

from __future__ import annotations

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.distributed import Distributed, run_ranks
from kfac_core_shims.numpy import KFAC, GaussNewton

from ..builders.reference import damped_inverse
from ..builders.tolerances import assert_close

DAMPING = 0.1
SETTINGS = {
    "learning_rate": 1.0,
    "momentum": 0.0,
    "kl_clip": None,
    "damping": DAMPING,
    "decay": 0.9,
    "damping_rule": "factored",
    "update_every": 5,
    "refresh_every": 1,
}


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
    )
    x, g = dense_case()
    optimizer.observe("fc", kc.Batch(x, g))
    for step in range(3):
        gradient, rate = dense_gradient(seed=20 + step), lr / (step + 1)
        V = matrix(gradient["fc"])
        d = dense_direction(x, g, gradient["fc"])
        nu = min(1.0, np.sqrt(kappa / (rate**2 * np.sum(V * d))))
        velocity = momentum * velocity + nu * d
        theta = theta - rate * (nu * d + momentum * velocity + eta * theta)

        optimizer.step(gradient)

        assert nu < 1
        np.testing.assert_allclose(matrix(parameters["fc"]), theta, rtol=1e-8)


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
        **SETTINGS | {"update_every": 1, "damping_rule": "exact"},
        likelihood="gaussian",
        fisher="exact",
        layers={"fc": kc.Block(layer, kc.EKFAC())},
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


@pytest.mark.parametrize("replaced", ["array", "layer"])
def test_an_array_in_the_place_of_a_parameter_is_the_one_that_moves(replaced):
    """The loop reads it from the mapping, and so does the step; the old one stays."""
    parameters, gradient, (x, g) = dense_parameters(), dense_gradient(), dense_case()
    optimizer = KFAC(parameters, **SETTINGS)
    old = parameters["fc"]["weight"]
    new, before = old + 1.0, old.copy()
    if replaced == "array":
        parameters["fc"]["weight"] = new
    else:
        parameters["fc"] = {**parameters["fc"], "weight": new}
    start = matrix(parameters["fc"])
    optimizer.observe("fc", kc.Batch(x, g))

    optimizer.step(gradient)

    expected = start - dense_direction(x, g, gradient["fc"])
    np.testing.assert_allclose(matrix(parameters["fc"]), expected, rtol=1e-10)
    assert parameters["fc"]["weight"] is new
    assert np.array_equal(old, before)
    parameters["fc"]["weight"] = new[None]
    with pytest.raises(kc.ShapeError, match="weight"):
        optimizer.step(gradient)
    assert optimizer.steps == 1


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


def test_a_mean_over_outputs_has_the_curvature_of_its_likelihood():
    """The Fisher matrix is I where a row's loss is ``|z - y|^2 / (2 P)``."""
    likelihood = kc.integration.RowLoss(
        likelihood=kc.losses.Gaussian(variance=1.0), mean_over_outputs=True
    )
    optimizer = KFAC(
        dense_parameters(), likelihood=likelihood, fisher="exact", **SETTINGS
    )

    g = optimizer.vectors(random(6, 3))

    expected = np.broadcast_to(np.eye(3), (6, 3, 3))
    np.testing.assert_allclose(np.einsum("mni,mnj->nij", g, g), expected, atol=1e-12)
    assert optimizer.loss_factor == 1 / 3
    with pytest.raises(kc.ConventionError, match="factor=1 / P"):
        KFAC(dense_parameters(), likelihood=likelihood, fisher="empirical")


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
        {"layers": 3},
    ):
        with pytest.raises(kc.KFACError, match=next(iter(wrong))):
            KFAC(dense_parameters(), **SETTINGS | wrong)
    optimizer = KFAC(dense_parameters(), **SETTINGS)
    with pytest.raises(kc.ConventionError, match="likelihood"):
        optimizer.vectors(random(6, 3))


def test_a_summed_loss_needs_its_number_of_rows():
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
        pi_damped = damped_inverse(A, first.T @ first / 12, V, damping=lam)
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


def test_a_step_that_makes_the_loss_worse_is_damped_until_it_does_not():
    """The curvature is a hundredth of the true one, so that steps are far too long."""
    x, y, W = random(12, 4, seed=1), random(12, 3, seed=2), random(4, 3)
    # The damping adapts from where the schedule is.
    settings = {**SETTINGS, "damping": lambda step: 1e-6 / (1 + step)}
    optimizer = KFAC({"fc": {"weight": W}}, **settings)

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
    D = damped_inverse(x.T @ x / 12, g.T @ g / 12, gradient, damping=1e-6)
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


def test_bases_on_one_of_several_processes():
    """Others observe without them, and may overwrite their arrays before the step."""
    layer = kc.Dense(in_features=4, out_features=3, bias=True, weight_layout="io")
    cuts, parts = [0, 5, 7, 8], ([0, 2], [2, 8])

    def run(communicator=None):
        options = {"fisher": "empirical", "reduction": "sum"}
        start, stop = 0, 8
        if communicator is not None:
            start, stop = cuts[communicator.rank : communicator.rank + 2]
            options["execution"] = Distributed(
                communicator=communicator, holders=1, reduce="owner"
            )
        kfac = KFAC(
            dense_parameters(),
            layers={"fc": kc.Block(layer, kc.EKFAC())},
            **SETTINGS | options,
        )
        changes = []
        for step in range(2):
            x, g = dense_case(seed=2 * step)
            for first, last in parts:
                own = slice(max(first, start), min(last, stop))
                if own.start < own.stop:
                    inputs, outputs = x[own].copy(), g[own].copy()
                    kfac.observe("fc", kc.Batch(inputs, outputs))
                    inputs[...] = outputs[...] = np.nan
            changes.append(matrix(kfac.step(dense_gradient(step), rows=1)["fc"]))
        return changes

    expected = run()
    for changes in run_ranks(3, run):
        np.testing.assert_allclose(changes, expected, rtol=1e-12)


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
        ([random(4, 3)], {}, kc.ArgumentError),
        ({"fc": random(4, 3)}, {}, kc.ArgumentError),
    ):
        with pytest.raises(error):
            KFAC(parameters, layers=layers, **SETTINGS)
    assert not frozen.flags.writeable


class Curve:
    """``tanh(x W + b) V - y`` with two outputs, and its Jacobian by hand."""

    def __init__(self):
        self.x = np.linspace(-1.0, 1.0, 12)[:, None]
        self.y = np.concatenate([np.sin(3 * self.x), self.x**2], axis=1)
        self.parameters = {
            "hidden": {"weight": random(1, 5), "bias": random(5, seed=1)},
            "out": {"weight": random(5, 2, seed=2) / 2},
        }

    def hidden(self):
        return np.tanh(
            self.x @ self.parameters["hidden"]["weight"]
            + self.parameters["hidden"]["bias"]
        )

    def residuals(self):
        return self.hidden() @ self.parameters["out"]["weight"] - self.y

    def batches(self):
        h, V = self.hidden(), self.parameters["out"]["weight"]
        g = np.stack([(1 - h**2) * V[:, c] for c in (0, 1)])
        units = np.broadcast_to(np.eye(2)[:, None, :], (2, 12, 2))
        return {
            "hidden": kc.Batch(self.x, g, sources=2),
            "out": kc.Batch(h, units, sources=2),
        }

    def jacobian(self):
        """Return J, rows (n, c), in the order of weight, bias and V."""
        h, V = self.hidden(), self.parameters["out"]["weight"]
        rows = []
        for n, c in np.ndindex(12, 2):
            slope = (1 - h[n] ** 2) * V[:, c]
            of_out = np.zeros((5, 2))
            of_out[:, c] = h[n]
            rows.append(np.concatenate([self.x[n] * slope, slope, of_out.ravel()]))
        return np.stack(rows)

    def flat(self):
        arrays = (self.parameters["hidden"], self.parameters["out"])
        return np.concatenate([a.ravel() for layer in arrays for a in layer.values()])


def test_steps_of_gauss_newton_are_dense_solutions_with_springs_momentum():
    curve, phi, mu = Curve(), np.zeros(20), 0.8
    optimizer = GaussNewton(
        curve.parameters,
        learning_rate=lambda t: 0.5 / (t + 1),
        momentum=mu,
        damping=0.01,
    )
    for t in range(3):
        J, r, before = curve.jacobian(), curve.residuals().ravel(), curve.flat()
        F = J.T @ J / 12 + 0.01 * np.eye(20)
        phi = mu * phi + np.linalg.solve(F, J.T @ (r - mu * J @ phi) / 12)

        loss = optimizer.step(curve.batches(), curve.residuals)

        assert_close(before - curve.flat(), 0.5 / (t + 1) * phi, "inverse", "float64")
        assert loss == pytest.approx(r @ r / 24)


def test_gauss_newton_fits_a_curve_without_a_rate():
    curve = Curve()
    optimizer = GaussNewton(curve.parameters)
    losses = [optimizer.step(curve.batches(), curve.residuals) for _ in range(60)]

    assert np.all(np.diff(losses) <= 0)
    assert losses[-1] < 1e-4 * losses[0]
    assert optimizer.damping < 1.0


def test_gauss_newton_leaves_parameters_as_they_were_where_it_raises():
    curve = Curve()
    optimizer, before, calls = GaussNewton(curve.parameters), curve.flat(), []

    def fails_at_a_trial():
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return curve.residuals()

    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(curve.batches(), fails_at_a_trial)
    with pytest.raises(kc.ShapeError, match="as of the batches"):
        optimizer.step(curve.batches(), lambda: curve.residuals()[:-1])
    with pytest.raises(kc.NotFiniteError, match="finite residuals"):
        optimizer.step(curve.batches(), lambda: curve.residuals() * np.nan)
    with pytest.raises(kc.ConventionError, match="learning_rate"):
        GaussNewton(curve.parameters, momentum=0.9)

    assert np.array_equal(curve.flat(), before)
    assert optimizer.damping == 1.0
