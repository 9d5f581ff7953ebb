"""Kronecker products acting in array shape, against the dense matrix."""

import functools

import numpy as np
import pytest

import kfac_core as kc

from ..builders.tolerances import assert_close, assert_differs

SIZES = [[(4, 3), (3, 2), (5, 4), (3, 2)][:k] for k in (1, 2, 3, 4)]
SIZES += [[(1, 1)], [(1, 3), (2, 1)], [(2, 3), (1, 1), (3, 1)]]


def factors_of(backend, dtype, matrices):
    """Copy matrices to the backend."""
    return [backend.asarray(F, dtype) for F in matrices]


@pytest.mark.parametrize("sizes", SIZES)
def test_product_is_the_dense_product(backend, dtype, rng, sizes):
    """Factors, wide or tall or of size one, act on an array as their kron on its ravel."""
    matrices = [rng.normal(size=size) for size in sizes]
    v = rng.normal(size=[n for _, n in sizes])

    got = kc.linalg.kronecker_multiply(
        factors_of(backend, dtype, matrices), backend.asarray(v, dtype)
    )

    dense = functools.reduce(np.kron, matrices)
    expected = (dense @ v.ravel()).reshape([n for n, _ in sizes])
    assert got.dtype == backend.dtype(dtype)
    assert_close(backend.to_numpy(got), expected, "product", dtype)


@pytest.mark.parametrize("sizes", SIZES)
def test_dense_form_is_row_major(backend, dtype, rng, sizes):
    """The dense form is NumPy's kron, the first factor outermost."""
    matrices = [rng.normal(size=size) for size in sizes]

    got = kc.linalg.kronecker_dense(factors_of(backend, dtype, matrices))

    expected = functools.reduce(np.kron, matrices)
    assert_close(backend.to_numpy(got), expected, "product", dtype)


def test_two_factors_are_a_sandwich(backend, dtype, rng):
    """A1: ``(A (x) G) rvec V = rvec(A V G^T)``, which is not ``A^T V G``."""
    A, G, V = (rng.normal(size=s) for s in ((3, 3), (2, 2), (3, 2)))

    got = backend.to_numpy(
        kc.linalg.kronecker_multiply(
            factors_of(backend, dtype, [A, G]), backend.asarray(V, dtype)
        )
    )

    assert_close(got, A @ V @ G.T, "product", dtype)
    assert_close(got, (np.kron(A, G) @ V.ravel()).reshape(3, 2), "product", dtype)
    assert_differs(got, A.T @ V @ G)
