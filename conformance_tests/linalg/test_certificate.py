"""Residual checks: they tell the truth, and find a factorization that is wrong."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.linalg import certificate

from ..builders import reference
from ..builders.tolerances import CERTIFICATE_FACTOR

N = 16
SHIFT = 0.01


def image(backend, dtype, M):
    """Return the probe vector and what M, or each M of a stack, makes of it."""
    array = backend.asarray(M, dtype)
    z = certificate.probe_of(array, backend.xp)
    return z, backend.xp.matmul(array, z)


def spoiled(rng, X, kind):
    """Return a symmetric X with one thing wrong, by a few percent of its size."""
    X = X.copy()
    if kind == "noise":
        E = rng.normal(size=X.shape)
        X += 0.05 * np.linalg.norm(X) / len(X) * (E + E.T)
    elif kind == "scale":
        X *= 1.05
    elif kind == "row":
        row = 0.2 * np.linalg.norm(X) * rng.normal(size=len(X))
        X[3] += row
        X[:, 3] += row
    elif kind == "entry":
        X[2, 5] += 0.5 * np.linalg.norm(X)
        X[5, 2] = X[2, 5]
    else:
        X = np.diag(np.diag(X))
    return X


KINDS = ["noise", "scale", "row", "entry", "diagonal only"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_residual_of_an_inverse_is_truthful(backend, dtype, rng, kind):
    """It is the true ``|M X - I|_F / sqrt(n)`` up to the stated factor."""
    A = reference.spd(rng, N)
    M = A + SHIFT * np.eye(N)
    X = spoiled(rng, np.linalg.inv(M), kind)

    residual = certificate.inverse_residual(
        kc.linalg.SymmetricMatrix(backend.asarray(X, dtype), full_storage=True),
        *image(backend, dtype, M),
        xp=backend.xp,
    )

    true = np.linalg.norm(M @ X - np.eye(N)) / np.sqrt(N)
    assert 1 / CERTIFICATE_FACTOR < float(residual) / true < CERTIFICATE_FACTOR
    assert float(residual) > certificate.RESIDUAL_LIMIT


@pytest.mark.parametrize("kind", KINDS)
def test_the_residual_of_a_factor_is_truthful(backend, dtype, rng, kind):
    """It is the true ``|L L^T - M|_F / |M|_F`` up to the stated factor."""
    A = reference.spd(rng, N)
    M = A + SHIFT * np.eye(N)
    L = np.tril(spoiled(rng, np.linalg.cholesky(M), kind))

    residual = certificate.cholesky_residual(
        backend.asarray(L, dtype), *image(backend, dtype, M), xp=backend.xp
    )

    true = np.linalg.norm(L @ L.T - M) / np.linalg.norm(M)
    assert 1 / CERTIFICATE_FACTOR < float(residual) / true < CERTIFICATE_FACTOR
    assert float(residual) > certificate.RESIDUAL_LIMIT


@pytest.mark.parametrize("spoil", ["eigenvalue", "eigenvector", "swapped"])
def test_a_spoiled_basis_is_caught(backend, dtype, rng, spoil):
    """A wrong eigenvalue, a wrong eigenvector and a wrong order are each seen."""
    A = reference.spd(rng, N)
    w, Q = np.linalg.eigh(A)
    good = w.copy(), Q.copy()
    if spoil == "eigenvalue":
        w[-1] *= 1.3
    elif spoil == "eigenvector":
        Q[:, -1] += 0.3 * rng.normal(size=N)
    else:
        w = w[::-1].copy()

    bad_residual, good_residual = (
        certificate.eigen_residual(
            backend.asarray(values, dtype),
            backend.asarray(vectors, dtype),
            *image(backend, dtype, A),
            xp=backend.xp,
        )
        for values, vectors in ((w, Q), good)
    )

    assert float(bad_residual) > certificate.RESIDUAL_LIMIT
    assert float(good_residual) < 1e-5


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_inverses_have_infinite_residuals(backend, dtype, bad):
    """NaN or infinity in an inverse gives an infinite residual, never NaN."""
    X = np.eye(N)
    X[1, 1] = bad

    with np.errstate(invalid="ignore"):
        residual = certificate.inverse_residual(
            kc.linalg.SymmetricMatrix(backend.asarray(X, dtype), full_storage=True),
            *image(backend, dtype, np.eye(N)),
            xp=backend.xp,
        )

    assert float(residual) == np.inf


@pytest.mark.parametrize("scale", [1e-18, 1e-12, 1e12, 1e18])
def test_residuals_do_not_depend_on_the_scale(backend, dtype, rng, scale):
    """Huge and tiny matrices have the residuals of ordinary ones, in float32 as well."""
    A = reference.spd(rng, N)
    w, Q = np.linalg.eigh(A)
    L, X = np.linalg.cholesky(A), 1.05 * np.linalg.inv(A)

    def residuals(s):
        given = image(backend, dtype, s * A)
        inverse = kc.linalg.SymmetricMatrix(
            backend.asarray(X / s, dtype), full_storage=True
        )
        xp = backend.xp
        factor = backend.asarray(1.05 * np.sqrt(s) * L, dtype)
        values, vectors = (
            backend.asarray(1.05 * s * w, dtype),
            backend.asarray(Q, dtype),
        )
        return [
            float(certificate.inverse_residual(inverse, *given, xp=xp)),
            float(certificate.cholesky_residual(factor, *given, xp=xp)),
            float(certificate.eigen_residual(values, vectors, *given, xp=xp)),
        ]

    scaled, ordinary = residuals(scale), residuals(1.0)

    np.testing.assert_allclose(scaled, ordinary, rtol=0.01)


@pytest.mark.parametrize(
    ("error", "scale", "expected"),
    [
        ([3.0, 4.0], [0.0, 10.0], 0.5),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([3e-30, 4e-30], [1e-29, 0.0], 0.5),
        ([3e30, 4e30], [1e31, 0.0], 0.5),
        ([np.nan, 1.0], [1.0, 1.0], np.inf),
        ([np.inf, 1.0], [1.0, 1.0], np.inf),
        ([1.0, 1.0], [np.nan, 1.0], np.inf),
    ],
)
def test_a_relative_norm_is_a_number(backend, dtype, error, scale, expected):
    """It neither over- nor underflows, and what is no number is infinite."""
    columns = [backend.asarray(np.array([x]).T, dtype) for x in (error, scale)]

    with np.errstate(invalid="ignore"):
        native = certificate.relative_norm(*columns, xp=backend.xp)
        defined = certificate.relative_norm.__wrapped__(*columns, xp=backend.xp)

    assert native.dtype == backend.dtype(dtype)
    assert native.shape == ()
    assert float(native) == pytest.approx(expected, rel=1e-6)
    assert float(defined) == pytest.approx(expected, rel=1e-6)
