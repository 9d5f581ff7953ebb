"""Defects that were confirmed in TensorFlow's K-FAC, one test each, named for them.

The numbers are those of section 9 of the reference notes.  Of the others, 9.1 and 9.8 to
9.11 are tested with the series, 9.3 and 9.5 with convolutions, 9.6, 9.14 and 9.17 with
losses, 9.13 and 9.15 with all approximations, 9.19 with dampings, and 9.21 with kfac-jax's
6.11; 9.7 cannot occur, since there are no global constants.
"""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.operators import kronecker_operator

from ..builders import reference
from ..builders.defect_cases import conv_batch, dense_block, dense_data, fed
from ..builders.layers import conv_layer
from ..builders.one_block import operator_for
from ..builders.tolerances import assert_close, assert_differs


@pytest.mark.parametrize("bias", [False, True])
def test_tfkfac_9_2_uncorrelated_input_is_in_the_weights_order(backend, rng, bias):
    """The factor stands in the order of the weight: kernel positions, then channels."""
    block = kc.Block(
        conv_layer(2, 2, (2, 2), bias=bias), kc.Kronecker(input="uncorrelated")
    )
    x, g, batch = conv_batch(backend, rng)

    operator = operator_for(
        block, fed(block, batch), damping=0.3, factorizations=("inverse",)
    )

    pixels = x.reshape(-1, 2)
    mean = pixels.mean(axis=0)
    covariance = np.cov(pixels.T, bias=True)
    u = np.concatenate([np.tile(mean, 4), np.ones(int(bias))])
    A = np.zeros((8 + bias, 8 + bias))
    A[:8, :8] = np.kron(np.eye(4), covariance)
    A += np.outer(u, u)
    G = g.reshape(-1, 2).T @ g.reshape(-1, 2) / 27
    F = reference.damped_block(A, G, 9.0, damping=0.3, rule="factored")
    assert_close(backend.to_numpy(operator.to_dense()), F, "product", "float64")
    V = rng.normal(size=(8 + bias, 2))
    got = backend.to_numpy(operator.multiply_inverse(backend.asarray(V)))
    expected = np.linalg.solve(F, V.ravel()).reshape(V.shape)
    assert_close(got, expected, "inverse", "float64")
    got = float(operator.logdet())
    assert_close(got, np.linalg.slogdet(F)[1], "logdet", "float64")
    got = backend.to_numpy(operator.multiply_matpower(backend.asarray(V), -0.5))
    root = reference.matrix_power(F, -0.5) @ V.ravel()
    assert_close(got, root.reshape(V.shape), "power", "float64")
    channels_first = np.kron(covariance, np.eye(4))
    assert_differs(A[:8, :8] - np.outer(u, u)[:8, :8], channels_first)


def test_tfkfac_9_4_a_mask_of_patches_reaches_the_diagonal(backend, rng):
    """Masked positions of a convolution count as absent in its diagonal too."""
    mask = rng.random((3, 3, 3)) > 0.4
    block = kc.Block(conv_layer(2, 2, (2, 2), bias=False), kc.Diagonal())
    x, g, batch = conv_batch(backend, rng, mask=backend.asarray(mask))

    statistics = fed(block, batch)

    got = backend.to_numpy(statistics.averages["block"].value(debias=True))
    expected = np.zeros((8, 2))
    for n in range(3):
        D = np.zeros((8, 2))
        for i in range(3):
            for j in range(3):
                if mask[n, i, j]:
                    patch = x[n, i : i + 2, j : j + 2].reshape(-1)
                    D += np.outer(patch, g[n, i, j])
        expected += D**2 / 3
    assert_close(got, expected.ravel(), "gram", "float64")


@pytest.mark.parametrize("rule", ["factored", "exact"])
def test_tfkfac_9_12_a_python_damping_keeps_its_64_bits(backend, rng, rule):
    """A damping of 0.1 is 0.1 in float64, not the nearest float32."""
    x, g = dense_data(rng)
    block = dense_block()
    statistics = fed(block, kc.Batch(backend.asarray(x), backend.asarray(g)))

    operator = operator_for(block, statistics, damping=0.1, rule=rule)

    A, G, S = reference.kronecker_factors(x, g[None], bias=True)
    F = reference.damped_block(A, G, S, damping=0.1, rule=rule)
    rounded = reference.damped_block(A, G, S, damping=float(np.float32(0.1)), rule=rule)
    got = backend.to_numpy(operator.to_dense())
    assert_close(got, F, "roundoff", "float64")
    assert_differs(got, rounded, by=1e-11)


@pytest.mark.parametrize("approximation", [kc.Diagonal(), kc.Full()])
def test_tfkfac_9_16_several_parameters_make_one_block(backend, rng, approximation):
    """Bare parameters may be a tuple, such as a weight and a bias."""
    shapes = {"w": (3, 2), "b": (2,)}
    block = kc.Block(kc.Parameters(shapes=shapes), approximation)
    gradients = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    batch = kc.GradientBatch(
        {name: backend.asarray(v) for name, v in gradients.items()}, 4
    )
    operator = operator_for(block, fed(block, batch), damping=0.5, rule="exact")

    v = np.concatenate([gradients["w"].ravel(), gradients["b"]])
    F = np.outer(v, v) / 4
    if approximation.name == "diagonal":
        F = np.diag(np.diag(F))
    got = backend.to_numpy(operator.to_dense())
    assert_close(got, F + 0.5 * np.eye(8), "gram", "float64")


@pytest.mark.parametrize("product", ["inverse", "cholesky"])
def test_tfkfac_9_18_failed_factorizations_raise(backend, product):
    """An indefinite moment without damping is an error, on the way of every product."""
    indefinite = backend.asarray([[1.0, 2.0], [2.0, 1.0]])

    with pytest.raises(kc.FactorizationError, match="damping"):
        kronecker_operator(None, indefinite, damping=0.0, factorizations=(product,))


def test_tfkfac_9_18_clipping_does_not_depend_on_other_factorizations(backend):
    """The inverse of an indefinite matrix is one and the same on every way to it."""
    A = backend.asarray([[1.0, 0.0], [0.0, -0.05]])
    v = backend.asarray([1.0, 1.0])

    alone = kronecker_operator(None, A, damping=0.1, factorizations=())
    beside = alone.prepared("eigenbasis", "cholesky")

    first = backend.to_numpy(alone**-1 @ v)
    second = backend.to_numpy(beside**-1 @ v)
    assert np.array_equal(first, second)


@pytest.mark.parametrize("rule", ["factored", "exact"])
def test_tfkfac_9_20_depthwise_powers_are_consistent(backend, rng, rule):
    """The inverse of a depthwise block undoes its product, and squares its root."""
    layer = conv_layer(3, 6, (2, 2), groups=3)
    block = kc.Block(layer, kc.Kronecker())
    _, _, batch = conv_batch(backend, rng, out=6, channels=3)
    operator = operator_for(block, fed(block, batch), damping=0.3, rule=rule)
    V = rng.normal(size=layer.matrix_shape)

    there = operator.multiply(backend.asarray(V))
    back = backend.to_numpy(operator.multiply_inverse(there))
    root = operator.multiply_matpower(backend.asarray(V), 0.5)
    square = backend.to_numpy(operator.multiply_matpower(root, 0.5))

    assert_close(back, V, "inverse", "float64")
    assert_close(square, backend.to_numpy(there), "power", "float64")
    F = backend.to_numpy(operator.to_dense())
    assert F.shape == (V.size, V.size)
    assert_close((F @ V.ravel()).reshape(V.shape), square, "power", "float64")
