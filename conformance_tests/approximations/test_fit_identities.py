"""A11: KFOC, the best Kronecker product, against a dense singular value decomposition.

The reference forms the block from loops, rearranges it as Van Loan does, and takes its top
singular pair; the library never forms it.
"""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.approximations.kfoc import KFOC

from ..builders import reference
from ..builders.layers import conv_layer, dense_layer
from ..builders.one_block import SUM, learn, operator_for
from ..builders.tolerances import assert_close

N, IN, OUT = 14, 3, 2
LAYER = dense_layer(IN, OUT)
CONVERGED = 25


def draw(rng, shared=(), sources=2, layer=LAYER):
    """Return x, and g of several sources whose size depends on x."""
    x = rng.normal(size=(N, *shared, layer.in_features))
    g = rng.normal(size=(sources, N, *shared, layer.out_features))
    return x, g * (1.0 + x[..., :1] ** 2)


def block_of(x, g, *, mask=None, bias=True):
    """Return the exact block, row-major, and its rearranged matrix."""
    n, m = x.shape[-1] + bias, g.shape[-1]
    F = np.zeros((n * m, n * m))
    for example in reference.rows_of(x, g, bias=bias, mask=mask):
        for j in range(len(g)):
            D = sum((np.outer(a, gs[j]) for a, gs in example), np.zeros((n, m)))
            F += np.outer(D.ravel(), D.ravel()) / len(x)
    return F


def rearranged(F, n):
    """Return R(F), for which R(A (x) G) is vec(A) vec(G)^T."""
    m = len(F) // n
    return F.reshape(n, m, n, m).transpose(0, 2, 1, 3).reshape(n * n, m * m)


def best_product(F, n):
    """Return the nearest Kronecker product, and all singular values."""
    m = len(F) // n
    U, s, V = np.linalg.svd(rearranged(F, n))
    A, G = U[:, 0].reshape(n, n), V[0].reshape(m, m)
    return s[0] * np.kron(A, G), s


def fed(backend, x, g, dtype="float64", mask=None):
    """Return a batch on the backend."""
    return kc.Batch(
        backend.asarray(x, dtype),
        backend.asarray(g, dtype),
        mask=None if mask is None else backend.asarray(mask),
        sources=len(g),
    )


def statistics_of(backend, batch, *, iterations=CONVERGED, layer=LAYER, **options):
    """Return a block, and its statistics after one update."""
    block = kc.Block(layer, KFOC(iterations=iterations))
    settings = {"conventions": SUM, "decay": 0.9} | options
    return block, kc.update_block(
        block, block.initial(batch.like), batch, kc.UpdateOptions(**settings)
    )


def dense_of(backend, block, statistics):
    """Return the undamped block on the host."""
    operator = operator_for(block, statistics, damping=0.0, factorizations=())
    return backend.to_numpy(operator.to_dense(damped=False))


def factors_of(backend, product):
    """Return A and G of a running product on the host."""
    value = product.value(debias=True)
    return [backend.to_numpy(value[side]) for side in ("input", "output")]


def test_a_kronecker_product_is_rearranged_to_rank_one(backend, dtype, rng):
    """A11: ``R(A (x) G) = vec(A) vec(G)^T``."""
    A, G = rng.normal(size=(IN, IN)), rng.normal(size=(OUT, OUT))

    product = kc.linalg.kronecker_dense([backend.asarray(x, dtype) for x in (A, G)])

    got = rearranged(backend.to_numpy(product), IN)
    assert_close(got, np.outer(A.ravel(), G.ravel()), "product", dtype)


@pytest.mark.parametrize("shared", [(), (3,)])
@pytest.mark.parametrize("masked", [False, True])
def test_the_fit_is_the_top_singular_pair(backend, dtype, rng, shared, masked):
    """A11: the power iteration finds it without the matrix; ``|F|^2 - s_1^2`` is left."""
    x, g = draw(rng, shared)
    mask = rng.random((N, *shared)) > 0.3 if masked else None
    if masked:
        x[~mask] = np.nan
    batch = fed(backend, x, g, dtype, mask)

    block, statistics = statistics_of(backend, batch)

    F = block_of(x, g, mask=mask)
    best, s = best_product(F, IN + 1)
    got = dense_of(backend, block, statistics)
    product = statistics.averages["block"]
    assert_close(got, best, "identity", dtype)
    assert_close(float(product.singular_value()), s[0], "identity", dtype)
    left = np.linalg.norm(F - got) ** 2
    assert_close(left, np.linalg.norm(F) ** 2 - s[0] ** 2, "identity", dtype)
    assert float(product.change) < {"float64": 1e-12, "float32": 1e-5}[dtype]


@pytest.mark.parametrize("iterations", [1, 2, CONVERGED])
def test_no_fit_is_worse_than_kfac(backend, rng, iterations):
    """A11: each iteration is nearer, all are nearer than K-FAC, and none is exact."""
    x, g = draw(rng)
    batch = fed(backend, x, g)
    block = kc.Block(LAYER, kc.Kronecker())
    statistics = learn(block, batch)
    F = block_of(x, g)
    kfac = np.linalg.norm(F - dense_of(backend, block, statistics))

    block, statistics = statistics_of(backend, batch, iterations=iterations)
    error = np.linalg.norm(F - dense_of(backend, block, statistics))

    best = np.linalg.norm(F - best_product(F, IN + 1)[0])
    assert best * (1 - 1e-12) <= error < 0.99 * kfac
    assert best > 0.1 * np.linalg.norm(F)
    if iterations == 1:
        assert error > best * (1 + 1e-6)


@pytest.mark.parametrize("iterations", [1, CONVERGED])
@pytest.mark.parametrize("shared", [(), (3,)])
def test_both_factors_are_positive_semidefinite(
    backend, dtype, rng, shared, iterations
):
    """A11: at any number of iterations, for rank-deficient data, after any updates."""
    x, g = draw(rng, shared)
    x[..., 1] = x[..., 0]
    batch = fed(backend, x, g, dtype)
    block, statistics = statistics_of(backend, batch, iterations=iterations)
    later = fed(backend, *draw(rng, shared), dtype)
    statistics = learn(block, later, statistics, decay=0.9)

    for factor in statistics.averages["block"].value(debias=True).values():
        A = backend.to_numpy(factor)
        w = np.linalg.eigvalsh(A)
        assert np.array_equal(A, A.T)
        assert w[0] > -w[-1] * {"float64": 1e-14, "float32": 1e-6}[dtype]


def test_change_falls_as_the_iteration_converges(backend, rng):
    """`change` falls as the error does: one iteration moves, many do not."""
    batch = fed(backend, *draw(rng))

    changes = [
        float(statistics_of(backend, batch, iterations=k)[1].averages["block"].change)
        for k in (1, 4, CONVERGED)
    ]

    assert changes[0] > 0.05
    assert changes[0] > 10 * changes[1] > 100 * changes[2]


def test_one_example_is_exact_at_once(backend, rng):
    """B1, B3: of one example without shared positions the block is the fit."""
    x, g = draw(rng, sources=1)
    x, g = x[:1], g[:, :1]

    block, statistics = statistics_of(backend, fed(backend, x, g), iterations=1)

    got = dense_of(backend, block, statistics)
    assert_close(got, block_of(x, g), "identity", "float64")


def test_factorial_statistics_are_exact_at_once(backend, rng):
    """B11: where every input meets every output gradient, in whichever order they come."""
    x, g = rng.normal(size=(N, IN)), rng.normal(size=(5, 2, OUT))
    pairs = np.repeat(x, 5, axis=0), np.tile(g, (N, 1, 1)).transpose(1, 0, 2)
    block = kc.Block(LAYER, KFOC(iterations=1))
    batches = [fed(backend, x, np.repeat(row[:, None], N, axis=1)) for row in g]
    statistics = block.initial(batches[0].like)

    for batch in batches:
        statistics = learn(block, batch, statistics, decay=1.0)

    # Each batch has the same inputs, so that the past is a product always.
    got = dense_of(backend, block, statistics)
    assert_close(got, block_of(*pairs), "identity", "float64")


def test_new_input_directions_enter_the_fit(backend, rng):
    """A new direction with most of the weight is taken, though the past fit is 0 there."""
    layer = dense_layer(4, OUT, bias=False)
    x, g = draw(rng, layer=layer)
    x[:, 2:] = 0.0
    y, h = draw(rng, layer=layer)
    y[:, :2] = 0.0
    batch = fed(backend, x, g)
    block, statistics = statistics_of(backend, batch, layer=layer)

    statistics = learn(block, fed(backend, y, 10 * h), statistics, decay=0.5)

    past, _ = best_product(block_of(x, g, bias=False), 4)
    F = (0.5 * past + block_of(y, 10 * h, bias=False)) / 1.5
    got = dense_of(backend, block, statistics)
    assert_close(got, best_product(F, 4)[0], "identity", "float64")


def test_the_bare_sum_is_not_divided_by_its_weight(backend, rng):
    """With ``debias=False`` the product is that of the sum."""
    batch = fed(backend, *draw(rng))
    block, statistics = statistics_of(backend, batch, weight=3.0)
    options = {"damping": 0.0, "rule": "factored", "factorizations": ()}

    dense = [
        backend.to_numpy(
            operator_for(block, statistics, debias=debias, **options).to_dense(
                damped=False
            )
        )
        for debias in (True, False)
    ]

    assert_close(dense[1], 3.0 * dense[0], "identity", "float64")


def test_groups_of_a_convolution_are_fitted_apart(backend, rng):
    """Each group of channels has its own best product."""
    layer = conv_layer(4, 4, (1, 1), bias=False, groups=2)
    x, g = rng.normal(size=(N, 2, 1, 4)), rng.normal(size=(1, N, 2, 1, 4))
    g = g * (1 + x[..., :1] ** 2)

    _, statistics = statistics_of(backend, fed(backend, x, g), layer=layer)

    product = statistics.averages["block"]
    assert tuple(product.change.shape) == (2,)
    A, G = factors_of(backend, product)
    for q, columns in enumerate((slice(0, 2), slice(2, 4))):
        rows = x[..., columns].reshape(N, 2, 2), g[..., columns].reshape(1, N, 2, 2)
        best, _ = best_product(block_of(*rows, bias=False), 2)
        assert_close(np.kron(A[q], G[q]), best, "identity", "float64")


def test_batches_of_nothing_add_nothing(backend, rng):
    """A batch that is masked throughout, or without gradients, and one after it."""
    x, g = draw(rng)
    batch = fed(backend, x, g)
    empty = fed(backend, np.full_like(x, np.nan), g, mask=np.zeros(N, bool))
    still = fed(backend, x, np.zeros_like(g))
    block, statistics = statistics_of(backend, batch)
    first = dense_of(backend, block, statistics)

    same = learn(block, empty, statistics, decay=1.0)
    _, nothing = statistics_of(backend, still)
    half = learn(block, batch, nothing, decay=1.0)

    assert_close(dense_of(backend, block, same), first, "identity", "float64")
    operator = operator_for(block, nothing, damping=0.5)
    dense = backend.to_numpy(operator.to_dense())
    assert_close(dense, 0.5 * np.eye(len(dense)), "identity", "float64")
    assert_close(dense_of(backend, block, half), first / 2, "identity", "float64")


@pytest.mark.parametrize("power", [-1, 1])
def test_tiny_and_huge_gradients_stay_in_range(backend, dtype, rng, power):
    """Factors of 1e-28 or 1e28 in float32: nothing under- or overflows on the way."""
    size = {"float64": 1e70, "float32": 1e14}[dtype] ** power
    x, g = draw(rng)
    block, statistics = statistics_of(backend, fed(backend, x, g * size, dtype))

    got = dense_of(backend, block, statistics)

    best, _ = best_product(block_of(x, g), IN + 1)
    assert_close(got / size**2, best, "identity", dtype)
    assert float(statistics.averages["block"].change) < 1e-5


def test_parts_of_a_batch_are_refused_with_the_reason(backend, rng):
    """The best product of a sum is not made of those of its parts."""
    block = kc.Block(LAYER, KFOC(iterations=2))
    parts = [
        kc.batch_moments(block, fed(backend, *draw(rng)), conventions=SUM)
        for _ in range(2)
    ]

    with pytest.raises(kc.UnsupportedError, match="whole batches"):
        parts[0].merged(parts[1])
    with pytest.raises(kc.UnsupportedError, match="whole batches"):
        kc.absorb_block(block, *parts, 0.9)
