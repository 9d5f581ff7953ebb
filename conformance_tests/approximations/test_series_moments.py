"""The statistics of the series: lag 0 and lag 1, updated together."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.approximations.series import Series
from kfac_core.errors import ShapeError

from ..builders.one_block import SUM, learn, operator_for
from ..builders.series_reference import moments
from ..builders.tolerances import assert_close

N, T, n, m, M = 6, 5, 3, 2, 2
NAMES = {"A0": "input", "G0": "output", "A1": "lagged_input", "G1": "lagged_output"}


def block_of(variant="symmetric", *, bias=True, steps=T):
    layer = kc.Dense(in_features=n, out_features=m, bias=bias, weight_layout="io")
    return kc.Block(layer, Series(variant=variant, **options(variant, steps)))


def options(variant, steps):
    return {"steps": steps} if variant == "symmetric" else {}


def batch_of(backend, x, g, dtype, mask=None):
    mask = None if mask is None else backend.asarray(mask)
    x, g = backend.asarray(x, dtype), backend.asarray(g, dtype)
    return kc.Batch(x, g, mask, sources=g.shape[0])


def value_of(backend, statistics, name):
    value = statistics.averages[name].value(debias=True)
    return backend.to_numpy(value.full() if hasattr(value, "full") else value)


def assert_moments(backend, statistics, expected, dtype):
    for short, name in NAMES.items():
        got = value_of(backend, statistics, name)
        assert_close(got, expected[short], "gram", dtype)
    got = value_of(backend, statistics, "repeats")
    assert_close(got, expected["S"], "roundoff", dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_moments_are_the_loops_over_steps(backend, dtype, rng, bias, masked):
    """With sources, a bias column and a mask with gaps; lag 1 is not symmetrized."""
    x, g = rng.normal(size=(N, T, n)), rng.normal(size=(M, N, T, m))
    mask = rng.random((N, T)) < 0.7 if masked else None
    block = block_of("infinite", bias=bias)
    batch = batch_of(backend, x, g, dtype, mask)

    start = block.initial(batch.inputs)
    statistics = learn(block, batch, start, decay=0.9)

    assert_moments(backend, statistics, moments(x, g, bias=bias, mask=mask), dtype)


def test_lengths_are_a_histogram_of_a_prefix_mask(backend):
    """Kept first parts of 0, 1, 3, 3 and 5 steps."""
    mask = np.arange(T) < np.array([0, 1, 3, 3, 5])[:, None]
    x, g = np.ones((5, T, n)), np.ones((1, 5, T, m))

    statistics = kc.batch_moments(
        block_of(steps=7), batch_of(backend, x, g, "float64", mask), conventions=SUM
    )

    got = value_of(backend, statistics, "lengths")
    assert_close(got, [0.2, 0, 0.4, 0, 0.2, 0, 0], "roundoff", "float64")


def test_lengths_count_pairs_of_a_mask_with_gaps(backend, rng):
    """Whatever the mask keeps, the shares give the mean number of pairs of each lag."""
    mask = rng.random((N, T)) < 0.6
    x, g = np.ones((N, T, n)), np.ones((1, N, T, m))

    statistics = kc.batch_moments(
        block_of(), batch_of(backend, x, g, "float64", mask), conventions=SUM
    )

    p = value_of(backend, statistics, "lengths")
    for d in range(T):
        pairs = np.mean(np.sum(mask[:, d:] & mask[:, : T - d], axis=1))
        got = sum(p[k - 1] * max(k - d, 0) for k in range(1, T + 1))
        assert got == pytest.approx(pairs, abs=1e-12)


@pytest.mark.parametrize("variant", ["symmetric", "infinite"])
def test_a_batch_without_a_kept_row_adds_nothing(backend, rng, variant):
    """Neither to a sum nor to a weight."""
    x, g = rng.normal(size=(N, T, n)), rng.normal(size=(M, N, T, m))
    block = block_of(variant)
    before = kc.batch_moments(
        block, batch_of(backend, x, g, "float64"), conventions=SUM
    )
    nothing = batch_of(backend, x, g, "float64", np.zeros((N, T), bool))

    after = learn(block, nothing, before, decay=1.0)

    for name, average in before.averages.items():
        assert float(after.averages[name].weight) == float(average.weight)
        expected = value_of(backend, before, name)
        assert_close(value_of(backend, after, name), expected, "roundoff", "float64")


def test_three_axes_are_read_batch_first_defect_tfkfac_9_9(backend, rng):
    """Inputs (N, T, n) have factors of n(+1) rows; TensorFlow's K-FAC took T for n."""
    x, g = rng.normal(size=(N, T, n)), rng.normal(size=(1, N, T, m))
    block = block_of()
    statistics = kc.batch_moments(
        block, batch_of(backend, x, g, "float64"), conventions=SUM
    )

    operator = operator_for(block, statistics, damping=0.1)

    assert operator.vector_shape == (n + 1, m)
    V = backend.asarray(rng.normal(size=(n + 1, m)))
    assert tuple(operator.multiply_inverse(V).shape) == (n + 1, m)


def test_two_shared_axes_are_refused(backend):
    """Which of them is time, nobody knows; the independent variant need not."""
    layer = kc.Dense(in_features=n, out_features=m, bias=True, weight_layout="io")
    x, g = (
        backend.asarray(np.ones((N, 2, T, n))),
        backend.asarray(np.ones((N, 2, T, m))),
    )
    kc.batch_moments(
        kc.Block(layer, Series(variant="independent")), kc.Batch(x, g), conventions=SUM
    )

    with pytest.raises(ShapeError, match="one shared axis"):
        kc.batch_moments(
            kc.Block(layer, Series(variant="infinite")), kc.Batch(x, g), conventions=SUM
        )
