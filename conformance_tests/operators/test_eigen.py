"""Eigendecompositions: only their products are compared, never eigenvectors."""

import numpy as np
import pytest

from kfac_core.array.status import Status
from kfac_core.errors import NotFiniteError
from kfac_core.linalg.eigen import eigh, eigh_in_place
from kfac_core.linalg.factorize import eigendecomposition
from kfac_core.linalg.symmetric import ScaledMatrix, SymmetricMatrix

from ..builders import reference
from ..builders.tolerances import assert_close


def problem(backend, array):
    """Return a matrix of which half is held, times 2, without a shift."""
    half = SymmetricMatrix(0.5 * array, full_storage=True)
    one = backend.xp.ones_like(array[..., 0, 0])
    return ScaledMatrix(half, 2.0 * one, backend.xp.zeros_like(one))


def rebuilt(w, Q):
    """Return ``Q diag(w) Q^T``."""
    return (Q * w[..., None, :]) @ np.swapaxes(Q, -1, -2)


@pytest.mark.parametrize(
    ("n", "whole"), [(1, True), (4, True), (4, False), (128, False)]
)
def test_the_product_is_the_matrix(backend, dtype, rng, n, whole):
    """Q diag(w) Q^T is A, Q is orthogonal, w ascends; the upper triangle is not read."""
    A = reference.spd(rng, n)
    stored = A if whole else np.tril(A) + np.triu(np.full_like(A, 3.0), 1)
    matrix = SymmetricMatrix(backend.asarray(stored, dtype), whole)

    w, Q = map(backend.to_numpy, eigh(matrix, xp=backend.xp))

    assert_close(rebuilt(w, Q), A, "eigenvalues", dtype)
    assert_close(Q.T @ Q, np.eye(n), "eigenvalues", dtype)
    assert_close(w, np.linalg.eigvalsh(A), "eigenvalues", dtype)
    assert np.all(np.diff(w) >= 0)


@pytest.mark.parametrize("kind", ["spd", "rank", "repeated", "zero"])
@pytest.mark.parametrize("n", [7, 300])
def test_a_matrix_decomposed_in_place_is_there_again(backend, dtype, rng, n, kind):
    """Eigenvalues descend; below the diagonal is the same to the bit."""
    A = {
        "spd": reference.spd(rng, n),
        "rank": (x := rng.normal(size=(n, 3))) @ x.T,
        "repeated": rebuilt(
            np.arange(n) % 2 + 1.0, np.linalg.qr(rng.normal(size=(n, n)))[0]
        ),
        "zero": np.zeros((n, n)),
    }[kind].astype(dtype)
    columns = backend.xp.matrix_transpose(backend.asarray(np.triu(A)))
    matrix = SymmetricMatrix(columns, full_storage=False)

    w, Q = map(backend.to_numpy, eigh_in_place(matrix, xp=backend.xp))

    assert_close(rebuilt(w, Q), A, "eigenvalues", dtype)
    assert_close(Q.T @ Q, np.eye(n), "eigenvalues", dtype)
    assert np.all(np.diff(w) <= 0)
    again = np.tril(backend.adapter.to_numpy(matrix.array))
    assert again.tobytes() == np.tril(A).tobytes()


@pytest.mark.parametrize("check", ["raise", "status"])
def test_negative_eigenvalues_are_kept_and_reported(backend, dtype, rng, check):
    """A basis is that of the matrix as it is; what a clipping would cut off is known."""
    V, _ = np.linalg.qr(rng.normal(size=(4, 4)))
    A = rebuilt(np.array([1.0, 0.5, -0.25, -0.125]), V)

    basis = eigendecomposition(
        problem(backend, backend.asarray(A, dtype)), check=check, name="fc/input"
    )

    w, Q = backend.to_numpy(basis.eigenvalues), backend.to_numpy(basis.eigenvectors)
    assert_close(rebuilt(w, Q), A, "eigenvalues", dtype)
    assert_close(backend.to_numpy(basis.clipped), 0.375, "eigenvalues", dtype)
    assert int(basis.status) == Status.OK


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_matrix_that_is_not_finite_is_refused(backend, dtype, bad):
    """NaN and infinity never reach a decomposition: an error that names the factor."""
    A = np.eye(4)
    A[2, 2] = bad

    with pytest.raises(NotFiniteError, match="fc/input"):
        eigendecomposition(
            problem(backend, backend.asarray(A, dtype)), check="raise", name="fc/input"
        )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_in_status_mode_it_is_flagged_and_nan(backend, dtype, bad):
    """A matrix that is not finite gives NaN throughout and the flag, and no error."""
    A = np.stack([2.0 * np.eye(4), np.eye(4)])
    A[1, 1, 0] = A[1, 0, 1] = bad

    basis = eigendecomposition(
        problem(backend, backend.asarray(A, dtype)), check="status", name="fc/input"
    )

    w, Q = backend.to_numpy(basis.eigenvalues), backend.to_numpy(basis.eigenvectors)
    flags = backend.to_numpy(basis.status).tolist()
    assert flags == [Status.OK, Status.MATRIX_NOT_FINITE]
    assert np.all(np.isnan(w[1]))
    assert np.all(np.isnan(Q[1]))
    assert_close(rebuilt(w[0], Q[0]), 2.0 * np.eye(4), "eigenvalues", dtype)
