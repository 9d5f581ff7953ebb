"""Cheaper blocks through an estimator's state, and inside a compiled program."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.approximations.example_gram import ExampleGram

from ..builders.states import differences, frozen
from ..builders.tolerances import assert_close

N, n, m = 5, 4, 3
LAYER = kc.Dense(in_features=n, out_features=m, bias=True, weight_layout="io")
APPROXIMATIONS = [
    ExampleGram(gradients=4),
]
IDS = [approximation.name for approximation in APPROXIMATIONS]


def estimator_of(approximation):
    return kc.Estimator(
        {"w": kc.Block(LAYER, approximation)},
        decay=0.9,
        damping=0.3,
        damping_rule="factored",
        reduction="sum",
    )


@pytest.mark.parametrize("approximation", APPROXIMATIONS, ids=IDS)
def test_an_estimator_restores_the_block(backend, rng, approximation):
    """State and products come back bit for bit, and go on as if nothing had been."""
    draws = [
        kc.Batch(*(backend.asarray(rng.normal(size=(N, size))) for size in (n, m)))
        for _ in range(2)
    ]
    one, other = estimator_of(approximation), estimator_of(approximation)
    one.update({"w": draws[0]})
    one.refresh()

    other.load_state_dict(one.state_dict())

    assert differences(frozen(one.state_dict()), frozen(other.state_dict())) == []
    V = {
        "weight": backend.asarray(np.ones((n, m))),
        "bias": backend.asarray(np.ones(m)),
    }
    for estimator in (one, other):
        estimator.update({"w": draws[1]})
        estimator.refresh()
    first, second = (e.precondition({"w": V})["w"]["weight"] for e in (one, other))
    assert np.array_equal(backend.to_numpy(first), backend.to_numpy(second))


def test_a_state_of_another_number_of_gradients_is_refused(backend, rng):
    """The approximation is written into the state, and compared."""
    batch = kc.Batch(*(backend.asarray(rng.normal(size=(N, size))) for size in (n, m)))
    one = estimator_of(APPROXIMATIONS[0])
    one.update({"w": batch})
    other = estimator_of(ExampleGram(gradients=3))

    with pytest.raises(kc.StateError, match="gradients"):
        other.load_state_dict(one.state_dict())


@pytest.mark.parametrize("approximation", APPROXIMATIONS, ids=IDS)
def test_a_block_runs_inside_a_compiled_program(requires_backend, rng, approximation):
    """Update, refresh and product in one program, with a status, equal to eager."""
    requires_backend("jax", adapter=True)
    import jax

    block = kc.Block(LAYER, approximation)
    x, g = (jax.numpy.asarray(rng.normal(size=(N, size))) for size in (n, m))
    V = jax.numpy.asarray(rng.normal(size=(n + 1, m)))
    traces = []

    def program(statistics, x, g, damping):
        traces.append(1)
        new = block.update(
            statistics,
            kc.Batch(x, g),
            conventions=kc.Conventions(reduction="sum", sources="sum"),
            decay=0.9,
            check="status",
        )
        made = block.operator(new, damping=damping, rule="factored", check="status")
        return made.multiply_inverse(V), new.status | made.status()

    start = block.initial(x)
    compiled = jax.jit(program)
    got, status = compiled(start, x, g, 0.3)
    again, _ = compiled(start, 2 * x, g, 0.3)
    expected, _ = program(start, x, g, 0.3)

    assert len(traces) == 2
    assert int(status) == 0
    assert_close(np.asarray(got), np.asarray(expected), "inverse", "float64")
    assert np.all(np.isfinite(np.asarray(again)))
