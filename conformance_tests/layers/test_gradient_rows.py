"""A gradient preconditioned by its rows is the gradient preconditioned (A15)."""

import numpy as np
import pytest

import kfac_core as kc

from ..builders import reference
from ..builders.tolerances import assert_close, assert_differs

N, n, m = 6, 4, 3
DAMPING = 0.4


def operator_of(backend, dtype, rng, rule):
    """Return an operator of two shared positions, and its dense matrix."""
    x, g = rng.normal(size=(N, 2, n)), rng.normal(size=(N, 2, m))
    layer = kc.Dense(in_features=n, out_features=m, bias=True, weight_layout="io")
    block = kc.Block(layer, kc.Kronecker())
    batch = kc.Batch(backend.asarray(x, dtype), backend.asarray(g, dtype))
    statistics = block.update(
        block.initial(batch.inputs),
        batch,
        conventions=kc.Conventions(reduction="sum", sources="sum"),
        decay=0.0,
    )
    A, G, S = reference.kronecker_factors(x, g[None], bias=True)
    F = reference.damped_block(A, G, S, damping=DAMPING, rule=rule)
    return block.operator(statistics, damping=DAMPING, rule=rule), F


@pytest.mark.parametrize("k", [1, 5])
def test_solved_rows_are_the_solved_gradient(backend, dtype, rng, k):
    """A15: with fewer rows than inputs and with more, S included."""
    made, F = operator_of(backend, dtype, rng, "factored")
    x, g, w = rng.normal(size=(k, n + 1)), rng.normal(size=(k, m)), rng.random(k)
    rows = backend.asarray(x, dtype), backend.asarray(g, dtype)

    got = made.multiply_inverse_of_rows(*rows, weights=backend.asarray(w, dtype))

    V = (x.T * w) @ g
    expected = np.linalg.solve(F, V.ravel()).reshape(V.shape)
    assert_close(backend.to_numpy(got), expected, "inverse", dtype)
    direct = made.multiply_inverse(backend.asarray(V, dtype))
    assert_close(backend.to_numpy(direct), expected, "inverse", dtype)
    assert_differs(expected, V)


def test_no_rows_are_no_gradient(backend, rng):
    """The sum over no rows is zero, of the right shape."""
    made, _ = operator_of(backend, "float64", rng, "factored")
    rows = (backend.asarray(np.zeros((0, size))) for size in (n + 1, m))

    got = made.multiply_inverse_of_rows(*rows, weights=backend.asarray(np.zeros(0)))

    assert np.array_equal(backend.to_numpy(got), np.zeros((n + 1, m)))


def test_what_makes_no_sense_is_refused(backend, rng):
    """Exact damping, whose inverse is no product, and rows that do not fit."""
    exact, _ = operator_of(backend, "float64", rng, "exact")
    made, _ = operator_of(backend, "float64", rng, "factored")
    x, g = (backend.asarray(rng.normal(size=(2, size))) for size in (n + 1, m))
    w = backend.asarray(np.ones(2))

    with pytest.raises(kc.UnsupportedError, match="Take a factored rule"):
        exact.multiply_inverse_of_rows(x, g, weights=w)
    with pytest.raises(kc.ShapeError, match="`inputs`"):
        made.multiply_inverse_of_rows(g, x, weights=w)
    with pytest.raises(kc.ShapeError, match="`output_grads`"):
        made.multiply_inverse_of_rows(x, g[:1, :], weights=w)
    with pytest.raises(kc.ShapeError, match="`weights`"):
        made.multiply_inverse_of_rows(x, g, weights=w[:1])
    with pytest.raises(kc.ShapeError, match="matrix of rows"):
        made.multiply_inverse_of_rows(x[0, :], g, weights=w)
