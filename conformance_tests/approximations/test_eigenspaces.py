"""EKFAC where eigenvalues coincide: a function of eigenspaces, and not of their bases."""

import numpy as np
import pytest

import kfac_core as kc

from ..builders.eigenspaces import eigenspaces
from ..builders.layers import conv_layer, dense_layer
from ..builders.one_block import learn, operator_for
from ..builders.tolerances import assert_close

SUM = kc.Conventions(reduction="sum", sources="sum")
ROWS = 24
BOUNDS = {"float64": 1e-10, "float32": 1e-4}


def dense(n, m):
    layer = dense_layer(n, m, bias=False)
    return kc.Block(layer, kc.EKFAC())


def grouped_conv(n, m):
    """Return two groups of 1x1 convolutions, whose statistics are stacks."""
    layer = conv_layer(2 * n, 2 * m, (1,), bias=False, groups=2)
    return kc.Block(layer, kc.EKFAC())


def draw(rng, block, rows=ROWS):
    """Return rows of a block."""
    layer = block.layer
    if layer.kind == "conv":
        n, m = layer.in_channels, layer.out_channels
        return rng.normal(size=(rows, 1, n)), rng.normal(size=(rows, 1, m))
    return rng.normal(size=(rows, layer.in_features)), rng.normal(
        size=(rows, layer.out_features)
    )


def statistics_of(backend, block, first, second, dtype="float64"):
    """Return statistics with the factors and bases of one batch, the moments of another."""
    one, two = (
        kc.Batch(*(backend.asarray(array.astype(dtype)) for array in rows))
        for rows in (first, second)
    )
    statistics = learn(block, one)
    statistics = kc.rebase_block(block, statistics, "zero", "raise")
    return block.approximation.corrected(
        statistics, block.layer.rows(two), conventions=SUM, decay=0.0, weight=1.0
    )


def operator(block, statistics):
    return operator_for(block, statistics, damping=0.1, rule="exact")


@pytest.mark.parametrize(
    "block",
    [dense(65, 4), dense(4, 65), dense(65, 65), grouped_conv(33, 3)],
    ids=["input", "output", "both", "stack"],
)
def test_the_order_of_rows_is_nothing(backend, rng, block, dtype):
    """Fewer rows than columns: roundoff alone chooses a basis of the null space."""
    first, second, third = (draw(rng, block) for _ in range(3))
    order = rng.permutation(ROWS)
    orders = [
        statistics_of(backend, block, rows, second, dtype)
        for rows in (first, [array[order] for array in first])
    ]
    # In bases of other factors, the moments that are carried are those of the old block.
    batch = kc.Batch(*(backend.asarray(array.astype(dtype)) for array in third))
    options = kc.UpdateOptions(conventions=SUM, decay=0.5)
    carried = [
        kc.rebase_block(
            block, kc.update_block(block, some, batch, options), "carried", "raise"
        )
        for some in orders
    ]

    for one, other in (orders, carried):
        made = operator(block, one), operator(block, other)
        vector = rng.normal(size=made[0].vector_shape).astype(dtype)
        for name in ("multiply", "multiply_inverse"):
            product, other_product = (
                backend.to_numpy(getattr(some, name)(backend.asarray(vector)))
                for some in made
            )
            error = np.linalg.norm(product - other_product)
            assert error <= BOUNDS[dtype] * np.linalg.norm(product)


@pytest.mark.parametrize("carried", [False, True])
def test_the_moments_are_means_over_the_null_space(backend, rng, carried):
    """``F = sum_kl c_kl P_k (x) P_l`` with ``c_kl = tr(F_1 P_k (x) P_l) / rank``.

    A rebase to the same factors carries all of it.
    """
    rows, n, m = 5, 9, 7
    block = dense(n, m)
    first, second = draw(rng, block, rows), draw(rng, block, rows)
    D = np.einsum("ri,ro->rio", *second).reshape(rows, -1)
    exact = D.T @ D / rows
    expected = np.zeros_like(exact)
    inputs, outputs = (eigenspaces(some.T @ some / rows) for some in first)
    for P in inputs:
        for Q in outputs:
            both = np.kron(P, Q)
            expected += np.trace(exact @ both) / np.trace(both) * both

    statistics = statistics_of(backend, block, first, second)
    if carried:
        statistics = kc.rebase_block(block, statistics, "carried", "raise")
    made = operator(block, statistics).to_dense(damped=False)

    assert_close(backend.to_numpy(made), expected, "inverse", "float64")


def test_separated_eigenvalues_keep_their_moments(backend, rng):
    """Eigenvalues that differ by 1e-9 of the largest are no eigenspace in float64."""
    rows, n, m = 40, 4, 3
    block = dense(n, m)
    x, g = draw(rng, block, rows)
    x = np.linalg.qr(x)[0] * np.sqrt([1.0, 1.0 - 1e-9, 0.5, 1e-9])
    statistics = statistics_of(backend, block, (x, g), draw(rng, block, rows))
    moments = statistics.averages["block"].value(debias=True)
    spectrum = operator(block, statistics).spectrum

    np.testing.assert_array_equal(backend.to_numpy(spectrum), backend.to_numpy(moments))
