"""Saving and loading: bit by bit the same, or an error that changes nothing."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import kfac_core as kc

from ..builders.block_kinds import PAIRS, fed
from ..builders.estimators import make_estimator
from ..builders.states import arrays_of, differences, frozen

N, n, m = 6, 4, 3
RULES = ["factored", "exact"]
EVERYTHING = ("inverse", "cholesky", "eigenbasis")


def block(**options):
    """Return a dense block."""
    layer = kc.Dense(in_features=n, out_features=m, bias=True, weight_layout="io")
    return kc.Block(layer, kc.Kronecker(**options))


def estimator(rule="factored", blocks=None, **options):
    """Return an estimator of two blocks."""
    settings = {
        "decay": 0.9,
        "damping": 0.1,
        "reduction": "mean",
        "factorizations": EVERYTHING,
    }
    blocks = blocks or {"full": block(), "diagonal": block(input="diagonal")}
    return make_estimator(blocks, damping_rule=rule, **(settings | options))


@pytest.fixture
def batches(backend, rng):
    """Four batches, one after the other."""
    return [
        kc.Batch(*(backend.asarray(rng.normal(size=(N, k))) for k in (n, m)))
        for _ in range(4)
    ]


def feed(kept, batches):
    """Update all blocks with each batch and refresh after each."""
    for batch in batches:
        kept.update(dict.fromkeys(kept.blocks, batch))
        kept.refresh()


@pytest.mark.parametrize("rule", RULES)
def test_a_state_survives_bit_by_bit(backend, batches, rule):
    """What is loaded is what was saved, in every bit, count and setting."""
    kept = estimator(rule)
    feed(kept, batches[:2])
    kept.update({"full": batches[2]})
    saved = kept.state_dict()
    fresh = estimator(rule, decay=0.5, damping=7.0)

    fresh.load_state_dict(saved)

    assert differences(frozen(saved), frozen(fresh.state_dict())) == []
    assert (fresh.decay, fresh.damping) == (0.9, 0.1)
    assert fresh.state["full"].updates == 3
    assert fresh.state["full"].age == 1
    assert fresh.state["diagonal"].age == 0


@pytest.mark.parametrize("rule", RULES)
def test_going_on_is_not_having_stopped(backend, batches, rule):
    """Updates, refreshes and results after a load are bitwise those without a stop."""
    straight, first = estimator(rule, burn_in=3), estimator(rule, burn_in=3)
    feed(straight, batches)
    feed(first, batches[:2])
    second = estimator(rule, burn_in=3)

    second.load_state_dict(first.state_dict())
    feed(second, batches[2:])

    assert differences(frozen(straight.state_dict()), frozen(second.state_dict())) == []
    vectors = {
        "weight": backend.asarray(np.ones((n, m))),
        "bias": backend.asarray(np.ones(m)),
    }
    for product in ("multiply_inverse", "multiply_cholesky", "multiply"):
        results = [
            frozen(kept.apply(product, {"full": vectors, "diagonal": vectors}))
            for kept in (straight, second)
        ]
        assert differences(*results) == [], product


def test_a_fresh_estimator_has_a_state(backend, batches):
    """A state without statistics or operators loads, and then all goes on."""
    saved = estimator().state_dict()
    kept = estimator()
    feed(kept, batches[:1])

    kept.load_state_dict(saved)

    assert kept.state["full"] == kc.BlockState()
    with pytest.raises(kc.NotReadyError):
        kept.refresh()


def test_statistics_without_operators_are_a_state(backend, batches):
    """A state before the first refresh loads, and the refresh gives the same."""
    kept, fresh = estimator(), estimator()
    kept.update({"full": batches[0]})

    fresh.load_state_dict(kept.state_dict())
    kept.refresh()
    fresh.refresh()

    assert differences(frozen(kept.state_dict()), frozen(fresh.state_dict())) == []


def test_a_damping_in_an_array_is_saved(backend, batches):
    """A 0-d damping is saved as the array that it is."""
    kept, fresh = estimator(), estimator()
    kept.damping = backend.asarray(np.array(0.25))

    fresh.load_state_dict(kept.state_dict())

    assert float(fresh.damping) == 0.25


def spoil(state):
    """Overwrite all numbers of a state's arrays, where they can be written."""
    for x in arrays_of(state):
        if x.ndim:
            x[...] = 7


@pytest.mark.parametrize("spoiled", ["saved", "loaded"])
def test_a_state_holds_copies(rng, spoiled):
    """Writing into a state's arrays changes neither the saver nor the loader."""
    batch = kc.Batch(rng.normal(size=(N, n)), rng.normal(size=(N, m)))
    kept, fresh = estimator(), estimator()
    feed(kept, [batch])
    state = kept.state_dict()
    fresh.load_state_dict(state)
    watched = {"saved": kept, "loaded": fresh}[spoiled]
    before = frozen(watched.state_dict())

    spoil(state)

    assert len(arrays_of(state)) > 10
    assert differences(before, frozen(watched.state_dict())) == []


def test_a_state_is_not_moved_by_what_comes_after(backend, batches):
    """A saved state stays as it was while the estimator goes on."""
    kept = estimator()
    feed(kept, batches[:1])
    saved = kept.state_dict()
    before = frozen(saved)

    feed(kept, batches[1:])

    assert differences(before, frozen(saved)) == []
    assert differences(before, frozen(kept.state_dict())) != []


def deep(state, path):
    """Return the dict that holds the last part of a path, and that part."""
    *parts, last = path.split("/")
    for part in parts:
        state = state[part]
    return state, last


def put(path, value):
    """Return what overwrites an entry."""

    def damage(backend, state):
        holder, last = deep(state, path)
        holder[last] = value(backend, holder.get(last)) if callable(value) else value

    return damage


def drop(path):
    """Return what removes an entry."""

    def damage(backend, state):
        holder, last = deep(state, path)
        del holder[last]

    return damage


def filled(value):
    """Return what replaces an array by one with a bad number."""
    return lambda backend, x: backend.asarray(np.full(x.shape, value))


SUM = "blocks/full/statistics/averages/input/sum"
MADE_FROM = "blocks/full/operator/input/damped/matrix"

DAMAGE = {
    "format": (put("format", "other"), "format 'kfac_core.estimator'"),
    "no_format": (drop("format"), "format 'kfac_core.estimator'"),
    "version": (put("version", 99), "version 1.*99.*another release"),
    "no_version": (drop("version"), "version 1.*None"),
    "loss": (put("conventions/loss", "sum"), "conventions.*'mean'.*'sum'"),
    "sources": (put("conventions/sources", "mean"), "conventions.*'sources'"),
    "debias": (put("conventions/debias", False), "conventions.*'debias'"),
    "no_conventions": (drop("conventions"), "conventions"),
    "damping": (put("settings/damping", -1.0), "`damping`"),
    "damping_nan": (put("settings/damping", float("nan")), "`damping`"),
    "decay": (put("settings/decay", 1.5), "`decay`"),
    "weight": (put("settings/weight", 0.0), "`weight`"),
    "rule": (put("settings/damping_rule", "tikhonov"), "'tikhonov'"),
    "no_decay": (drop("settings/decay"), "settings.*'decay'"),
    "burn_in": (put("settings/burn_in", "many"), "'burn_in'"),
    "settings": (put("settings", 3), "'settings'"),
    "block_missing": (drop("blocks/full"), r"blocks \['diagonal', 'full'\]"),
    "block_more": (put("blocks/extra", lambda b, x: {}), "blocks.*'extra'"),
    "block_kind": (put("blocks/full", 3), "'full'"),
    "layer": (put("blocks/full/layer/out_features", 5), "'full'.*layer"),
    "layout": (put("blocks/full/layer/weight_layout", "oi"), "'full'.*layer"),
    "approximation": (
        put("blocks/full/approximation/sharing", "reduce"),
        "'full'.*approximation",
    ),
    "updates": (put("blocks/full/updates", -1), "'full'.*'updates'"),
    "age": (put("blocks/full/age", 0.5), "'full'.*'age'"),
    "no_failures": (drop("blocks/full/failures"), "'full'.*'failures'"),
    "no_statistics": (drop("blocks/full/statistics"), "'full'.*statistics"),
    "no_operator": (drop("blocks/full/operator"), "'full'.*operator"),
    "sum_nan": (put(f"{SUM}/array", filled(np.nan)), "'full'.*input.*NaN"),
    "sum_inf": (put(f"{SUM}/array", filled(np.inf)), "'full'.*input.*infinity"),
    "sum_shape": (
        put(f"{SUM}/array", lambda b, x: b.asarray(np.ones((2, 2)))),
        r"'full'.*input.*\(5, 5\).*\(2, 2\)",
    ),
    "sum_integers": (
        put(f"{SUM}/array", lambda b, x: b.asarray(np.ones(x.shape, "int32"))),
        "'full'.*input",
    ),
    "sum_float32": (
        put(f"{SUM}/array", lambda b, x: b.asarray(np.ones(x.shape, "float32"))),
        "'full'.*input",
    ),
    "sum_list": (put(f"{SUM}/array", lambda b, x: [[1.0]]), "'full'.*array.*list"),
    "sum_none": (put(f"{SUM}/array", None), "'full'"),
    "sum_unknown": (put(f"{SUM}/structure", "Pickle"), "unknown structure 'Pickle'"),
    "sum_no_field": (drop(f"{SUM}/whole"), "'full'.*'whole'.*SymmetricMatrix"),
    "sum_more": (put(f"{SUM}/extra", 1), "'full'.*'extra'"),
    "whole_number": (put(f"{SUM}/whole", 3), "'full'.*whole"),
    "weight_negative": (
        put("blocks/full/statistics/averages/input/weight", filled(-1.0)),
        "'full'.*weight",
    ),
    "weight_number": (
        put("blocks/full/statistics/averages/input/weight", 3),
        "'full'.*weight",
    ),
    "average_missing": (drop("blocks/full/statistics/averages/repeats"), "'full'"),
    "other_statistics": (
        lambda b, s: s["blocks"]["full"].update(
            statistics=s["blocks"]["diagonal"]["statistics"]
        ),
        "'full'",
    ),
    "other_operator": (
        lambda b, s: s["blocks"]["full"].update(
            operator=s["blocks"]["full"]["operator"]["input"]
        ),
        "'full'.*operator",
    ),
    "operator_nan": (put(f"{MADE_FROM}/array", filled(np.nan)), "'full'.*operator"),
    "operator_shape": (
        put(f"{MADE_FROM}/array", lambda b, x: b.asarray(np.ones((2, 2)))),
        "'full'.*operator",
    ),
    "operator_solving": (put("blocks/full/operator/input/solving", "never"), "'full'"),
    "operator_unknown": (
        put("blocks/full/operator/structure", "Exec"),
        "unknown structure 'Exec'",
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_every_kind_of_block_comes_back_bit_by_bit(backend, rng, pair):
    """Statistics and operator, with whatever the operator has prepared."""
    layer, approximation = PAIRS[pair]
    rule = "exact" if approximation.name == "eigen" else "factored"
    settings = {"decay": 0.8, "damping": 0.3, "damping_rule": rule, "reduction": "sum"}
    first, second = (
        make_estimator({"a": kc.Block(layer, approximation)}, **settings)
        for _ in range(2)
    )
    first.update({"a": fed(backend, rng, layer)})
    first.rebase(moments="kronecker")
    first.refresh()

    second.load_state_dict(first.state_dict())

    assert differences(frozen(first.state_dict()), frozen(second.state_dict())) == []


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_state_is_refused(backend, batches, case):
    """Anything that does not fit is an error that says where, and changes nothing."""
    damage, match = DAMAGE[case]
    source, target = estimator(), estimator(decay=0.5)
    feed(source, batches[:2])
    feed(target, batches[2:3])
    state = source.state_dict()
    damage(backend, state)
    before = frozen(target.state_dict())

    with pytest.raises(kc.StateError, match=match):
        target.load_state_dict(state)

    assert differences(before, frozen(target.state_dict())) == []


@pytest.mark.parametrize("state", [None, {}, [], 3, "state"], ids=repr)
def test_what_is_no_state_is_refused(state):
    """Something else than a state is an error, whatever it is."""
    with pytest.raises(kc.StateError, match=r"format 'kfac_core\.estimator'"):
        estimator().load_state_dict(state)


def test_an_undamaged_copy_is_taken(backend, batches):
    """The row that must pass: the state that the damaged ones are made from."""
    source, target = estimator(), estimator(decay=0.5)
    feed(source, batches[:2])

    target.load_state_dict(copy.copy(source.state_dict()))

    assert differences(frozen(source.state_dict()), frozen(target.state_dict())) == []
