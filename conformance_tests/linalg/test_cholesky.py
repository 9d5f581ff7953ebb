"""Cholesky factors, inverses from them, and the test that finds a failed one."""

import math

import numpy as np
import pytest

from kfac_core.linalg.cholesky import (
    cholesky_in_place,
    cholesky_inverse,
    damped_cholesky,
    is_positive_factor,
    restored_matrix,
)
from kfac_core.linalg.symmetric import SymmetricMatrix
from kfac_core.linalg.triangular import multiply_triangular

from ..builders import reference
from ..builders.tolerances import assert_close


def lower_only(A):
    """Return the lower triangle, with finite garbage above the diagonal."""
    return np.tril(A) + np.triu(np.full_like(A, 3.0), 1)


@pytest.mark.parametrize(
    ("n", "whole"), [(1, True), (4, True), (4, False), (128, False)]
)
def test_the_factor_is_the_cholesky_factor(backend, dtype, rng, n, whole):
    """L is lower triangular and unique; the upper triangle of A is not read."""
    A = reference.spd(rng, n)
    stored = A if whole else lower_only(A)

    L = damped_cholesky(
        SymmetricMatrix(backend.asarray(stored, dtype), whole), 0.05, xp=backend.xp
    )

    got, expected = backend.to_numpy(L), np.linalg.cholesky(A + 0.05 * np.eye(n))
    assert L.dtype == backend.dtype(dtype)
    assert np.array_equal(got, np.tril(got))
    assert_close(got, expected, "cholesky", dtype)
    assert bool(is_positive_factor(L, xp=backend.xp))


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_factor_may_stand_in_the_memory_of_its_matrix(backend, dtype, rng, order):
    """It is read below the diagonal; the matrix comes back, also after a failure."""
    n, xp = 700, backend.xp
    A = reference.spd(rng, n)
    stored = lower_only(A)
    if order == "C":
        array = backend.asarray(stored, dtype)
    else:
        array = xp.matrix_transpose(backend.asarray(stored.T.copy(), dtype))
    matrix = SymmetricMatrix(array, full_storage=False)
    diagonal, v = 1.0 * matrix.diagonal(), rng.normal(size=(n, 2))
    expected = np.linalg.cholesky(A + 0.05 * np.eye(n))
    for shift in (-1e3, 0.05):
        L = cholesky_in_place(matrix, shift, xp=xp)
        if shift < 0:
            assert np.isnan(backend.to_numpy(L)[n - 1, n - 1])
        else:
            got = np.tril(backend.to_numpy(L))
            assert_close(got, expected, "cholesky", dtype)
            for transpose in (False, True):
                product = multiply_triangular(
                    L, backend.asarray(v, dtype), transpose=transpose, xp=xp
                )
                dense = (expected.T if transpose else expected) @ v
                assert_close(backend.to_numpy(product), dense, "cholesky", dtype)
        matrix = restored_matrix(matrix, diagonal, xp=xp)
        restored = np.tril(backend.to_numpy(matrix.array))
        assert np.array_equal(restored, np.tril(A).astype(dtype))


@pytest.mark.parametrize(("n", "lead"), [(1, ()), (4, ()), (128, ()), (4, (3,))])
def test_the_inverse_comes_from_the_factor(backend, dtype, rng, n, lead):
    """``(L L^T)^-1`` is the dense inverse, and L stays as it was, natively or not.

    Leading axes are independent matrices, each with its own shift.
    """
    parts = [reference.spd(rng, n) for _ in range(math.prod(lead))]
    A, shift = np.reshape(parts, (*lead, n, n)), rng.uniform(size=lead)
    matrix = SymmetricMatrix(backend.asarray(A, dtype), full_storage=True)
    M = A + shift[..., None, None] * np.eye(n)

    for of in (lambda f: f, lambda f: f.__wrapped__):
        L = of(damped_cholesky)(matrix, backend.asarray(shift, dtype), xp=backend.xp)
        before = backend.to_numpy(L)
        X = SymmetricMatrix(*of(cholesky_inverse)(L, xp=backend.xp))

        assert_close(before, np.linalg.cholesky(M), "cholesky", dtype)
        assert_close(backend.to_numpy(X.full()), np.linalg.inv(M), "inverse", dtype)
        assert np.array_equal(backend.to_numpy(L), before)


@pytest.mark.parametrize(
    "A",
    [
        pytest.param(np.zeros((4, 4)), id="zero"),
        pytest.param(-np.eye(4), id="negative"),
        pytest.param(np.diag([1.0, 2.0, 1.0, -3.0]), id="last-pivot"),
        pytest.param(np.eye(4) + np.eye(4)[::-1] * 2.0, id="indefinite"),
        pytest.param(np.ones((4, 4)), id="singular"),
        pytest.param(np.diag(np.r_[np.ones(127), -1.0]), id="large"),
    ],
)
def test_an_indefinite_matrix_is_flagged(backend, dtype, A):
    """No exception, and no factor that passes for one, whatever the library leaves."""
    matrix = SymmetricMatrix(backend.asarray(A, dtype), full_storage=True)

    L = damped_cholesky(matrix, 0.0, xp=backend.xp)
    L_defined = damped_cholesky.__wrapped__(matrix, 0.0, xp=backend.xp)

    assert not bool(is_positive_factor(L, xp=backend.xp))
    assert not bool(is_positive_factor(L_defined, xp=backend.xp))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((1, 1), 0.0),
        ((1, 1), -1e-30),
        ((2, 2), -3.0),
        ((0, 0), np.nan),
        ((2, 0), np.nan),
        ((2, 1), np.inf),
        ((1, 1), np.inf),
    ],
)
def test_a_factor_with_bad_pivots_is_a_failure(backend, dtype, rng, place, value):
    """A diagonal entry that is not positive, or any that is not finite, is a failure."""
    L = np.linalg.cholesky(reference.spd(rng, 4))
    garbage = L.copy()
    garbage[place] = value

    flags = is_positive_factor(
        backend.asarray(np.stack([L, garbage]), dtype), xp=backend.xp
    )

    assert backend.to_numpy(flags).tolist() == [True, False]
