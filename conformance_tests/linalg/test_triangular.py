"""Solving with lower triangular matrices, and inverting them."""

import math

import numpy as np
import pytest

from kfac_core.linalg.triangular import (
    multiply_triangular,
    solve_triangular,
    triangular_inverse,
)

from ..builders import reference
from ..builders.tolerances import assert_close


def lower(rng, n, *lead):
    """Return lower triangular matrices with condition number 10."""
    parts = [reference.spd(rng, n) for _ in range(math.prod(lead))]
    return np.linalg.cholesky(np.reshape(parts, (*lead, n, n)))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "lead"), [(1, 1, ()), (4, 3, ()), (128, 2, ()), (4, 2, (3,))]
)
def test_solution_is_the_dense_one(
    backend, dtype, rng, n, k, lead, transpose, overwrite
):
    """L x = b (or L^T x = b), at sizes below and above the leaf, natively or not.

    What was not given away is not written to.
    """
    L, b = lower(rng, n, *lead), rng.normal(size=(*lead, n, k))
    expected = np.linalg.solve(np.swapaxes(L, -1, -2) if transpose else L, b)

    for function in (solve_triangular, solve_triangular.__wrapped__):
        given = backend.asarray(L, dtype), backend.asarray(b, dtype)
        before = backend.to_numpy(given[1])

        got = function(*given, transpose=transpose, overwrite=overwrite, xp=backend.xp)

        if not overwrite:
            assert np.array_equal(backend.to_numpy(given[1]), before)
        assert got.dtype == backend.dtype(dtype)
        assert_close(backend.to_numpy(got), expected, "inverse", dtype)


@pytest.mark.parametrize("n", [1, 4, 128])
def test_the_inverse_is_lower_triangular(backend, dtype, rng, n):
    """The inverse is the dense one, with exact zeros above the diagonal."""
    L = lower(rng, n)

    got = backend.to_numpy(triangular_inverse(backend.asarray(L, dtype), xp=backend.xp))

    assert np.array_equal(got, np.tril(got))
    assert_close(got, np.linalg.inv(L), "inverse", dtype)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "lead"), [(1, 1, ()), (4, 3, ()), (128, 1, ()), (4, 1, (3,))]
)
def test_product_is_the_dense_one(backend, dtype, rng, n, k, lead, transpose):
    """L v or L^T v, natively and by the definition, in either memory layout of L.

    Leading axes of L are independent problems, and one right side serves all.
    """
    L, v = lower(rng, n, *lead), rng.normal(size=(n, k))
    V = backend.asarray(v, dtype)
    L_T = np.swapaxes(L, -1, -2)
    plain = backend.asarray(L, dtype)
    transposed = backend.xp.matrix_transpose(backend.asarray(L_T, dtype))

    products = [
        function(held, V, transpose=transpose, xp=backend.xp)
        for function in (multiply_triangular, multiply_triangular.__wrapped__)
        for held in (plain, transposed)
    ]

    for got in products:
        assert got.dtype == backend.dtype(dtype)
        expected = (L_T if transpose else L) @ v
        assert_close(backend.to_numpy(got), expected, "product", dtype)
