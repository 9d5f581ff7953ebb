"""Several processes give what one process gives with the rows of all of them."""

from __future__ import annotations

import functools
import itertools
import json
import types

import numpy as np
import pytest

import kfac_core as kc
from conformance_tests.builders.eigenspaces import BOUNDS, Singular
from conformance_tests.builders.layers import conv_layer
from conformance_tests.builders.shards import (
    Schedule,
    batch_of,
    dense,
    every_block,
    gradients_of,
    largest_difference,
    require_same,
    schedule_of,
    shard,
)
from conformance_tests.builders.tolerances import relative_error
from kfac_core.array.structure import leaves
from kfac_core.distributed import Distributed, run_ranks
from kfac_core.distributed.placement import divisors

HOST = types.SimpleNamespace(asarray=np.asarray, to_numpy=np.asarray)
# Primes, squares and products, whose ranks are divided in every way.
SIZES = (1, 2, 3, 5, 6, 8, 12, 16)


def estimator_of(blocks, communicator=None, /, *, like=None, options=None, **more):
    """Return an estimator of one process, or of the processes of a communicator."""
    execution = None
    if communicator is not None:
        execution = Distributed(communicator=communicator, like=like, **(options or {}))
    settings = {"reduction": "sum", "damping": 0.3, "decay": 0.9} | more
    return kc.Estimator(blocks, execution=execution, **settings)


def both(backend, rng, blocks, size, /, *, options=None, schedule=None, **more):
    """Return the directions of one process, and those of each rank."""
    schedule = schedule or schedule_of(rng, blocks, size)
    gradients = gradients_of(backend, rng, blocks)
    like = backend.asarray(np.zeros(1))
    alone = schedule.run(backend, estimator_of(blocks, **more), None, gradients)

    def run(communicator):
        made = estimator_of(blocks, communicator, like=like, options=options, **more)
        return schedule.run(backend, made, communicator.rank, gradients)

    return alone, run_ranks(size, run)


@pytest.mark.parametrize("size", SIZES)
def test_every_approximation_is_that_of_one_process(size):
    """Unequal and empty shards, ragged masks, burn-in; any number of ranks and holders."""
    _require_exact(HOST, size)


def test_every_library_is_that_of_one_process(backend, compiles_long):
    """The same on every backend."""
    _require_exact(backend, 2, steps=3)


def test_a_block_on_every_library(backend):
    """One block on two ranks, one of them empty at the second step.

    Of few shapes, since JAX compiles for each.
    """
    rng = np.random.default_rng(0)
    blocks = {"a": kc.Block(dense(3, 2), kc.Kronecker())}
    batches = [{"a": batch_of(rng, blocks["a"], N)} for N in (8, 4)]
    schedule = Schedule(batches, sizes=[8, 4], cuts=[[0, 4, 8], [0, 4, 4]])

    alone, found = both(
        *(backend, rng, blocks, 2), options={"holders": 1}, schedule=schedule
    )

    require_same(found, alone)


def _require_exact(backend, size, steps=4):
    rng = np.random.default_rng(size)
    # The other numbers of holders, and both ways of reducing, come with other sizes.
    holders = divisors(size)[size % len(divisors(size))]
    reduce = ("refresh", "owner", "owner", "refresh")[size % 4]
    options = {"holders": holders, "reduce": reduce}
    averaging = kc.Averaging(burn_in=2, debias=size % 2 == 0, weight=0.7)

    blocks = every_block()
    schedule = schedule_of(rng, blocks, size, steps=steps)

    alone, found = both(
        *(backend, rng, blocks, size),
        options=options,
        schedule=schedule,
        averaging=averaging,
    )

    require_same(found, alone)


@pytest.mark.parametrize(
    ("holders", "reduce"),
    [(1, "refresh"), (2, "owner"), (3, "refresh"), (6, "refresh"), (1, "owner")],
)
def test_every_strategy_gives_the_same(holders, reduce):
    """Owners that send directions, groups, and everybody; bases of a null space too."""
    backend = HOST
    rng = np.random.default_rng(holders)
    blocks = {"a": kc.Block(dense(65, 4), kc.EKFAC()), **_several()}
    options = {"holders": holders, "reduce": reduce, "bucket_bytes": 100}

    alone, found = both(backend, rng, blocks, 6, options=options)

    require_same(found, alone)


@pytest.mark.parametrize("size", [1, 3, 6, 8])
def test_the_placement_changes_no_bit(size):
    """Sums are in the order of the ranks, whoever owns a block and whoever holds it.

    Every approximation with every number of holders; one process differs by roundoff.
    """
    backend = HOST
    rng = np.random.default_rng(0)
    blocks = every_block()
    schedule = schedule_of(rng, blocks, size, steps=2)
    gradients = gradients_of(backend, rng, blocks)
    like = backend.asarray(np.zeros(1))

    # Blocks of equal costs get their owners in the order in which they are given.
    reordered = dict(reversed(blocks.items()))

    def run(communicator):
        made, owners = [], []
        for holders in divisors(size):
            options = {
                "holders": holders,
                "bucket_bytes": 25 * 2 ** (20 * (holders % 2)),
            }
            given = reordered if holders == 1 else blocks
            estimator = estimator_of(given, communicator, like=like, options=options)
            made += [schedule.run(backend, estimator, communicator.rank, gradients)]
            owners += [estimator.placement.owners]
        assert size == 1 or any(own != owners[0] for own in owners)
        return made

    found = [directions for made in run_ranks(size, run) for directions in made]

    require_same(found, found[0], 0.0)
    alone = schedule.run(backend, estimator_of(blocks), None, gradients)
    require_same(found[:1], alone)


@pytest.mark.parametrize("reduce", ["refresh", "owner"])
def test_directions_of_a_large_block_are_divided(reduce):
    """Ranks without blocks compute rows of them, also from a state that was loaded."""
    rng = np.random.default_rng(9)
    blocks = {
        "tall": kc.Block(dense(230, 120), kc.Kronecker()),
        "wide": kc.Block(dense(120, 230), kc.Kronecker(sharing="reduce")),
        "small": kc.Block(dense(4, 3), kc.Kronecker()),
    }
    schedule, gradients = schedule_of(rng, blocks, 9), gradients_of(HOST, rng, blocks)
    alone = schedule.run(HOST, estimator_of(blocks), None, gradients)
    options = {"holders": 1, "reduce": reduce, "interval": 20}

    def run(communicator):
        made, *loaded = (
            estimator_of(blocks, communicator, like=np.zeros(1), options=options)
            for _ in range(3)
        )
        found = schedule.run(HOST, made, communicator.rank, gradients)
        loaded[0].load_state_dict(made.state_dict())
        loaded[1].load_state_dict(made.state_dict(owned=True), owned=True)
        directions = [each.precondition(gradients) for each in (made, *loaded)]
        # Owners compute all other products, of which this is the inverse.
        products = made.apply("multiply", directions[0])
        return found, directions, products, made.placement.workers

    for found, (first, *others), products, workers in run_ranks(9, run):
        assert workers == {"wide": (3, 4, 5, 6), "tall": (7, 8)}
        require_same([found], alone)
        require_same([[directions] for directions in others], [first], 0.0)
        require_same([[products]], [gradients])


def test_shards_without_the_whole_count_are_wrong():
    """The row that must differ: each rank's mean, as if all shards were equal."""
    backend = HOST
    rng = np.random.default_rng(1)
    blocks = {"expand": every_block()["expand"]}
    schedule = schedule_of(rng, blocks, 2)
    gradients = gradients_of(backend, rng, blocks)
    alone = schedule.run(backend, estimator_of(blocks), None, gradients)

    own = [
        schedule.run(backend, estimator_of(blocks), rank, gradients)
        for rank in range(2)
        if all(cut[rank] < cut[rank + 1] for cut in schedule.cuts)
    ]

    assert own
    assert all(largest_difference(found, alone)[0] > 1e-2 for found in own)


@pytest.mark.parametrize("reduction", ["mean", "mean_rows"])
@pytest.mark.parametrize("loss", ["shard", "batch", "ddp"])
def test_gradients_of_a_mean_are_scaled(reduction, loss):
    """Whatever each process divided its loss by, the curvature is that of the batch."""
    backend = HOST
    rng = np.random.default_rng(5)
    blocks = {"expand": every_block()["expand"], "tnt": every_block()["tnt"]}
    schedule = schedule_of(rng, blocks, 3)
    gradients = gradients_of(backend, rng, blocks)
    like = backend.asarray(np.zeros(1))

    def divided(values, start, stop, rank):
        """Return a shard whose gradients are those of the loss of this process."""
        by_rows = reduction == "mean_rows"
        sizes = values["mask"].sum(axis=1) if by_rows else np.ones(len(values["mask"]))
        by = sizes[start:stop].sum() if rank is None or loss == "shard" else sizes.sum()
        by = by / 3 if rank is not None and loss == "ddp" else by
        grads = {**values, "output_grads": values["output_grads"] / by}
        return shard(backend, grads, start, stop)

    def run(estimator, rank):
        for step, N in enumerate(schedule.sizes):
            start, stop = (0, N) if rank is None else schedule.cuts[step][rank:][:2]
            fed = {
                name: divided(values, start, stop, rank)
                for name, values in schedule.batches[step].items()
                if stop > start
            }
            estimator.update(fed)
        estimator.refresh()
        return [
            {
                name: {key: backend.to_numpy(x) for key, x in own.items()}
                for name, own in estimator.precondition(gradients).items()
            }
        ]

    alone = run(estimator_of(blocks, reduction=reduction), None)
    found = run_ranks(
        3,
        lambda c: run(
            estimator_of(
                blocks, c, like=like, options={"loss": loss}, reduction=reduction
            ),
            c.rank,
        ),
    )

    require_same(found, alone)


@pytest.mark.parametrize("size", [1, 3, 6, 8])
def test_sharing_and_chains(size):
    """A shared factor is sent once; a chain is one block.  The placement changes no bit."""
    backend = HOST
    rng = np.random.default_rng(2)
    blocks = {
        name: kc.Block(dense(4, m), kc.Kronecker())
        for name, m in {"q": 3, "k": 2, "v": 5}.items()
    }
    blocks |= {
        name: kc.Block(dense(n, m), kc.Kronecker())
        for name, n, m in (("fc1", 3, 4), ("fc2", 4, 2))
    }
    coupling = kc.Coupling(
        factors={"k/input": "q/input", "v/input": "q/input"},
        chains={"encoder": ("fc1", "fc2")},
    )
    schedule = schedule_of(rng, blocks, size, steps=2)
    for batches in schedule.batches:
        for name in ("k", "v"):
            batches[name]["inputs"] = batches["q"]["inputs"]
            batches[name]["mask"] = batches["q"]["mask"]
        for name in ("fc1", "fc2"):
            for key, x in batches[name].items():
                batches[name][key] = x[:, 0]

    first = []
    for holders in divisors(size):
        alone, found = both(
            *(backend, np.random.default_rng(3), blocks, size),
            schedule=schedule,
            options={"holders": holders, "reduce": "owner" if size == 3 else "refresh"},
            coupling=coupling,
        )
        first = first or found[0]
        require_same(found, alone)
        require_same(found, first, 0.0)


@pytest.mark.parametrize("loaded_by", [1, 2, 3])
@pytest.mark.parametrize("reduce", [("refresh", "owner"), ("owner", "refresh")])
def test_a_state_of_p_processes_loads_on_q(loaded_by, reduce):
    """A state is that of one process, to roundoff, and goes on on any number."""
    backend = HOST
    rng = np.random.default_rng(4)
    blocks = {name: every_block()[name] for name in ("expand", "eigen", "full")}
    first, second = schedule_of(rng, blocks, 4), schedule_of(rng, blocks, loaded_by)
    gradients = gradients_of(backend, rng, blocks)
    like = backend.asarray(np.zeros(1))
    alone = estimator_of(blocks)
    first.run(backend, alone, None, gradients)
    saved = alone.state_dict()
    expected = second.run(backend, alone, None, gradients)

    def saving(communicator):
        options = {"holders": 2, "reduce": reduce[0]}
        made = estimator_of(blocks, communicator, like=like, options=options)
        first.run(backend, made, communicator.rank, gradients)
        return made.state_dict(), made.state_dict(owned=True)

    states, of_owners = zip(*run_ranks(4, saving), strict=True)
    by_owner = {name: own for part in of_owners for name, own in part["blocks"].items()}
    # One block each, and one rank has none.
    assert sorted(len(part["blocks"]) for part in of_owners) == [0, 1, 1, 1]

    def loading(communicator):
        options = {"holders": 1, "reduce": reduce[1]}
        found = []
        for owned in (False, True):
            made = estimator_of(blocks, communicator, like=like, options=options)
            state = states[0]
            if owned:
                own = {name: by_owner[name] for name in made.owned_blocks}
                state = {**of_owners[0], "blocks": own}
            made.load_state_dict(state, owned=owned)
            made.check_replicas()
            found.append(second.run(backend, made, communicator.rank, gradients))
        return found

    found = [run for of_rank in run_ranks(loaded_by, loading) for run in of_rank]

    for state in states:
        assert _described(state) == _described(saved)
    require_same(found, expected)


@pytest.mark.parametrize("kinds", ["operators", "directions", "all"])
@pytest.mark.parametrize("reduce", ["refresh", "owner"])
def test_messages_in_float32(kinds, reduce):
    """What is sent may be rounded; all ranks then have the same, to the bit."""
    rng = np.random.default_rng(6)
    kinds = ("operators", "directions") if kinds == "all" else (kinds,)
    narrow = {f"{kind}_dtype": "float32" for kind in kinds}

    alone, found = both(
        *(HOST, rng, every_block(), 4),
        options={"holders": 2, "reduce": reduce, **narrow},
    )

    error, where = largest_difference(found[0], alone)
    # Of rounding to float32, times a condition of the damped factors.
    assert 1e-10 < error < 1e-5, where
    require_same(found, found[0], 0.0)
    sent = [x for step in found[1] for own in step.values() for x in own.values()]
    rounded = [np.array_equal(x, x.astype(np.float32)) for x in sent]
    assert all(rounded) if "directions" in kinds else not any(rounded)


@pytest.mark.parametrize("storage", BOUNDS)
@pytest.mark.parametrize("reduce", ["refresh", "owner"])
def test_moments_in_a_null_space(reduce, storage):
    """EKFAC of fewer rows than columns, with sums that are kept and sent in a dtype."""
    problem = Singular.drawn(np.random.default_rng(7))

    def run(communicator):
        execution = Distributed(communicator=communicator, reduce=reduce, holders=1)
        return problem.direction(communicator, storage, execution)

    for direction in (problem.direction(None, storage), *run_ranks(3, run)):
        assert relative_error(direction, problem.expected()) < BOUNDS[storage]


def test_unsent_values_are_not_rounded():
    """Nor is what is sent in a wider dtype; a state is gathered as it is."""
    blocks = _several()

    def run(holders, **dtypes):
        rng = np.random.default_rng(6)
        options = {"holders": holders, **dtypes}
        return both(HOST, rng, blocks, 2, options=options)[1]

    everybody = run("all", directions_dtype="float32")
    owners = run(1, operators_dtype="float32")
    wider = run(1, directions_dtype="float64")

    for found in (everybody, owners, wider):
        require_same(found, run(1)[0], 0.0)

    def saved(communicator):
        options = {"holders": 1, "directions_dtype": "float32"}
        made = estimator_of(blocks, communicator, options=options)
        batch = batch_of(np.random.default_rng(communicator.rank), blocks["one"], 6)
        made.update({"one": shard(HOST, batch, 0, 6)})
        made.refresh()
        values = made.state_dict()["blocks"]["one"]["values"]
        return [np.asarray(x) for x in values.values()]

    for values in run_ranks(2, saved):
        floats = [x for x in values if x.dtype == np.float64 and x.ndim == 2]
        assert floats
        assert not any(np.array_equal(x, x.astype(np.float32)) for x in floats)


@pytest.mark.parametrize("approximation", [kc.Kronecker(), kc.EKFAC()])
def test_what_a_rank_keeps_shrinks_with_their_number(approximation):
    """Statistics, operators and bases of 48 equal layers are 1 / p of one process's."""
    blocks = {f"{k}": kc.Block(dense(24, 24), approximation) for k in range(48)}
    rng = np.random.default_rng(0)
    rows = {name: rng.normal(size=(2, 8, 24)) for name in blocks}

    def kept(communicator):
        made = estimator_of(
            *(blocks, communicator),
            like=np.zeros(1),
            options={"holders": 1, "reduce": "owner"},
            refreshing=kc.Refreshing(keep_matrices=False),
        )
        made.update({n: kc.Batch(*x) for n, x in rows.items()})
        if approximation.has_bases:
            made.rebase(moments="kronecker")
        made.refresh()
        numbers = [0, 0, 0]
        for block in made.state.blocks.values():
            for i, part in enumerate(
                (block.statistics.averages, block.operator, block.statistics.bases)
            ):
                numbers[i] += sum(x.size for _, x in leaves(part))
        predicted = sum(load.kept for load in made.placement.loads.values())
        return np.asarray(numbers), predicted

    alone, predicted = run_ranks(1, kept)[0]
    # One triangle of each symmetric matrix, 325 and 300 numbers; 600 second moments.
    triangles = 625 + 600 * approximation.has_bases
    assert triangles <= alone[0] / 48 <= triangles + 10
    # The bases of an operator are those of the statistics.
    assert predicted == pytest.approx(alone[0] + alone[1], rel=0.05)
    for p in (2, 4, 8):
        for numbers, _ in run_ranks(p, kept):
            assert (numbers <= 1.3 * alone / p).all(), p


def test_parts_of_a_batch_and_flags_with_statistics_at_owners():
    """Merged parts are one batch; flagged rows change nothing and raise nothing."""
    blocks = {name: every_block()[name] for name in ("expand", "eigen", "tnt")}
    rng = np.random.default_rng(8)
    batches = {name: batch_of(rng, block, 6) for name, block in blocks.items()}
    gradients = gradients_of(HOST, rng, blocks)

    def lazily(made, parts):
        """Return a function, since the bases are on their owners alone."""
        options = {"conventions": made.conventions}

        def moments(statistics):
            taken = [
                kc.batch_moments(*part, statistics=statistics, **options)
                for part in parts
            ]
            return functools.reduce(kc.Statistics.merged, taken)

        return moments

    def run(made, rank, size):
        for start in range(2):
            parts = range(6)[start * 3 : (start + 1) * 3][rank::size]
            parts_of = {}
            for k, (name, block) in itertools.product(parts, blocks.items()):
                parts_of.setdefault(name, []).append(
                    (block, shard(HOST, batches[name], k, k + 1))
                )
            made.absorb({n: lazily(made, own) for n, own in parts_of.items()})
            made.rebase(moments="kronecker")
        bad = {name: shard(HOST, batch, 0, 2) for name, batch in batches.items()}
        if rank:
            bad["tnt"].inputs[...] = np.nan
        if size > 1:
            made.update(bad, check="status")
            flags = [int(block.status) for block in made.state.blocks.values()]
            assert flags[:2] == [0, 0]
            assert flags[2]
        made.refresh()
        return [made.precondition(gradients)]

    expected = run(estimator_of(blocks), 0, 1)
    options = {"reduce": "owner", "holders": 1, "bucket_bytes": 8}
    found = run_ranks(
        2, lambda c: run(estimator_of(blocks, c, options=options), c.rank, 2)
    )

    require_same(found, expected)


def test_statistics_that_cannot_be_reduced_raise():
    """Centered moments, and whatever does not say."""

    class Undeclared(kc.Diagonal):
        reduction = kc.Approximation.reduction

    conv = conv_layer(2, 3, (2,))
    pairs = {
        "centered": (conv, kc.Kronecker(input="uncorrelated")),
        "does not say": (dense(3, 2), Undeclared()),
    }
    for reason, (layer, approximation) in pairs.items():
        block = {"fc": kc.Block(layer, approximation)}
        with pytest.raises(kc.errors.UnsupportedError, match=rf"'fc'.*{reason}"):
            run_ranks(2, lambda c, b=block: estimator_of(b, c))


def _several():
    return {
        name: kc.Block(dense(n, m), kc.Kronecker())
        for name, n, m in (("one", 5, 4), ("two", 4, 4), ("three", 3, 6))
    }


def _described(state):
    """Return what a state says besides numbers."""
    parts = {name: part["layer"] for name, part in state["blocks"].items()}
    paths = {name: sorted(part["values"]) for name, part in state["blocks"].items()}
    return json.dumps([parts, paths, state["settings"], state["conventions"]])
