"""A network's pure functions as programs of JAX: traced once, donated, in branches."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.array.structure import leaves

from ..builders.block_kinds import KINDS, fed, network_of, stages_of
from ..builders.estimators import make_estimator
from ..builders.tolerances import assert_close
from ..builders.tracing import Traced

N, n, m = 10, 4, 3
STATUS = {"check": "status"}
KRONECKER = kc.Kronecker()
STEPPED = {
    "kronecker": ({"a": KRONECKER, "b": KRONECKER}, "factored"),
    "exact": ({"a": KRONECKER}, "exact"),
    "mixed": ({"a": kc.TNT(), "b": kc.Diagonal(), "c": kc.EKFAC()}, "factored_unit_pi"),
}


@pytest.fixture
def jax_backend(requires_backend):
    return requires_backend("jax", adapter=True)


@pytest.fixture
def jax(jax_backend):
    """JAX itself, with 64-bit floats."""
    import jax

    return jax


def estimator_of(kinds, rule="factored", **options):
    layer = kc.Dense(in_features=n, out_features=m, bias=True, weight_layout="io")
    blocks = {name: kc.Block(layer, kind) for name, kind in kinds.items()}
    return make_estimator(
        blocks, reduction="sum", damping=0.3, damping_rule=rule, **options
    )


def draw(backend, rng, names):
    return {
        name: kc.Batch(
            backend.asarray(rng.normal(size=(N, n))),
            backend.asarray(rng.normal(size=(N, m))),
        )
        for name in names
    }


def gradients(backend, rng, names):
    return {
        name: {
            "weight": backend.asarray(rng.normal(size=(n, m))),
            "bias": backend.asarray(rng.normal(size=m)),
        }
        for name in names
    }


def first(network, backend):
    return network.initial(backend.asarray(np.zeros(1)), damping=0.3)


def assert_same(found, expected):
    """Compare two structures bit by bit."""
    for (path, a), (_, b) in zip(leaves(found), leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=path)


def avals(jax, state):
    """Return the tree of a state, and what a program is compiled for of each array."""
    flat, tree = jax.tree.flatten(state)
    return tree, [(x.shape, x.dtype, x.weak_type) for x in flat]


@pytest.mark.parametrize(("pair", "rule"), KINDS)
def test_every_stage_returns_the_form_and_types_that_it_was_given(
    jax, jax_backend, rng, pair, rule
):
    """So that what one program returns another takes; a decay may be of another dtype."""
    network = network_of(pair, rule)
    batch = fed(jax_backend, rng, network.blocks["a"].layer)
    start = first(network, jax_backend)
    single = jax.numpy.asarray(0.5, "float32")
    stages = [
        *stages_of(network, batch),
        lambda held: network.update(held, {"a": batch}, decay=single, **STATUS),
        lambda held: network.refresh(held, damping=single, **STATUS),
    ]

    for stage in stages:
        made = jax.eval_shape(stage, start)
        assert avals(jax, made) == avals(jax, start)


def test_wide_factors_keep_their_form(jax, jax_backend):
    """Those whose updates and inverses JAX computes by panels, one triangle of them."""
    layer = kc.Dense(in_features=600, out_features=m, bias=True, weight_layout="io")
    summed = kc.Conventions(reduction="sum", sources="sum")
    network = kc.Network({"a": kc.Block(layer, KRONECKER)}, conventions=summed)
    x, g = (jax_backend.asarray(np.zeros((N, k))) for k in (600, m))
    start = first(network, jax_backend)

    for stage in stages_of(network, kc.Batch(x, g)):
        made = jax.eval_shape(stage, start)
        assert avals(jax, made) == avals(jax, start)


@pytest.mark.parametrize("case", STEPPED)
def test_compiled_steps_are_the_steps(jax, jax_backend, rng, case):
    """With decays and dampings that change: one program, whose old state is given up."""
    kinds, rule = STEPPED[case]
    plain = estimator_of(kinds, rule)
    network, V = plain.network, gradients(jax_backend, rng, kinds)
    bases = any(block.approximation.has_bases for block in network.blocks.values())

    @Traced
    def step(state, batches, vectors, decay, damping, due):
        state = network.update(state, batches, decay=decay, **STATUS)
        if bases:
            state = network.rebase(state, moments="kronecker", **STATUS)
        refresh = functools.partial(network.refresh, damping=damping, **STATUS)
        state = jax.lax.cond(due, refresh, lambda held: held, state)
        return state, network.precondition(state, vectors)

    compiled = jax.jit(step, donate_argnums=0)
    state = first(network, jax_backend)
    for i in range(4):
        fed, due = draw(jax_backend, rng, kinds), i != 2
        old, decay, damping = state, 0.9 - 0.1 * i, 0.3 * (i + 1)
        state, found = compiled(old, fed, V, decay, damping, due)
        plain.decay, plain.damping = decay, damping
        plain.update(fed)
        if bases:
            plain.rebase(moments="kronecker")
        if due:
            plain.refresh()
        for held in old.blocks.values():
            for averages in held.statistics.averages.values():
                assert all(x.is_deleted() for _, x in leaves(averages))
        for name, vector in plain.precondition(V).items():
            for role, expected in vector.items():
                assert_close(found[name][role], expected, "inverse", "float64")

    assert step.traces == 1
    held = state["a"]
    assert [int(x) for x in (held.updates, held.refreshes, held.age)] == [4, 3, 0]
    assert bool(state.is_good())


def test_states_of_an_estimator_can_be_donated(jax, jax_backend, rng):
    """Its operators may have arrays of its statistics; a state in form has its own."""
    held = estimator_of({"a": kc.EKFAC()}, "exact")
    batches = draw(jax_backend, rng, "a")
    held.update(batches)
    held.rebase(moments="kronecker")
    held.refresh(check="status")
    network = held.network
    state = held.state.in_form_of(first(network, jax_backend))

    def update(state):
        return network.update(state, batches, decay=0.5, **STATUS)

    made = jax.jit(update, donate_argnums=0)(state)

    held.update(batches)
    assert int(made["a"].updates) == held.state["a"].updates == 2
    before = held.operator("a").to_dense()
    assert_close(made["a"].operator.to_dense(), before, "product", "float64")


def test_a_bad_batch_changes_nothing_but_flags(jax, jax_backend, rng):
    """One bad block keeps all from moving, inside a program."""
    network = estimator_of(STEPPED["kronecker"][0]).network

    @jax.jit
    def step(state, batches):
        state = network.update(state, batches, decay=0.8, **STATUS)
        return network.refresh(state, damping=0.3, **STATUS)

    state = step(first(network, jax_backend), draw(jax_backend, rng, "ab"))
    bad = draw(jax_backend, rng, "ab")
    nan = jax_backend.asarray(np.full((N, n), np.nan))
    bad["b"] = kc.Batch(nan, bad["b"].output_grads)
    kept = jax.jit(functools.partial(network.update, decay=0.8, **STATUS))(state, bad)

    assert int(kept["a"].status) == kc.Status.OK
    assert int(kept["b"].status) == kc.Status.INPUTS_NOT_FINITE
    assert not bool(kept.is_good())
    for name in "ab":
        assert int(kept[name].updates) == 1
        averages = (s[name].statistics.averages for s in (kept, state))
        for found, expected in zip(*(a.values() for a in averages), strict=True):
            assert_same(found, expected)
        assert_same(kept[name].operator, state[name].operator)


def test_a_factorization_that_fails_keeps_the_operator(jax, jax_backend):
    """A singular factor is flagged, the operator stays; a damping makes it good again."""
    network = estimator_of({"a": KRONECKER}).network
    ones = map(jax_backend.asarray, (np.ones((2, n)), np.ones((2, m))))
    state = network.update(
        first(network, jax_backend), {"a": kc.Batch(*ones)}, decay=0.9, **STATUS
    )
    traced = Traced(functools.partial(network.refresh, **STATUS))
    refresh = jax.jit(traced)
    good = refresh(state, damping=0.1)
    failed = refresh(good, damping=0.0)
    again = refresh(failed, damping=0.2)

    assert kc.Status(int(failed["a"].status)) & kc.Status.NOT_POSITIVE
    assert_same(failed["a"].operator, good["a"].operator)
    assert float(failed["a"].damping) == pytest.approx(0.1)
    counts = [
        (int(s["a"].refreshes), int(s["a"].failures)) for s in (good, failed, again)
    ]
    assert counts == [(1, 0), (1, 1), (2, 0)]
    assert traced.traces == 1


def test_states_are_mapped_over(jax, jax_backend, rng):
    """``jax.vmap`` over states, batches and dampings is a loop over them."""
    network = estimator_of({"a": KRONECKER}).network
    V = gradients(jax_backend, rng, "a")
    two = [draw(jax_backend, rng, "a") for _ in range(2)]
    stacked = jax.tree.map(lambda *xs: jax.numpy.stack(xs), *two)
    start = first(network, jax_backend)
    starts = jax.tree.map(lambda x: jax.numpy.stack([x, x]), start)

    def step(state, batches, damping):
        state = network.update(state, batches, decay=0.9, **STATUS)
        state = network.refresh(state, damping=damping, **STATUS)
        return state, network.precondition(state, V)

    dampings = jax_backend.asarray([0.1, 0.4])
    states, found = jax.jit(jax.vmap(step))(starts, stacked, dampings)

    alone = jax.jit(step)
    assert states["a"].updates.tolist() == [1, 1]
    for i, batches in enumerate(two):
        _, expected = alone(start, batches, dampings[i])
        for role, x in expected["a"].items():
            assert_close(found["a"][role][i], x, "inverse", "float64")
