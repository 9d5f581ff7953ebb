"""Running averages: sums with weights, merged, decayed, debiased (C1, C3, C8)."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.linalg.symmetric import SymmetricMatrix

from ..builders import reference
from ..builders.one_block import learn
from ..builders.tolerances import assert_close, assert_differs

N, S, IN, OUT = 12, 2, 4, 3
SUM = kc.Conventions(reduction="sum", sources="sum")


def block(**options):
    """Return a dense block with a bias."""
    layer = kc.Dense(in_features=IN, out_features=OUT, bias=True, weight_layout="io")
    return kc.Block(layer, kc.Kronecker(**options))


def data(rng, n=N):
    """Return inputs and output gradients of n examples with S shared positions."""
    return rng.normal(size=(n, S, IN)), rng.normal(size=(n, S, OUT))


def batch(backend, dtype, x, g, mask=None):
    """Copy a batch to the backend."""
    return kc.Batch(
        backend.asarray(x, dtype),
        backend.asarray(g, dtype),
        None if mask is None else backend.asarray(mask),
    )


def values(backend, statistics, *, debias=True):
    """Return A, G and S on the host."""
    A, G = (statistics.averages[k].value(debias=debias) for k in ("input", "output"))
    repeats = statistics.averages["repeats"].value(debias=True)
    return [backend.to_numpy(x) for x in (A.full(), G.full(), repeats)]


def assert_same(got, expected, dtype):
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, "gram", dtype)


@pytest.mark.parametrize("debias", [True, False])
def test_an_average_is_its_sum_over_its_weight(backend, dtype, rng, debias):
    """The value is ``sum / weight``, or the bare sum; an average of nothing is zero."""
    C = reference.spd(rng, 3)
    total = SymmetricMatrix(backend.asarray(C, dtype), full_storage=True)
    average = kc.factors.Average(total, backend.asarray(4.0, dtype))
    empty = kc.factors.Average(total.scaled(0.0), backend.asarray(0.0, dtype))

    got = backend.to_numpy(average.value(debias=debias).full())
    nothing = backend.to_numpy(empty.value(debias=debias).full())

    assert_close(got, C / 4.0 if debias else C, "roundoff", dtype)
    assert_close(nothing, np.zeros((3, 3)), "exact", dtype)


@pytest.mark.parametrize("debias", [True, False])
def test_updates_are_the_decayed_sum(backend, dtype, rng, debias):
    """``sum <- d sum + w C`` and ``weight <- d weight + w``, over three updates."""
    made, steps = block(), [(0.9, 1.0), (0.5, 2.0), (0.7, 0.25)]
    statistics, A, G, weight = None, 0.0, 0.0, 0.0

    for decay, w in steps:
        x, g = data(rng)
        fed = batch(backend, dtype, x, g)
        statistics = learn(
            made,
            fed,
            made.initial(fed.inputs) if statistics is None else statistics,
            decay=decay,
            weight=w,
        )
        new_A, new_G, _ = reference.kronecker_factors(x, g[None], bias=True)
        A, G = decay * A + w * new_A, decay * G + w * new_G
        weight = decay * weight + w

    got = values(backend, statistics, debias=debias)
    over = weight if debias else 1.0
    assert_same(got, [A / over, G / over, float(S)], dtype)


def test_a_plain_mean_needs_no_debiasing_by_the_paper(backend, dtype, rng):
    """C3: the paper's decay is a plain mean for 20 steps, and not for the 21st."""
    made, seen = block(), []
    statistics = None

    for k in range(1, 22):
        x, g = data(rng, 2)
        fed = batch(backend, dtype, x, g)
        decay = min(1.0 - 1.0 / k, 0.95)
        statistics = learn(
            made,
            fed,
            made.initial(fed.inputs) if statistics is None else statistics,
            decay=decay,
            weight=1.0 - decay,
        )
        seen.append(reference.kronecker_factors(x, g[None], bias=True))
        if k == 20:
            at_20 = values(backend, statistics, debias=False)
    at_21 = values(backend, statistics, debias=False)

    mean_20 = [np.mean([s[i] for s in seen[:20]], axis=0) for i in range(3)]
    mean_21 = np.mean([s[0] for s in seen], axis=0)
    assert_same(at_20, mean_20, dtype)
    assert_differs(at_21[0], mean_21)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_a_shard_of_padding_counts_its_examples(backend, dtype, rng, sharing):
    """C1 holds where a shard is masked throughout: its examples are part of the N."""
    made, (x, g) = block(sharing=sharing), data(rng)
    mask = np.ones((N, S), bool)
    mask[8:] = False
    shards = [
        kc.batch_moments(
            made, batch(backend, dtype, x[r], g[r], mask[r]), conventions=SUM
        )
        for r in (slice(0, 8), slice(8, N))
    ]

    merged = shards[0].merged(shards[1])

    expected = reference.kronecker_factors(
        x, g[None], bias=True, mask=mask, sharing=sharing
    )
    assert_same(values(backend, merged), expected, dtype)


@pytest.mark.parametrize("kind", [np.float64, np.float32, float])
def test_the_dtype_of_coefficients_changes_no_dtype(backend, dtype, rng, kind):
    """Decay and weight as NumPy scalars leave statistics in their own dtype."""
    made, fed = block(), batch(backend, dtype, *data(rng))
    options = {"decay": kind(0.5), "weight": kind(1.0)}
    moments = kc.batch_moments(made, fed, conventions=SUM)

    updated = kc.update_block(
        made,
        made.initial(fed.inputs),
        fed,
        kc.UpdateOptions(conventions=SUM, **options),
    )
    absorbed = kc.absorb_block(
        made, made.initial(fed.inputs), moments, *options.values()
    )

    for statistics in (updated, absorbed):
        assert statistics.averages["input"].sum.array.dtype == backend.dtype(dtype)
        assert statistics.averages["output"].weight.dtype == backend.dtype(dtype)


def test_the_order_of_micro_batches_does_not_matter(backend, dtype, rng):
    """C8: merging in any order gives the same, to roundoff."""
    made = block()
    parts = [
        kc.batch_moments(made, batch(backend, dtype, *data(rng, n)), conventions=SUM)
        for n in (1, 7, 3, 5)
    ]

    forward = parts[0].merged(parts[1]).merged(parts[2]).merged(parts[3])
    paired = parts[3].merged(parts[1]).merged(parts[2].merged(parts[0]))

    assert_same(values(backend, paired), values(backend, forward), dtype)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("debias", [True, False])
def test_a_batch_of_padding_adds_nothing(backend, dtype, rng, sharing, debias):
    """A batch that is masked throughout leaves averages as they were, with decay 1."""
    made, (x, g) = block(sharing=sharing), data(rng)
    start = learn(
        made,
        batch(backend, dtype, x, g),
        made.initial(backend.asarray(x, dtype)),
        decay=1.0,
    )
    padding = batch(backend, dtype, x * np.nan, g * np.nan, np.zeros((N, S), bool))

    once = learn(made, padding, start, decay=1.0)
    decayed = learn(made, padding, start, decay=0.5)

    expected = values(backend, start, debias=debias)
    assert_same(values(backend, once, debias=debias), expected, dtype)
    assert_same(values(backend, decayed), values(backend, start), dtype)


def test_burn_in_is_a_plain_mean(backend, dtype, rng):
    """The first updates weigh alike; after them the decay is that of the estimator."""
    estimator = kc.Estimator(
        {"fc": block()},
        decay=0.5,
        damping=0.1,
        damping_rule="factored",
        reduction="sum",
        averaging=kc.Averaging(weight=0.5, burn_in=3),
    )
    seen = []

    for _ in range(4):
        x, g = data(rng)
        estimator.update({"fc": batch(backend, dtype, x, g)})
        seen.append(reference.kronecker_factors(x, g[None], bias=True)[0])
        if len(seen) == 3:
            at_3 = values(backend, estimator.state["fc"].statistics)[0]
    at_4 = values(backend, estimator.state["fc"].statistics)[0]

    assert_close(at_3, sum(seen[:3]) / 3, "gram", dtype)
    assert_close(at_4, (0.5 * sum(seen[:3]) + 0.5 * seen[3]) / 2.0, "gram", dtype)
