"""Recurrent use of a layer: a time axis, masks, several uses."""

import numpy as np
import pytest

import kfac_core as kc

from ..builders import reference
from ..builders.layers import conv_layer, dense_layer
from ..builders.one_block import learn
from ..builders.tolerances import assert_close


def factors_of(backend, block, batch):
    """Return A, G and S after one update with a batch, or several uses."""
    statistics = learn(block, batch, block.initial(block.rows(batch).like))
    averages = statistics.averages
    values = [averages[side].value(debias=True).full() for side in ("input", "output")]
    return [
        *map(backend.to_numpy, values),
        float(averages["repeats"].value(debias=True)),
    ]


def dense_block():
    layer = dense_layer(3, 2)
    return kc.Block(layer, kc.Kronecker())


@pytest.mark.parametrize("masked", [False, True])
def test_uses_of_a_dense_layer_are_a_shared_axis(backend, rng, masked):
    """A list of uses gives what one batch with a time axis gives, masks and all."""
    x, g = rng.normal(size=(4, 5, 3)), rng.normal(size=(4, 5, 2))
    lengths = np.array([5, 2, 1, 4])
    mask = np.arange(5) < lengths[:, None] if masked else None
    block = dense_block()
    whole = kc.Batch(
        backend.asarray(x),
        backend.asarray(g),
        mask=None if mask is None else backend.asarray(mask),
    )

    one = factors_of(backend, block, whole)
    steps = [
        kc.Batch(
            backend.asarray(x[:, t]),
            backend.asarray(g[:, t]),
            mask=None if mask is None else backend.asarray(mask[:, t]),
        )
        for t in range(5)
    ]
    uses = factors_of(backend, block, steps)

    expected = reference.kronecker_factors(x, g[None], bias=True, mask=mask)
    for got, also, value in zip(one, uses, expected, strict=True):
        assert_close(got, value, "gram", "float64")
        assert_close(also, value, "gram", "float64")


def test_uses_with_and_without_a_mask_go_together(backend, rng):
    """A use without a mask counts whole beside one with a mask."""
    x, g = rng.normal(size=(2, 4, 3)), rng.normal(size=(2, 4, 2))
    mask = np.array([[1, 1, 0, 0], [1, 1, 1, 1]], bool)[1::-1].T
    block = dense_block()
    uses = (
        kc.Batch(backend.asarray(x[0]), backend.asarray(g[0])),
        kc.Batch(
            backend.asarray(x[1]),
            backend.asarray(g[1]),
            mask=backend.asarray(mask[:, 1]),
        ),
    )

    got = factors_of(backend, block, uses)

    keep = np.stack([np.ones(4, bool), mask[:, 1]], axis=1)
    expected = reference.kronecker_factors(
        x.swapaxes(0, 1), g.swapaxes(0, 1)[None], bias=True, mask=keep
    )
    for one, value in zip(got, expected, strict=True):
        assert_close(one, value, "gram", "float64")


@pytest.mark.parametrize("sources", [None, 2])
def test_a_recurrent_convolution_is_fed_step_by_step(backend, rng, sources):
    """Steps of a 1 x 1 convolution are those of a dense layer, with lengths masked."""
    x = rng.normal(size=(3, 4, 2, 2, 3))
    g = rng.normal(size=(sources or 1, 3, 4, 2, 2, 2))
    mask = np.arange(4) < np.array([4, 1, 3])[:, None]
    conv = conv_layer(3, 2, (1, 1))
    every = np.broadcast_to(mask[:, :, None, None], (3, 4, 2, 2))
    uses = [
        kc.Batch(
            backend.asarray(x[:, t]),
            backend.asarray(g[:, :, t] if sources else g[0, :, t]),
            mask=backend.asarray(every[:, t]),
            sources=sources,
        )
        for t in range(4)
    ]

    got = factors_of(backend, kc.Block(conv, kc.Kronecker()), uses)

    expected = reference.kronecker_factors(x, g, bias=True, mask=every)
    for one, value in zip(got, expected, strict=True):
        assert_close(one, value, "gram", "float64")


def test_uses_of_other_examples_are_refused(backend, rng):
    """Uses with different numbers of examples name both."""
    uses = [
        kc.Batch(
            backend.asarray(rng.normal(size=(n, 3))), backend.asarray(np.ones((n, 2)))
        )
        for n in (4, 5)
    ]

    with pytest.raises(kc.ShapeError, match="number of examples"):
        dense_block().rows(uses)
