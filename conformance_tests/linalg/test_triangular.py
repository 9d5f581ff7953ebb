"""Solving with lower triangular matrices, and inverting them."""

import numpy as np
import pytest

from kfac_core.linalg.triangular import (
    multiply_triangular,
    solve_triangular,
    triangular_inverse,
)

from ..builders import reference
from ..builders.tolerances import assert_close


def lower(rng, n):
    """Return a lower triangular matrix with condition number 10."""
    return np.linalg.cholesky(reference.spd(rng, n))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (4, 3), (128, 2)])
def test_solution_is_the_dense_one(backend, dtype, rng, n, k, transpose, overwrite):
    """L x = b (or L^T x = b) is solved, at sizes below and above the leaf.

    What was not given away is not written to.
    """
    L, b = lower(rng, n), rng.normal(size=(n, k))
    given = backend.asarray(L, dtype), backend.asarray(b, dtype)
    before = backend.to_numpy(given[1])

    got = solve_triangular(
        *given, transpose=transpose, overwrite=overwrite, xp=backend.xp
    )

    expected = np.linalg.solve(L.T if transpose else L, b)
    if not overwrite:
        assert np.array_equal(backend.to_numpy(given[1]), before)
    assert got.dtype == backend.dtype(dtype)
    assert_close(backend.to_numpy(got), expected, "inverse", dtype)


@pytest.mark.parametrize("transpose", [False, True])
def test_native_solution_agrees_with_the_definition(backend, dtype, rng, transpose):
    """A backend's own solve gives what the definition gives."""
    L, b = lower(rng, 128), rng.normal(size=(128, 2))
    arguments = backend.asarray(L, dtype), backend.asarray(b, dtype)

    native = solve_triangular(*arguments, transpose=transpose, xp=backend.xp)
    defined = solve_triangular.__wrapped__(
        *arguments, transpose=transpose, xp=backend.xp
    )

    expected = backend.to_numpy(defined)
    assert_close(backend.to_numpy(native), expected, "inverse", dtype)


@pytest.mark.parametrize("transpose", [False, True])
def test_stacks_are_solved_one_by_one(backend, dtype, rng, transpose):
    """Leading axes are independent systems."""
    L = np.stack([lower(rng, 4) for _ in range(3)])
    b = rng.normal(size=(3, 4, 2))

    got = solve_triangular(
        backend.asarray(L, dtype),
        backend.asarray(b, dtype),
        transpose=transpose,
        xp=backend.xp,
    )

    expected = np.linalg.solve(np.swapaxes(L, 1, 2) if transpose else L, b)
    assert_close(backend.to_numpy(got), expected, "inverse", dtype)


@pytest.mark.parametrize("n", [1, 4, 128])
def test_the_inverse_is_lower_triangular(backend, dtype, rng, n):
    """The inverse is the dense one, with exact zeros above the diagonal."""
    L = lower(rng, n)

    got = backend.to_numpy(triangular_inverse(backend.asarray(L, dtype), xp=backend.xp))

    assert np.array_equal(got, np.tril(got))
    assert_close(got, np.linalg.inv(L), "inverse", dtype)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (4, 3), (128, 1)])
def test_product_is_the_dense_one(backend, dtype, rng, n, k, transpose):
    """L v or L^T v, natively and by the definition, in either memory layout of L."""
    L, v = lower(rng, n), rng.normal(size=(n, k))
    V = backend.asarray(v, dtype)
    plain = backend.asarray(L, dtype)
    transposed = backend.xp.matrix_transpose(backend.asarray(L.T, dtype))

    products = [
        function(held, V, transpose=transpose, xp=backend.xp)
        for function in (multiply_triangular, multiply_triangular.__wrapped__)
        for held in (plain, transposed)
    ]

    expected = (L.T if transpose else L) @ v
    for got in products:
        assert got.dtype == backend.dtype(dtype)
        assert_close(backend.to_numpy(got), expected, "product", dtype)


@pytest.mark.parametrize("transpose", [False, True])
def test_stacks_are_multiplied_one_by_one(backend, dtype, rng, transpose):
    """Leading axes are independent problems, and one right side serves all."""
    L = np.stack([lower(rng, 4) for _ in range(3)])
    v = rng.normal(size=(4, 1))

    got = multiply_triangular(
        backend.asarray(L, dtype),
        backend.asarray(v, dtype),
        transpose=transpose,
        xp=backend.xp,
    )

    expected = np.stack([(x.T if transpose else x) @ v for x in L])
    assert_close(backend.to_numpy(got), expected, "product", dtype)
