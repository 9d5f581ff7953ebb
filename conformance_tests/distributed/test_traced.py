"""Statistics added up inside a program: on virtual ranks, and under JAX's mapped axes."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import kfac_core as kc
from conformance_tests.builders.shards import dense, every_block, schedule_of, shard
from conformance_tests.builders.tolerances import assert_close
from kfac_core.distributed import SummedOver, run_ranks

SUMMED = kc.Conventions(reduction="sum", sources="sum")


def sums_of(state):
    return {
        f"{name}/{side}": np.asarray(average.value(debias=True).full())
        for name, held in state.blocks.items()
        for side, average in held.statistics.averages.items()
        if hasattr(average.value(debias=True), "full")
    }


def test_every_rank_has_the_statistics_of_all_rows():
    """Ragged masks and a rank without rows that count."""
    kept = "expand", "reduced", "tnt", "tnt independent", "eigen", "full"
    blocks = {name: every_block()[name] for name in kept}
    network = kc.Network(blocks, conventions=SUMMED)
    rng = np.random.default_rng(0)
    schedule = schedule_of(rng, blocks, 3, steps=3)

    def fed(batches, start, stop):
        """Return some of five examples, of which the last is masked as a whole."""
        made = {}
        for name, values in batches.items():
            padded = {k: np.concatenate([v[:4], v[:1]]) for k, v in values.items()}
            padded["mask"] = padded["mask"] & (np.arange(5) < 4)[:, None]
            made[name] = shard(_NumPy, padded, start, stop)
        return made

    alone = network.empty()
    for batches in schedule.batches:
        alone = network.update(alone, fed(batches, 0, 5), decay=0.9)

    def run(communicator):
        def psum(x):
            flat = np.reshape(x, (-1,))
            return np.reshape(communicator.all_reduce(flat).wait(), np.shape(x))

        state = network.empty()
        start, stop = [0, 1, 4, 5][communicator.rank :][:2]
        for batches in schedule.batches:
            state = network.update(
                state,
                fed(batches, start, stop),
                decay=0.9,
                check="status",
                executor=SummedOver(psum),
            )
        return sums_of(state)

    for found in run_ranks(3, run):
        for key, expected in sums_of(alone).items():
            assert_close(found[key], expected, "gram", "float64")


def test_flags_of_one_rank_are_those_of_all():
    """Every rank keeps its statistics."""
    network = kc.Network(
        {"fc": kc.Block(dense(3, 2), kc.Kronecker())}, conventions=SUMMED
    )

    def run(communicator):
        def psum(x):
            flat = np.reshape(x, (-1,))
            return np.reshape(communicator.all_reduce(flat).wait(), np.shape(x))

        x = np.ones((2, 3))
        x[0, 0] = np.nan if communicator.rank == 1 else 1.0
        state = network.update(
            network.empty(),
            {"fc": kc.Batch(x, np.ones((2, 2)))},
            decay=0.9,
            check="status",
            executor=SummedOver(psum),
        )
        averages = state["fc"].statistics.averages
        return int(state["fc"].status), float(averages["input"].weight)

    assert run_ranks(2, run) == [(1, 0.0)] * 2


def test_windows_are_refused_inside_a_program():
    """What is merged and not added up, by name."""
    network = kc.Network(
        {"fc": kc.Block(dense(3, 2), kc.ExampleGram(gradients=3))}, conventions=SUMMED
    )
    batch = kc.Batch(np.ones((2, 3)), np.ones((2, 2)))

    with pytest.raises(kc.UnsupportedError, match=r"'fc'.*only sums"):
        network.update(
            network.empty(), {"fc": batch}, decay=0.9, executor=SummedOver(lambda x: x)
        )


def test_under_a_mapped_axis_of_jax(backend, requires_backend):
    """A program that is compiled and mapped over shards, which may be masked."""
    requires_backend("jax")
    if backend.name != "jax":
        pytest.skip("a test of jax alone")
    import jax

    network = kc.Network(
        {"fc": kc.Block(dense(3, 2), kc.Kronecker())}, conventions=SUMMED
    )
    rng = np.random.default_rng(0)
    x, g = rng.normal(size=(2, 4, 1, 3)), rng.normal(size=(2, 4, 1, 2))
    mask = np.asarray([[1, 1, 1, 1], [1, 0, 0, 0]], bool)[..., None]
    state = network.initial(backend.asarray(x[0, 0]), damping=0.1)
    psum = functools.partial(jax.lax.psum, axis_name="shards")

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, 0), axis_name="shards")
    def step(state, batch):
        return network.update(
            state,
            {"fc": batch},
            decay=0.9,
            check="status",
            executor=SummedOver(psum),
        )

    put = backend.asarray
    batch = kc.Batch(put(x), put(g), mask=put(mask))
    found = step(state, batch)["fc"].statistics.averages["input"].sum.array

    kept = x[mask]
    rows = np.concatenate([kept, np.ones((5, 1))], axis=1)
    for of_shard in backend.to_numpy(found):
        assert_close(np.tril(of_shard), np.tril(rows.T @ rows / 5), "gram", "float64")


class _NumPy:
    asarray = staticmethod(np.asarray)
