"""Weights of rows in the loss: the moments of inputs are means with them."""

from __future__ import annotations

import numpy as np
import pytest

import kfac_core as kc

from ..builders.layers import conv_layer, dense_layer

LAMBDA = 0.1
N, S = 4, 3
WEIGHTS = np.array(
    [[0.5, 1.0, 2.0], [0.0, 0.0, 0.0], [1.5, 0.0, 0.25], [1.0, 1.0, 3.0]]
)


def estimator_of(layer, approximation):
    block = kc.Block(layer, approximation)
    options = {"reduction": "sum", "damping": LAMBDA, "damping_rule": "exact"}
    return kc.Estimator({"a": block}, **options)


def direction(backend, layer, approximation, batch, V):
    """Return the inverse curvature times V, on a backend."""
    estimator = estimator_of(layer, approximation)
    x, g, weights = (backend.asarray(part) for part in batch)
    estimator.update({"a": kc.Batch(x, g, mask=weights)})
    estimator.refresh()
    vector = {name: backend.asarray(part) for name, part in V.items()}
    found = estimator.precondition({"a": vector})["a"]
    return np.concatenate([backend.to_numpy(found[name]).ravel() for name in V])


def solved(F, V):
    flat = np.concatenate([part.ravel() for part in V.values()])
    return np.linalg.solve(F + LAMBDA * np.eye(len(F)), flat)


@pytest.fixture
def dense(rng):
    """Inputs that are NaN where a row does not count, g of weighted rows, and a vector."""
    x, alone = rng.normal(size=(N, S, 2)), rng.normal(size=(N, S, 3))
    g = alone * np.sqrt(WEIGHTS)[..., None]
    V = {"weight": rng.normal(size=(2, 3)), "bias": rng.normal(size=3)}
    return np.where(WEIGHTS[..., None] > 0, x, np.nan), g, V


def test_kronecker_factors_are_means_with_the_weights(backend, dense):
    """``A = sum w x x^T / sum w``, and the block is that of the sum over weighted rows."""
    x, g, V = dense
    layer = dense_layer(2, 3)
    found = direction(backend, layer, kc.Kronecker(), (x, g, WEIGHTS), V)
    rows = np.concatenate([np.nan_to_num(x), np.ones((N, S, 1))], axis=2).reshape(-1, 3)
    A = (rows.T * WEIGHTS.ravel()) @ rows / WEIGHTS.sum()
    g = g.reshape(-1, 3)
    np.testing.assert_allclose(found, solved(np.kron(A, g.T @ g / N), V), rtol=1e-8)


def test_exact_blocks_have_each_weight_once(backend, dense):
    """It comes with the output gradients alone."""
    x, g, V = dense
    layer = dense_layer(2, 3)
    found = direction(backend, layer, kc.Full(), (x, g, WEIGHTS), V)
    rows = np.concatenate([np.nan_to_num(x), np.ones((N, S, 1))], axis=2)
    D = np.einsum("nsi,nsj->nij", rows, g).reshape(N, -1)
    np.testing.assert_allclose(found, solved(D.T @ D / N, V), rtol=1e-8)


def test_ids_are_counted_by_their_weights(backend, rng):
    """The diagonal input factor of an embedding."""
    ids = rng.integers(0, 5, size=(N, S))
    g = rng.normal(size=(N, S, 3)) * np.sqrt(WEIGHTS)[..., None]
    layer = kc.Embedding(num_embeddings=5, features=3, weight_layout="io")
    V = {"weight": rng.normal(size=(5, 3))}
    kind = kc.Kronecker(input="diagonal")
    found = direction(backend, layer, kind, (ids, g, WEIGHTS), V)
    counts = np.bincount(ids.ravel(), WEIGHTS.ravel(), minlength=5) / WEIGHTS.sum()
    g = g.reshape(-1, 3)
    F = np.kron(np.diag(counts), g.T @ g / N)
    np.testing.assert_allclose(found, solved(F, V), rtol=1e-8)


def test_patches_have_the_weights_of_their_places(backend, rng):
    """A convolution, whose rows are also read in chunks."""
    layer = conv_layer(2, 3, (2,), bias=False)
    x = rng.normal(size=(N, S + 1, 2))
    g = rng.normal(size=(N, S, 3)) * np.sqrt(WEIGHTS)[..., None]
    V = {"weight": rng.normal(size=(2, 2, 3))}
    found = direction(backend, layer, kc.Kronecker(), (x, g, WEIGHTS), V)
    rows = np.concatenate([x[:, :-1], x[:, 1:]], axis=2).reshape(-1, 4)
    A = (rows.T * WEIGHTS.ravel()) @ rows / WEIGHTS.sum()
    g = g.reshape(-1, 3)
    np.testing.assert_allclose(found, solved(np.kron(A, g.T @ g / N), V), rtol=1e-8)


def test_the_gradient_of_weighted_rows(dense):
    """``sum w x g^T`` of the rows alone."""
    x, g, _ = dense
    layer = dense_layer(2, 3)
    estimator = estimator_of(layer, kc.Kronecker())
    found = estimator.blocks["a"].mean_gradient(
        kc.Batch(x, g, mask=WEIGHTS), conventions=estimator.conventions
    )
    rows = np.concatenate([np.nan_to_num(x), np.ones((N, S, 1))], axis=2)
    root = np.sqrt(WEIGHTS)[..., None]
    np.testing.assert_allclose(found, np.einsum("nsi,nsj->ij", rows, g * root) / N)


def test_reduced_positions_take_no_weights(dense):
    """Refused: one row an example would need one weight an example."""
    x, g, _ = dense
    layer = dense_layer(2, 3)
    estimator = estimator_of(layer, kc.Kronecker(sharing="reduce"))
    with pytest.raises(kc.UnsupportedError, match="sharing='expand'"):
        estimator.update({"a": kc.Batch(x, g, mask=WEIGHTS)})
