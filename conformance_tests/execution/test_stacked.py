"""Equal small blocks as one: stacks compute what each block alone would."""

import gc
import weakref

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.array.structure import array_fields, is_structure, leaves
from kfac_core.execution import stacked as stacks
from kfac_core.stages import Executor, plain

from ..builders.reference import kronecker_factors
from ..builders.tolerances import assert_close

DECAY = 0.75
NAMES = ("a", "b", "c")
PRODUCTS = {
    "multiply": "product",
    "multiply_inverse": "inverse",
    "multiply_cholesky": "cholesky",
    "multiply_cholesky_inverse": "inverse",
}


class Seen(Executor):
    """The plain executor, and how many blocks each call of a stage had."""

    def __init__(self):
        self.sizes = []

    def __call__(self, stage, tasks, /):
        for task in tasks.values():
            (count,) = getattr(task[0].layer, "leading", ()) or (1,)
            self.sizes.append(count)
        return plain(stage, tasks)

    def taken(self):
        sizes, self.sizes = sorted(self.sizes), []
        return sizes


@pytest.fixture
def copies(monkeypatch):
    """The classes of what was copied into a stack."""
    made, own = [], stacks.stacked

    def told(values, /):
        made.append(type(values[0]).__name__)
        return own(values)

    monkeypatch.setattr(stacks, "stacked", told)
    return made


def layer_of(bias=True, n=3, m=2):
    return kc.Dense(in_features=n, out_features=m, bias=bias, weight_layout="io")


def block_of(bias=True, n=3, m=2, **approximation):
    return kc.Block(layer_of(bias, n, m), kc.Kronecker(**approximation))


def network_of(blocks, **options):
    """Return a network of a summed loss."""
    conventions = kc.Conventions(reduction="sum", sources="sum")
    return kc.Network(blocks, conventions=conventions, **options)


def data(rng, names=NAMES, shape=(5, 2), n=3, m=2):
    """Return inputs and output gradients of two updates for each name."""
    return {
        name: [
            (rng.normal(size=(*shape, n)), rng.normal(size=(*shape, m)))
            for _ in range(2)
        ]
        for name in names
    }


def batch_of(backend, dtype, x, g, **options):
    return kc.Batch(backend.asarray(x, dtype), backend.asarray(g, dtype), **options)


def fed(backend, dtype, network, seen, executor=plain, **options):
    """Return the state after two updates."""
    state = network.empty()
    for i in range(2):
        batches = {n: batch_of(backend, dtype, *seen[n][i]) for n in seen}
        state = network.update(
            state, batches, decay=DECAY, executor=executor, **options
        )
    return state


def gradients_of(backend, dtype, rng, network):
    made = {}
    for name, block in network.blocks.items():
        shapes = block.layer.parameter_shapes
        made[name] = {
            key: backend.asarray(rng.normal(size=shape), dtype)
            for key, shape in shapes.items()
        }
    return made


def dense(average):
    return average.sum.full() if hasattr(average.sum, "full") else average.sum


def forms(value):
    """Return the paths and shapes of a structure's arrays."""
    return [(path, tuple(x.shape)) for path, x in leaves(value)]


def parts_of(value):
    """Yield a structure and those in it, and its arrays."""
    if isinstance(value, dict):
        value = list(value.values())
    elif is_structure(value):
        yield value
        value = [part for _, part in array_fields(value)]
    elif not isinstance(value, list):
        yield value
        return
    for part in value:
        if part is not None:
            yield from parts_of(part)


def assert_same_statistics(backend, dtype, got, expected):
    """Sums, weights and statuses of every block, and their forms."""
    for name, held in expected.blocks.items():
        ours, reference = got[name].statistics, held.statistics
        assert forms(ours) == forms(reference)
        assert int(ours.status) == int(reference.status)
        for side, average in reference.averages.items():
            got_average = ours.averages[side]
            pairs = (
                (dense(got_average), dense(average)),
                (got_average.weight, average.weight),
            )
            for a, b in pairs:
                assert_close(backend.to_numpy(a), backend.to_numpy(b), "gram", dtype)


def assert_same_products(backend, dtype, got, expected):
    for name, parameters in expected.items():
        for key, value in parameters.items():
            ours = backend.to_numpy(got[name][key])
            assert_close(ours, backend.to_numpy(value), "inverse", dtype)


def test_a_status_is_of_the_bad_block_alone(backend, rng):
    """With ``check="status"`` it is flagged, and no block of the batch moves."""
    network, seen = network_of({name: block_of() for name in NAMES}), data(rng)
    executor = kc.execution.Stacked(fewest=2)
    state = fed(backend, "float64", network, seen, executor)
    x = seen["c"][1][0].copy()
    x[4, 0, 2] = np.nan
    spoilt = seen | {"c": [None, (x, seen["c"][1][1])]}
    batches = {n: batch_of(backend, "float64", *spoilt[n][1]) for n in NAMES}

    kept = network.update(
        state, batches, decay=DECAY, check="status", executor=executor
    )

    flags = [int(kept[n].status) for n in NAMES]
    assert flags == [kc.Status.OK, kc.Status.OK, kc.Status.INPUTS_NOT_FINITE]
    for name in NAMES:
        for side in ("input", "output"):
            pair = (s[name].statistics.averages[side] for s in (kept, state))
            got, before = (backend.to_numpy(dense(average)) for average in pair)
            assert_close(got, before, "exact", "float64")


def test_only_equals_are_stacked(backend, rng):
    """Another shape, kind, dtype, mask, number of sources or approximation is alone."""
    x, g = rng.normal(size=(4, 3)), rng.normal(size=(4, 2))
    usual = batch_of(backend, "float64", x, g)
    base = block_of()
    mask = backend.asarray([True, True, False, True], "bool")
    odd = {
        "batch": (base, batch_of(backend, "float64", x[:3], g[:3])),
        "dtype": (base, batch_of(backend, "float32", x, g)),
        "mask": (base, batch_of(backend, "float64", x, g, mask=mask)),
        "masked": (base, batch_of(backend, "float64", x, g, mask=mask)),
        "sources": (base, batch_of(backend, "float64", x, g[None], sources=1)),
        "uses": (base, [usual, usual]),
        "layer": (block_of(bias=False), usual),
        "sharing": (block_of(sharing="reduce"), usual),
        "approximation": (kc.Block(layer_of(), kc.Diagonal()), usual),
        "factor": (block_of(output="diagonal"), usual),
        "large": (
            block_of(n=128),
            batch_of(backend, "float64", np.ones((1, 128)), g[:1]),
        ),
        "huge": (
            block_of(n=128),
            batch_of(backend, "float64", np.ones((1, 128)), g[:1]),
        ),
        "fits": (
            block_of(n=127),
            batch_of(backend, "float64", np.ones((1, 127)), g[:1]),
        ),
        "also": (
            block_of(n=127),
            batch_of(backend, "float64", np.ones((1, 127)), g[:1]),
        ),
    }
    # Equal, and not one object.
    blocks = {"p": base, "q": block_of()} | {name: b for name, (b, _) in odd.items()}
    batches = {"p": usual, "q": usual} | {name: f for name, (_, f) in odd.items()}
    network, inner = network_of(blocks), Seen()
    expected, got = (
        network.update(network.empty(), batches, decay=DECAY, executor=executor)
        for executor in (plain, kc.execution.Stacked(inner, fewest=2))
    )

    assert inner.taken() == [1] * 12 + [2, 2]
    assert_same_statistics(backend, "float32", got, expected)


def test_blocks_in_burn_in_have_their_own_decay(backend, dtype, rng):
    """During the burn-in of one of them; afterwards all are one stack."""
    averaging = kc.Averaging(burn_in=2, weight=0.5)
    network = network_of({n: block_of() for n in NAMES}, averaging=averaging)
    seen, inner = data(rng), Seen()
    states = []
    for executor in (plain, kc.execution.Stacked(inner, fewest=2)):
        state = network.empty()
        for names in (NAMES, ("a", "b"), NAMES, NAMES):
            batches = {n: batch_of(backend, dtype, *seen[n][0]) for n in names}
            state = network.update(state, batches, decay=DECAY, executor=executor)
        states.append(state)

    assert inner.taken() == [1, 2, 2, 3, 3]
    assert_same_statistics(backend, dtype, states[1], states[0])


def test_blocks_on_different_devices_are_not_stacked(requires_backend, rng):
    """Each of two devices has a stack of its own, which stays there."""
    strict = requires_backend("array_api_strict")
    devices = strict.xp.__array_namespace_info__().devices()
    names = ("a", "b", "c", "d")
    network, inner = network_of({name: block_of() for name in names}), Seen()
    executor = kc.execution.Stacked(inner, fewest=2)
    at = dict(zip(names, (devices[0], devices[1], devices[0], devices[1]), strict=True))

    def put(name, values):
        return strict.xp.asarray(values, device=at[name])

    batches, given = {}, {}
    for name in names:
        x, g = rng.normal(size=(5, 3)), rng.normal(size=(5, 2))
        batches[name] = kc.Batch(put(name, x), put(name, g))
        given[name] = {"weight": put(name, x[:3, :2]), "bias": put(name, g[0])}
    state = network.update(network.empty(), batches, decay=DECAY, executor=executor)
    state = network.refresh(state, damping=0.1, executor=executor)
    products = network.precondition(state, given, executor=executor)

    assert inner.taken() == [2] * 6
    for name in names:
        assert products[name]["weight"].device == at[name]
        assert {x.device for _, x in leaves(state[name].operator)} == {at[name]}


def test_blocks_with_shared_factors_are_not_stacked(backend, rng):
    """A block that takes a factor of another's is fed by itself, with the same sums."""
    coupling = kc.Coupling(factors={"b/input": "a/input"})
    network = network_of({name: block_of() for name in NAMES}, coupling=coupling)
    seen, inner = data(rng), Seen()
    x = seen["a"][0][0]
    batches = {n: batch_of(backend, "float64", x, seen[n][0][1]) for n in NAMES}
    gradients = gradients_of(backend, "float64", rng, network)
    products = []
    for executor in (plain, kc.execution.Stacked(inner, fewest=2)):
        state = network.update(network.empty(), batches, decay=DECAY, executor=executor)
        assert inner.taken() in ([], [1, 2])
        state = network.refresh(state, damping=0.1, executor=executor)
        products.append(network.precondition(state, gradients, executor=executor))

    factors = kronecker_factors(x, seen["b"][0][1][None], bias=True)
    held = state["b"].statistics.averages
    assert_close(backend.to_numpy(dense(held["output"])), factors[1], "gram", "float64")
    assert float(backend.to_numpy(held["input"].weight)) == 0.0
    assert_same_products(backend, "float64", products[1], products[0])


@pytest.mark.parametrize("rule", ["factored", "factored_unit_pi"])
@pytest.mark.parametrize("debias", [True, False])
def test_each_operator_is_that_of_its_block(backend, dtype, rng, rule, debias):
    """Three dampings: a stack of two blocks, and two blocks that are alone."""
    # Eager JAX compiles each operation anew, which is nearly all of the time here.
    wanted = (
        ("inverse",) if backend.name == "jax" else ("inverse", "cholesky", "eigenbasis")
    )
    names = (*NAMES, "d", "e")
    network = network_of(
        {name: block_of() for name in names[:4]} | {"e": block_of(m=1)},
        damping_rule=rule,
        averaging=kc.Averaging(debias=debias),
        refreshing=kc.Refreshing(factorizations=wanted),
    )
    seen = data(rng, names[:4]) | data(rng, ("e",), m=1)
    state = fed(backend, dtype, network, seen)
    damping = {"a": 0.1, "b": 0.1, "c": 0.7, "d": backend.asarray(0.1, dtype), "e": 0.1}
    inner = Seen()

    expected, got = (
        network.refresh(state, damping=damping, executor=executor)
        for executor in (plain, kc.execution.Stacked(inner, fewest=2))
    )

    assert inner.taken() == [1, 1, 1, 2]
    for name in names:
        ours, reference = got.blocks[name].operator, expected.blocks[name].operator
        assert forms(ours) == forms(reference)
        assert got[name].damping is damping[name]
        V = backend.asarray(rng.normal(size=reference.vector_shape), dtype)
        for product, kind in PRODUCTS.items():
            if len(wanted) > 1 or product == "multiply_inverse":
                pair = (getattr(made, product)(V) for made in (ours, reference))
                assert_close(*map(backend.to_numpy, pair), kind, dtype)
        if len(wanted) > 1:
            pair = (made.multiply_matpower(V, -0.5) for made in (ours, reference))
            assert_close(*map(backend.to_numpy, pair), "power", dtype)


def replaced_entry(backend, statistics, value):
    """Return statistics with another first entry of the input factor."""

    def spoil(x):
        host = np.array(backend.adapter.to_numpy(x))
        if host.ndim == 2:
            host[0, 0] = value
        return backend.asarray(host, str(host.dtype))

    averages = dict(statistics.averages)
    averages["input"] = kc.array.map_structure(spoil, averages["input"])
    return type(statistics)(averages, statistics.status)


def spoiled(backend, network, rng, value, rule="factored"):
    """Return a state of which one block's input factor has a bad entry."""
    state = fed(backend, "float64", network, data(rng))
    held = state["b"]
    bad = replaced_entry(backend, held.statistics, value)
    return state, state.updated({"b": kc.BlockState(statistics=bad, updates=2)})


def test_a_bad_matrix_is_an_error_of_its_own_block(backend, rng):
    """Within a budget its neighbors in the stack are what they would have been."""
    refreshing = kc.Refreshing(failure_budget=1)
    network = network_of({n: block_of() for n in NAMES}, refreshing=refreshing)
    good, bad = spoiled(backend, network, rng, np.nan)
    good = network.refresh(good, damping=0.1)
    bad = bad.updated({"b": kc.BlockState(bad["b"].statistics, good["b"].operator)})

    got = network.refresh(bad, damping=0.1, executor=kc.execution.Stacked(fewest=2))

    assert [got[name].failures for name in NAMES] == [0, 1, 0]
    assert got["b"].operator is good["b"].operator
    for name in ("a", "c"):
        V = backend.asarray(rng.normal(size=(4, 2)), "float64")
        pair = (made[name].operator.multiply_inverse(V) for made in (got, good))
        assert_close(*map(backend.to_numpy, pair), "inverse", "float64")
    with pytest.raises(kc.NotFiniteError, match="b/input"):
        network.refresh(got, damping=0.1, executor=kc.execution.Stacked(fewest=2))


def test_fallbacks_are_per_block_in_a_stack(backend, rng):
    """A negative eigenvalue is clipped for its block; the others need no fallback."""
    network = network_of(
        {n: block_of() for n in NAMES}, damping_rule="factored_unit_pi"
    )
    _, indefinite = spoiled(backend, network, rng, -5.0)

    expected, got = (
        network.refresh(indefinite, damping=0.1, executor=executor)
        for executor in (plain, kc.execution.Stacked(fewest=2))
    )

    reports = [
        {
            n: kc.report.report_of(network.blocks[n], made[n]).factors["input"].fallback
            for n in NAMES
        }
        for made in (expected, got)
    ]
    assert reports[0] == reports[1]
    assert len({reports[1]["a"], reports[1]["b"]}) == 2
    assert reports[1]["a"] == reports[1]["c"]
    for name in NAMES:
        V = backend.asarray(rng.normal(size=(4, 2)), "float64")
        pair = (made[name].operator.multiply_inverse(V) for made in (got, expected))
        assert_close(*map(backend.to_numpy, pair), "inverse", "float64")


def test_pieces_of_a_stack_are_recognized(backend, rng, copies):
    """Only what comes from outside is copied: batches, gradients, first statistics."""
    network, seen = network_of({name: block_of() for name in NAMES}), data(rng)
    given = gradients_of(backend, "float64", rng, network)
    batches = {n: batch_of(backend, "float64", *seen[n][0]) for n in NAMES}
    state, executor, found = network.empty(), kc.execution.Stacked(fewest=2), []
    for _ in range(3):
        state = network.update(state, batches, decay=DECAY, executor=executor)
        state = network.refresh(state, damping=0.1, executor=executor)
        network.precondition(state, given, executor=executor)
        network.precondition(state, given, executor=executor)
        found.append(sorted(copies))
        copies.clear()

    assert found == [
        ["Batch", "Statistics", "dict", "dict"],
        ["Batch", "dict", "dict"],
        ["Batch", "dict", "dict"],
    ]


def test_arrays_from_elsewhere_are_copied_once(backend, rng, copies):
    """Statistics of a file, or operators of a refresh in the background."""
    network = network_of({name: block_of() for name in NAMES})
    state = network.refresh(fed(backend, "float64", network, data(rng)), damping=0.1)
    given = gradients_of(backend, "float64", rng, network)
    executor = kc.execution.Stacked(fewest=2)
    for _ in range(3):
        network.precondition(state, given, executor=executor)
    for _ in range(3):
        network.refresh(state, damping=0.1, executor=executor)

    assert sorted(copies) == sorted(["dict"] * 3 + ["FactoredKronecker", "Statistics"])


def test_a_block_updated_alone_rejoins_its_stack(backend, rng, copies):
    """After an update of one block all three are copied once, and one again then."""
    network, seen = network_of({name: block_of() for name in NAMES}), data(rng)
    inner = Seen()
    executor = kc.execution.Stacked(inner, fewest=2)
    state = fed(backend, "float64", network, seen, executor)
    batches = {n: batch_of(backend, "float64", *seen[n][0]) for n in NAMES}
    alone = {"b": batches["b"]}
    expected = network.update(state, alone, decay=DECAY)
    state = network.update(state, alone, decay=DECAY, executor=executor)
    inner.taken(), copies.clear()

    for _ in range(2):
        state = network.update(state, batches, decay=DECAY, executor=executor)
        expected = network.update(expected, batches, decay=DECAY)

    assert inner.taken() == [3, 3]
    assert sorted(copies) == ["Batch", "Batch", "Statistics"]
    assert_same_statistics(backend, "float64", state, expected)


def test_executors_release_old_states(backend, rng):
    """An executor holds nothing of states that nobody has any more."""
    network, seen = network_of({name: block_of() for name in NAMES}), data(rng)
    batches = {n: batch_of(backend, "float64", *seen[n][0]) for n in NAMES}
    given = gradients_of(backend, "float64", rng, network)
    executor, state, before = kc.execution.Stacked(fewest=2), network.empty(), []
    for names in (NAMES, ("a", "b"), ("b", "c"), NAMES, ("c", "a"), NAMES):
        some = {name: batches[name] for name in names}
        state = network.update(state, some, decay=DECAY, executor=executor)
        state = network.refresh(
            state,
            damping=0.1,
            names=[n for n in NAMES if state[n].statistics],
            executor=executor,
        )
        network.precondition(
            state, {name: given[name] for name in names}, executor=executor
        )
        before += [
            (weakref.ref(held.statistics), weakref.ref(held.operator))
            for held in state.blocks.values()
        ]
        current = {id(part) for part in parts_of(state)}

    gc.collect()
    kept = [part for pair in before for of in pair if (part := of()) is not None]
    assert {id(part) for part in kept} <= current
    assert len(executor._pieces) <= 2 * len(NAMES)
    assert len(executor._last) <= 2 * len(NAMES)


def test_executors_compose(requires_backend, rng):
    """Stacks, threads and the host's memory, in any order, give the same."""
    backend = requires_backend("torch")
    blocks = {name: block_of() for name in NAMES} | {"w": block_of(n=140, m=4)}
    network = network_of(blocks)
    seen = data(rng) | data(rng, ("w",), n=140, m=4)
    given = gradients_of(backend, "float64", rng, network)
    expected = fed(backend, "float64", network, seen)
    directions = network.precondition(network.refresh(expected, damping=0.1), given)

    for executor in (
        kc.execution.Stacked(fewest=2),
        kc.execution.Stacked(kc.execution.Threaded(2), fewest=2),
        kc.execution.Threaded(2, kc.execution.Stacked(fewest=2)),
        kc.execution.Stacked(kc.execution.Hosted(), fewest=2),
        kc.execution.Hosted(kc.execution.Stacked(fewest=2)),
        kc.execution.Stacked(kc.execution.Threaded(2, kc.execution.Hosted()), fewest=2),
        kc.execution.Threaded(2, kc.execution.Hosted(kc.execution.Stacked(fewest=2))),
    ):
        state = fed(backend, "float64", network, seen, executor)
        assert_same_statistics(backend, "float64", state, expected)
        for _ in range(2):
            state = network.refresh(state, damping=0.1, executor=executor)
        got = network.precondition(state, given, executor=executor)
        assert list(got) == list(blocks)
        assert_same_products(backend, "float64", got, directions)
