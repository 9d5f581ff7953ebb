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
        state = network.empty()
        start, stop = [0, 1, 4, 5][communicator.rank :][:2]
        for batches in schedule.batches:
            state = network.update(
                state,
                fed(batches, start, stop),
                decay=0.9,
                check="status",
                executor=SummedOver(communicator),
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
        x = np.ones((2, 3))
        x[0, 0] = np.nan if communicator.rank == 1 else 1.0
        state = network.update(
            network.empty(),
            {"fc": kc.Batch(x, np.ones((2, 2)))},
            decay=0.9,
            check="status",
            executor=SummedOver(communicator),
        )
        averages = state["fc"].statistics.averages
        return int(state["fc"].status), float(averages["input"].weight)

    assert run_ranks(2, run) == [(1, 0.0)] * 2


def test_under_a_mapped_axis_of_jax(backend, requires_backend):
    """A program that is compiled and mapped over shards, which may be masked."""
    requires_backend("jax")
    if backend.name != "jax":
        pytest.skip("a test of jax alone")
    import jax

    from kfac_core_backends.jax_axes import AxisCommunicator

    network = kc.Network(
        {"fc": kc.Block(dense(3, 2), kc.Kronecker())}, conventions=SUMMED
    )
    rng = np.random.default_rng(0)
    x, g = rng.normal(size=(2, 4, 1, 3)), rng.normal(size=(2, 4, 1, 2))
    mask = np.asarray([[1, 1, 1, 1], [1, 0, 0, 0]], bool)[..., None]
    state = network.initial(backend.asarray(x[0, 0]), damping=0.1)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, 0), axis_name="shards")
    def step(state, batch):
        return network.update(
            state,
            {"fc": batch},
            decay=0.9,
            check="status",
            executor=SummedOver(AxisCommunicator("shards")),
        )

    put = backend.asarray
    batch = kc.Batch(put(x), put(g), mask=put(mask))
    found = step(state, batch)["fc"].statistics.averages["input"].sum.array

    kept = x[mask]
    rows = np.concatenate([kept, np.ones((5, 1))], axis=1)
    for of_shard in backend.to_numpy(found):
        assert_close(np.tril(of_shard), np.tril(rows.T @ rows / 5), "gram", "float64")


def test_exchanges_over_a_mapped_axis_of_jax(backend, requires_backend):
    """Every exchange against NumPy; what one program cannot do is refused by name."""
    requires_backend("jax")
    if backend.name != "jax":
        pytest.skip("a test of jax alone")
    import jax

    from kfac_core_backends import jax_axes

    x = np.arange(24.0).reshape(2, 3, 4)  # of two times three devices

    def exchanged(flat):
        c = jax_axes.connect(timeout=1.0)
        assert jax_axes.problem() is None
        assert c.size == 6
        one = [2] * 3
        rows = jax_axes.AxisCommunicator("column")
        handles = {
            "sum": c.all_reduce(flat),
            "part": rows.reduce_scatter(jax.numpy.tile(flat, 3), [4] * 3),
            "all": rows.all_gather(flat[:2], one),
            "each": rows.all_to_all(jax.numpy.tile(flat[:2], 3), one, one),
            "rank": rows.all_reduce(jax.numpy.reshape(rows.rank * 1.0, (1,))),
        }
        assert rows.traffic.calls["all_gather"] == 1
        for call in (
            lambda: rows.reduce_scatter(flat, [2, 1, 1]),
            lambda: rows.split([[0, 1], [2]]),
        ):
            with pytest.raises(kc.UnsupportedError, match=r"Pad them|mapped axis"):
                call()
        return {name: handle.wait() for name, handle in handles.items()}

    mapped = jax.vmap(jax.vmap(exchanged, axis_name="column"), axis_name="row")
    found = {
        name: backend.to_numpy(y) for name, y in mapped(backend.asarray(x)).items()
    }

    assert jax_axes.problem() is not None
    for i, j in np.ndindex(2, 3):
        expected = {
            "sum": x.sum(axis=(0, 1)),
            "part": x[i].sum(axis=0),
            "all": x[i, :, :2].reshape(-1),
            "each": x[i, :, :2].reshape(-1),
            "rank": np.asarray([3.0]),
        }
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name][i, j], value, err_msg=name)


class _NumPy:
    asarray = staticmethod(np.asarray)
