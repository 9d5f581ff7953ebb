"""A first look; the files named for concepts hold the tests."""

import numpy as np

import kfac_core as kc

from ..builders import reference
from ..builders.layers import dense_layer
from ..builders.tolerances import assert_close


def test_precondition_is_the_dense_solve(backend, dtype, rng):
    """The estimator's update is the solution with the dense damped block."""
    N, n, m = 20, 5, 4
    x, g = rng.normal(size=(N, n)), rng.normal(size=(N, m))
    V = rng.normal(size=(n + 1, m))
    layer = dense_layer(n, m)
    estimator = kc.Estimator(
        {"fc": kc.Block(layer, kc.Kronecker())}, decay=0.9, damping=0.1, reduction="sum"
    )
    estimator.update(
        {"fc": kc.Batch(backend.asarray(x, dtype), backend.asarray(g, dtype))}
    )
    estimator.refresh()
    gradients = {
        "weight": backend.asarray(V[:-1], dtype),
        "bias": backend.asarray(V[-1], dtype),
    }

    got = estimator.precondition({"fc": gradients})["fc"]

    A, G, S = reference.kronecker_factors(x, g[None], bias=True)
    F = reference.damped_block(A, G, S, damping=0.1, rule="factored")
    expected = np.linalg.solve(F, V.ravel()).reshape(V.shape)
    assert_close(backend.to_numpy(got["weight"]), expected[:-1], "inverse", dtype)
    assert_close(backend.to_numpy(got["bias"]), expected[-1], "inverse", dtype)
