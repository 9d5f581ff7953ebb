"""Update, refresh and precondition as compiled programs."""

import numpy as np
import pytest

import kfac_core as kc

from ..builders.estimators import make_estimator
from ..builders.states import differences, frozen
from ..builders.tolerances import assert_close

SETTINGS = {
    "decay": 0.8,
    "damping": 0.3,
    "damping_rule": "factored",
    "reduction": "sum",
}
LAYER = kc.Dense(in_features=4, out_features=3, bias=True, weight_layout="io")


def make(approximation=None, **options):
    block = kc.Block(LAYER, approximation or kc.Kronecker())
    return make_estimator({"a": block}, **(SETTINGS | options))


def draw(backend, rng):
    x, g = rng.normal(size=(10, 4)), rng.normal(size=(10, 3))
    return kc.Batch(backend.asarray(x), backend.asarray(g))


def gradients(backend, rng):
    weight, bias = rng.normal(size=(4, 3)), rng.normal(size=3)
    return {"a": {"weight": backend.asarray(weight), "bias": backend.asarray(bias)}}


@pytest.fixture
def jax_backend(requires_backend):
    return requires_backend("jax", adapter=True)


def test_compiled_steps_are_the_steps(jax_backend, rng):
    """Several of them, with decays and dampings that change, and one program a stage."""
    plain, compiled = make(), make(compiled=True)
    V = gradients(jax_backend, rng)
    for step in range(4):
        batch = draw(jax_backend, rng)
        results = []
        for estimator in (plain, compiled):
            estimator.decay = 0.9 - 0.1 * step
            estimator.damping = 0.3 * (step + 1)
            estimator.update({"a": batch})
            estimator.refresh()
            results.append(estimator.precondition(V)["a"])
        for name in ("weight", "bias"):
            expected, got = (jax_backend.to_numpy(result[name]) for result in results)
            assert_close(got, expected, "inverse", "float64")
    assert compiled.compilation.programs == {
        "update": 1,
        "refresh": 1,
        "precondition": 1,
    }
    assert all(seconds > 0 for seconds in compiled.compilation.seconds.values())
    assert plain.compilation is None
    compiled.update({})
    assert compiled.precondition({}) == {}
    assert compiled.state["a"].updates == 4


def test_statistics_are_given_up_and_operators_are_not(jax_backend, rng):
    """The old statistics are gone after an update; what was made of them stays."""
    compiled = make(approximation=kc.Eigen(), damping_rule="exact", compiled=True)
    compiled.update({"a": draw(jax_backend, rng)})
    compiled.rebase(moments="kronecker")
    compiled.refresh()
    before = jax_backend.to_numpy(compiled.operator("a").to_dense())
    held = compiled.state["a"].statistics
    refresh = compiled.start_refresh()
    compiled.update({"a": draw(jax_backend, rng)})

    assert held.averages["input"].sum.array.is_deleted()
    after = jax_backend.to_numpy(compiled.operator("a").to_dense())
    assert np.array_equal(before, after)
    refresh.install()
    again = jax_backend.to_numpy(compiled.operator("a").to_dense())
    assert_close(again, before, "product", "float64")


def test_a_bad_batch_changes_nothing(jax_backend, rng):
    """It raises by name, and the statistics hold what they held."""
    compiled = make(compiled=True)
    compiled.update({"a": draw(jax_backend, rng)})
    before = frozen(compiled.state_dict())
    x = np.full((10, 4), np.nan)
    bad = kc.Batch(jax_backend.asarray(x), jax_backend.asarray(np.ones((10, 3))))
    with pytest.raises(kc.NotFiniteError, match=r"'a'.*inputs"):
        compiled.update({"a": bad})
    assert differences(before, frozen(compiled.state_dict())) == []


def test_a_factorization_that_fails_climbs_the_ladder(jax_backend, rng):
    """A singular factor is no worse off than without a compiler: here, refused."""
    compiled = make(compiled=True, damping=0.0)
    ones = np.ones((2, 4)), np.ones((2, 3))
    compiled.update({"a": kc.Batch(*map(jax_backend.asarray, ones))})
    with pytest.raises(kc.FactorizationError, match="a/input"):
        compiled.refresh()
    compiled.damping = 0.1
    compiled.refresh()
    assert compiled.state["a"].age == 0


def test_a_library_without_a_compiler_says_so(rng):
    estimator = make(compiled=True)
    batch = kc.Batch(rng.normal(size=(5, 4)), rng.normal(size=(5, 3)))
    with pytest.raises(kc.UnsupportedError, match="numpy has no function compiler"):
        estimator.update({"a": batch})
    with pytest.raises(kc.UnsupportedError, match="refresh_threshold"):
        make(compiled=True, threshold=0.1)


def test_a_compiled_stage_may_be_a_part_of_another_program(jax_backend, rng):
    """Which is compiled as the whole is, and gives what the stage alone gives."""
    jax = pytest.importorskip("jax")
    estimator, V = make(compiled=True), gradients(jax_backend, rng)
    estimator.update({"a": draw(jax_backend, rng)})
    estimator.refresh()

    alone = estimator.precondition(V)["a"]
    part = jax.jit(lambda vectors: estimator.precondition(vectors)["a"])(V)
    constant = jax.jit(lambda: estimator.precondition(V)["a"])()

    for found in (part, constant):
        for name, expected in alone.items():
            got, known = (jax_backend.to_numpy(x) for x in (found[name], expected))
            assert_close(got, known, "inverse", "float64")
