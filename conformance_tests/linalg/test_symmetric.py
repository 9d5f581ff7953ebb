"""Symmetric matrices that are a number times another, which is not multiplied out."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.factors.average import Average
from kfac_core.linalg.cholesky import damped_cholesky
from kfac_core.linalg.damped import damped_matrix
from kfac_core.linalg.symmetric import ScaledMatrix, SymmetricMatrix

from ..builders.layers import dense_layer
from ..builders.tolerances import assert_close

n = 5


@pytest.fixture
def dense(rng):
    rows = rng.normal(size=(2 * n, n))
    return rows.T @ rows


def lower_of(backend, dense, dtype):
    """A matrix of which the lower triangle alone holds anything."""
    return SymmetricMatrix(backend.asarray(np.tril(dense), dtype), full_storage=False)


def test_a_scaled_matrix_is_the_product(backend, dtype, dense):
    """In every way in which it can be read, and the base is what it was."""
    base = lower_of(backend, dense, dtype)
    expected, tell = 0.3 * dense, backend.to_numpy

    made = ScaledMatrix(base, backend.asarray(0.3, dtype))

    assert made.size == n
    assert_close(tell(made.multiplied().full()), expected, "gram", dtype)
    assert_close(tell(made.trace()), np.trace(expected), "gram", dtype)
    L = tell(damped_cholesky(base, 0.5, factor=made.factor, xp=backend.xp))
    damped = expected + 0.5 * np.eye(n)
    assert_close(L @ L.T, damped, "cholesky", dtype)
    assert (np.triu(L, 1) == 0.0).all()
    assert np.array_equal(tell(base.array), tell(lower_of(backend, dense, dtype).array))


@pytest.mark.parametrize("size", [3, 150, 600])
def test_a_scaled_matrix_is_factorized_as_it_is(backend, dtype, rng, size):
    """Alone and in a stack, at the sizes at which backends change their ways."""
    rows = rng.normal(size=(2 * size, size))
    A = rows.T @ rows / size
    damped = 0.3 * A + 0.5 * np.eye(size)

    for stacked in (False, True):
        given = np.stack([A, A]) if stacked else A
        base = SymmetricMatrix(backend.asarray(given, dtype), full_storage=True)
        factor = backend.asarray(np.full(given.shape[:-2], 0.3), dtype)
        L = damped_cholesky(base, 0.5, factor=factor, xp=backend.xp)
        for one in backend.to_numpy(L).reshape(-1, size, size):
            assert_close(one @ one.T, damped, "cholesky", dtype)


def test_every_product_of_a_scaled_matrix_is_that_of_the_product(backend, dtype, dense):
    """With and without the shift, by the base and the factor alone."""
    A, v = 0.3 * dense, np.arange(1.0, 1.0 + 2 * n).reshape(n, 2)
    V = backend.asarray(v, dtype)
    scaled = ScaledMatrix(lower_of(backend, dense, dtype), backend.asarray(0.3, dtype))

    made = damped_matrix(scaled, 0.5)

    M = A + 0.5 * np.eye(n)
    expected = {
        "product": (made.multiply(V, shifted=True), M @ v),
        "undamped": (made.multiply(V, shifted=False), A @ v),
        "solution": (made.solve(V), np.linalg.solve(M, v)),
        "dense": (made.dense(shifted=True), M),
        "trace": (made.trace(shifted=True), np.trace(M)),
        "eigenvalues": (made.eigenvalues(shifted=True), np.linalg.eigvalsh(M)),
        "power": (made.power(V, 2.0), M @ M @ v),
    }
    for name, (got, right) in expected.items():
        kind = {"solution": "inverse", "eigenvalues": "eigenvalues", "power": "power"}
        assert_close(backend.to_numpy(got), right, kind.get(name, "gram"), dtype)


def test_an_operator_holds_the_sum_and_no_copy_of_it(requires_backend, rng):
    """A refresh on NumPy adds factorizations to the memory, and nothing else."""
    requires_backend("numpy", adapter=True)
    layer = dense_layer(4, 3, bias=False)
    estimator = kc.Estimator(
        {"fc": kc.Block(layer, kc.Kronecker())}, decay=0.9, damping=0.1, reduction="sum"
    )
    for _ in range(2):
        batch = kc.Batch(rng.normal(size=(8, 4)), rng.normal(size=(8, 3)))
        estimator.update({"fc": batch})
    estimator.refresh()

    held: Average = estimator.state["fc"].statistics.averages["input"]
    made = estimator.operator("fc").input
    assert made.problem.matrix is made.applied is held.sum
    A = made.dense(shifted=False)
    assert_close(A, held.value(debias=True).full(), "gram", "float64")
    assert_close(A, held.sum.full() / float(held.weight), "gram", "float64")
