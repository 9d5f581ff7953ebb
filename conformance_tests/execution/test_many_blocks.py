"""Many blocks of equal shape in one estimator: as stacks, and as if each were alone."""

import numpy as np
import pytest

import kfac_core as kc

from ..builders.estimators import make_estimator
from ..builders.tolerances import assert_close

SETTINGS = {
    "decay": 0.8,
    "damping": 0.3,
    "damping_rule": "factored",
    "reduction": "sum",
}
NAMES = ("a", "b", "c")


def block(n=4, m=3):
    layer = kc.Dense(in_features=n, out_features=m, bias=False, weight_layout="io")
    return kc.Block(layer, kc.Kronecker())


def fed(backend, rng, n=4, m=3):
    x, g = rng.normal(size=(10, n)), rng.normal(size=(10, m))
    return kc.Batch(backend.asarray(x), backend.asarray(g))


def solved(backend, estimator, name, V):
    F = backend.to_numpy(estimator.operator(name).to_dense())
    return np.linalg.solve(F, V.ravel()).reshape(V.shape)


@pytest.mark.parametrize("workers", [1, 2])
def test_every_block_is_divided_by_its_own(backend, rng, workers):
    """All of a stack, some of it, and another shape, before and after a new refresh."""
    blocks = {name: block() for name in NAMES} | {"wide": block(6, 2)}
    estimator = make_estimator(
        blocks, execution=kc.Execution(workers=workers), **SETTINGS
    )
    V = {name: rng.normal(size=b.layer.matrix_shape) for name, b in blocks.items()}
    gradients = {n: {"weight": backend.asarray(v)} for n, v in V.items()}
    batches = {name: fed(backend, rng) for name in NAMES}
    batches["wide"] = fed(backend, rng, 6, 2)
    estimator.update(batches)
    for names in (tuple(blocks), ("b", "wide")):
        estimator.refresh()
        for asked in (names, ("c", "a"), ("wide",)):
            result = estimator.precondition({name: gradients[name] for name in asked})
            assert tuple(result) == asked
            for name in asked:
                expected = solved(backend, estimator, name, V[name])
                got = backend.to_numpy(result[name]["weight"])
                assert_close(got, expected, "inverse", "float64")
        # Only some blocks change, so that a stack that were kept would be wrong.
        estimator.update({"b": fed(backend, rng)})
        estimator.damping = 0.7


def test_one_bad_block_of_a_stack_is_named_alone(backend, rng):
    """The others are made; with a budget the bad one keeps its operator."""
    estimator = make_estimator(
        {name: block() for name in NAMES},
        refreshing=kc.Refreshing(failure_budget=1),
        **SETTINGS,
    )
    estimator.update({name: fed(backend, rng) for name in NAMES})
    estimator.refresh()
    old = {name: estimator.operator(name) for name in NAMES}
    estimator.decay, estimator.damping = 0.0, 0.0
    ones = kc.Batch(backend.asarray(np.ones((1, 4))), backend.asarray(np.ones((1, 3))))
    estimator.update({"a": fed(backend, rng), "b": ones, "c": fed(backend, rng)})

    estimator.refresh()

    assert [estimator.state[name].failures for name in NAMES] == [0, 1, 0]
    assert estimator.operator("b") is old["b"]
    assert estimator.operator("a") is not old["a"]
    with pytest.raises(kc.FactorizationError, match="b/"):
        estimator.refresh()


def test_a_stack_says_whose_gradient_does_not_fit(backend, rng):
    estimator = make_estimator({name: block() for name in NAMES}, **SETTINGS)
    estimator.update({name: fed(backend, rng) for name in NAMES})
    estimator.refresh()
    good, bad = backend.asarray(np.zeros((4, 3))), backend.asarray(np.zeros((3, 3)))
    gradients = {name: {"weight": good} for name in NAMES} | {"b": {"weight": bad}}
    with pytest.raises(kc.ShapeError, match="'b'"):
        estimator.precondition(gradients)
    with pytest.raises(kc.ConventionError, match="workers"):
        make_estimator({"a": block()}, execution=kc.Execution(workers=0), **SETTINGS)
