"""The JAX shim against dense NumPy references from JAX's own per-example gradients."""

from __future__ import annotations

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.array.structure import leaves

jax = pytest.importorskip("jax")
jnp = jax.numpy
shim = pytest.importorskip("kfac_core_shims.jax")
programs = pytest.importorskip("kfac_core_shims.jax.compiled")

LAMBDA = 0.1
pytestmark = pytest.mark.usefixtures("jax_float64")


def made(network, **options):
    chosen = {
        "decay": 0.9,
        "damping": LAMBDA,
        "damping_rule": "exact",
        "reduction": "sum",
        "refresh_every": 1,
        "kl_clip": None,
    }
    return shim.KFAC(network, **(chosen | options))


def mlp(params, x):
    hidden = jnp.tanh(shim.dense("one", x, *params["one"]))
    return shim.dense("two", hidden, params["two"])


def nll(z, y):
    """Return the summed negative log-likelihood."""
    return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(z), y[:, None], axis=1))


@pytest.fixture(scope="module")
def small(jax_float64):
    """Parameters, inputs and labels of `mlp`."""
    rng = np.random.default_rng(5)
    params = {
        "one": [jnp.asarray(rng.normal(size=(4, 3))), jnp.asarray(rng.normal(size=3))],
        "two": jnp.asarray(rng.normal(size=(3, 3))),
    }
    return params, jnp.asarray(rng.normal(size=(6, 4))), jnp.asarray([0, 1, 2, 2, 1, 1])


def empirical(network, kfac, *, reduction):
    """Return one step's direction, gradient of the mean and state, to be compiled."""

    def step(params, state, x, y, damping):
        z, pull = network.vjp(params, x)
        cotangent = jax.grad(nll)(z, y) / (len(y) if reduction == "mean" else 1)
        gradients, captured = pull(cotangent, reduction=reduction)
        gradients = jax.tree.map(
            lambda g: g / (1 if reduction == "mean" else len(y)), gradients
        )
        direction, state = kfac.update(
            gradients, state, captured=captured, damping=damping
        )
        return direction, gradients, state

    return step


@pytest.fixture(scope="module")
def compiled_step(small):
    """The transformation of `mlp` with the settings of `made`, and its compiled step."""
    params, x, _ = small
    network = shim.Network(mlp, params, x)
    kfac = made(network)
    return kfac, jax.jit(empirical(network, kfac, reduction="sum"))


def solved(F, *parts, damping=LAMBDA):
    """Return ``(F + damping I)^-1`` times the parts, flattened and joined."""
    v = np.concatenate([np.ravel(part) for part in parts])
    return np.linalg.solve(F + damping * np.eye(len(v)), v)


def flat(*parts):
    return np.concatenate([np.ravel(part) for part in parts])


def assert_same(found, expected):
    """Compare two structures bit by bit."""
    pairs = zip(leaves(found), leaves(expected), strict=True)
    for (path, a), (_, b) in pairs:
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=path)


def test_directions_are_those_of_the_dense_matrix(small, compiled_step):
    """One compiled step gives ``(A (x) G + lam I)^-1`` times the mean gradient."""
    params, x, y = small
    kfac, step = compiled_step

    direction, gradients, _ = step(params, kfac.init(params), x, y, LAMBDA)

    each = jax.vmap(
        jax.grad(lambda p, x, y: nll(mlp(p, x[None]), y[None])), (None, 0, 0)
    )
    per = jax.tree.map(np.asarray, each(params, x, y))
    g = per["one"][1]
    rows = np.concatenate([np.asarray(x), np.ones((6, 1))], axis=1)
    F = np.kron(rows.T @ rows / 6, g.T @ g / 6)
    mean = [part.mean(axis=0) for part in per["one"]]
    np.testing.assert_allclose(flat(*gradients["one"]), flat(*mean), rtol=1e-9)
    np.testing.assert_allclose(flat(*direction["one"]), solved(F, *mean), rtol=1e-7)
    hidden = np.tanh(np.asarray(x @ params["one"][0] + params["one"][1]))
    # x g^T of an example times x, over x^T x, is its g.
    g = np.einsum("nio,ni->no", per["two"], hidden) / np.sum(hidden**2, 1)[:, None]
    F = np.kron(hidden.T @ hidden / 6, g.T @ g / 6)
    expected = solved(F, per["two"].mean(axis=0))
    np.testing.assert_allclose(flat(direction["two"]), expected, rtol=1e-7)


SCHEDULES = {"kronecker": (kc.Kronecker(), None), "eigen": (kc.EKFAC(), 20)}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_sixty_steps_of_one_program_are_those_of_an_estimator(small, kind):
    """With bases, operators and damping on schedules, and the old state donated."""

    def damping_at(step):
        return 0.1 + step / 60.0  # float64 where steps are traced

    params, x, y = small
    approximation, bases_every = SCHEDULES[kind]
    network = shim.Network(mlp, params, x, approximation=lambda *_: approximation)
    every = {"refresh_every": 5, "bases_every": bases_every or 100}
    kfac = made(network, damping=damping_at, **every)
    step = jax.jit(empirical(network, kfac, reduction="sum"), donate_argnums=1)

    @jax.jit
    def capture(x):
        z, pull = network.vjp(params, x)
        return pull(jax.grad(nll)(z, y), reduction="sum")[1].batches

    # On NumPy, which computes each stage of each step with nothing to compile.
    estimator, state = kfac.estimator(), kfac.init(params)
    for i in range(60):
        batch = x * (1 + i / 60)
        old, damping = state, damping_at(i)
        given = None if bases_every else damping
        direction, gradients, state = step(params, old, batch, y, given)
        estimator.update(jax.tree.map(np.asarray, capture(batch)))
        if bases_every and i % bases_every == 0:
            estimator.rebase(moments="kronecker")
        if i % 5 == 0:
            estimator.damping = damping
            estimator.refresh()
        if i % 20 in (0, 19):
            vector = {"two": {"weight": np.asarray(gradients["two"])}}
            expected = estimator.precondition(vector)["two"]["weight"]
            np.testing.assert_allclose(direction["two"], expected, rtol=1e-8)

    assert step._cache_size() == 1
    assert old["one"].statistics.averages["input"].sum.array.is_deleted()
    assert int(state["one"].updates) == 60
    assert int(state["one"].refreshes) == 12
    assert int(state["one"].age) == 4
    assert int(state["one"].basis_age) == (19 if bases_every else -1)
    assert bool(state.is_good())


def test_schedules_count_steps_with_and_without_captured_rows(small):
    """Damping and clip follow the steps where every third one has statistics."""
    params, x, y = small
    network = shim.Network(mlp, params, x)
    falling = kc.integration.Falling
    damping, clip = falling(0.5, after=2.0), falling(1e-4 / 3, after=3.0, power=2.0)
    clip = kc.integration.PerOutput(clip)  # of three
    kfac = made(network, damping=damping, kl_clip=clip, learning_rate=1.0)

    @jax.jit
    def step(state, captures):
        z, pull = network.vjp(params, x)
        gradients, captured = pull(jax.grad(nll)(z, y), reduction="sum")
        update = kfac.update(gradients, state, captured=captured)
        plain = kfac.update(gradients, state, captured=None)
        return gradients, *jax.tree.map(
            lambda a, b: jnp.where(captures, a, b), update, plain
        )

    state, whole = kfac.init(params), made(network, damping=0.5 / 2.5)
    for i in range(6):
        gradients, direction, state = step(state, i % 3 == 0)
        if i == 3:
            state = kfac.state(kfac.estimator(state), params)  # as from a file

    # Equal batches leave the averages as they are: the last refresh was that of step 3.
    z, pull = network.vjp(params, x)
    _, captured = pull(jax.grad(nll)(z, y), reduction="sum")
    expected, _ = whole.update(gradients, whole.init(params), captured=captured)
    vectors = [flat(*jax.tree.leaves(tree)) for tree in (gradients, expected)]
    scale = np.sqrt(1e-4 / (1 + (5 / 3) ** 2) / np.dot(*vectors))
    assert scale < 1
    assert int(state["one"].steps) == 6
    assert int(state["one"].updates) == 2
    for a, b in zip(*map(jax.tree.leaves, (direction, expected)), strict=True):
        np.testing.assert_allclose(a, scale * np.asarray(b), rtol=1e-6)


def test_a_short_step_of_a_classifier_is_lengthened(small):
    """Where the likelihood is known, to the geometric mean with the bound."""
    params, x, y = small
    network = shim.Network(mlp, params, x)
    z, pull = network.vjp(params, x)
    gradients, captured = pull(jax.grad(nll)(z, y), reduction="sum")
    directions = []
    for likelihood in (None, "gaussian", "categorical"):
        clip = {"kl_clip": kc.integration.PerOutput(1e3), "learning_rate": 1.0}
        kfac = made(network, likelihood=likelihood, **clip)
        update, _ = kfac.update(gradients, kfac.init(params), captured=captured)
        directions.append(flat(*jax.tree.leaves(update)))

    plain, gaussian, longer = directions
    size = np.dot(flat(*jax.tree.leaves(gradients)), plain)
    np.testing.assert_array_equal(gaussian, plain)
    np.testing.assert_allclose(longer, plain * (3e3 / size) ** 0.25, rtol=1e-6)


def test_the_optax_transformation_chains(small):
    """In a chain with a learning rate it is minus the rate times the direction."""
    optax = pytest.importorskip("optax")
    params, x, y = small
    network = shim.Network(mlp, params, x)
    kfac = made(network)
    chain = optax.chain(kfac.optax(), optax.scale_by_learning_rate(0.5))

    @jax.jit
    def step(params, held):
        z, pull = network.vjp(params, x)
        gradients, captured = pull(jax.grad(nll)(z, y), reduction="sum")
        updates, held = chain.update(gradients, held, params, captured=captured)
        again, _ = chain.update(gradients, held, params, captured=None)
        return (
            updates,
            again,
            kfac.update(gradients, kfac.init(params), captured=captured),
        )

    updates, again, (direction, _) = step(params, chain.init(params))

    np.testing.assert_allclose(updates["two"], -0.5 * direction["two"], rtol=1e-9)
    np.testing.assert_array_equal(again["two"], updates["two"])
    # Neither has parameters of its own in its state.
    empty = kfac.optax().init({})
    assert jax.tree.structure(empty) == jax.tree.structure(kfac.init(params))
    both = optax.chain(kfac.optax(), optax.trace(0.9))
    held = both.init(params)
    ones = optax.tree.map_params(both, jnp.ones_like, held)
    np.testing.assert_array_equal(ones[1].trace["two"], 1.0)
    assert_same(ones[0], held[0])
    with pytest.raises(TypeError, match="captured"):
        chain.update(params, chain.init(params), params)
    with pytest.raises(kc.ConventionError, match=r"'dampng'.*'damping'"):
        chain.update(params, chain.init(params), params, captured=None, dampng=1.0)


def test_layers_that_cannot_be_captured_raise(small):
    """Each refusal names the layer or parameter, and says what to do."""
    params, x, y = small

    def changed(params, x):
        return shim.dense("one", x, *(p * 1.0 for p in params["one"]))

    def tied(params, x):
        y = shim.dense("a", x, params["two"])
        layer = kc.Dense(in_features=3, out_features=3, bias=False, weight_layout="oi")
        return shim.tap("b", layer, y, y @ params["two"].T, weight=params["two"])

    with pytest.raises(kc.ConventionError, match=r"'one'.*leaf"):
        shim.Network(changed, params, x)
    unused = shim.Network(lambda p, x: shim.dense("two", x[:, :3], p["two"]), params, x)
    assert unused.uncovered == {"['one'][0]": "unused", "['one'][1]": "unused"}
    with pytest.raises(kc.UnsupportedError, match=r"\['two'\].*not in 2"):
        shim.Network(tied, params, x[:, :3], uncovered="keep")
    one = shim.Network(
        tied,
        params,
        x[:, :3],
        uncovered="keep",
        approximation=lambda name, layer: kc.Kronecker() if name == "a" else None,
    )
    assert set(one.blocks) == {"a"}

    network = shim.Network(mlp, params, x)
    kfac = made(network, reduction="mean")
    step = empirical(network, kfac, reduction="sum")
    with pytest.raises(kc.ConventionError, match="reduction='sum'"):
        jax.eval_shape(step, params, kfac.init(params), x, y, LAMBDA)
    z, pull = network.vjp(params, x)
    with pytest.raises(kc.ConventionError, match="reduction"):
        pull(z)


@pytest.mark.parametrize("kind", ["dense", "conv"])
def test_a_mark_with_its_weight_transposed_is_refused(kind):
    """It was reshaped, and the direction was that of another matrix."""
    if kind == "dense":
        layer = kc.Dense(in_features=4, out_features=3, bias=False, weight_layout="oi")
        x, y, W = jnp.ones((5, 4)), jnp.ones((5, 3)), jnp.ones((4, 3))
    else:
        layer = kc.Conv(
            in_channels=2,
            out_channels=3,
            kernel_size=(2,),
            padding="valid",
            bias=False,
            weight_layout="oi_spatial",
            data_layout="channels_last",
        )
        x, y, W = jnp.ones((5, 6, 2)), jnp.ones((5, 5, 3)), jnp.ones((2, 2, 3))
    with pytest.raises(kc.ShapeError, match=r"'a'.*`weight`.*\(3, .*weight_layout"):
        shim.tap("a", layer, x, y, weight=W)
    transposed = jnp.moveaxis(W, -1, 0) if kind == "conv" else W.T
    shim.tap("a", layer, x, y, weight=transposed)
    # Merged axes, as of the heads of attention, are another form of the same order.
    shim.tap("a", layer, x, y, weight=transposed.reshape(3, -1, 1))


# ------------------------------------------- an estimator whose stages are programs


def estimators(kind=None, **options):
    """Return an estimator, and one of the same settings that is compiled."""
    layer = kc.Dense(in_features=4, out_features=3, bias=True, weight_layout="io")
    blocks = {"a": kc.Block(layer, kind or kc.Kronecker())}
    settings = {"decay": 0.8, "damping": 0.3, "reduction": "sum", **options}
    compiled = kc.Estimator(blocks, **settings, execution=shim.compiled)
    return kc.Estimator(blocks, **settings), compiled


def batch_of(rng):
    return kc.Batch(*(jnp.asarray(rng.normal(size=(10, k))) for k in (4, 3)))


def vector_of(rng):
    weight, bias = rng.normal(size=(4, 3)), rng.normal(size=3)
    return {"a": {"weight": jnp.asarray(weight), "bias": jnp.asarray(bias)}}


def assert_close_vectors(found, expected):
    for role, x in expected["a"].items():
        np.testing.assert_allclose(found["a"][role], x, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [kc.Kronecker(), kc.EKFAC()])
def test_a_compiled_estimator_is_the_estimator(rng, kind):
    """With decays and dampings that change, and one program a stage."""
    rule = "exact" if kind.has_bases else "factored"
    plain, compiled = estimators(kind, damping_rule=rule)
    V, sizes = vector_of(rng), []
    for step in range(4):
        batch = batch_of(rng)
        for estimator in (plain, compiled):
            estimator.decay, estimator.damping = 0.9 - 0.1 * step, 0.3 * (step + 1)
            estimator.update({"a": batch})
            if kind.has_bases:
                estimator.rebase(moments="kronecker")
            estimator.refresh()
        assert_close_vectors(compiled.precondition(V), plain.precondition(V))
        sizes.append(programs._program(programs.compiler_options("cpu"))._cache_size())

    # The first update makes statistics, whose form is then that of a program's results.
    assert sizes[1] == sizes[3]
    compiled.update({})
    assert compiled.precondition({}) == {}
    assert compiled.state["a"].updates == 4
    assert_close_vectors(
        compiled.apply("multiply_matpower", V, -0.5),
        plain.apply("multiply_matpower", V, -0.5),
    )


def test_compiled_estimators_raise_flagged_errors(rng):
    """By name, with nothing changed; a singular factor is refused by every fallback."""
    _, compiled = estimators(damping=0.0)
    ones = jnp.ones((2, 4)), jnp.ones((2, 3))
    compiled.update({"a": kc.Batch(*ones)})
    with pytest.raises(kc.FactorizationError, match="a/input"):
        compiled.refresh()
    compiled.damping = 0.1
    compiled.refresh()
    before = compiled.state
    bad = kc.Batch(jnp.full((2, 4), jnp.nan), ones[1])
    with pytest.raises(kc.NotFiniteError, match=r"'a'.*inputs"):
        compiled.update({"a": bad})
    assert compiled.state is before
    assert (before["a"].updates, before["a"].age) == (1, 0)


# ------------------------------------------------------- equal blocks in one program


def test_equal_blocks_are_traced_once(rng, monkeypatch):
    """For the first state and all steps: the formulas run once, not for each block."""
    weights = [jnp.asarray(rng.normal(size=(7, 7))) for _ in range(4)]
    # Of a size that no other test has a program for.
    x, y = jnp.asarray(rng.normal(size=(6, 7))), jnp.asarray([0, 1, 2, 6, 1, 5])

    def chain(weights, x):
        for W in weights:
            x = jnp.tanh(x @ W)
        return x

    network = shim.Network(chain, weights, x)
    kfac = made(network, damping_rule="factored")
    runs = []
    operator = kc.Kronecker.operator

    def counted(self, *given):
        runs.append(self)
        return operator(self, *given)

    monkeypatch.setattr(kc.Kronecker, "operator", counted)
    state = kfac.init(weights)
    step = empirical(network, kfac, reduction="sum")

    direction, gradients, _ = jax.jit(step)(weights, state, x, y, jnp.float64(LAMBDA))

    assert len(network.blocks) == 4
    assert len(runs) == 1
    hidden = [np.asarray(x)]
    for W in weights:
        hidden.append(np.tanh(hidden[-1] @ np.asarray(W)))
    p = np.exp(hidden[-1])
    g = p / p.sum(1, keepdims=True) - np.eye(7)[np.asarray(y)]
    for i in range(3, -1, -1):
        g = g * (1 - hidden[i + 1] ** 2)
        A, G = hidden[i].T @ hidden[i] / 6, g.T @ g / 6
        pi = np.sqrt(np.trace(A) / np.trace(G))
        root, eye = np.sqrt(LAMBDA), np.eye(7)
        left = np.linalg.solve(A + pi * root * eye, np.asarray(gradients[i]))
        expected = np.linalg.solve(G + root / pi * eye, left.T).T
        np.testing.assert_allclose(direction[i], expected, rtol=1e-9)
        g = g @ np.asarray(weights[i]).T


def test_a_state_goes_through_a_file(small, tmp_path):
    """What was saved and loaded goes on as if nothing had happened, bit by bit."""
    params, x, y = small
    network = shim.Network(mlp, params, x)
    kfac = made(network, damping_rule="factored", refresh_every=3)
    step = jax.jit(empirical(network, kfac, reduction="sum"))
    start = kfac.init(params)
    _, _, state = step(params, start, x, y, LAMBDA)
    kc.save_checkpoint(tmp_path / "a.npz", kfac.estimator(state))

    loaded = kfac.estimator()
    kc.load_checkpoint(tmp_path / "a.npz", loaded, backend="jax")
    resumed = kfac.state(loaded, params)

    after, expected = (step(params, s, 2.0 * x, y, LAMBDA) for s in (resumed, state))
    assert jax.tree.structure(resumed) == jax.tree.structure(state)
    for a, b in zip(*map(jax.tree.leaves, (after[:2], expected[:2])), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(*map(jax.tree.leaves, (after[2], expected[2])), strict=True):
        # Of a symmetric matrix a file keeps one triangle.
        np.testing.assert_array_equal(
            *(np.tril(x) if x.ndim == 2 else x for x in (a, b))
        )
    assert int(after[2]["one"].updates) == 2
