"""Directions of float32 rows, right to 1e-4 or refused: ranks, scales and dampings."""

import itertools

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.samples import Jacobian, sample_curvature, sample_gram

from ..builders.tolerances import relative_error

SIZES = (20, 4, 3), (60, 4, 3), (30, 8, 8)
SCALES = 1e-6, 1.0, 1e6
DAMPINGS = 1.0, 1e-3, 1e-6, 1e-9, 1e-12, 1e-14
"""In units of the largest eigenvalue of ``J^T J / N``."""


def rows(rng, N, n, m, scales, deficient):
    x, g = rng.normal(size=(N, n)), rng.normal(size=(N, m))
    if deficient:
        x = x[:, :1] * (1.0 + 1e-4 * rng.normal(size=(N, n)))
    return (scales[0] * x).astype("float32"), (scales[1] * g).astype("float32")


def dense(x, g):
    """Return J, of which the bias is the last input."""
    inputs = np.concatenate([x, np.ones((len(x), 1))], axis=1).astype("float64")
    return np.einsum("ni,nj->nij", inputs, g).reshape(len(x), -1)


def direction(J, r, lam):
    """Return the direction by singular values, which squares no condition number."""
    U, s, V = np.linalg.svd(J, full_matrices=False)
    return V.T @ (s / (s**2 + len(r) * lam) * (U.T @ r))


@pytest.mark.parametrize("deficient", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_directions_of_float32_rows_are_right_or_refused(backend, size, deficient):
    rng = np.random.default_rng(0)
    N, n, m = size
    layer = kc.Dense(in_features=n, out_features=m, bias=True, weight_layout="io")
    right = refused = 0
    for scales in itertools.product(SCALES, SCALES):
        x, g = rows(rng, N, n, m, scales, deficient)
        r = rng.normal(size=N).astype("float32")
        J_dense = dense(x, g)
        top = np.linalg.norm(J_dense, 2) ** 2 / N
        batch = kc.Batch(*(backend.asarray(a, "float32") for a in (x, g)))
        J = Jacobian.of({"a": layer}, {"a": batch})
        if "float64" not in str(sample_gram(J).array.dtype):
            pytest.skip("no float64 here: K is in float32")
        for damping in DAMPINGS:
            try:
                F = sample_curvature(J, damping=damping * top)
                d = F.direction(backend.asarray(r, "float32"))["a"]
            except kc.KFACError:
                refused += 1
                continue
            parts = backend.to_numpy(d["weight"]), backend.to_numpy(d["bias"])[None]
            got = np.concatenate(parts).ravel()
            expected = direction(J_dense, r.astype("float64"), damping * top)
            assert relative_error(got, expected) < 1e-4, (scales, damping)
            right += 1
    assert right > refused
