"""Saving and loading: bit by bit the same, or an error that changes nothing."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.linalg import damped

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


class BackendOfNumpy:
    """What `fed` asks of a backend."""

    asarray = staticmethod(np.asarray)


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


@pytest.mark.parametrize("rule", RULES)
def test_a_relative_damping_stays_relative(backend, batches, rule):
    """The unit of the damping is part of a state, as its rule is."""
    relative = kc.Refreshing(damping_scaling="mean_eigenvalue")
    kept, fresh = estimator(rule, refreshing=relative), estimator(rule)
    feed(kept, batches[:1])

    fresh.load_state_dict(kept.state_dict())
    for going_on in (kept, fresh):
        feed(going_on, batches[1:2])

    assert differences(frozen(kept.state_dict()), frozen(fresh.state_dict())) == []


def test_a_state_of_before_the_scaling_was_written_is_read(backend, batches):
    """The estimator then keeps its own."""
    relative = kc.Refreshing(damping_scaling="mean_eigenvalue")
    kept, fresh = estimator(), estimator(refreshing=relative)
    feed(kept, batches[:1])
    state = kept.state_dict()
    del state["settings"]["damping_scaling"]

    fresh.load_state_dict(state)

    assert fresh.network.refreshing.damping_scaling == "mean_eigenvalue"


def test_a_fresh_estimator_has_a_state(backend, batches):
    """A state without statistics or operators loads, and then all goes on."""
    saved = estimator().state_dict()
    kept = estimator()
    feed(kept, batches[:1])

    kept.load_state_dict(saved)

    assert kept.state["full"].statistics is None
    assert kept.state["full"].updates == 0
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


VALUES = "blocks/full/values"
SUM = f"{VALUES}/statistics.averages.input.sum"
WEIGHT = f"{VALUES}/statistics.averages.input.weight"
MADE_FROM = f"{VALUES}/operator.input.problem.matrix"
INVERSE = f"{VALUES}/operator.input.inverse"


def shaped(*shape):
    """Return what replaces an array by one of another shape."""
    return lambda backend, x: backend.asarray(np.ones(shape))


def typed(dtype):
    """Return what replaces an array by one of another dtype."""
    return lambda backend, x: backend.asarray(np.ones(x.shape, dtype))


def other_operator(backend, state):
    """Give a block the operator of another kind of block."""
    full, diagonal = (state["blocks"][name]["values"] for name in ("full", "diagonal"))
    for path in [path for path in full if path.startswith("operator.")]:
        del full[path]
    full.update({p: x for p, x in diagonal.items() if p.startswith("operator.")})


def without(part):
    """Return what removes all values of a part."""

    def damage(backend, state):
        values = state["blocks"]["full"]["values"]
        for path in [path for path in values if path.startswith(part)]:
            del values[path]

    return damage


def of_another_library(backend, x):
    """Return an array that lies elsewhere than the others."""
    strict = pytest.importorskip("array_api_strict")
    ones = np.ones(x.shape)
    return ones if backend.name != "numpy" else strict.asarray(ones)


DAMAGE = {
    "format": (put("format", "other"), "format 'kfac_core.estimator'"),
    "no_format": (drop("format"), "format 'kfac_core.estimator'"),
    "version": (put("version", 1), "version 2.*1.*another release"),
    "version_true": (put("version", True), "version 2.*True"),
    "no_version": (drop("version"), "version 2.*None"),
    "reduction": (put("conventions/reduction", "sum"), "conventions.*'mean'.*'sum'"),
    "sources": (put("conventions/sources", "mean"), "conventions.*'sources'"),
    "debias": (put("conventions/debias", False), "conventions.*'debias'"),
    "debias_number": (put("conventions/debias", 1), "conventions.*'debias'"),
    "no_conventions": (drop("conventions"), "conventions"),
    "damping": (put("settings/damping", -1.0), "settings: .*damping.*-1.0"),
    "damping_nan": (put("settings/damping", float("nan")), "settings: .*damping.*nan"),
    "decay": (put("settings/decay", 1.5), "`decay`"),
    "weight": (put("settings/weight", 0.0), "`weight`"),
    "rule": (put("settings/damping_rule", "tikhonov"), "'tikhonov'"),
    "scaling": (put("settings/damping_scaling", "trace"), "'mean_eigenvalue'.*'trace'"),
    "no_decay": (drop("settings/decay"), "settings: decay is missing"),
    "burn_in": (put("settings/burn_in", "many"), "settings: .*burn_in.*'many'"),
    "burn_in_negative": (put("settings/burn_in", -1), "settings: .*burn_in.*-1"),
    "settings": (put("settings", 3), "'settings'"),
    "block_missing": (drop("blocks/full"), r"blocks \['diagonal', 'full'\]"),
    "block_more": (put("blocks/extra", lambda b, x: {}), "blocks.*'extra'"),
    "block_kind": (put("blocks/full", 3), "'full'"),
    "layer": (put("blocks/full/layer/out_features", 5), "'full'.*layer.*3.*5"),
    "layout": (put("blocks/full/layer/weight_layout", "oi"), "'full'.*layer"),
    "no_layer": (drop("blocks/full/layer"), "'full'.*'layer'"),
    "approximation": (
        put("blocks/full/approximation/sharing", "reduce"),
        "'full'.*approximation.*'expand'.*'reduce'",
    ),
    "values": (put(VALUES, [1]), "'full'.*'values'"),
    "updates": (put(f"{VALUES}/updates", -1), "'full'.*updates.*-1"),
    "updates_true": (put(f"{VALUES}/updates", True), "'full'.*updates.*True"),
    "age": (put(f"{VALUES}/age", 0.5), "'full'.*age.*0.5"),
    "no_failures": (drop(f"{VALUES}/failures"), "'full'.*failures is missing"),
    "operator_damping": (put(f"{VALUES}/damping", -1.0), "'full'.*damping.*-1.0"),
    "damping_alone": (without("operator."), "'full'.*damping belongs to no operator"),
    "operator_alone": (drop(f"{VALUES}/damping"), "'full'.*damping is missing"),
    "sum_nan": (put(SUM, filled(np.nan)), "'full'.*averages.input.sum.*NaN"),
    "sum_inf": (put(SUM, filled(np.inf)), "'full'.*averages.input.sum.*infinity"),
    "sum_shape": (put(SUM, shaped(2, 2)), r"'full'.*input.sum.*\(5, 3\).*\(2, 2\)"),
    "sum_integers": (put(SUM, typed("int32")), "'full'.*input.sum.*float64.*int32"),
    "sum_float32": (put(SUM, typed("float32")), "'full'.*input.sum.*float64.*float32"),
    "sum_elsewhere": (
        put(SUM, of_another_library),
        "'full'.*`statistics.averages.input",
    ),
    "sum_list": (put(SUM, lambda b, x: [[1.0]]), "'full'.*input.sum.*list"),
    "sum_none": (put(SUM, None), "'full'.*input.sum.*None"),
    "no_sum": (drop(SUM), "'full'.*averages.input.sum is missing"),
    "sum_more": (put(f"{SUM}.extra", 1), "'full'.*extra.*belong to nothing"),
    "weight_negative": (put(WEIGHT, filled(-1.0)), "'full'.*weight.*'input'.*got -1"),
    "weight_number": (put(WEIGHT, 3), "'full'.*input.weight.*int"),
    "status_real": (
        put(f"{VALUES}/statistics.status", lambda b, x: b.asarray(np.zeros(()))),
        "'full'.*statistics.status.*int32.*float64",
    ),
    "other_operator": (other_operator, "'full'.*operator"),
    "operator_nan": (
        put(MADE_FROM, filled(np.nan)),
        "'full'.*operator.input.problem.matrix.*NaN",
    ),
    "operator_shape": (
        put(MADE_FROM, shaped(2, 2)),
        "'full'.*operator.input.problem.matrix",
    ),
    "operator_solving": (
        put(f"{VALUES}/operator.input.solving", "never"),
        "'full'.*solving.*'inverse', 'triangular'.*'never'",
    ),
    "inverse_nan": (put(f"{INVERSE}.matrix", filled(np.nan)), "'full'.*inverse.*NaN"),
    "inverse_shape": (put(f"{INVERSE}.matrix", shaped(3, 1)), "'full'.*damaged"),
    "inverse_square": (
        put(f"{INVERSE}.matrix", shaped(5, 5)),
        "'full'.*triangle.*5, 5",
    ),
    "no_residual": (drop(f"{INVERSE}.residual"), "'full'.*inverse.residual is missing"),
    "failed": (
        put(f"{INVERSE}.status", lambda b, x: b.asarray(np.ones((), "int32"))),
        "'full'.*failed",
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


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "pair", ["kronecker", "uncorrelated", "tnt", "kfoc", "eigen", "diagonal", "full"]
)
def test_a_load_factorizes_nothing(rng, monkeypatch, pair, rule):
    """What is prepared is read, and the template has nothing prepared."""
    layer, approximation = PAIRS[pair]
    kept, fresh = (
        make_estimator(
            {"a": kc.Block(layer, approximation)},
            **{"decay": 0.8, "damping": 0.3, "damping_rule": rule, "reduction": "sum"},
        )
        for _ in range(2)
    )
    kept.update({"a": fed(BackendOfNumpy, rng, layer)})
    kept.rebase(moments="kronecker")
    kept.refresh()
    state = kept.state_dict()

    def forbidden(*_, **__):
        raise AssertionError("a factorization")

    for name in ("cholesky_factor", "damped_inverse", "eigendecomposition"):
        monkeypatch.setattr(damped, name, forbidden)
    fresh.load_state_dict(state)

    assert fresh.operator("a").factorizations == kept.operator("a").factorizations
    assert "inverse" in fresh.operator("a").factorizations


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

    with pytest.raises(kc.StateError, match=match) as caught:
        target.load_state_dict(state)

    assert "\n" not in str(caught.value)

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
