"""All functions of an operator, compared with those of a dense matrix."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

import kfac_core as kc

from . import reference
from .tolerances import assert_close


def assert_functions_are(
    backend: Any,
    dtype: str,
    operator: Any,
    F: np.ndarray,
    undamped: np.ndarray,
    rng: np.random.Generator,
    *,
    refused: Collection[str] = (),
    condition: float = 1.0,
) -> None:
    """Compare an operator with a damped matrix and with that without damping.

    What has no structure is named in ``refused``; the bounds of products and traces are
    scaled by ``condition``.
    """
    shape = tuple(operator.vector_shape)
    V = rng.normal(size=shape)
    v, vec = backend.asarray(V, dtype), V.ravel()

    def close(got: Any, expected: Any, operation: str) -> None:
        scaled = condition if operation == "product" else 1.0
        values = np.reshape(backend.to_numpy(got), np.shape(expected))
        assert_close(values, expected, operation, dtype, condition=scaled)

    assert int(operator.status()) == kc.Status.OK
    close(operator.to_dense(), F, "product")
    close(operator.multiply(v), F @ vec, "product")
    close(operator.trace(), np.trace(F), "product")
    close(operator.frobenius_norm(), np.linalg.norm(F), "product")
    close(operator.multiply_inverse(v), np.linalg.solve(F, vec), "inverse")
    close(operator.logdet(), np.linalg.slogdet(F)[1], "logdet")
    if "sample" not in refused:
        # The covariance of samples, from its root: noise of one coordinate at a time.
        units = backend.asarray(np.eye(V.size), dtype)
        samples = [
            operator.sample(backend.xp.reshape(units[i, :], shape))
            for i in range(V.size)
        ]
        root = np.stack([backend.to_numpy(sample).ravel() for sample in samples])
        assert_close(root.T @ root, np.linalg.inv(F), "inverse", dtype)
    if "undamped" not in refused:
        close(operator.to_dense(damped=False), undamped, "product")
        close(operator.multiply(v, damped=False), undamped @ vec, "product")
        close(operator.trace(damped=False), np.trace(undamped), "product")
    if "spectral" not in refused:
        spectral = operator.spectral()
        close(spectral.to_dense(damped=False), undamped, "power")
    if "eigenvalues" not in refused:
        close(operator.eigenvalues(), np.linalg.eigvalsh(F), "eigenvalues")
    if "powers" not in refused:
        for exponent in (1, -1, 0.5, -0.5, 2):
            power = reference.matrix_power(F, exponent) @ vec
            close(operator.multiply_matpower(v, exponent), power, "power")
    if "cholesky" not in refused:
        L = np.linalg.cholesky(F)
        for transpose, factor in ((False, L), (True, L.T)):
            product = operator.multiply_cholesky(v, transpose=transpose)
            solved = operator.multiply_cholesky_inverse(v, transpose=transpose)
            close(product, factor @ vec, "cholesky")
            close(solved, np.linalg.solve(factor, vec), "cholesky")
