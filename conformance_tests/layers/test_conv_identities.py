"""B20: convolutions on which K-FAC is exact, by patches and loops alone.

One linear convolution and half the sum of squares.  With a global sum pool after it
(`reduce`), or a loss at every position (`expand`), the Gauss-Newton block is a single
Kronecker product.
"""

import numpy as np
import pytest

import kfac_core as kc

from ..builders.layers import conv_layer
from ..builders.one_block import learn, operator_for
from ..builders.tolerances import assert_close, assert_differs

N, SIZE, CHANNELS, OUT = 4, 4, 2, 3
S = 9

biases = pytest.mark.parametrize("bias", [True, False])


def patches_of(x, *, bias):
    """Return the patches of 2 x 2 kernels, shape (N, S, n), a 1 appended for a bias."""
    found = np.zeros((N, S, 4 * CHANNELS + bias))
    for n in range(N):
        for s in range(S):
            i, j = divmod(s, 3)
            patch = x[n, i : i + 2, j : j + 2].reshape(-1)
            found[n, s] = np.append(patch, 1.0) if bias else patch
    return found


def block_of(backend, x, g, *, bias, sharing):
    """Return the library's undamped block for sources g."""
    layer = conv_layer(CHANNELS, OUT, (2, 2), bias=bias)
    block = kc.Block(layer, kc.Kronecker(sharing=sharing))
    batch = kc.Batch(backend.asarray(x), backend.asarray(g), sources=len(g))
    statistics = learn(block, batch)
    operator = operator_for(block, statistics, damping=0.0, factorizations=())
    return backend.to_numpy(operator.to_dense(damped=False))


@biases
def test_reduce_is_exact_under_a_global_sum_pool(backend, rng, bias):
    """The pooled output sees the sum of patches; expand is another matrix."""
    x = rng.normal(size=(N, SIZE, SIZE, CHANNELS))
    g = np.broadcast_to(np.eye(OUT)[:, None, None, None, :], (OUT, N, 3, 3, OUT))

    got = block_of(backend, x, g, bias=bias, sharing="reduce")

    sums = patches_of(x, bias=bias).sum(axis=1)
    dense = np.kron(sums.T @ sums / N, np.eye(OUT))
    assert_close(got, dense, "identity", "float64")
    other = block_of(backend, x, g, bias=bias, sharing="expand")
    assert_differs(other, dense)


@biases
def test_expand_is_exact_for_a_loss_at_every_position(backend, rng, bias):
    """Each position is an output of its own; reduce is another matrix."""
    x = rng.normal(size=(N, SIZE, SIZE, CHANNELS))
    g = np.zeros((S * OUT, N, 3, 3, OUT))
    for s in range(S):
        for c in range(OUT):
            g[s * OUT + c, :, s // 3, s % 3, c] = 1.0

    got = block_of(backend, x, g, bias=bias, sharing="expand")

    rows = patches_of(x, bias=bias).reshape(N * S, -1)
    dense = np.kron(rows.T @ rows / N, np.eye(OUT))
    assert_close(got, dense, "identity", "float64")
    other = block_of(backend, x, g, bias=bias, sharing="reduce")
    assert_differs(other, dense)
