"""A10: sums and differences of two Kronecker products, solved against the dense matrix."""

import numpy as np
import pytest

import kfac_core as kc

from ..builders import reference
from ..builders.tolerances import assert_close


def problem(rng, n, m):
    """Return A, B positive definite, and C, D with correlations in (-0.8, 0.8)."""
    found = []
    for size in (n, m):
        A = reference.spd(rng, size, condition=20.0)
        Q, _ = np.linalg.qr(rng.normal(size=(size, size)))
        s = rng.uniform(-0.8, 0.8, size=size)
        L = np.linalg.cholesky(A)
        found.append((A, L @ (Q * s) @ Q.T @ L.T))
    (A, C), (B, D) = found
    return A, B, C, D


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("n", "m"), [(4, 3), (1, 3), (5, 1)])
def test_the_solution_is_the_dense_one(backend, dtype, rng, n, m, sign):
    """``(A (x) B +- C (x) D)^-1 v`` is that of the dense matrix."""
    matrices = problem(rng, n, m)
    V = rng.normal(size=(n, m))

    made = kc.kronecker_sum(*(backend.asarray(x, dtype) for x in matrices), sign=sign)
    got = backend.to_numpy(made.solve(backend.asarray(V, dtype)))

    A, B, C, D = matrices
    F = np.kron(A, B) + sign * np.kron(C, D)
    expected = np.linalg.solve(F, V.ravel()).reshape(V.shape)
    assert_close(got, expected, "inverse", dtype)


def test_a_sum_that_is_not_positive_is_refused(backend, rng):
    """Diagonal moments staler than cross moments make an indefinite difference."""
    A, B, C, D = problem(rng, 4, 3)
    bad = [backend.asarray(x) for x in (A, B, 40 * C, 40 * D)]

    with pytest.raises(kc.FactorizationError, match="Damp A and B"):
        kc.kronecker_sum(*bad, sign=-1)
    made = kc.kronecker_sum(*bad, sign=-1, check="status")
    assert int(made.status) == kc.Status.NOT_POSITIVE


def test_matrices_that_do_not_fit_are_refused(backend, rng):
    """The message names the matrix and the shape that was expected."""
    A, B, _, D = map(backend.asarray, problem(rng, 4, 3))

    with pytest.raises(kc.ShapeError, match=r"`C`.*\(4, 4\)"):
        kc.kronecker_sum(A, B, D, D, sign=1)
