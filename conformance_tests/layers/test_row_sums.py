"""A block takes the sums of a batch's outer products in the place of the batch."""

import numpy as np
import pytest

import kfac_core as kc

from ..builders.tolerances import assert_close

N, S, IN, OUT = 5, 3, 4, 2


def block_of(sharing="expand", **options):
    layer = kc.Dense(in_features=IN, out_features=OUT, bias=True, weight_layout="io")
    return kc.Block(layer, kc.Kronecker(sharing=sharing, **options))


def dense_factors(x, g, mask, sharing):
    """Return A and G of one batch by loops over its rows."""
    A, G = np.zeros((IN + 1, IN + 1)), np.zeros((OUT, OUT))
    for n in range(N):
        kept = [s for s in range(S) if mask[n, s]]
        if sharing == "expand":
            for s in kept:
                row = np.append(x[n, s], 1.0)
                A += np.outer(row, row)
                G += np.outer(g[n, s], g[n, s])
        else:
            row = np.append(x[n, kept].mean(0), 1.0)
            total = g[n, kept].sum(0)
            A += np.outer(row, row)
            G += np.outer(total, total)
    count = mask.sum() if sharing == "expand" else N
    return A / count, G / count


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("masked", [False, True])
def test_sums_of_two_batches_update_as_both(backend, dtype, rng, sharing, masked):
    """With gradients scaled by a number, and the old sums decayed."""
    block = block_of(sharing)
    conventions = kc.Conventions(reduction="sum", sources="sum")
    x, g = rng.normal(size=(N, S, IN)), rng.normal(size=(N, S, OUT))
    mask = np.ones((N, S), dtype=bool)
    if masked:
        mask[1, 2] = mask[3, 0] = False
    parts = []
    for own in (slice(0, 2), slice(2, N)):
        batch = kc.Batch(
            backend.asarray(x[own], dtype),
            backend.asarray(g[own], dtype),
            mask=backend.asarray(mask[own]) if masked else None,
        )
        parts.append(block.row_sums(batch, batch.inputs.dtype))
    sums = parts[0].plus(parts[1].with_scaled_grads(1.0)).with_scaled_grads(3.0)
    assert sums.examples == N
    old = block.initial(sums.like)
    new = block.update(old, sums, conventions=conventions, decay=0.5)
    again = block.update(new, sums, conventions=conventions, decay=0.5)
    A, G = dense_factors(x, 3.0 * g, mask, sharing)
    for side, expected in (("input", A), ("output", G)):
        got = again.averages[side].value(debias=True).full()
        assert_close(backend.to_numpy(got), expected, "gram", dtype)
    repeats = backend.to_numpy(again.averages["repeats"].value(debias=True))
    assert_close(repeats, mask.sum() / N if sharing == "expand" else 1.0, "gram", dtype)


def test_equal_blocks_take_their_sums_as_one(backend, dtype, rng):
    """A stack of sums is as good as one after the other."""
    names = [f"layer{i}" for i in range(5)]
    blocks = {name: block_of() for name in names}
    estimator = kc.Estimator(blocks, reduction="sum", damping=1.0)
    fed, given = {}, {}
    for name in names:
        x, g = rng.normal(size=(N, S, IN)), rng.normal(size=(N, S, OUT))
        fed[name] = x, g
        batch = kc.Batch(backend.asarray(x, dtype), backend.asarray(g, dtype))
        given[name] = blocks[name].row_sums(batch, batch.inputs.dtype)
    estimator.update(given)
    estimator.update(given)
    every = np.ones((N, S), dtype=bool)
    for name, (x, g) in fed.items():
        for side, expected in zip(
            ("input", "output"), dense_factors(x, g, every, "expand"), strict=True
        ):
            average = estimator.state[name].statistics.averages[side]
            got = backend.to_numpy(average.value(debias=True).full())
            assert_close(got, expected, "gram", dtype)


def test_sums_that_are_not_finite_are_refused(backend, rng):
    """By the name of the argument, with nothing changed."""
    block = block_of()
    x, g = rng.normal(size=(N, S, IN)), rng.normal(size=(N, S, OUT))
    g[2, 1, 0] = np.nan
    batch = kc.Batch(backend.asarray(x, "float64"), backend.asarray(g, "float64"))
    sums = block.row_sums(batch, batch.inputs.dtype)
    estimator = kc.Estimator({"fc": block}, reduction="sum", damping=1.0)
    before = estimator.state
    with pytest.raises(kc.NotFiniteError, match="`output_grads`"):
        estimator.update({"fc": sums})
    assert estimator.state is before


def test_what_reads_more_than_sums_has_none(backend, rng):
    """Factors that are no full matrices, EKFAC, and sums of another kind of rows."""
    x, g = rng.normal(size=(N, S, IN)), rng.normal(size=(N, S, OUT))
    batch = kc.Batch(backend.asarray(x, "float64"), backend.asarray(g, "float64"))
    dtype = batch.inputs.dtype
    assert block_of(output="diagonal").row_sums(batch, dtype) is None
    layer = block_of().layer
    assert kc.Block(layer, kc.Eigen()).row_sums(batch, dtype) is None
    sums = block_of().row_sums(batch, dtype)
    other = block_of("reduce")
    conventions = kc.Conventions(reduction="sum", sources="sum")
    with pytest.raises(kc.ConventionError, match="sharing"):
        other.update(other.initial(sums.like), sums, conventions=conventions, decay=0.5)
