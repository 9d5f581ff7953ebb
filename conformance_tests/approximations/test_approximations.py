"""Approximations and layers without a Kronecker product: blocks from the definition."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.operators import kronecker_operator

from ..builders import reference
from ..builders.dense_functions import assert_functions_are
from ..builders.layers import dense_layer
from ..builders.memory import PeakMemory
from ..builders.one_block import learn, operator_for
from ..builders.tolerances import assert_close


def gradients_of(x, g, *, bias, mask=None):
    """Return every example's and source's gradient, flattened, by loops."""
    rows = reference.rows_of(x, g, bias=bias, mask=mask)
    n, m = x.shape[-1] + bias, g.shape[-1]
    found = []
    for example in rows:
        for j in range(g.shape[0]):
            D = np.zeros((n, m))
            for row, gs in example:
                D += np.outer(row, gs[j])
            found.append(D)
    return found


def dense_of(kind, x, g, *, bias, mask=None):
    """Return the undamped block of one batch; the input of Kronecker's is diagonal."""
    if kind.name == "kronecker":
        A, G, S = reference.kronecker_factors(x, g, bias=bias, mask=mask)
        return S * np.kron(np.diag(np.diag(A)), G)
    gradients = gradients_of(x, g, bias=bias, mask=mask)
    if kind.name == "tnt":
        A, G = sum(D @ D.T for D in gradients), sum(D.T @ D for D in gradients)
        return np.kron(A, G) / np.trace(A) / len(x)
    F = sum(np.outer(D.ravel(), D.ravel()) for D in gradients) / len(x)
    return np.diag(np.diag(F)) if kind.name == "diagonal" else F


OF_IDS = {
    "kronecker": kc.Kronecker(input="diagonal"),
    "diagonal": kc.Diagonal(),
    "full": kc.Full(),
}


def operator_of(block, batch, **options):
    """Return the operator after one update."""
    statistics = learn(block, batch)
    settings = {"damping": 0.2, "rule": "factored", "factorizations": ()}
    return operator_for(block, statistics, **settings | options)


def test_a_scaled_identity_is_a_number(backend, dtype, rng):
    """Every function is that of ``(scale + damping) I``, whatever the batch."""
    x, g = rng.normal(size=(20, 3)), rng.normal(size=(20, 2))
    layer = dense_layer(3, 2, bias=False)
    batch = kc.Batch(backend.asarray(x, dtype), backend.asarray(g, dtype))

    operator = operator_of(kc.Block(layer, kc.ScaledIdentity(scale=2.0)), batch)

    eye = np.eye(6)
    assert_functions_are(backend, dtype, operator, 2.2 * eye, 2.0 * eye, rng)


def embedding(**options):
    settings = {"num_embeddings": 6, "features": 2, "weight_layout": "io"}
    return kc.Embedding(**(settings | options))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", OF_IDS)
def test_an_embedding_is_a_dense_layer_on_one_hot_rows(backend, rng, name, masked):
    """Ids give the blocks of their one-hot vectors, positions with one id added up."""
    ids = np.array([[0, 3, 3], [1, 1, 1], [5, 0, 5], [2, 3, 2]])
    g = rng.normal(size=(2, 4, 3, 2))
    mask = np.array([[1, 1, 0], [1, 1, 1], [0, 1, 1], [1, 0, 0]], bool)
    given = backend.asarray(mask) if masked else None
    batch = kc.Batch(backend.asarray(ids), backend.asarray(g), given, sources=2)
    x = np.eye(6)[ids]

    operator = operator_of(kc.Block(embedding(), OF_IDS[name]), batch)

    F = dense_of(OF_IDS[name], x, g, bias=False, mask=mask if masked else None)
    got = backend.to_numpy(operator.to_dense(damped=False))
    assert_close(got, F, "gram", "float64")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("duplicates", ["binary", "count"])
@pytest.mark.parametrize("name", OF_IDS)
def test_a_bag_is_one_row(backend, rng, name, duplicates, masked):
    """The n-hot vector of a bag counts a doubled id once or twice, as described."""
    ids = np.array([[0, 3, 3], [1, 1, 1], [5, 0, 2]])
    g = rng.normal(size=(3, 2))
    x = np.eye(6)[ids].sum(axis=1)
    if duplicates == "binary":
        x = np.minimum(x, 1)
    layer = embedding(bag=True, duplicates=duplicates)
    mask = np.array([True, False, True]) if masked else None
    given = None if mask is None else backend.asarray(mask)
    batch = kc.Batch(backend.asarray(ids), backend.asarray(g), given)

    operator = operator_of(kc.Block(layer, OF_IDS[name]), batch)

    F = dense_of(OF_IDS[name], x, g[None], bias=False, mask=mask)
    got = backend.to_numpy(operator.to_dense(damped=False))
    assert_close(got, F, "gram", "float64")


def test_a_large_vocabulary_costs_its_counts(backend, rng):
    """A million ids are counted without a one-hot row."""
    size, k = (10**6, 10**4) if backend.name != "array_api_strict" else (10**5, 10**3)
    ids, g = rng.integers(size, size=k), rng.normal(size=(k, 2))
    layer = embedding(num_embeddings=size)
    block = kc.Block(layer, kc.Kronecker(input="diagonal"))
    batch = kc.Batch(backend.asarray(ids), backend.asarray(g))

    statistics = learn(block, batch)

    got = backend.to_numpy(statistics.averages["input"].value(debias=True))
    assert_close(got, np.bincount(ids, minlength=size) / k, "gram", "float64")


def test_counting_holds_nothing_but_counts(rng):
    """The memory of an update is a few times that of the counts, never of one-hot rows."""
    size, k = 10**6, 10**4
    block = kc.Block(embedding(num_embeddings=size), kc.Kronecker(input="diagonal"))
    batch = kc.Batch(rng.integers(size, size=k), rng.normal(size=(k, 2)))
    start = block.initial(batch.like)
    learn(block, batch, start, decay=0.5)

    with PeakMemory() as memory:
        learn(block, batch, start, decay=0.5)

    assert memory.peak < 8 * 8 * size


@pytest.mark.parametrize("bad", [-1, 6])
def test_an_id_out_of_range_is_refused(backend, bad):
    """An id that stands for no row names the argument and changes nothing."""
    estimator = kc.Estimator(
        {"e": kc.Block(embedding(), kc.Kronecker(input="diagonal"))},
        decay=0.9,
        damping=0.1,
        reduction="sum",
    )
    batch = kc.Batch(
        backend.asarray(np.array([0, bad])), backend.asarray(np.ones((2, 2)))
    )

    with pytest.raises(kc.IdRangeError, match=r"'e'.*`inputs`"):
        estimator.update({"e": batch})
    assert estimator.state["e"].statistics is None
    mask = backend.asarray(np.array([True, False]))
    estimator.update({"e": kc.Batch(batch.inputs, batch.output_grads, mask=mask)})


@pytest.mark.parametrize(
    ("scale_shape", "shift_shape"),
    [((3,), (3,)), ((2, 3), None), (None, (2, 1)), ((1, 1), (3,)), ((), (2, 3))],
)
@pytest.mark.parametrize("kind", [kc.Diagonal(), kc.Full()])
def test_scale_and_shift_are_summed_to_their_shapes(
    backend, rng, scale_shape, shift_shape, kind
):
    """Each example's gradient is summed over the axes that a parameter lacks."""
    x, g = rng.normal(size=(5, 2, 3)), rng.normal(size=(2, 5, 2, 3))
    layer = kc.ScaleShift(scale_shape=scale_shape, shift_shape=shift_shape)
    batch = kc.Batch(backend.asarray(x), backend.asarray(g), sources=2)

    operator = operator_of(kc.Block(layer, kind), batch)

    def down(values, shape):
        aligned = (1,) * (2 - len(shape)) + shape
        axes = tuple(i for i in range(2) if aligned[i] == 1)
        return values.sum(axis=axes, keepdims=True).ravel()

    vectors = []
    for j in range(2):
        for n in range(5):
            parts = []
            if scale_shape is not None:
                parts.append(down(x[n] * g[j, n], scale_shape))
            if shift_shape is not None:
                parts.append(down(g[j, n], shift_shape))
            vectors.append(np.concatenate(parts))
    F = sum(np.outer(v, v) for v in vectors) / 5
    if kind.name == "diagonal":
        F = np.diag(np.diag(F))
    got = backend.to_numpy(operator.to_dense(damped=False))
    assert_close(got, F, "gram", "float64")


@pytest.mark.parametrize(
    ("layer", "approximation", "reason"),
    [
        (embedding(), kc.Kronecker(), "input='diagonal'"),
        (embedding(), kc.TNT(), "dense or conv"),
        (embedding(), kc.EKFAC(), "EKFAC.input='diagonal'"),
        (kc.Parameters(shapes={"w": (2,)}), kc.Kronecker(), "Full or Diagonal"),
        (kc.ScaleShift(scale_shape=(2,), shift_shape=None), kc.TNT(), "dense or conv"),
    ],
)
def test_invalid_pairs_raise(layer, approximation, reason):
    """A layer and an approximation that do not go together are refused where written."""
    with pytest.raises(kc.UnsupportedError, match=reason):
        kc.Block(layer, approximation)


def test_powers_of_a_single_damped_factor(backend, dtype, rng):
    """Powers of a damped factor, on vectors and on matrices."""
    A = reference.spd(rng, 4)
    V, v = rng.normal(size=(4, 3)), rng.normal(size=4)

    for moment in (A, np.diag(A)):
        dense = (A if moment.ndim == 2 else np.diag(moment)) + 0.1 * np.eye(4)
        G = backend.asarray(moment, dtype)
        factor = kronecker_operator(None, G, damping=0.1)
        for exponent in (1, -1, 0.5, -0.5, 2):
            power = reference.matrix_power(dense, exponent)
            left = factor**exponent @ backend.asarray(V, dtype)
            one = factor**exponent @ backend.asarray(v, dtype)
            assert_close(backend.to_numpy(left), power @ V, "power", dtype)
            assert_close(backend.to_numpy(one), power @ v, "power", dtype)
        got = backend.to_numpy(factor.to_dense())
        assert_close(got, dense, "product", dtype)
        assert_close(
            float(factor.trace(damped=True)), np.trace(dense), "product", dtype
        )
        assert_close(
            float(factor.logdet()), np.linalg.slogdet(dense)[1], "logdet", dtype
        )
        got = backend.to_numpy(factor.eigenvalues(damped=True))
        assert_close(got, np.linalg.eigvalsh(dense), "eigenvalues", dtype)
