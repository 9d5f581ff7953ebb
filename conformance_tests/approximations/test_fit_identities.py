"""A11: the best Kronecker product of an example file, against a dense singular pair.

The reference forms the block from loops, rearranges it as Van Loan does, and takes its top
singular pair; the example never forms it.
"""

import numpy as np
import pytest

import kfac_core as kc

from ..builders import reference
from ..builders.approximations import EXAMPLES, example_module
from ..builders.layers import conv_layer, dense_layer
from ..builders.one_block import SUM, learn, operator_for
from ..builders.tolerances import assert_close

if not EXAMPLES.is_dir():
    pytest.skip("the documentation is not here", allow_module_level=True)

KFOC = example_module("kfoc").KFOC

N, IN, OUT = 14, 3, 2
LAYER = dense_layer(IN, OUT)
CONVERGED = 25


def draw(rng, shared=()):
    """Return x, and g of two sources whose size depends on x."""
    x, g = rng.normal(size=(N, *shared, IN)), rng.normal(size=(2, N, *shared, OUT))
    return x, g * (1.0 + x[..., :1] ** 2)


def block_of(x, g, *, mask=None, bias=True):
    """Return the exact block, row-major."""
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
    """Return the nearest Kronecker product, and its norm."""
    U, s, V = np.linalg.svd(rearranged(F, n))
    m = len(F) // n
    return s[0] * np.kron(U[:, 0].reshape(n, n), V[0].reshape(m, m)), s[0]


def fed(backend, x, g, dtype="float64", mask=None):
    """Return a batch on the backend."""
    placed = (backend.asarray(rows, dtype) for rows in (x, g))
    mask = None if mask is None else backend.asarray(mask)
    return kc.Batch(*placed, mask=mask, sources=len(g))


def dense_of(backend, block, statistics, **options):
    """Return the block on the host, undamped unless a damping is given."""
    settings = {"damping": 0.0, "factorizations": ()} | options
    return backend.to_numpy(operator_for(block, statistics, **settings).to_dense())


def test_a_kronecker_product_is_rearranged_to_rank_one(backend, dtype, rng):
    """A11: ``R(A (x) G) = vec(A) vec(G)^T``."""
    A, G = rng.normal(size=(IN, IN)), rng.normal(size=(OUT, OUT))

    product = kc.linalg.kronecker_dense([backend.asarray(x, dtype) for x in (A, G)])

    got = rearranged(backend.to_numpy(product), IN)
    assert_close(got, np.outer(A.ravel(), G.ravel()), "product", dtype)


@pytest.mark.parametrize("shared", [(), (3,)])
@pytest.mark.parametrize("power", [-1, 0, 1])
def test_the_fit_is_the_top_singular_pair(backend, dtype, rng, shared, power):
    """A11: ``|F|^2 - s_1^2`` is left, with g of 1e-14 or 1e14 in float32 too."""
    x, g = draw(rng, shared)
    mask = rng.random((N, *shared)) > 0.3
    x[~mask] = np.nan
    size = {"float64": 1e70, "float32": 1e14}[dtype] ** power
    block = kc.Block(LAYER, KFOC(iterations=CONVERGED))

    statistics = learn(block, fed(backend, x, g * size, dtype, mask))

    F = block_of(x, g, mask=mask)
    best, s = best_product(F, IN + 1)
    got = dense_of(backend, block, statistics) / size**2
    assert_close(got, best, "identity", dtype)
    left = np.linalg.norm(F - got) ** 2
    assert_close(left, np.linalg.norm(F) ** 2 - s**2, "identity", dtype)


@pytest.mark.parametrize("iterations", [1, CONVERGED])
@pytest.mark.parametrize("shared", [(), (3,)])
def test_no_fit_is_worse_than_kfac(backend, dtype, rng, shared, iterations):
    """A11: it is nearer at any number of iterations, and positive semidefinite."""
    x, g = draw(rng, shared)
    x[..., 1] = x[..., 0]
    F, errors = block_of(x, g), []
    for approximation in (KFOC(iterations=iterations), kc.Kronecker()):
        block = kc.Block(LAYER, approximation)
        got = dense_of(backend, block, learn(block, fed(backend, x, g, dtype)))
        errors.append(np.linalg.norm(F - got))
        w = np.linalg.eigvalsh(got)
        assert w[0] > -w[-1] * {"float64": 1e-14, "float32": 1e-6}[dtype]

    best = np.linalg.norm(F - best_product(F, IN + 1)[0])
    assert best * (1 - 1e-5) <= errors[0] < 0.99 * errors[1]
    assert (errors[0] > best * (1 + 1e-6)) == (iterations == 1) or dtype == "float32"


@pytest.mark.parametrize("rule", ["factored", "exact"])
def test_an_update_fits_the_past_product_and_the_batch(backend, rng, rule):
    """In new directions of x; weights divide the sum, and a batch of nothing adds none."""
    layer = dense_layer(4, OUT, bias=False)
    block = kc.Block(layer, KFOC(iterations=CONVERGED))
    pairs = [draw(rng, ()) for _ in range(2)]
    zeros = np.zeros((N, 2))
    x, y = (pairs[0][0][:, :2], zeros), (zeros, pairs[1][0][:, :2])
    (x, g), (y, h) = (np.hstack(x), pairs[0][1]), (np.hstack(y), 10 * pairs[1][1])

    statistics = learn(block, fed(backend, x, g), weight=2.0)
    statistics = learn(block, fed(backend, y, h), statistics, decay=0.5, weight=3.0)
    still = learn(
        block, fed(backend, x, g, mask=np.zeros(N, bool)), statistics, decay=1.0
    )

    past, _ = best_product(block_of(x, g, bias=False), 4)
    best, _ = best_product(past + 3.0 * block_of(y, h, bias=False), 4)
    for found in (statistics, still):
        got = dense_of(backend, block, found)
        assert_close(got, best / 4.0, "identity", "float64")
        got = dense_of(backend, block, found, debias=False)
        assert_close(got, best, "identity", "float64")
    A, G = (
        np.trace(best.reshape(4, OUT, 4, OUT), axis1=i, axis2=i + 2) for i in (1, 0)
    )
    A, G = A / np.trace(A), G / 4.0
    damped = reference.damped_block(A, G, 1.0, damping=0.3, rule=rule)
    got = dense_of(backend, block, statistics, damping=0.3, rule=rule)
    assert_close(got, damped, "identity", "float64")


def test_groups_of_a_convolution_are_fitted_apart(backend, rng):
    """Each group of channels has its own best product."""
    layer = conv_layer(4, 4, (1, 1), bias=False, groups=2)
    block = kc.Block(layer, KFOC(iterations=CONVERGED))
    x, g = rng.normal(size=(N, 2, 1, 4)), rng.normal(size=(1, N, 2, 1, 4))
    g = g * (1 + x[..., :1] ** 2)

    statistics = learn(block, fed(backend, x, g))

    value = statistics.averages["block"].factors(debias=True)
    A, G = (backend.to_numpy(value[side]) for side in ("input", "output"))
    for q, columns in enumerate((slice(0, 2), slice(2, 4))):
        rows = x[..., columns].reshape(N, 2, 2), g[..., columns].reshape(1, N, 2, 2)
        best, _ = best_product(block_of(*rows, bias=False), 2)
        assert_close(np.kron(A[q], G[q]), best, "identity", "float64")


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
    with pytest.raises(kc.ConventionError, match="one iteration"):
        KFOC(iterations=0)
