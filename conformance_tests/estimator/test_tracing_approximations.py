"""Every layer and approximation inside ``jax.jit``: compiled once, equal to eager."""

import numpy as np
import pytest

import kfac_core as kc

from ..builders.tolerances import assert_close

DENSE = kc.Dense(in_features=3, out_features=2, bias=True, weight_layout="oi")
EMBEDDING = kc.Embedding(num_embeddings=6, features=2, weight_layout="io")


def conv(groups):
    return kc.Conv(
        in_channels=2,
        out_channels=4,
        kernel_size=(2, 2),
        padding="same",
        bias=True,
        weight_layout="spatial_io",
        data_layout="channels_last",
        groups=groups,
    )


PAIRS = {
    "conv groups": (conv(2), kc.Kronecker()),
    "conv uncorrelated": (conv(1), kc.Kronecker(input="uncorrelated")),
    "conv tnt": (conv(2), kc.TNT()),
    "conv diagonal": (conv(2), kc.Diagonal()),
    "dense full": (DENSE, kc.Full()),
    "dense eigen": (DENSE, kc.Eigen()),
    "dense kfoc": (DENSE, kc.KFOC(iterations=2)),
    "dense symmetric": (DENSE, kc.Series(variant="symmetric", steps=5)),
    "dense infinite": (DENSE, kc.Series(variant="infinite")),
    "embedding": (EMBEDDING, kc.Kronecker(input="diagonal")),
}


def draw(rng, layer):
    """Return inputs and output gradients of a layer."""
    if layer.kind == "conv":
        return rng.normal(size=(3, 4, 4, 2)), rng.normal(size=(3, 4, 4, 4))
    if layer.kind == "embedding":
        return rng.integers(6, size=(4, 3)), rng.normal(size=(4, 3, 2))
    return rng.normal(size=(4, 5, 3)), rng.normal(size=(4, 5, 2))


@pytest.mark.parametrize("pair", PAIRS)
def test_a_block_runs_inside_a_compiled_program(requires_backend, rng, pair):
    """Update, refresh and product in one program, with a status, equal to eager."""
    requires_backend("jax", adapter=True)
    import jax

    layer, approximation = PAIRS[pair]
    block = kc.Block(layer, approximation)
    x, g = map(jax.numpy.asarray, draw(rng, layer))
    V = jax.numpy.asarray(rng.normal(size=layer.matrix_shape))
    traces = []

    def step(statistics, x, g, V, damping, decay):
        traces.append(1)
        statistics = kc.update_block(
            block,
            statistics,
            kc.Batch(x, g),
            kc.UpdateOptions(
                conventions=kc.Conventions(reduction="mean", sources="sum"),
                decay=decay,
                check="status",
            ),
        )
        operator = kc.operator_of(
            block,
            statistics,
            kc.RefreshOptions(damping=damping, rule="factored", check="status"),
        )
        flags = operator.status() | statistics.status
        return statistics, operator.multiply_inverse(V), flags

    compiled = jax.jit(step)
    start = block.initial(g)
    first, got, flags = compiled(start, x, g, V, 0.1, 0.9)
    _, _, bad = compiled(first, x, g.at[0].set(np.nan), V, 0.2, 0.8)
    assert len(traces) == 1

    _, expected, _ = step(start, x, g, V, 0.1, 0.9)
    assert_close(np.asarray(got), np.asarray(expected), "inverse", "float64")
    assert int(flags) == kc.Status.OK
    assert int(bad) == kc.Status.OUTPUT_GRADS_NOT_FINITE
