"""Finite rows whose squares overflow: refused as rows of NaN, and how to start again."""

from __future__ import annotations

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.array.structure import leaves

from ..builders.estimators import make_estimator
from ..builders.states import differences, frozen

N, n, m = 6, 4, 3
LAYER = kc.Dense(in_features=n, out_features=m, bias=True, weight_layout="io")
KINDS = {
    "kronecker": (kc.Kronecker(), "factored"),
    "diagonal factors": (kc.Kronecker(input="diagonal", output="diagonal"), "factored"),
    "eigen": (kc.EKFAC(), "exact"),
    "full": (kc.Full(), "exact"),
    "diagonal": (kc.Diagonal(), "exact"),
    "series": (kc.Series(variant="infinite"), "factored"),
}


def made(backend, kind, **options):
    approximation, rule = KINDS[kind]
    settings = {"damping": 0.1, "damping_rule": rule, "decay": 0.9, "reduction": "sum"}
    blocks = {name: kc.Block(LAYER, approximation) for name in ("a", "b")}
    return make_estimator(blocks, **settings, **options)


def batch(backend, scale=1.0, seed=0):
    rng = np.random.default_rng(seed)
    x, g = (scale * rng.normal(size=(N, size)) for size in (n, m))
    return kc.Batch(backend.asarray(x, "float32"), backend.asarray(g, "float32"))


def numbers(backend, statistics):
    """Return the sums by path; of matrices the lower triangle, which is what is kept."""
    found = {}
    for path, leaf in leaves(statistics.averages):
        number = backend.to_numpy(leaf)
        found[path] = np.tril(number) if number.ndim == 2 else number
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_rows_whose_squares_overflow_are_refused(backend, kind):
    """Rows of 1e20 in float32: no number of any block changes."""
    estimator = made(backend, kind)
    good = {name: batch(backend, seed=i) for i, name in enumerate("ab")}
    estimator.update(good)
    before = frozen(estimator.state_dict())

    with pytest.raises(kc.NotFiniteError, match=r"'b'.*overflow"):
        estimator.update({"a": good["a"], "b": batch(backend, 1e20)})

    assert differences(before, frozen(estimator.state_dict())) == []


@pytest.mark.parametrize("scale", [1e20, np.nan])
@pytest.mark.parametrize("kind", ["kronecker", "eigen", "diagonal"])
def test_a_dropped_batch_changes_no_count(backend, kind, scale):
    """With check="status" the flag is set, and sums, updates and ages stay."""
    estimator = made(backend, kind)
    good = {name: batch(backend, seed=i) for i, name in enumerate("ab")}
    estimator.update(good)
    sums = {name: numbers(backend, estimator.state[name].statistics) for name in "ab"}

    bad = batch(backend, scale)
    with np.errstate(over="ignore", invalid="ignore"):
        estimator.update({"a": good["a"], "b": bad}, check="status")

    overflow = kc.Status.OVERFLOWED
    nan = kc.Status.INPUTS_NOT_FINITE | kc.Status.OUTPUT_GRADS_NOT_FINITE
    expected = overflow if scale == 1e20 else nan
    assert int(estimator.state["b"].status) == expected
    for name in "ab":
        held = estimator.state[name]
        assert (int(held.updates), int(held.age)) == (1, 1)
        for path, number in numbers(backend, held.statistics).items():
            np.testing.assert_array_equal(number, sums[name][path], err_msg=path)

    estimator.update(good, check="status")
    assert int(estimator.state["b"].updates) == 2


def test_one_block_can_be_reset(backend):
    """It is as before its first batch, and the other one is as it was."""
    estimator = made(backend, "kronecker")
    good = {name: batch(backend, seed=i) for i, name in enumerate("ab")}
    estimator.update(good)
    estimator.refresh()
    other = estimator.state["b"]

    estimator.reset("a")

    assert estimator.state["b"] is other
    assert estimator.state["a"].updates == 0
    assert estimator.state["a"].statistics is None
    with pytest.raises(kc.NotReadyError, match="'a'"):
        estimator.operator("a")
    with pytest.raises(kc.UnknownBlockError):
        estimator.reset("c")
    fresh = made(backend, "kronecker")
    fresh.update(good)
    estimator.update({"a": good["a"]})
    first, second = (
        numbers(backend, e.state["a"].statistics) for e in (fresh, estimator)
    )
    assert first.keys() == second.keys()
    for path, expected in first.items():
        np.testing.assert_allclose(second[path], expected, rtol=1e-5, err_msg=path)


def test_a_state_of_arrays_keeps_its_form_at_a_reset(backend):
    """For function compilers: counts and sums are zero, and products until a refresh."""
    network = made(backend, "kronecker").network
    first = batch(backend)
    state = network.initial(first.inputs, damping=0.1)
    state = network.update(state, {"a": first}, decay=0.9, check="status")
    state = network.refresh(state, damping=0.1, check="status")

    reset = network.reset(state, "a")

    held = reset["a"]
    assert [int(held.updates), int(held.refreshes), int(held.basis_age)] == [0, 0, -1]
    assert not np.any(backend.to_numpy(held.statistics.averages["input"].sum.array))
    v = {"weight": first.inputs[:n, :m] * 0 + 1, "bias": first.inputs[0, :m] * 0 + 1}
    found = network.precondition(reset, {"a": v})["a"]["bias"]
    assert not np.any(backend.to_numpy(found))
