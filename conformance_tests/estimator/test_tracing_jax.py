"""The pure functions inside JAX's transforms: same numbers, flags for exceptions."""

from __future__ import annotations

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.array import namespaces
from kfac_core.array.structure import leaves, replaced

from ..builders.layers import dense_layer
from ..builders.tolerances import assert_close

N, n, m = 12, 4, 3
BLOCK = kc.Block(dense_layer(n, m), kc.Kronecker())
SUMMED = kc.Conventions(reduction="sum", sources="sum")
EVERYTHING = ("inverse", "cholesky", "eigenbasis")
RULES = ["factored", "exact"]


@pytest.fixture
def arrays(jax, rng):
    """Inputs, output gradients and a vector."""
    shapes = (N, n), (N, m), (n + 1, m)
    return tuple(jax.numpy.asarray(rng.normal(size=shape)) for shape in shapes)


def updated(statistics, x, g, decay=0.9, weight=1.0):
    """Return the statistics after one update that looks at no value."""
    return kc.update_block(
        BLOCK,
        statistics,
        kc.Batch(x, g),
        kc.UpdateOptions(
            conventions=SUMMED, decay=decay, weight=weight, check="status"
        ),
    )


def operator(statistics, damping, rule, factorizations=EVERYTHING):
    """Return the operator, made without looking at a value."""
    return kc.operator_of(
        BLOCK,
        statistics,
        kc.RefreshOptions(
            damping=damping, rule=rule, factorizations=factorizations, check="status"
        ),
    )


def preconditioned(statistics, x, g, V, damping, decay, rule):
    """Return new statistics, the preconditioned vector and all flags."""
    statistics = updated(statistics, x, g, decay)
    op = operator(statistics, damping, rule, ("inverse",))
    return statistics, op.multiply_inverse(V), statistics.status | op.status()


def host(structure):
    """Return the arrays of a structure on the host, by path."""
    return {path: np.array(x) for path, x in leaves(structure)}


def assert_same_sums(got, expected):
    """Compare all sums and weights of two statistics, bit by bit."""
    got, expected = host(got.averages), host(expected.averages)
    assert got.keys() == expected.keys()
    for path, x in expected.items():
        np.testing.assert_array_equal(got[path], x, err_msg=path)


def test_moments_merge_and_absorb_under_jit(jax, arrays):
    """Micro-batches merged and absorbed inside ``jax.jit`` are the whole batch."""
    x, g, _ = arrays
    start = updated(BLOCK.initial(x), g @ np.ones((m, n)), g)

    @jax.jit
    def in_parts(start, x, g, decay):
        parts = [
            kc.batch_moments(
                BLOCK, kc.Batch(x[s], g[s]), conventions=SUMMED, check="status"
            )
            for s in (slice(0, 5), slice(5, None))
        ]
        return kc.absorb_block(BLOCK, start, parts[0].merged(parts[1]), decay)

    got = in_parts(start, x, g, 0.7)

    whole = kc.update_block(
        BLOCK, start, kc.Batch(x, g), kc.UpdateOptions(conventions=SUMMED, decay=0.7)
    )
    for path, expected in host(whole.averages).items():
        actual = host(got.averages)[path]
        if actual.ndim == 2:  # one triangle is what is promised
            actual, expected = np.tril(actual), np.tril(expected)
        assert_close(actual, expected, "gram", "float64")


@pytest.mark.parametrize("rule", RULES)
def test_vmap_flags_only_the_bad_batch(jax, arrays, rule):
    """Under ``jax.vmap`` a bad batch is flagged and the ones beside it are right."""
    x, g, V = arrays
    start = updated(BLOCK.initial(x), x, g)
    xs = jax.numpy.stack([x, x.at[0, 0].set(np.nan)])

    def step(x):
        return preconditioned(start, x, g, V, 0.1, 0.9, rule)[1:]

    got, flags = jax.vmap(step)(xs)

    expected, _ = step(x)
    assert flags.tolist() == [kc.Status.OK, kc.Status.INPUTS_NOT_FINITE]
    assert_close(got[0], expected, "inverse", "float64")


BAD_UPDATES = {
    # name: (x[0, 0], g[0, 0], decay, weight, flag)
    "inputs_nan": (np.nan, 0.0, 0.9, 1.0, kc.Status.INPUTS_NOT_FINITE),
    "inputs_inf": (np.inf, 0.0, 0.9, 1.0, kc.Status.INPUTS_NOT_FINITE),
    "output_grads_nan": (0.0, np.nan, 0.9, 1.0, kc.Status.OUTPUT_GRADS_NOT_FINITE),
    "decay_negative": (0.0, 0.0, -0.1, 1.0, kc.Status.BAD_DECAY),
    "decay_above_one": (0.0, 0.0, 1.9, 1.0, kc.Status.BAD_DECAY),
    "decay_nan": (0.0, 0.0, np.nan, 1.0, kc.Status.BAD_DECAY),
    "weight_zero": (0.0, 0.0, 0.9, 0.0, kc.Status.BAD_DECAY),
    "weight_infinite": (0.0, 0.0, 0.9, np.inf, kc.Status.BAD_DECAY),
}


@pytest.mark.parametrize("case", BAD_UPDATES)
def test_a_traced_bad_update_is_a_flag_and_changes_nothing(jax, arrays, case):
    """Where a traced update is given something bad, it says so and keeps the sums."""
    x, g, _ = arrays
    bad_x, bad_g, decay, weight, flag = BAD_UPDATES[case]
    start = updated(BLOCK.initial(x), x, g)

    got = jax.jit(updated)(
        start, x.at[0, 0].set(bad_x), g.at[0, 0].set(bad_g), decay, weight
    )

    assert int(got.status) == flag
    assert_same_sums(got, start)


def test_bad_moments_are_absorbed_as_nothing(jax, arrays):
    """Moments of a batch that is not finite leave running statistics as they were."""
    x, g, _ = arrays
    start = updated(BLOCK.initial(x), x, g)

    @jax.jit
    def absorb(start, x):
        part = kc.batch_moments(
            BLOCK, kc.Batch(x, g), conventions=SUMMED, check="status"
        )
        return kc.absorb_block(BLOCK, start, part, 0.5)

    got = absorb(start, x.at[0, 0].set(np.nan))

    assert int(got.status) == kc.Status.INPUTS_NOT_FINITE
    assert_same_sums(got, start)


@pytest.mark.parametrize("rule", RULES)
def test_a_traced_bad_damping_is_a_flag(jax, arrays, rule):
    """A negative or non-finite traced damping sets its flag; a good one sets none."""
    x, g, V = arrays
    start = BLOCK.initial(x)
    step = jax.jit(lambda damping: preconditioned(start, x, g, V, damping, 0.9, rule))

    flags = {damping: int(step(damping)[2]) for damping in (-0.1, np.inf, 0.1)}
    flags["nan"] = int(step(np.nan)[2])

    bad = int(kc.Status.BAD_DAMPING)
    assert {damping: flag & bad for damping, flag in flags.items()} == {
        -0.1: bad,
        np.inf: bad,
        "nan": bad,
        0.1: 0,
    }


@pytest.mark.parametrize("rule", RULES)
def test_nan_in_statistics_is_a_flag(jax, arrays, rule):
    """NaN in statistics is reported by the operator's status, and no answer is finite."""
    x, g, V = arrays
    statistics = updated(BLOCK.initial(x), x, g)

    @jax.jit
    def compute(statistics):
        op = operator(statistics, 0.1, rule, ("inverse",))
        return op.multiply_inverse(V), op.status()

    for side in ("input", "output"):
        average = statistics.averages[side]
        poisoned = replaced(
            average, sum=replaced(average.sum, array=average.sum.array * np.nan)
        )
        averages = {**statistics.averages, side: poisoned}
        u, flags = compute(kc.Statistics(averages, statistics.status))

        assert kc.Status.MATRIX_NOT_FINITE in kc.Status(int(flags)), side
        assert not np.any(np.isfinite(u)), side


def test_a_tracer_is_asked_once_where_it_lies(jax, arrays, monkeypatch):
    """A tracer does not know, and searches all of its program before it says so."""
    asked = []
    device = namespaces.array_api_compat.device

    def counted(x):
        asked.append(type(x))
        return device(x)

    monkeypatch.setattr(namespaces.array_api_compat, "device", counted)
    x, g, _ = arrays

    jax.make_jaxpr(lambda s: operator(updated(s, x, g), 0.1, "factored"))(
        BLOCK.initial(x)
    )

    tracers = [kind for kind in asked if issubclass(kind, jax.core.Tracer)]
    assert len(tracers) == len(set(tracers))
    for array in arrays:  # the row that must differ: arrays know their devices
        assert namespaces.device_of(array) is not None
