"""EKFAC over time: bases on a schedule of their own, moments in between."""

import numpy as np
import pytest

import kfac_core as kc

from ..builders import reference
from ..builders.estimators import make_estimator
from ..builders.layers import conv_layer, dense_layer
from ..builders.memory import PeakMemory
from ..builders.one_block import learn
from ..builders.tolerances import assert_close, assert_differs

N, IN, OUT, STEPS = 9, 3, 2, 4
DECAY = 0.7
DAMPING = 0.2


def dense(**options):
    layer = dense_layer(IN, OUT)
    return kc.Block(layer, kc.EKFAC(**options))


def grouped_conv():
    """Return two groups of 1x1 convolutions: dense layers on the pixels."""
    layer = conv_layer(2 * IN, 2 * OUT, (1,), bias=False, groups=2)
    return kc.Block(layer, kc.EKFAC())


def make(block, **options):
    settings = {
        "decay": DECAY,
        "damping": DAMPING,
        "damping_rule": "exact",
        "reduction": "sum",
    }
    return make_estimator({"a": block}, **(settings | options))


def draw(rng, positions=STEPS, width=1):
    """Return rows of distinct scales, so that no two eigenvalues are near."""
    x = rng.normal(size=(N, positions, width * IN)) * np.tile([1.0, 2.0, 0.5], width)
    g = rng.normal(size=(N, positions, width * OUT)) * np.tile([1.0, 3.0], width)
    return x, g * (1 + x[..., :1] ** 2)


def batch_of(backend, x, g, **options):
    return kc.Batch(backend.asarray(x), backend.asarray(g), **options)


def gradients(x, g):
    """Return each example's gradient, the bias' row last."""
    full = np.concatenate([x, np.ones((*x.shape[:-1], 1))], axis=-1)
    return np.einsum("nsi,nsj->nij", full, g)


def factors(x, g):
    full = np.concatenate([x, np.ones((*x.shape[:-1], 1))], axis=-1)
    rows, grads = full.reshape(-1, IN + 1), g.reshape(-1, OUT)
    return rows.T @ rows / len(rows), grads.T @ grads / len(grads)


def eigenbasis(A):
    return np.linalg.eigh(A)[1]


def squares(D, Q_A, Q_G):
    in_basis = np.einsum("ik,nij,jl->nkl", Q_A, D, Q_G)
    return np.mean(in_basis**2, axis=0)


def dense_of(Q_A, Q_G, E):
    Q = np.kron(Q_A, Q_G)
    return (Q * E.ravel()) @ Q.T


def current(backend, estimator, *, damped=False):
    estimator.refresh()
    return backend.to_numpy(estimator.operator("a").to_dense(damped=damped))


def test_bases_and_moments_have_separate_schedules(backend, rng):
    """Four updates, bases after the second, against the sums written out densely."""
    estimator = make(dense(moment_decay=0.4))
    fed = [draw(rng) for _ in range(4)]
    for x, g in fed[:2]:
        estimator.update({"a": batch_of(backend, x, g)})
    estimator.rebase(moments="carried")
    for x, g in fed[2:]:
        estimator.update({"a": batch_of(backend, x, g)})

    got = current(backend, estimator)

    parts = [factors(x, g) for x, g in fed[:2]]
    Q_A, Q_G = (
        eigenbasis(DECAY * first + second) for first, second in zip(*parts, strict=True)
    )
    eye_A, eye_G = np.eye(IN + 1), np.eye(OUT)
    sums = [squares(gradients(x, g), eye_A, eye_G) for x, g in fed[:2]]
    start = (Q_A**2).T @ (0.4 * sums[0] + sums[1]) @ (Q_G**2)
    sums = [squares(gradients(x, g), Q_A, Q_G) for x, g in fed[2:]]
    E = 0.4 * (0.4 * start + sums[0]) + sums[1]
    weight = 1 + 0.4 + 0.4**2 + 0.4**3
    expected = dense_of(Q_A, Q_G, E / weight)
    assert_close(got, expected, "product", "float64")
    state = estimator.state["a"]
    assert (state.updates, state.age, state.basis_age) == (4, 0, 2)
    assert estimator.report()["a"].basis_age == 2
    # The factors went on with the block's decay, not that of the moments.
    value = backend.to_numpy(
        state.statistics.averages["input"].value(debias=True).full()
    )
    A = sum(DECAY ** (3 - k) * factors(x, g)[0] for k, (x, g) in enumerate(fed))
    A = A / sum(DECAY**k for k in range(4))
    assert_close(value, A, "gram", "float64")


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_moments_start_as_those_of_kfac(backend, rng, sharing):
    """Right after a change of basis the block is that of Kronecker under exact damping."""
    x, g = draw(rng)
    batch = batch_of(backend, x, g)
    estimator = make(dense(sharing=sharing))
    estimator.update({"a": batch})
    estimator.rebase(moments="kronecker")
    kfac = make(kc.Block(dense().layer, kc.Kronecker(sharing=sharing)))
    kfac.update({"a": batch})

    got = current(backend, estimator, damped=True)

    assert_close(got, current(backend, kfac, damped=True), "product", "float64")
    estimator.update({"a": batch})
    assert_differs(current(backend, estimator, damped=True), got)


def test_moments_are_carried_over_as_the_old_block_has_them(backend, rng):
    """The new diagonal is that of the old block in the new basis; the trace stays."""
    estimator = make(dense())
    x, g = draw(rng)
    estimator.update({"a": batch_of(backend, x, g)})
    estimator.rebase(moments="zero")
    y, h = draw(rng)
    estimator.update({"a": batch_of(backend, y, h)})
    old = current(backend, estimator)

    estimator.rebase(moments="carried")

    got = current(backend, estimator)
    bases = estimator.state["a"].statistics.bases
    Q = np.kron(
        *(backend.to_numpy(bases[side].eigenvectors) for side in ("input", "output"))
    )
    expected = (Q * np.diag(Q.T @ old @ Q)) @ Q.T
    assert_close(got, expected, "product", "float64")
    assert_close(np.trace(got), np.trace(old), "product", "float64")
    assert_differs(got, old)


def test_an_operator_waits_for_bases_and_moments(backend, rng):
    """Never the diagonal of the coordinates in silence, nor nothing at all."""
    estimator = make(dense())
    x, g = draw(rng)
    with pytest.raises(kc.NotReadyError, match="update"):
        estimator.rebase(["a"], moments="kronecker")
    estimator.update({"a": batch_of(backend, x, g)})
    with pytest.raises(kc.NotReadyError, match="rebase"):
        estimator.refresh()
    estimator.rebase(moments="zero")
    with pytest.raises(kc.NotReadyError, match="update"):
        estimator.refresh()
    estimator.update({"a": batch_of(backend, x, g)})
    estimator.refresh()
    kfac = make(kc.Block(dense().layer, kc.Kronecker()))
    kfac.update({"a": batch_of(backend, x, g)})
    with pytest.raises(kc.UnsupportedError, match="no bases"):
        kfac.rebase(["a"], moments="zero")
    kfac.rebase(moments="zero")  # No block has bases: nothing to do.
    with pytest.raises(kc.ConventionError, match="moments"):
        estimator.rebase(moments="some")


@pytest.mark.parametrize("check", ["raise", "status"])
def test_a_failed_basis_keeps_the_old_one(backend, rng, check):
    """A factor that is not finite has no basis; the old one and its moments stay."""
    estimator = make(dense())
    x, g = draw(rng)
    estimator.update({"a": batch_of(backend, x, g)})
    estimator.rebase(moments="kronecker")
    averages = dict(estimator.state["a"].statistics.averages)
    bad = averages["input"].sum.array * float("nan")
    broken = kc.Statistics(
        averages
        | {
            "input": kc.factors.Average(
                type(averages["input"].sum)(bad, True), averages["input"].weight
            )
        },
        estimator.state["a"].statistics.status,
        estimator.state["a"].statistics.bases,
    )
    approximation = dense().approximation
    if check == "raise":
        with pytest.raises(kc.NotFiniteError, match="input"):
            approximation.rebased(broken, dense().layer, moments="carried", check=check)
        return

    made = approximation.rebased(broken, dense().layer, moments="carried", check=check)

    assert int(made.status) != 0
    for side in ("input", "output"):
        got = backend.to_numpy(made.bases[side].eigenvectors)
        before = backend.to_numpy(broken.bases[side].eigenvectors)
        assert np.array_equal(got, before)
    moments = backend.to_numpy(made.averages["block"].sum)
    assert np.array_equal(moments, backend.to_numpy(averages["block"].sum))


def test_each_group_has_its_own_bases(backend, rng):
    """A convolution in two groups is two blocks, in every product."""
    x, g = draw(rng, width=2)
    estimator = make(grouped_conv())
    batch = batch_of(backend, x, g)
    estimator.update({"a": batch})
    estimator.rebase(moments="zero")
    estimator.update({"a": batch})
    estimator.refresh()
    operator = estimator.operator("a").prepared("cholesky")

    F = np.zeros((IN, 2, OUT, IN, 2, OUT))
    for q in range(2):
        rows, grads = x[..., q * IN : (q + 1) * IN], g[..., q * OUT : (q + 1) * OUT]
        D = np.einsum("nsi,nsj->nij", rows, grads)
        flat, other = rows.reshape(-1, IN), grads.reshape(-1, OUT)
        Q_A, Q_G = eigenbasis(flat.T @ flat), eigenbasis(other.T @ other)
        block = dense_of(Q_A, Q_G, squares(D, Q_A, Q_G))
        F[:, q, :, :, q, :] = block.reshape(IN, OUT, IN, OUT)
    F = F.reshape(IN * 2 * OUT, -1)
    damped = F + DAMPING * np.eye(len(F))
    got = backend.to_numpy(operator.to_dense(damped=False))
    assert_close(got, F, "product", "float64")
    V = rng.normal(size=(IN, 2 * OUT))
    L = np.linalg.cholesky(damped)
    products = {
        "multiply": (damped, {}),
        "multiply_inverse": (np.linalg.inv(damped), {}),
        "multiply_cholesky": (L, {}),
        "multiply_cholesky_inverse": (np.linalg.inv(L).T, {"transpose": True}),
        "sample": (reference.matrix_power(damped, -0.5), {}),
    }
    for product, (matrix, options) in products.items():
        result = getattr(operator, product)(backend.asarray(V), **options)
        expected = (matrix @ V.ravel()).reshape(V.shape)
        assert_close(backend.to_numpy(result), expected, "inverse", "float64")
    logdet = float(operator.logdet())
    assert_close(logdet, np.linalg.slogdet(damped)[1], "logdet", "float64")


@pytest.mark.parametrize("bag", ["none", "binary", "count"])
def test_an_embedding_has_a_block_whose_input_basis_is_the_ids(backend, rng, bag):
    """It is a dense layer on the one-hot rows, whose input factor is diagonal."""
    V, m = 5, 2
    ids = np.array([[0, 3, 3], [1, 1, 1], [4, 0, 4], [2, 3, 2]])
    bags = bag != "none"
    g = rng.normal(size=(4, 1 if bags else 3, m)) * [1.0, 3.0]
    options = {"bag": True, "duplicates": bag} if bags else {}
    layer = kc.Embedding(num_embeddings=V, features=m, weight_layout="io", **options)
    estimator = make(kc.Block(layer, kc.EKFAC(input="diagonal")))
    fed = kc.Batch(backend.asarray(ids), backend.asarray(g[:, 0] if bags else g))
    estimator.update({"a": fed})
    estimator.rebase(moments="zero")
    estimator.update({"a": fed})

    got = current(backend, estimator)

    hot = np.eye(V)[ids]
    if bags:
        hot = hot.sum(axis=1, keepdims=True)
        hot = np.minimum(hot, 1) if bag == "binary" else hot
    rows = g.reshape(-1, m)
    Q_G = eigenbasis(rows.T @ rows)
    D = np.einsum("nsi,nsj->nij", hot, g)
    expected = dense_of(np.eye(V), Q_G, squares(D, np.eye(V), Q_G))
    assert_close(got, expected, "product", "float64")


def test_gradients_of_the_examples_are_never_all_formed():
    """With shared positions, memory stays that of the rows and of the factors."""
    rng = np.random.default_rng(0)
    n = m = 128
    x, g = rng.normal(size=(64, 2, n)), rng.normal(size=(64, 2, m))
    layer = dense_layer(n, m, bias=False)
    block = kc.Block(layer, kc.EKFAC())
    batch = kc.Batch(x, g)
    statistics = block.initial(x)
    learn(block, batch, statistics)
    with PeakMemory() as memory:
        learn(block, batch, statistics)

    assert memory.peak < 64 * n * m * 8 / 4


def test_parts_of_a_batch_have_their_moments_in_the_bases(backend, rng):
    """They were taken in the coordinates, and added to moments in eigenbases."""
    layer = dense_layer(4, 3, bias=False)
    block = kc.Block(layer, kc.EKFAC())
    estimator = kc.Estimator(
        {"a": block}, reduction="sum", damping=0.1, damping_rule="exact", decay=0.0
    )
    x, g = rng.normal(size=(2, 12, 4)), rng.normal(size=(2, 12, 3))
    first = kc.Batch(backend.asarray(x[0]), backend.asarray(g[0]))
    estimator.update({"a": first})
    estimator.rebase(moments="kronecker")

    def parts(**options):
        summed = kc.Conventions(reduction="sum", sources="sum")
        found = None
        for rows in (slice(0, 5), slice(5, 12)):
            batch = kc.Batch(backend.asarray(x[1][rows]), backend.asarray(g[1][rows]))
            own = kc.batch_moments(block, batch, conventions=summed, **options)
            found = own if found is None else found.merged(own)
        return found

    with pytest.raises(kc.ConventionError, match=r"Block 'a': .*`batch_moments\("):
        estimator.absorb({"a": parts()})
    held = estimator.state["a"].statistics
    with pytest.raises(kc.ConventionError, match="other bases"):
        held.merged(parts())
    estimator.absorb({"a": parts(statistics=held)})
    estimator.refresh()

    _, Q_A = np.linalg.eigh(x[0].T @ x[0])
    _, Q_G = np.linalg.eigh(g[0].T @ g[0])
    Q = np.kron(Q_A, Q_G)
    D = np.einsum("ni,no->nio", x[1], g[1]).reshape(12, 12)
    expected = Q @ np.diag(np.diag(Q.T @ (D.T @ D / 12) @ Q)) @ Q.T
    got = backend.to_numpy(estimator.operator("a").to_dense(damped=False))
    np.testing.assert_allclose(got, expected, atol=1e-10)
