"""Statistics of convolutions: chunks within a budget."""

import numpy as np
import pytest

import kfac_core as kc

from ..builders.layers import conv_layer
from ..builders.memory import PeakMemory
from ..builders.one_block import learn
from ..builders.tolerances import assert_close

CONV = conv_layer(2, 4, (2, 2), padding="same")


def values_of(backend, statistics):
    """Return every average on the host."""
    found = {}
    for name, average in statistics.averages.items():
        value = average.value(debias=True)
        found[name] = backend.to_numpy(
            value.full() if hasattr(value, "full") else value
        )
    return found


@pytest.mark.parametrize("weight", [2.0, None])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("loss", ["sum", "mean", "mean_rows"])
@pytest.mark.parametrize(
    "approximation",
    [kc.Kronecker(), kc.Kronecker(sharing="reduce"), kc.Diagonal(), kc.TNT()],
)
def test_chunks_give_what_the_whole_batch_gives(
    backend, rng, approximation, loss, masked, weight
):
    """A budget changes when patches are made, never a statistic, whatever the loss."""
    x, g = rng.normal(size=(5, 3, 3, 2)), rng.normal(size=(5, 3, 3, 4))
    mask = backend.asarray(rng.random((5, 3, 3)) > 0.4) if masked else None
    block = kc.Block(conv_layer(2, 4, (2, 2), padding="same", groups=2), approximation)
    batch = kc.Batch(backend.asarray(x), backend.asarray(g), mask=mask)
    start = block.initial(batch.like)
    options = {
        "conventions": kc.Conventions(reduction=loss, sources="sum"),
        "decay": 0.7,
        "weight": weight,
    }
    start = kc.update_block(block, start, batch, kc.UpdateOptions(**options))

    whole = kc.update_block(block, start, batch, kc.UpdateOptions(**options))
    one = 9 * 4 * 2
    parts = kc.update_block(
        block, start, batch, kc.UpdateOptions(**options, max_patch_elements=2 * one + 1)
    )

    expected = values_of(backend, whole)
    for name, got in values_of(backend, parts).items():
        assert_close(got, expected[name], "gram", "float64")


def test_centered_moments_of_parts_merge_into_those_of_the_whole(backend, dtype, rng):
    """The means of parts differ, which the covariance of all their pixels holds."""
    x = rng.normal(size=(6, 3, 3, 2)) + np.arange(6.0)[:, None, None, None]
    g = rng.normal(size=(6, 3, 3, 4))
    block = kc.Block(CONV, kc.Kronecker(input="uncorrelated"))
    conventions = kc.Conventions(reduction="sum", sources="sum")

    parts = [
        kc.batch_moments(
            block,
            kc.Batch(*(backend.asarray(a[part], dtype) for a in (x, g))),
            conventions=conventions,
        )
        for part in (slice(0, 1), slice(1, 3), slice(3, None))
    ]
    merged = parts[0].merged(parts[1]).merged(parts[2])

    moments = merged.averages["input"].value(debias=True)
    pixels = x.reshape(-1, 2)
    assert_close(backend.to_numpy(moments.mean), pixels.mean(0), "gram", dtype)
    covariance = np.cov(pixels.T, bias=True)
    assert_close(backend.to_numpy(moments.covariance.full()), covariance, "gram", dtype)
    # An empty part, such as a process may have, changes nothing.
    again = merged.merged(block.initial(backend.asarray(x, dtype)))
    got = again.averages["input"].value(debias=True).covariance.full()
    assert_close(backend.to_numpy(got), covariance, "gram", dtype)


def test_an_estimator_keeps_to_its_budget(rng):
    """The estimator never holds many more patches than it was allowed."""
    conv = conv_layer(4, 4, (5, 5), padding="same")
    x, g = rng.normal(size=(64, 16, 16, 4)), rng.normal(size=(64, 16, 16, 4))
    patches = 64 * 16 * 16 * 25 * 4
    peaks = {}
    for budget in (None, patches // 16):
        estimator = kc.Estimator(
            {"conv": kc.Block(conv, kc.Kronecker())},
            decay=0.9,
            damping=0.1,
            reduction="sum",
            execution=kc.Execution(max_patch_elements=budget),
        )
        estimator.update({"conv": kc.Batch(x[:1], g[:1])})
        with PeakMemory() as memory:
            estimator.update({"conv": kc.Batch(x, g)})
        peaks[budget] = memory.peak / (8 * patches)

    assert peaks[None] > 1.0
    assert peaks[patches // 16] < 0.3


def test_a_budget_below_one_example_is_refused(backend, rng):
    """An example that does not fit the budget names the argument and what it needs."""
    block = kc.Block(CONV, kc.Kronecker())
    batch = kc.Batch(
        backend.asarray(rng.normal(size=(2, 3, 3, 2))),
        backend.asarray(rng.normal(size=(2, 3, 3, 4))),
    )

    with pytest.raises(kc.ShapeError, match=r"`max_patch_elements`.*72"):
        learn(block, batch, decay=0.9, max_patch_elements=71)


def test_gradients_of_examples_have_no_patches_to_bound():
    """The error says which option to leave out."""
    batch = kc.GradientBatch({"weight": np.ones((2, 3))}, batch_size=2)
    parts = kc.Block(CONV, kc.Kronecker()).row_parts(batch, max_patch_elements=9)
    with pytest.raises(kc.ArgumentError, match="`max_patch_elements` to be None"):
        next(parts)
