"""Gram matrices of rows and their running sums, against loops over the rows."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import kfac_core as kc
from kfac_core.linalg.gram import HomogeneousRows, gram_update, updated_gram
from kfac_core.linalg.symmetric import SymmetricMatrix

from ..builders import reference
from ..builders.tolerances import assert_close, assert_differs


@pytest.mark.parametrize("homogeneous", [False, True])
@pytest.mark.parametrize(("n", "d"), [(7, 4), (1, 3), (0, 3), (5, 1)])
def test_gram_is_the_sum_of_outer_products(backend, dtype, rng, n, d, homogeneous):
    """Every row adds its outer product; no rows give the zero matrix."""
    rows = rng.normal(size=(n, d))

    got = kc.gram(backend.asarray(rows, dtype), homogeneous=homogeneous)

    expected = reference.gram(rows, homogeneous=homogeneous)
    assert got.dtype == backend.dtype(dtype)
    assert_close(backend.to_numpy(got), expected, "gram", dtype)


@pytest.mark.parametrize("homogeneous", [False, True])
def test_weights_multiply_outer_products(backend, dtype, rng, homogeneous):
    """A weight multiplies its row's outer product once, and its 1 as well."""
    rows, weights = rng.normal(size=(9, 4)), rng.uniform(0.1, 5.0, size=9)
    weights[2] = 0.0

    got = kc.gram(
        backend.asarray(rows, dtype),
        weights=backend.asarray(weights, dtype),
        homogeneous=homogeneous,
    )

    expected = reference.gram(rows, weights=weights, homogeneous=homogeneous)
    squared = reference.gram(rows, weights=weights**2, homogeneous=homogeneous)
    assert_close(backend.to_numpy(got), expected, "gram", dtype)
    assert_differs(backend.to_numpy(got), squared)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("homogeneous", [False, True])
def test_masked_rows_are_ignored(backend, dtype, rng, homogeneous, weighted):
    """NaN and infinity in masked rows and in their weights leave no trace."""
    rows, weights = rng.normal(size=(8, 3)), rng.uniform(0.5, 2.0, size=8)
    mask = np.array([1, 1, 0, 1, 0, 1, 1, 0], bool)
    expected = reference.gram(
        rows[mask], weights=weights[mask] if weighted else None, homogeneous=homogeneous
    )
    rows[2], rows[4, 1], weights[7] = np.nan, np.inf, np.nan

    got = kc.gram(
        backend.asarray(rows, dtype),
        weights=backend.asarray(weights, dtype) if weighted else None,
        mask=backend.asarray(mask),
        homogeneous=homogeneous,
    )

    assert_close(backend.to_numpy(got), expected, "gram", dtype)


def test_a_mask_of_nothing_gives_zero(backend, dtype):
    """Where every row is masked the Gram matrix is exactly zero, its corner too."""
    rows = np.full((4, 3), np.nan)

    got = kc.gram(
        backend.asarray(rows, dtype),
        mask=backend.asarray(np.zeros(4, bool)),
        homogeneous=True,
    )

    assert_close(backend.to_numpy(got), np.zeros((4, 4)), "exact", dtype)


def test_gram_is_exactly_symmetric(backend, dtype, rng):
    """Both triangles hold the same bits."""
    rows = rng.normal(size=(33, 17))

    got = backend.to_numpy(kc.gram(backend.asarray(rows, dtype), homogeneous=True))

    assert np.array_equal(got, got.T)


@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("with_tail", [False, True])
@pytest.mark.parametrize("stored", ["whole", "lower", "nothing"])
@pytest.mark.parametrize(("decay", "scale"), [(0.9, 0.3), (1.0, 1.0), (0.0, 2.5)])
def test_update_is_the_dense_update(
    backend, dtype, rng, decay, scale, stored, with_tail, lead
):
    """One update is ``decay C + scale X^T X`` and leaves the old sum as it was.

    Leading axes of the rows are independent problems.
    """
    rows, tail = rng.normal(size=(*lead, 6, 4)), rng.uniform(size=(*lead, 6))
    X = np.concatenate([rows, tail[..., None]], axis=-1) if with_tail else rows
    x, xp = backend.asarray(rows, dtype), backend.xp
    ones = backend.asarray(tail, dtype) if with_tail else None
    parts = [reference.spd(rng, X.shape[-1]) for _ in range(math.prod(lead))]
    old = np.reshape(parts, (*lead, *parts[0].shape))
    garbage = np.triu(np.full_like(old, 7.0), 1)
    held = np.tril(old) + garbage if stored == "lower" else old
    array = backend.asarray(held, dtype)
    total = None
    if stored != "nothing":
        total = SymmetricMatrix(array, stored == "whole")
    options = {"tail": ones, "decay": decay, "scale": scale, "xp": xp}

    got = [SymmetricMatrix(*gram_update.__wrapped__(total, x, **options))]
    x = HomogeneousRows(x, ones) if with_tail else x
    got.append(updated_gram(total, x, decay, scale, xp=xp))

    expected = scale * np.swapaxes(X, -1, -2) @ X + (
        0 if total is None else decay * old
    )
    for new in got:
        assert_close(backend.to_numpy(new.full()), expected, "gram", dtype)
    kept = np.asarray(held, dtype).astype(np.float64)
    assert np.array_equal(backend.to_numpy(array), kept)


@pytest.mark.parametrize("lead", [(), (3,)])
def test_a_sum_that_is_ours_may_be_updated_in_place(backend, dtype, rng, lead):
    """With rows that follow each other, and the decay; the memory order is LAPACK's."""
    rows, tail = rng.normal(size=(2, *lead, 40, 80)), rng.uniform(size=(2, *lead, 40))
    zeros = backend.xp.matrix_transpose(
        backend.asarray(np.zeros((*lead, 81, 81)), dtype)
    )
    total = SymmetricMatrix(zeros, full_storage=False)
    for x, ones in zip(rows, tail, strict=True):
        array, full = gram_update(
            total,
            backend.asarray(x, dtype),
            tail=backend.asarray(ones, dtype),
            decay=0.5,
            scale=0.25,
            overwrite=True,
            xp=backend.xp,
        )
        total = SymmetricMatrix(array, full and total.full_storage)
    X = np.concatenate([rows, tail[..., None]], axis=-1)
    grams = np.swapaxes(X, -1, -2) @ X
    expected = 0.125 * grams[0] + 0.25 * grams[1]
    assert_close(backend.to_numpy(total.full()), expected, "gram", dtype)


@settings(deadline=None, max_examples=50)
@given(
    rows=hnp.arrays(
        np.float64,
        st.tuples(st.integers(0, 6), st.integers(1, 5)),
        elements=st.integers(-64, 64).map(lambda k: k / 8),
    )
)
def test_gram_of_all_rows_is_the_sum_over_parts(rows):
    """Split anywhere, the parts' Gram matrices add up (any shape, no rows included)."""
    cut = len(rows) // 2

    whole = kc.gram(rows, homogeneous=True)
    parts = kc.gram(rows[:cut], homogeneous=True) + kc.gram(
        rows[cut:], homogeneous=True
    )

    assert_close(parts, whole, "gram", "float64")
