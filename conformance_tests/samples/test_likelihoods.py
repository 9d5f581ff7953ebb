"""Likelihoods as least squares: ``B r = g`` and ``B B^T`` the Fisher matrix."""

import numpy as np
import pytest

from kfac_core.losses import (
    Bernoulli,
    Categorical,
    Gaussian,
    GaussianLearnedVariance,
    Joint,
)
from kfac_core.samples import likelihood_residuals

from ..builders.tolerances import assert_close

N, C = 5, 4


def softmax(z):
    p = np.exp(z - z.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


def categorical(z, rng):
    labels = rng.integers(0, C, N)
    p = softmax(z)
    fisher = np.eye(C) * p[:, None] - p[:, :, None] * p[:, None]
    return (
        Categorical(),
        labels,
        p - np.eye(C)[labels],
        fisher,
        -np.log(p[np.arange(N), labels]),
    )


def bernoulli(z, rng):
    y = rng.integers(0, 2, (N, C)) * 1.0
    p = 1 / (1 + np.exp(-z))
    fisher = np.eye(C) * (p * (1 - p))[:, None]
    nats = -np.sum(y * np.log(p) + (1 - y) * np.log(1 - p), axis=1)
    return Bernoulli(), y, p - y, fisher, nats


def gaussian(z, rng):
    y = rng.normal(size=(N, C))
    nats = np.sum((y - z) ** 2, axis=1) / 4 + C / 2 * np.log(4 * np.pi)
    fisher = np.broadcast_to(np.eye(C) / 2, (N, C, C))
    return Gaussian(variance=2.0), y, (z - y) / 2, fisher, nats


def learned_variance(z, rng):
    y, (m, s) = rng.normal(size=(N, C // 2)), np.split(z, 2, axis=1)
    error = (y - m) ** 2 * np.exp(-s)
    g = np.concatenate([(m - y) * np.exp(-s), (1 - error) / 2], axis=1)
    diagonal = np.concatenate([np.exp(-s), np.full_like(s, 0.5)], axis=1)
    nats = 0.5 * np.sum(error + s + np.log(2 * np.pi), axis=1)
    return GaussianLearnedVariance(), y, g, np.eye(C) * diagonal[:, None], nats


def joint(z, rng):
    """Return three classes, and a number of weight 1/2, whose variance is 2."""
    labels, y = rng.integers(0, 3, N), rng.normal(size=(N, 1))
    p = softmax(z[:, :3])
    fisher = np.zeros((N, C, C))
    fisher[:, :3, :3] = np.eye(3) * p[:, None] - p[:, :, None] * p[:, None]
    fisher[:, 3, 3] = 0.25
    g = np.concatenate([p - np.eye(3)[labels], (z[:, 3:] - y) / 4], axis=1)
    nats = (y[:, 0] - z[:, 3]) ** 2 / 8 + np.log(4 * np.pi) / 4
    loss = Joint(
        losses=(Categorical(), Gaussian(variance=2.0)), sizes=(3, 1), weights=(1.0, 0.5)
    )
    return loss, (labels, y), g, fisher, nats - np.log(p[np.arange(N), labels])


@pytest.mark.parametrize("scale", [1.0, 12.0])
@pytest.mark.parametrize(
    "make", [categorical, bernoulli, gaussian, learned_variance, joint]
)
def test_residuals_give_the_gradient_and_roots_the_fisher_matrix(backend, make, scale):
    """Also of outputs that are sure, and sometimes wrong."""
    rng = np.random.default_rng(0)
    z = scale * rng.normal(size=(N, C)) / (1.0 if make is not learned_variance else 8.0)
    loss, targets, gradient, fisher, nats = make(z, rng)
    outputs = backend.asarray(z, "float64")

    def there(y):
        if isinstance(y, tuple):
            return tuple(map(there, y))
        return backend.asarray(y, "int64" if y.dtype.kind == "i" else "float64")

    found = likelihood_residuals(loss, outputs, there(targets))

    B, r = backend.to_numpy(found.root), backend.to_numpy(found.residuals)
    assert_close(np.einsum("nci,ni->nc", B, r), gradient, "inverse", "float64")
    assert_close(B @ np.swapaxes(B, 1, 2), fisher, "product", "float64")
    assert_close(backend.to_numpy(found.loss), nats.mean(), "product", "float64")
    rows = backend.to_numpy(found.rows(outputs))
    assert_close(rows, np.einsum("nci,nc->ni", B, z), "product", "float64")
