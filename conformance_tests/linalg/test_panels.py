"""Matrices large enough to be worked through in panels, against dense references.

Backends switch at sizes of their own; 520 rows are above all of them.
"""

import array_api_compat.numpy
import numpy as np
import pytest

from kfac_core.linalg.cholesky import (
    cholesky_inverse,
    damped_cholesky,
    is_positive_factor,
)
from kfac_core.linalg.gram import HomogeneousRows, updated_gram
from kfac_core.linalg.symmetric import SymmetricMatrix, multiply_symmetric

from ..builders import reference
from ..builders.memory import PeakMemory
from ..builders.tolerances import assert_close

N = 520


def lower_only(A):
    """Return the lower triangle, with finite garbage above the diagonal."""
    return np.tril(A) + np.triu(np.full_like(A, 3.0), 1)


def test_sums_may_be_wider_than_rows(rng):
    """NumPy's: float32 rows, added to a sum and with a border in float64."""
    rows, tail = rng.normal(size=(300, 20)), rng.uniform(size=300)
    narrow, old = rows.astype(np.float32), np.asfortranarray(np.eye(21))
    guard = old.copy()

    got = updated_gram(
        SymmetricMatrix(old, full_storage=False),
        HomogeneousRows(narrow, tail),
        0.75,
        0.5,
        xp=array_api_compat.numpy,
    )

    extended = np.column_stack([narrow, tail]).astype(np.float64)
    expected = 0.5 * extended.T @ extended + 0.75 * np.eye(21)
    assert_close(got.full(), expected, "gram", "float32")
    assert np.array_equal(old, guard)


@pytest.mark.parametrize("total", [False, True])
@pytest.mark.parametrize("order", ["C", "F", "strided", "read-only"])
def test_rows_are_read_in_any_order(dtype, rng, order, total):
    """NumPy's rows, with a border, of more numbers than are copied."""
    wide = np.asarray(rng.normal(size=(300, 40)), dtype)
    made = {"C": wide[:, :20].copy(), "F": wide[:, :20].copy(order="F")}
    rows = made.get(order, wide[::2, 1::2])
    if order == "read-only":
        rows = made["C"]
        rows.flags.writeable = False
    tail = np.asarray(rng.uniform(size=len(rows)), dtype)
    old = np.eye(21, dtype=dtype)
    before = rows.copy(), tail.copy()

    got = updated_gram(
        SymmetricMatrix(old, full_storage=True) if total else None,
        HomogeneousRows(rows, tail),
        0.75,
        0.5,
        xp=array_api_compat.numpy,
    )

    extended = np.column_stack([rows, tail]).astype(np.float64)
    expected = 0.5 * extended.T @ extended + (0.75 * np.eye(21) if total else 0.0)
    assert_close(got.full(), expected, "gram", dtype)
    assert np.array_equal(old, np.eye(21))
    assert np.array_equal(rows, before[0])
    assert np.array_equal(tail, before[1])


def test_an_update_makes_nothing_larger_than_the_factor(requires_adapters, rng):
    """With a border too: on NumPy with SciPy the rows are not copied."""
    pytest.importorskip("scipy")
    rows, tail = rng.normal(size=(4000, 60)), np.ones(4000)
    old = SymmetricMatrix(np.eye(61), full_storage=True)

    def update():
        x = HomogeneousRows(rows, tail)
        return updated_gram(old, x, 0.9, 0.1, xp=array_api_compat.numpy)

    update()
    with PeakMemory() as memory:
        update()

    assert memory.peak < 1.5 * old.array.nbytes


@pytest.mark.parametrize("with_tail", [False, True])
def test_an_update_by_panels_is_the_dense_update(backend, dtype, rng, with_tail):
    """Panels meet without gap or overlap, the border included; the old sum stays."""
    rows, tail = rng.normal(size=(5, N)), rng.uniform(size=5)
    extended = np.column_stack([rows, tail]) if with_tail else rows
    x = backend.asarray(rows, dtype)
    x = HomogeneousRows(x, backend.asarray(tail, dtype)) if with_tail else x
    old = rng.normal(size=(extended.shape[1],) * 2)
    old = old + old.T
    stored = backend.asarray(lower_only(old), dtype)

    got = updated_gram(
        SymmetricMatrix(stored, full_storage=False), x, 0.75, 0.5, xp=backend.xp
    )

    expected = 0.75 * old + 0.5 * extended.T @ extended
    full = backend.to_numpy(got.full())
    assert_close(full, expected, "gram", dtype)
    assert np.array_equal(full, full.T)
    kept = np.asarray(lower_only(old), dtype).astype(np.float64)
    assert np.array_equal(backend.to_numpy(stored), kept)


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_factor_and_the_inverse_are_the_dense_ones(backend, dtype, rng, overwrite):
    """L is lower triangular, and the inverse from it does not depend on its memory."""
    A = reference.spd(rng, N)
    matrix = SymmetricMatrix(backend.asarray(lower_only(A), dtype), full_storage=False)

    L = damped_cholesky(matrix, 0.05, xp=backend.xp)
    got = backend.to_numpy(L)
    X = SymmetricMatrix(*cholesky_inverse(L, overwrite=overwrite, xp=backend.xp))

    M = A + 0.05 * np.eye(N)
    assert np.array_equal(got, np.tril(got))
    assert_close(got, np.linalg.cholesky(M), "cholesky", dtype)
    full = backend.to_numpy(X.full())
    assert_close(full, np.linalg.inv(M), "inverse", dtype)
    assert np.array_equal(full, full.T)
    if not overwrite:
        assert np.array_equal(backend.to_numpy(L), got)


@pytest.mark.parametrize("place", [0, 100, N - 1])
def test_a_nonpositive_pivot_is_flagged_in_any_panel(backend, place):
    """A negative pivot in the first, a middle or the last panel is no factor."""
    A = np.eye(N)
    A[place, place] = -1.0

    L = damped_cholesky(
        SymmetricMatrix(backend.asarray(A, "float64"), full_storage=True),
        0.5,
        xp=backend.xp,
    )

    assert not bool(is_positive_factor(L, xp=backend.xp))


def test_the_upper_triangle_is_not_read(backend, dtype, rng):
    """Products and multiples of a lower triangle are those of the matrix."""
    A, v = reference.spd(rng, N), rng.normal(size=(N, 3))
    matrix = SymmetricMatrix(backend.asarray(lower_only(A), dtype), full_storage=False)
    V = backend.asarray(v, dtype)

    twice = matrix.scaled(2.0)
    wide = multiply_symmetric(matrix, V, xp=backend.xp)
    narrow = multiply_symmetric(twice, V[:, :1], xp=backend.xp)

    assert_close(backend.to_numpy(twice.full()), 2.0 * A, "roundoff", dtype)
    assert_close(backend.to_numpy(wide), A @ v, "product", dtype)
    assert_close(backend.to_numpy(narrow), 2.0 * A @ v[:, :1], "product", dtype)
