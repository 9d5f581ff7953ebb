"""What processes agree on: one small message a step, of one size at every stage."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import kfac_core as kc
from conformance_tests.builders.shards import dense, require_same
from kfac_core.distributed import Agreement, Distributed, run_ranks
from kfac_core.errors import (
    CommunicationError,
    DampingError,
    FactorizationError,
    NotFiniteError,
    ReplicaError,
)

BLOCKS = {
    "one": kc.Block(dense(3, 2), kc.Kronecker()),
    "two": kc.Block(dense(2, 3), kc.EKFAC()),
}
EXAMPLES = [4, 0, 3]
"""Examples of each rank."""


def natural(communicator=None, *, blocks=BLOCKS, where=None, **options):
    execution = None
    if communicator is not None:
        settings = {"like": np.zeros(1), "holders": "all"} | (where or {})
        execution = Distributed(communicator=communicator, **settings)
    estimator = kc.Estimator(
        blocks,
        reduction="sum",
        damping=0.1,
        mode="exact",
        execution=execution,
        refreshing=kc.Refreshing(failure_budget=1),
    )
    settings = {"reduction": "mean", "refresh_every": 2, "kl_clip": 1e-3} | options
    return kc.integration.NaturalGradient(
        estimator, communicator=communicator, **settings
    )


def calls_of(step, start, stop):
    """Return the calls of some of the seven examples of a step."""
    rng = np.random.default_rng(step)
    calls = []
    for name, block in BLOCKS.items():
        n, m = block.layer.in_features, block.layer.out_features
        x, g = rng.normal(size=(7, n)), rng.normal(size=(7, m))
        if stop > start:
            calls.append(kc.integration.LayerCall(name, x[start:stop]))
            calls[-1].add_source(g[start:stop])
    return calls


def gradients_of(step):
    rng = np.random.default_rng(100 + step)
    return {
        name: {k: rng.normal(size=s) for k, s in block.layer.parameter_shapes.items()}
        for name, block in BLOCKS.items()
    }


@pytest.mark.parametrize(
    "where", [{"holders": 1}, {"holders": "all"}, {"holders": 1, "reduce": "owner"}]
)
@pytest.mark.parametrize(
    ("positions", "votes"),
    [
        # Statistics, gradients and rows in one message, also where operators or the bases
        # of EKFAC are due.
        ([2, 2, 2], [1, 1, 1, 1]),
        # Where an example has unlike numbers of rows, the first step finds out.
        ([2, 5, 3], [3, 2, 2, 2]),
    ],
)
def test_a_step_has_one_vote_and_is_that_of_one_process(positions, votes, where):
    """Whether all examples have as many rows of outputs, or each rank's have others."""
    ends = np.cumsum([0, *EXAMPLES])

    def run(communicator):
        kfac, directions, calls = (
            natural(communicator, where=where),
            [],
            [],
        )
        rank = communicator.rank
        for step in range(4):
            before = communicator.traffic.calls["all_reduce"]
            rows = EXAMPLES[rank] * positions[rank]
            local_calls = calls_of(step, ends[rank], ends[rank + 1])
            directions.append(
                kfac.directions(gradients_of(step), local_calls, rows=rows)
            )
            calls.append(communicator.traffic.calls["all_reduce"] - before)
        return directions, calls

    alone = natural()
    rows = int(np.dot(EXAMPLES, positions))
    expected = [
        alone.directions(gradients_of(step), calls_of(step, 0, 7), rows=rows)
        for step in range(4)
    ]
    for directions, calls in run_ranks(3, run):
        assert calls == votes
        require_same([directions], expected, 1e-13)


@pytest.mark.parametrize("where", [{}, {"holders": 1, "reduce": "owner"}])
def test_parts_of_unlike_shapes_on_one_rank(where):
    """Their moments are in bases that may be on another rank."""
    rng = np.random.default_rng(0)
    rows = {
        name: [
            rng.normal(size=(2, 3, k, size))
            for k in (2, 4)
            for size in (block.layer.in_features, block.layer.out_features)
        ]
        for name, block in BLOCKS.items()
    }

    def step(kfac, number, parts):
        calls = []
        for name, (x, g, y, h) in rows.items():
            for part, (inputs, gradients) in enumerate(((x, g), (y, h))):
                if part in parts:
                    call = kc.integration.LayerCall(name, inputs[number])
                    call.add_source(gradients[number])
                    calls.append(call)
        # As many rows for each example on each rank.
        return kfac.directions(gradients_of(number), calls, rows=9.0 * len(parts))

    def run(communicator=None):
        kfac = natural(communicator, where=where)
        parts = [(0, 1), (), ()][communicator.rank] if communicator else (0, 1)
        return [step(kfac, number, parts) for number in range(2)]

    require_same(run_ranks(3, run), run(), 1e-13)


@pytest.mark.parametrize("holders", [1, 2, 4])
def test_a_failed_factorization_is_told_without_a_vote_before(holders):
    """All ranks keep the operator and count a failure, or raise, as one process does."""
    blocks = {name: kc.Block(b.layer, kc.Kronecker()) for name, b in BLOCKS.items()}
    good, bad = 0.1, {"one": 0.1, "two": 0.0}

    def run(communicator=None):
        rank = 0 if communicator is None else communicator.rank
        options = {"refresh_every": 1, "kl_clip": None, "decay": 0.0}
        kfac = natural(
            communicator, where={"holders": holders}, blocks=blocks, **options
        )
        directions, failures = [], []
        for step, damping in enumerate((good, bad, bad, good)):
            kfac.estimator.damping = damping
            # One example, of which no factor has an inverse without damping.
            arguments = calls_of(step, 0, int(rank == 0))
            rows = 2.0 * (rank == 0)
            if step == 2:
                with pytest.raises(FactorizationError, match="two"):
                    kfac.directions(gradients_of(step), arguments, rows=rows)
                assert kfac.steps == 2
                continue
            found = kfac.directions(gradients_of(step), arguments, rows=rows)
            directions += [x for own in found.values() for x in own.values()]
            failures.append(
                [block.failures for block in kfac.estimator.state.blocks.values()]
            )
        assert failures == [[0, 0], [0, 1], [0, 0]]
        return directions

    expected = run()
    for directions in run_ranks(4, run):
        for x, reference in zip(directions, expected, strict=True):
            np.testing.assert_allclose(x, reference, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("size", "where"), [(1, {}), (3, {}), (3, {"reduce": "owner", "holders": 1})]
)
def test_a_refresh_in_the_background_takes_over_after_its_lag(size, where):
    """Directions are those of the operators of two steps before, on all ranks."""
    options = {"refresh_every": 4, "kl_clip": None}
    ends = np.linspace(0, 7, size + 1).astype(int)

    def run(communicator):
        own = communicator if size > 1 else None
        kfac = natural(own, where=where, refresh_lag=2, **options)
        start, stop = ends[communicator.rank], ends[communicator.rank + 1]
        directions, ages = [], []
        for step in range(11):
            local_calls = calls_of(step, start, stop)
            rows = 2 * (stop - start)
            directions.append(
                kfac.directions(gradients_of(step), local_calls, rows=rows)
            )
            ages.append(kfac.operator_age)
            if step == 7:
                # A step that fails in between changes nothing.
                bad = gradients_of(step)
                bad["one"]["weight"][0, 0] = np.nan
                with pytest.raises(NotFiniteError):
                    kfac.directions(bad, calls_of(step, start, stop), rows=rows)
        # A state is that of a run whose refresh has ended.
        assert kfac.state_dict()["steps"] == 11
        assert kfac.operator_age == 3
        return directions, ages

    # The first refresh is at once, and none follows.
    alone = natural(**options | {"refresh_every": 100})
    expected, operators, waiting = [], alone.estimator, None
    for step in range(11):
        alone.directions(gradients_of(step), calls_of(step, 0, 7), rows=14)
        if waiting is not None and step % 4 == 2:
            operators = waiting
        expected.append(operators.precondition(gradients_of(step)))
        if step and step % 4 == 0:
            waiting = copy.deepcopy(alone.estimator)
            waiting.refresh()
    for directions, ages in run_ranks(size, run):
        assert ages == [1, 2, 3, 4, 5, 6, 3, 4, 5, 6, 3]
        require_same([directions], expected, 1e-13)


def test_a_difference_between_ranks_is_named_alone():
    """Of a step of many parts those that differ, with the ranks, on all of them."""

    def run(communicator):
        part = "refresh" if communicator.rank == 1 else "no refresh"
        with pytest.raises(ReplicaError) as raised:
            Agreement(communicator).vote(f"step 7; {part}; bases", [1.0])
        return str(raised.value)

    for text in run_ranks(3, run):
        assert text.startswith(
            "Rank 0 is at 'no refresh' and rank 1 at 'refresh'. All ranks must"
        )


def test_votes_of_other_lengths_and_stages_meet():
    """Their messages have one length; an error of one rank is that of all."""

    def run(communicator):
        agreement = Agreement(communicator)
        assert agreement.vote("many", np.ones(100)).tolist() == [3.0] * 100
        with agreement.riding("taken along", [1.0, 2.0]) as rider:
            assert agreement.vote("both", [5.0]).tolist() == [15.0]
        assert rider.total.tolist() == [3.0, 6.0]
        step, length = ("few", 2) if communicator.rank == 2 else ("many", 100)
        with pytest.raises(ReplicaError, match="rank 2 at 'few'"):
            agreement.vote(step, np.ones(length))
        error = DampingError("too small") if communicator.rank == 1 else None
        with pytest.raises(DampingError, match="too small"):
            agreement.vote("elsewhere" if error else "many", error=error)
        with agreement.announced():
            agreement.meet("nothing is sent")
        return communicator.traffic.calls["all_reduce"]

    # Two of the first, which does not fit, and one of each other.
    assert run_ranks(3, run) == [5] * 3


def test_ranks_that_divide_unlike_are_named():
    """Engines would wait for ever."""

    def run(communicator):
        groups = [[0], [1, 2]] if communicator.rank == 2 else [[0, 1], [2]]
        with pytest.raises(CommunicationError, match="Rank 2 divides the ranks"):
            communicator.split(groups)

    run_ranks(3, run)


@pytest.mark.parametrize("name", ["update_every", "refresh_every", "bases_every"])
def test_intervals_that_differ_are_named(name):
    """When the object is made, or at the step that they change."""

    def numbers(communicator):
        with pytest.raises(ReplicaError, match=f"differs from rank 0 in `{name}`"):
            natural(communicator, **{name: 2 + communicator.rank})

    def functions(communicator):
        kfac = natural(communicator, **{name: lambda step: 2 + communicator.rank})
        for step in range(2):
            kfac.directions(gradients_of(step), calls_of(step, 0, 7), rows=7)
        with pytest.raises(ReplicaError, match=r"Rank 0 is at .*: True.* and rank 1"):
            kfac.directions(gradients_of(2), calls_of(2, 0, 7), rows=7)

    run_ranks(2, numbers)
    run_ranks(2, functions)
