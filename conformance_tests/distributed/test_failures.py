"""What fails on one rank is a named error on every rank, and changes nothing."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import kfac_core as kc
from conformance_tests.builders.shards import dense
from kfac_core.distributed.transport import unpack

BLOCKS = {
    "one": kc.Block(dense(3, 2), kc.Kronecker()),
    "two": kc.Block(dense(2, 3), kc.Kronecker()),
}


def estimator_of(communicator, /, *, blocks=None, holders=1, **options):
    execution = kc.distributed.Distributed(communicator=communicator, holders=holders)
    settings = {"reduction": "sum", "damping": 0.1} | options
    return kc.Estimator(blocks or BLOCKS, execution=execution, **settings)


def fed(rng, N=4):
    return {
        name: kc.Batch(
            rng.normal(size=(N, block.layer.in_features + 0)),
            rng.normal(size=(N, block.layer.out_features)),
        )
        for name, block in BLOCKS.items()
    }


def ones():
    return {
        name: {k: np.ones(s) for k, s in block.layer.parameter_shapes.items()}
        for name, block in BLOCKS.items()
    }


def caught(size, function, timeout=60.0):
    """Return what each rank raised, or returned."""

    def run(communicator):
        try:
            return function(communicator)
        except Exception as error:
            return error

    return kc.distributed.run_ranks(size, run, timeout=timeout)


def test_rows_that_are_not_finite_on_one_rank():
    """Every rank raises the error of the rank, and keeps its statistics."""
    kept = []

    def run(communicator):
        rng = np.random.default_rng(communicator.rank)
        estimator = estimator_of(communicator)
        estimator.update(fed(rng))
        estimator.refresh()
        before = estimator.state
        batches = fed(rng)
        if communicator.rank == 2:
            batches["two"].inputs[1, 0] = np.nan
        try:
            estimator.update(batches)
        finally:
            kept.append(estimator.state is before)

    found = caught(3, run)

    assert kept == [True] * 3
    for error in found:
        assert isinstance(error, kc.NotFiniteError)
        assert "Rank 2: Block 'two': `inputs`" in str(error)


def test_flags_of_one_rank_are_those_of_all():
    """Without raising, every rank keeps its statistics and has the flags."""

    def run(communicator):
        rng = np.random.default_rng(communicator.rank)
        estimator = estimator_of(communicator)
        estimator.update(fed(rng))
        before = estimator.state["two"].statistics.averages["input"].sum.array
        batches = fed(rng)
        if communicator.rank == 1:
            batches["two"].inputs[1, 0] = np.inf
        estimator.update(batches, check="status")
        after = estimator.state["two"]
        same = np.array_equal(after.statistics.averages["input"].sum.array, before)
        return int(after.status), same

    assert kc.distributed.run_ranks(2, run) == [(1, True)] * 2


MISTAKES = {
    "a wrong shape": (
        lambda fed: (
            fed | {"one": kc.array.replaced(fed["one"], inputs=np.ones((4, 7)))}
        ),
        kc.ShapeError,
        "Block 'one'",
    ),
    "an unknown block": (
        lambda fed: fed | {"q": fed["one"]},
        kc.UnknownBlockError,
        "'q'",
    ),
    "no batch": (lambda fed: fed | {"two": 3}, kc.ArgumentError, "Block 'two'"),
    "no mapping": (lambda fed: [*fed], kc.ArgumentError, "`batches`"),
    "nothing": (lambda fed: {}, kc.NotReadyError, "`like`"),
}


@pytest.mark.parametrize("loss", ["shard", "batch"])
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_batches_that_are_wrong_on_one_rank(mistake, before, loss):
    """The others raise what this rank does, before it begins or while it reads its rows."""
    given, error, text = MISTAKES[mistake]
    if before and mistake == "nothing":
        given, text = lambda fed: {"one": fed["two"]}, "Block 'one'"
        error = kc.ShapeError

    def run(communicator):
        execution = kc.distributed.Distributed(communicator=communicator, loss=loss)
        estimator = kc.Estimator(
            BLOCKS, reduction="mean", damping=0.1, execution=execution
        )
        for _ in range(before):
            estimator.update(fed(np.random.default_rng(1)))
        state = estimator.state
        batches = fed(np.random.default_rng(0))
        if communicator.rank == 1:
            batches = given(batches)
        try:
            estimator.update(batches)
        except kc.KFACError as found:
            assert estimator.state is state
            estimator.update(fed(np.random.default_rng(2)))
            return found
        return None

    found = kc.distributed.run_ranks(2, run, timeout=60.0)

    assert [type(raised) for raised in found] == [error] * 2
    assert str(found[0]).startswith("Rank 1: ")
    assert text in str(found[0])
    assert text in str(found[1])


@pytest.mark.parametrize("holders", [1, 2])
def test_vectors_that_are_wrong_on_one_rank(holders):
    """The others raise too, unless all ranks hold all blocks and exchange nothing."""

    def run(communicator):
        estimator = estimator_of(communicator, holders=holders)
        estimator.update(fed(np.random.default_rng(0)))
        estimator.refresh()
        vectors = ones()
        if communicator.rank == 1:
            vectors["q"] = vectors["one"]
        try:
            return estimator.precondition(vectors)
        except kc.UnknownBlockError as error:
            estimator.precondition(ones())
            return str(error)

    first, second = kc.distributed.run_ranks(2, run, timeout=60.0)

    assert "'q'" in second
    assert "Rank 1: " in first if holders == 1 else sorted(first) == ["one", "two"]


@pytest.mark.parametrize("holders", [1, 3])
def test_a_factorization_that_fails_on_its_owner(holders):
    """Every rank raises, or counts a failure and keeps its operators."""

    def run(communicator):
        rng = np.random.default_rng(0)
        refreshing = kc.Refreshing(failure_budget=1)
        estimator = estimator_of(communicator, holders=holders, refreshing=refreshing)
        estimator.update(fed(rng))
        estimator.refresh()
        operators = [estimator.state[name].operator for name in BLOCKS]
        # Of one example: no factor of more rows has an inverse without damping.
        estimator.decay = 0.0
        estimator.update(fed(rng, N=1) if communicator.rank == 0 else {})
        estimator.damping = 0.0
        estimator.refresh()
        counted = [estimator.state[name].failures for name in BLOCKS]
        kept = [estimator.state[name].operator for name in BLOCKS]
        assert all(a is b for a, b in zip(kept, operators, strict=True))
        assert counted == [1, 1]
        estimator.refresh()

    for error in caught(3, run):
        assert isinstance(error, kc.FactorizationError)
        assert "one" in str(error)


def test_a_rank_is_named_as_all_know_it():
    """Also by those that wait in a group, where it has another number."""

    def run(communicator):
        half = communicator.split([[0, 1], [2, 3]])
        if communicator.rank == 3:
            raise KeyError("in the data")
        if communicator.rank == 2:
            half.all_reduce(np.ones(1)).wait()

    found = caught(4, run)

    assert isinstance(found[2], kc.errors.CommunicationError)
    assert "Rank 3 ended before all_reduce, for which rank 2 waits" in str(found[2])


def test_ranks_with_different_options_or_steps_raise():
    """Before anything is exchanged, and where their calls differ."""
    other = {**BLOCKS, "two": kc.Block(dense(2, 3), kc.TNT())}

    networks = caught(2, lambda c: estimator_of(c, blocks=other if c.rank else BLOCKS))
    holders = caught(2, lambda c: estimator_of(c, holders=1 + c.rank))
    decays = caught(2, lambda c: _decayed(c))
    orders = caught(2, lambda c: _out_of_order(c))

    for errors, what in ((networks, "the network"), (holders, "`holders`")):
        for error in errors:
            assert isinstance(error, kc.errors.ReplicaError)
            assert f"Rank 1 differs from rank 0 in {what}" in str(error)
    for error in decays:
        assert isinstance(error, kc.errors.ReplicaError)
        assert "rank 1 at 'update with [0.75, 1.0]'" in str(error)
    for error in orders:
        assert isinstance(error, (kc.errors.ReplicaError, kc.errors.CommunicationError))


def test_parameters_that_differ_between_ranks_raise():
    """By name and rank; what is equal passes."""

    def run(communicator, by):
        rng = np.random.default_rng(communicator.rank)
        estimator = estimator_of(communicator, holders=2)
        estimator.update(fed(rng))
        estimator.refresh()
        moved = np.ones(3) + (by if communicator.rank == 3 else 0.0)
        estimator.check_replicas(weights={"fc": np.zeros(2)}, biases=moved)
        return True

    assert kc.distributed.run_ranks(4, lambda c: run(c, 0.0)) == [True] * 4
    for error in caught(4, lambda c: run(c, 1e-16 + 1e-15)):
        assert isinstance(error, kc.errors.ReplicaError)
        assert "Rank 3 differs from rank 0 in biases" in str(error)


def test_an_operator_that_differs_between_ranks_raises():
    """By block and rank, to the last bit; in float64 one unit of it on one rank."""

    def run(communicator):
        execution = kc.distributed.Distributed(communicator=communicator, holders=3)
        settings = {"reduction": "sum", "damping": 0.1, "execution": execution}
        estimator = kc.Estimator(BLOCKS, **settings)
        estimator.update(fed(np.random.default_rng(communicator.rank)))
        estimator.refresh()
        estimator.check_replicas()
        state = estimator.state
        if communicator.rank == 2:
            held = state["two"]
            moved = kc.array.map_structure(_nudged, held.operator)
            blocks = {**state.blocks, "two": kc.array.replaced(held, operator=moved)}
            estimator.state = kc.NetworkState(blocks, state.share)
        estimator.check_replicas()

    for error in caught(3, run):
        assert isinstance(error, kc.errors.ReplicaError)
        assert "Rank 2 differs from rank 0 in two: operator" in str(error)


def test_a_module_that_another_rank_names_is_not_imported():
    """Only classes that are structures of arrays here are made from a message."""
    before = set(sys.modules)

    with pytest.raises(kc.errors.CommunicationError, match="antigravity:fly"):
        unpack({"class": "antigravity:fly", "fields": {}}, {})

    assert "antigravity" not in set(sys.modules) - before


def _nudged(x):
    return np.nextafter(x, np.inf) if x.dtype == np.float64 else x


def test_a_saved_state_of_other_blocks_is_refused_on_every_rank():
    """And the estimators are unchanged."""

    def run(communicator):
        estimator = estimator_of(communicator)
        estimator.update(fed(np.random.default_rng(0)))
        saved = estimator.state_dict()
        del saved["blocks"]["two"]
        estimator.load_state_dict(saved)

    assert [type(e) for e in caught(2, run)] == [kc.StateError, kc.StateError]


def test_a_failure_leaves_directions_as_they_were():
    """After an error the ranks go on together."""

    def run(communicator):
        rng = np.random.default_rng(communicator.rank)
        estimator = estimator_of(communicator)
        estimator.update(fed(rng))
        estimator.refresh()
        before = estimator.precondition(ones())
        batches = fed(rng)
        batches["one"].inputs[0, 0] = np.nan if communicator.rank else 1.0
        with pytest.raises(kc.NotFiniteError):
            estimator.update(batches)
        after = estimator.precondition(ones())
        return all(
            np.array_equal(after[name][key], x)
            for name, own in before.items()
            for key, x in own.items()
        )

    assert kc.distributed.run_ranks(2, run) == [True, True]


def _decayed(communicator):
    estimator = estimator_of(communicator, decay=0.5 + 0.25 * communicator.rank)
    estimator.update(fed(np.random.default_rng(0)))


def _out_of_order(communicator):
    estimator = estimator_of(communicator)
    estimator.update(fed(np.random.default_rng(0)))
    if communicator.rank:
        estimator.refresh()
    else:
        estimator.update(fed(np.random.default_rng(0)))


def test_a_part_of_a_state_is_refused_where_all_rows_are_meant():
    """And the state of all rows where each rank would count it again."""

    def part(communicator):
        estimator = estimator_of(communicator)
        estimator.update(fed(np.random.default_rng(communicator.rank)))
        return estimator.state

    alone = kc.Estimator(BLOCKS, reduction="sum", damping=0.1)
    batches = fed(np.random.default_rng(0))
    for state in kc.distributed.run_ranks(2, part):
        alone.state = state
        calls = (
            lambda: alone.update(batches),
            alone.refresh,
            alone.state_dict,
            lambda: alone.absorb({}),
        )
        for call in calls:
            with pytest.raises(kc.StateError, match=r"rank . of 2 .* all rows"):
                call()
        assert alone.state is state

    alone = kc.Estimator(BLOCKS, reduction="sum", damping=0.1)
    alone.update(batches)

    def whole(communicator):
        estimator = estimator_of(communicator)
        estimator.state = alone.state
        estimator.update(batches)

    for rank, error in enumerate(caught(2, whole)):
        assert isinstance(error, kc.StateError)
        assert f"to all rows, and the call to rank {rank} of 2" in str(error)
