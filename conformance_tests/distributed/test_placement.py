"""Owners, holders, and what is sent: against brute force and against counts."""

from __future__ import annotations

import importlib
import itertools
import tomllib
from pathlib import Path

import numpy as np
import pytest

import kfac_core as kc
from conformance_tests.builders.shards import dense
from kfac_core.distributed import BlockLoad, Distributed, place, run_ranks
from kfac_core.distributed.communicator import Traffic, communicator_names, connect

SHAPES = {"a": (6, 4), "b": (4, 9), "c": (9, 9), "d": (2, 3), "e": (3, 7)}
BLOCKS = {
    name: kc.Block(dense(n, m), kc.Kronecker()) for name, (n, m) in SHAPES.items()
}


def loads_of(flops):
    return {f"b{i}": BlockLoad(float(f), 10, 20, 5, 30) for i, f in enumerate(flops)}


@pytest.mark.parametrize("seed", range(5))
def test_the_busiest_rank_has_at_most_four_thirds_of_the_least(seed):
    """The bound of Graham for longest processing time first, against all placements."""
    flops = np.random.default_rng(seed).integers(1, 50, size=7)
    size = 3

    made = place(loads_of(flops), size)

    best = min(
        max(sum(flops[np.asarray(owners) == rank]) for rank in range(size))
        for owners in itertools.product(range(size), repeat=len(flops))
    )
    assert max(made.flops()) <= (4 / 3 - 1 / (3 * size)) * best
    assert sum(made.flops()) == sum(flops)
    assert made.imbalance() == max(made.flops()) / (sum(flops) / size)


def test_groups_and_rows_cover_all_ranks_once():
    """Each row has one holder of every block."""
    made = place(loads_of([5, 4, 3, 2, 1, 1]), 6, holders=2)

    assert made.groups == ((0, 1), (2, 3), (4, 5))
    assert made.rows == ((0, 2, 4), (1, 3, 5))
    for name, owner in made.owners.items():
        assert owner in made.groups[made.group_of(name)]


def test_blocks_without_room_are_named():
    """A block too large for any rank, and holders that do not divide the ranks."""
    loads = {**loads_of([1, 1]), "embedding": BlockLoad(9.0, 1000, 2000, 5, 3000)}

    with pytest.raises(kc.UnsupportedError, match=r"'embedding' needs room for 3,000"):
        place(loads, 4, memory=1500)
    with pytest.raises(kc.ConventionError, match=r"\[1, 2, 4\].*got 3"):
        place(loads, 4, holders=3)
    with pytest.raises(kc.ConventionError, match=r"holders.*got 3"):
        run_ranks(4, lambda c: Distributed(communicator=c, holders=3))


def test_blocks_that_share_a_factor_have_one_owner():
    """Its giver's statistics are where the taker's are."""
    made = place(loads_of([9, 8, 7, 1]), 3, together=[("b3", "b0"), ("b1", "b3")])

    assert len({made.owners[name] for name in ("b0", "b1", "b3")}) == 1
    assert made.owners["b2"] != made.owners["b0"]


@pytest.mark.parametrize("keep_matrices", [False, True])
@pytest.mark.parametrize(("size", "holders"), [(2, 1), (4, 2), (4, 4), (6, 3)])
def test_as_many_bytes_are_sent_as_predicted(size, holders, keep_matrices):
    """Statistics and directions exactly; operators but for their residuals and flags.

    Of operators that keep inverses alone half as many.
    """

    def run(communicator):
        rng = np.random.default_rng(communicator.rank)
        options = Distributed(communicator=communicator, holders=holders)
        refreshing = kc.Refreshing(keep_matrices=keep_matrices)
        estimator = kc.Estimator(
            BLOCKS, reduction="sum", execution=options, refreshing=refreshing
        )
        batches = {
            name: kc.Batch(rng.normal(size=(3, n)), rng.normal(size=(3, m)))
            for name, (n, m) in SHAPES.items()
        }
        estimator.update(batches)
        estimator.refresh()
        found = {}
        traffic = communicator.traffic
        traffic.reset()
        estimator.update(batches)
        found["update"] = dict(traffic.calls)
        traffic.reset()
        estimator.refresh()
        found["statistics"] = traffic.wire["reduce_scatter"] / 8
        found["operators"] = traffic.wire["all_gather"] / 8
        found["calls"] = traffic.calls["reduce_scatter"]
        traffic.reset()
        gradients = {
            name: {"weight": np.ones((n, m)), "bias": np.ones(m)}
            for name, (n, m) in SHAPES.items()
        }
        estimator.precondition(gradients)
        found["directions"] = traffic.wire["all_gather"] / 8
        return found, estimator.placement.numbers_sent()

    ran = run_ranks(size, run)
    predicted = ran[0][1]
    rows = size // holders

    for found, _ in ran:
        # One vector an update, one bucket a refresh.
        assert found["update"] == {**Traffic().calls, "all_reduce": 1}
        assert found["calls"] == 1
        assert found["statistics"] == pytest.approx(predicted["statistics"], rel=1e-12)
        # And one number a rank of the row, which says that nothing failed.
        flags = rows * (rows - 1) / rows if rows > 1 else 0
        assert found["directions"] == pytest.approx(
            predicted["directions"] + flags, rel=1e-12
        )
    mean = np.mean([found["operators"] for found, _ in ran])
    small = 30 * len(SHAPES)
    assert predicted["operators"] <= mean <= predicted["operators"] + small
    triangles = sum(
        (n + 1) * (n + 2) // 2 + m * (m + 1) // 2 for n, m in SHAPES.values()
    )
    sent = triangles * (2 if keep_matrices else 1) * (holders - 1) / rows / holders
    assert predicted["operators"] == pytest.approx(sent, rel=1e-12)


def test_rarer_refreshes_take_more_holders():
    """The choice: operators are sent at a refresh, directions at each step."""

    def holders(interval):
        return run_ranks(
            4,
            lambda c: (
                kc.Estimator(
                    BLOCKS,
                    reduction="sum",
                    execution=Distributed(communicator=c, interval=interval),
                ).placement.holders
            ),
        )

    assert holders(1) == [1] * 4
    assert holders(100) == [4] * 4


@pytest.mark.parametrize("sides", [[(24, 24)] * 3, [(16, 32), (32, 32), (32, 32)]])
@pytest.mark.parametrize("size", [2, 4, 6])
def test_by_default_a_tenth_of_the_bytes_of_averaging_are_sent(size, sides):
    """Beside kfac-pytorch: factors at every step, inverses every ten, as matrices.

    Square layers send the most: with owners that send directions it is more than a fifth.
    """
    blocks = {
        f"fc{i}": kc.Block(dense(n, m), kc.Kronecker())
        for i, (n, m) in enumerate(sides)
    }

    def run(communicator, holders):
        rng = np.random.default_rng(communicator.rank)
        options = Distributed(communicator=communicator, holders=holders)
        estimator = kc.Estimator(blocks, reduction="sum", execution=options)
        batches = {
            name: kc.Batch(rng.normal(size=(3, n)), rng.normal(size=(3, m)))
            for name, (n, m) in zip(blocks, sides, strict=True)
        }
        gradients = {
            name: {"weight": np.ones((n, m)), "bias": np.ones(m)}
            for name, (n, m) in zip(blocks, sides, strict=True)
        }
        estimator.update(batches)
        estimator.refresh()
        communicator.traffic.reset()
        for step in range(10):
            estimator.update(batches)
            if step == 0:
                estimator.refresh()
            estimator.precondition(gradients)
        # What all ranks agree on is of a few numbers a block, which are no factors.
        return communicator.traffic.total - communicator.traffic.wire["all_reduce"]

    squares = sum((n + 1) ** 2 + m**2 for n, m in sides)
    averaged = 8 * (size - 1) / size * squares * (2 * 10 + 1)
    chosen = np.mean(run_ranks(size, lambda c: run(c, "auto"))) / averaged
    owners = np.mean(run_ranks(size, lambda c: run(c, 1))) / averaged

    assert chosen <= 0.1
    assert owners > 0.2


def test_every_engine_is_complete():
    """Each module of the entry points; none needs its library to say what is wrong."""
    path = Path(__file__).parents[2] / "pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    engines = project["entry-points"]["kfac_core.communicators"]

    assert set(engines) == {"alone", "jax", "mpi", "torch"}
    for module in engines.values():
        adapter = importlib.import_module(module)
        assert callable(adapter.connect)
        assert adapter.problem() is None or isinstance(adapter.problem(), str)
        assert isinstance(adapter.versions(), dict)


def test_engines_are_registered_and_chosen_by_name(monkeypatch):
    """By argument or by the environment, and never in silence."""
    assert {"alone", "mpi", "torch"} <= set(communicator_names())
    assert connect("alone").size == 1
    monkeypatch.setenv("KFAC_CORE_COMMUNICATOR", "alone")
    assert connect().name == "alone"
    with pytest.raises(kc.UnknownBackendError, match=r"'nonsense'.*alone"):
        connect("nonsense")
    monkeypatch.delenv("KFAC_CORE_COMMUNICATOR")
    with pytest.raises(kc.UnknownBackendError, match="Unknown communicator None"):
        connect()
