"""Rounding by factors: as one entry after the other."""

import itertools

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.linalg import rounded_weight


def problem(rng, n, m):
    X, Y = rng.normal(size=(3 * n, n)), rng.normal(size=(3 * m, m))
    mix = rng.normal(size=(n, n))
    return rng.normal(size=(n, m)), (X @ mix).T @ (X @ mix), Y.T @ Y


def unit_lower(F, fraction=1e-2):
    C = np.linalg.cholesky(F + fraction * np.trace(F) / len(F) * np.eye(len(F)))
    return C / np.diagonal(C)


def one_at_a_time(W, A, G, bits):
    """Round the last entry first, each with the whole product of what is rounded."""
    n, m = W.shape
    L_A, L_G = unit_lower(A), unit_lower(G)
    low, high = W.min(0), W.max(0)
    step = (high - low) / (2**bits - 1)
    D = np.zeros_like(W)
    for i, j in itertools.product(range(n - 1, -1, -1), range(m - 1, -1, -1)):
        wanted = W[i, j] + (L_A.T @ D @ L_G)[i, j]
        k = np.clip(np.rint((wanted - low[j]) / step[j]), 0, 2**bits - 1)
        D[i, j] = W[i, j] - (low[j] + k * step[j])
    return W - D


@pytest.mark.parametrize("shape", [(5, 4), (4, 7), (1, 3), (6, 1)])
def test_it_is_what_rounding_one_entry_after_the_other_gives(backend, rng, shape):
    W, A, G = problem(rng, *shape)
    W[0, 0] += 0.1  # No column has one value alone.
    expected = W if shape[0] == 1 else one_at_a_time(W, A, G, 3)
    found = rounded_weight(
        backend.asarray(W),
        input_factor=backend.asarray(A),
        output_factor=backend.asarray(G),
        bits=3,
    )
    np.testing.assert_allclose(backend.to_numpy(found), expected, atol=1e-6)


def test_both_factors_beat_one_and_one_beats_none(rng):
    """On average over weights, in the loss that the factors say."""

    def loss(W, found, A, G):
        D = W - found
        return np.trace(D.T @ A @ D @ G)

    totals = np.zeros(3)
    for _ in range(20):
        W, A, G = problem(rng, 12, 10)
        both = rounded_weight(W, input_factor=A, output_factor=G, bits=2)
        one = rounded_weight(W, input_factor=A, bits=2)
        none = rounded_weight(W, bits=2)
        assert all(len({*column}) <= 4 for w in (both, one, none) for column in w.T)
        totals += [loss(W, found, A, G) for found in (both, one, none)]
    assert totals[0] < 0.9 * totals[1] < 0.9 * totals[2]


def test_a_column_of_one_value_keeps_it(rng):
    """The error of its neighbors took it to another value."""
    W, A, G = problem(rng, 5, 4)
    W[:, 1] = 0.3
    found = rounded_weight(W * 20.0, input_factor=A, output_factor=G, bits=2)
    np.testing.assert_array_equal(found[:, 1], W[:, 1] * 20.0)


def test_a_factor_that_is_not_positive_is_refused(rng):
    W, A, _ = problem(rng, 4, 3)
    with pytest.raises(kc.FactorizationError, match="input_factor"):
        rounded_weight(W, input_factor=-A, bits=3)
    with pytest.raises(kc.ShapeError, match="output_factor"):
        rounded_weight(W, output_factor=A, bits=3)
