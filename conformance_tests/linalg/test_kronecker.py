"""Kronecker products acting in array shape, against the dense matrix."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kfac_core as kc

from ..builders import reference
from ..builders.tolerances import assert_close, assert_differs

SIZES = [3, 2, 4, 2]


def factors_of(backend, dtype, matrices):
    """Copy matrices to the backend."""
    return [backend.asarray(F, dtype) for F in matrices]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_product_is_the_dense_product(backend, dtype, rng, k):
    """k rectangular factors act on an array as their kron acts on its raveled form."""
    matrices = [rng.normal(size=(n + 1, n)) for n in SIZES[:k]]
    v = rng.normal(size=SIZES[:k])

    got = kc.linalg.kronecker_multiply(
        factors_of(backend, dtype, matrices), backend.asarray(v, dtype)
    )

    dense = functools.reduce(np.kron, matrices)
    expected = (dense @ v.ravel()).reshape([n + 1 for n in SIZES[:k]])
    assert got.dtype == backend.dtype(dtype)
    assert_close(backend.to_numpy(got), expected, "product", dtype)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_dense_form_is_row_major(backend, dtype, rng, k):
    """The dense form is NumPy's kron, the first factor outermost."""
    matrices = [rng.normal(size=(n, n + 1)) for n in SIZES[:k]]

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


@pytest.mark.parametrize("exponent", [0.5, -0.25, -0.5, -1.0])
def test_powers_are_powers_of_the_factors(backend, dtype, rng, exponent):
    """A6: ``(A (x) G)^p = A^p (x) G^p``."""
    A, G = reference.spd(rng, 3), reference.spd(rng, 2)
    powers = [reference.matrix_power(F, exponent) for F in (A, G)]

    got = kc.linalg.kronecker_dense(factors_of(backend, dtype, powers))

    expected = reference.matrix_power(np.kron(A, G), exponent)
    assert_close(backend.to_numpy(got), expected, "power", dtype)


def test_the_cholesky_factor_is_that_of_the_factors(backend, dtype, rng):
    """A6: ``chol(A (x) G) = chol(A) (x) chol(G)``."""
    A, G = reference.spd(rng, 3), reference.spd(rng, 2)
    factors = [np.linalg.cholesky(A), np.linalg.cholesky(G)]

    got = kc.linalg.kronecker_dense(factors_of(backend, dtype, factors))

    expected = np.linalg.cholesky(np.kron(A, G))
    assert_close(backend.to_numpy(got), expected, "cholesky", dtype)


def test_trace_norm_and_logdet_multiply(backend, dtype, rng):
    """A7: traces and norms multiply; logdet is ``m logdet A + n logdet G``."""
    A, G = reference.spd(rng, 3), reference.spd(rng, 2)

    dense = backend.to_numpy(
        kc.linalg.kronecker_dense(factors_of(backend, dtype, [A, G]))
    )

    norms = np.linalg.norm(A) * np.linalg.norm(G)
    logdet = 2 * np.linalg.slogdet(A)[1] + 3 * np.linalg.slogdet(G)[1]
    assert_close(np.trace(dense), np.trace(A) * np.trace(G), "identity", dtype)
    assert_close(np.linalg.norm(dense), norms, "identity", dtype)
    assert_close(np.linalg.slogdet(dense)[1], logdet, "logdet", dtype)


@settings(deadline=None, max_examples=50)
@given(sizes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), max_size=4))
def test_every_shape_is_the_dense_product(sizes):
    """Any number of factors, wide or tall, of size one as well, act as their kron."""
    sizes = sizes or [(1, 1)]
    rng = np.random.default_rng(0)
    matrices = [rng.normal(size=size) for size in sizes]
    v = rng.normal(size=[n for _, n in sizes])

    got = kc.linalg.kronecker_multiply(matrices, v)

    expected = (functools.reduce(np.kron, matrices) @ v.ravel()).reshape(got.shape)
    assert got.shape == tuple(m for m, _ in sizes)
    assert_close(got, expected, "product", "float64")
