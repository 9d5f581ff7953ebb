"""Saving and loading: bit by bit the same, or an error that changes nothing."""

from __future__ import annotations

import re

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


def filled(value):
    """Return what replaces an array by one with a bad number."""
    return lambda backend, x: backend.asarray(np.full(x.shape, value))


VALUES = "blocks/full/values"
SUM = f"{VALUES}/statistics.averages.input.sum"
WEIGHT = f"{VALUES}/statistics.averages.input.weight"
INVERSE = f"{VALUES}/operator.input.inverse"


def shaped(*shape):
    """Return what replaces an array by one of another shape."""
    return lambda backend, x: backend.asarray(np.ones(shape))


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
    "version": (put("version", 1), "version.*2.*release.*got 1"),
    "reduction": (put("conventions/reduction", "sum"), "conventions.*'mean'.*'sum'"),
    "damping": (put("settings/damping", -1.0), "settings: .*damping.*-1.0"),
    "weight": (put("settings/weight", 0.0), "`weight`"),
    "layer": (put("blocks/full/layer/out_features", 5), "'full'.*layer.*3.*5"),
    "updates": (put(f"{VALUES}/updates", -1), "'full'.*updates.*-1"),
    "operator_damping": (put(f"{VALUES}/damping", -1.0), "'full'.*damping.*-1.0"),
    "sum_nan": (put(SUM, filled(np.nan)), "'full'.*averages.input.sum.*NaN"),
    "sum_shape": (put(SUM, shaped(2, 2)), r"'full'.*input.sum.*\(5, 3\).*\(2, 2\)"),
    "sum_elsewhere": (
        put(SUM, of_another_library),
        "'full'.*`statistics.averages.input",
    ),
    "weight_negative": (put(WEIGHT, filled(-1.0)), "'full'.*weight.*'input'.*got -1"),
    "status_real": (
        put(f"{VALUES}/statistics.status", lambda b, x: b.asarray(np.zeros(()))),
        "'full'.*statistics.status.*int32.*float64",
    ),
    "other_operator": (other_operator, "'full'.*operator"),
    "operator_solving": (
        put(f"{VALUES}/operator.input.solving", "never"),
        "'full'.*solving.*'inverse', 'triangular'.*'never'",
    ),
    "inverse_square": (
        put(f"{INVERSE}.matrix", shaped(5, 5)),
        "'full'.*triangle.*5, 5",
    ),
    "failed": (
        put(f"{INVERSE}.status", lambda b, x: b.asarray(np.ones((), "int32"))),
        "'full'.*failed",
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_negative_scales_and_counts_raise(rng, pair):
    """Scales, counts of rows, ranks, shifts and residuals, in an array or a number."""
    layer, approximation = PAIRS[pair]
    rule = "exact" if approximation.name == "ekfac" else "factored"
    settings = {"damping": 0.3, "damping_rule": rule, "reduction": "sum"}
    own = make_estimator({"a": kc.Block(layer, approximation)}, **settings)
    own.update({"a": fed(np, rng, layer)})
    own.rebase(moments="kronecker")
    own.refresh()
    names = ("clipped", "factor", "rank", "residual", "rows", "scale", "shift")
    for path, value in own.state_dict()["blocks"]["a"]["values"].items():
        if path.rpartition(".")[2] not in names:
            continue
        state = own.state_dict()
        state["blocks"]["a"]["values"][path] = -np.ones_like(value)
        with pytest.raises(kc.StateError, match=re.escape(f"{path} to be in [0, inf]")):
            own.load_state_dict(state)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "pair", ["kronecker", "uncorrelated", "tnt", "eigen", "diagonal", "full"]
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
    kept.update({"a": fed(np, rng, layer)})
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


def test_a_damping_in_an_array_is_saved(backend, batches):
    """A 0-d damping is saved as the array that it is."""
    kept, fresh = estimator(), estimator()
    kept.damping = backend.asarray(np.array(0.25))

    fresh.load_state_dict(kept.state_dict())

    assert float(fresh.damping) == 0.25
