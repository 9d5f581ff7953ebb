"""Merged weights: the minimum of the sum of quadratics, by dense matrices."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.operators import kronecker_operator, spectral_operator
from kfac_core.posterior import merged_weight


def test_it_is_the_minimum_of_the_sum_of_quadratics(backend, rng):
    n, m, examples = 4, 3, [10.0, 30.0, 5.0]
    factors = []
    for _ in examples:
        X, Y = rng.normal(size=(3, n)), rng.normal(size=(6, m))
        factors.append((X.T @ X, Y.T @ Y))
    weights = [rng.normal(size=(n, m)) for _ in examples]
    dense = [N * np.kron(A, G) for N, (A, G) in zip(examples, factors, strict=True)]
    total = sum(dense)
    lam = 1e-2 * np.trace(total) / (n * m)
    b = sum(
        (F + lam / 3 * np.eye(n * m)) @ W.ravel()
        for F, W in zip(dense, weights, strict=True)
    )
    expected = np.linalg.solve(total + lam * np.eye(n * m), b).reshape(n, m)
    operators = [
        kronecker_operator(
            backend.asarray(A), backend.asarray(G), damping=0.0, factorizations=()
        ).spectral()
        for A, G in factors
    ]
    merged = merged_weight(
        operators,
        [backend.asarray(W) for W in weights],
        examples=examples,
        damping_fraction=1e-2,
        tolerance=1e-6,
    )
    assert merged.residual <= 2e-6
    np.testing.assert_allclose(backend.to_numpy(merged.weight), expected, atol=1e-3)


def test_without_any_curvature_it_is_the_mean(backend, rng):
    """And nothing is divided by zero."""
    nothing = spectral_operator(
        backend.asarray(np.zeros((4, 3))), damping=0.0, factorizations=()
    )
    weights = [rng.normal(size=(4, 3)) for _ in range(3)]
    merged = merged_weight(
        [nothing] * 3, [backend.asarray(W) for W in weights], examples=[1.0, 2.0, 3.0]
    )
    assert merged.residual == merged.iterations == 0
    np.testing.assert_allclose(
        backend.to_numpy(merged.weight), np.mean(weights, axis=0)
    )


def test_lists_of_other_lengths_are_refused(rng):
    F = kronecker_operator(np.eye(2), np.eye(2), damping=0.0, factorizations=())
    with pytest.raises(kc.ShapeError, match="number of models"):
        merged_weight([F.spectral()], [np.eye(2)], examples=[1.0, 2.0])
