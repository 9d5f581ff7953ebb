"""TNT of bare arrays by their axes, and of positions taken as examples."""

import functools

import numpy as np
import pytest

import kfac_core as kc

from ..builders.dense_functions import assert_functions_are
from ..builders.one_block import learn, operator_for
from ..builders.tolerances import assert_close, assert_differs

RULES = ["factored", "factored_unit_pi", "exact"]


def dense_of(F, S, damping, rule):
    """Return the dense damped product of any number of factors."""
    k = len(F)
    product = functools.reduce(np.kron, F)
    if rule == "exact":
        return S * product + damping * np.eye(len(product))
    means = np.array([np.trace(f) / len(f) for f in F])
    pi = means / np.exp(np.log(means).mean()) if rule == "factored" else np.ones(k)
    shifts = pi * (damping / S) ** (1 / k)
    damped = [f + s * np.eye(len(f)) for f, s in zip(F, shifts, strict=True)]
    return S * functools.reduce(np.kron, damped)


def fed(backend, rng, shape, N=7, M=5):
    """Return a block of one array, its statistics and its dense factors."""
    V = rng.normal(size=(M, *shape))
    block = kc.Block(kc.Parameters(shapes={"w": shape}), kc.TNT())
    batch = kc.GradientBatch({"w": backend.asarray(V)}, N, sources=M)
    statistics = learn(block, batch)
    F = []
    for axis, n in enumerate(shape):
        unfolded = np.moveaxis(V, axis + 1, 1).reshape(M, n, -1)
        F.append(sum(v @ v.T for v in unfolded) / N)
    return block, statistics, F


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 2), (2, 1, 3, 2)])
def test_every_product_is_that_of_the_dense_block(backend, rng, shape, rule):
    """One to four factors: each product is the dense matrix's."""
    block, statistics, F = fed(backend, rng, shape)
    operator = operator_for(block, statistics, damping=0.4, rule=rule)
    S = np.trace(F[0]) ** (1.0 - len(F))
    dense = dense_of(F, S, 0.4, rule)
    undamped = S * functools.reduce(np.kron, F)
    # What is damped exactly has no structure for these.
    refused = ("spectral", "cholesky", "sample") if rule == "exact" else ("spectral",)
    assert_functions_are(
        backend, "float64", operator, dense, undamped, rng, refused=refused
    )


@pytest.mark.parametrize("masked", [False, True])
def test_positions_may_be_examples(backend, rng, masked):
    """With independent positions the statistics weigh each row by the other's norm."""
    x, g = rng.normal(size=(4, 3, 2)), rng.normal(size=(4, 3, 2))
    mask = rng.random((4, 3)) > 0.3 if masked else np.ones((4, 3), bool)
    layer = kc.Dense(in_features=2, out_features=2, bias=True, weight_layout="io")
    given = backend.asarray(mask) if masked else None
    batch = kc.Batch(backend.asarray(x), backend.asarray(g), given)
    blocks = []
    for positions in ("independent", "summed"):
        block = kc.Block(layer, kc.TNT(positions=positions))
        statistics = learn(block, batch)
        operator = operator_for(block, statistics, damping=0.0, factorizations=())
        blocks.append(backend.to_numpy(operator.to_dense(damped=False)))

    rows = np.concatenate([x, np.ones((4, 3, 1))], axis=-1)[mask]
    grads = g[mask]
    A = (rows * (grads**2).sum(1)[:, None]).T @ rows / len(rows)
    G = (grads * (rows**2).sum(1)[:, None]).T @ grads / len(rows)
    expected = (len(rows) / 4) * np.kron(A, G) / np.trace(A)
    assert_close(blocks[0], expected, "gram", "float64")
    assert_differs(blocks[1], expected)
