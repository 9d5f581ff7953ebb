"""Whether a step kept its promise, and taking it back."""

import math

import numpy as np
import pytest

import kfac_core as kc

from ..builders.steps_reference import SIZE, flat, put
from ..builders.tolerances import assert_close

nan, inf = math.nan, math.inf

RATIOS = [
    # loss before, loss after, predicted change, rho
    (3.0, 2.0, -2.0, 0.5),
    (3.0, 4.0, -2.0, -0.5),
    (3.0, 3.0, -2.0, 0.0),
    (3.0, 2.0, 2.0, -inf),
    (3.0, 4.0, 2.0, -inf),
    (3.0, 3.0, 0.0, -inf),
    (3.0, nan, -2.0, -inf),
    (3.0, inf, -2.0, -inf),
    (nan, 3.0, -2.0, -inf),
    (3.0, 2.0, nan, -inf),
    (3.0, 2.0, -inf, -inf),
]


@pytest.mark.parametrize(("before", "after", "predicted", "expected"), RATIOS)
def test_the_ratio_is_never_nan(backend, before, after, predicted, expected):
    """It is the quotient, or minus infinity; numbers and arrays agree."""
    arrays = [backend.asarray(x, "float64") for x in (before, after, predicted)]

    host = kc.steps.reduction_ratio(before, after, predicted=predicted)
    got = kc.steps.reduction_ratio(*arrays[:2], predicted=arrays[2])
    mixed = kc.steps.reduction_ratio(before, after, predicted=arrays[2])

    assert isinstance(host, float)
    assert host == float(got) == float(mixed) == expected


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_change_that_overflows_is_not_finite(sign):
    """Of two finite numbers, as of two arrays."""
    assert kc.steps.reduction_ratio(sign * 1e308, -sign * 1e308, predicted=-2.0) == -inf


@pytest.mark.parametrize(("before", "after", "predicted", "rho"), RATIOS)
def test_a_broken_promise_raises_the_damping(before, after, predicted, rho):
    """A worse loss never lowers the damping, even where the model foretold it."""
    found = kc.steps.reduction_ratio(before, after, predicted=predicted)
    damping = kc.levenberg_marquardt(1.0, found, decay=0.5)

    kept = 0.25 <= rho <= 0.75
    assert damping == (1.0 if kept else 2.0)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (2.0, 1.0, True),
        (2.0, 2.0, True),
        (2.0, 3.0, False),
        (2.0, nan, False),
        (2.0, -inf, False),
        (nan, 2.0, True),
        (inf, 2.0, True),
        (nan, nan, False),
    ],
)
def test_a_step_stands_where_the_loss_is_no_worse(backend, before, after, expected):
    """Numbers give a bool, arrays an array."""
    got = kc.steps.is_accepted(backend.asarray(before), backend.asarray(after))

    assert bool(got) is expected
    assert kc.steps.is_accepted(before, after) is expected
    assert backend.to_numpy(got).dtype == bool


def state(backend, dtype, theta, velocity, count):
    """Return what an optimizer holds: parameters, velocity, a count, a structure."""
    one = backend.asarray(np.ones(1), dtype)
    number = backend.asarray(float(count), dtype)
    return {
        "parameters": put(backend, theta, dtype),
        "velocity": (put(backend, velocity, dtype), None),
        "count": [backend.asarray(np.asarray(count, np.int32))],
        "model": kc.steps.QuadraticModel(
            number * one, one[:, None], one[:, None], number
        ),
    }


@pytest.mark.parametrize("bad", [1.0, nan])
def test_a_rejected_step_restores_the_state(backend, dtype, rng, bad):
    """Bit by bit, counts and structures too, whatever the proposed state holds."""
    theta, velocity, delta = rng.normal(size=(3, SIZE))
    current = state(backend, dtype, theta, velocity, 3)
    there = put(backend, bad * delta, dtype)
    moved = flat(
        backend, kc.steps.linear_combination([1.0, 1.0], [current["parameters"], there])
    )
    proposed = state(backend, dtype, moved, bad * delta, 4)

    for accepted, expected in ((False, current), (True, proposed)):
        for condition in (backend.asarray(np.asarray(accepted)), accepted):
            got = kc.steps.select(condition, proposed, current)

            for key in ("parameters", "velocity"):
                one, other = got[key], expected[key]
                if key == "velocity":
                    (one, nothing), (other, _) = one, other
                    assert nothing is None
                np.testing.assert_array_equal(flat(backend, one), flat(backend, other))
            assert int(got["count"][0]) == (4 if accepted else 3)
            assert got["count"][0].dtype == current["count"][0].dtype
            slope = backend.to_numpy(got["model"].slope)
            assert_close(slope, [4.0 if accepted else 3.0], "exact", dtype)


@pytest.mark.parametrize(
    ("proposed", "words"),
    [
        ({"w": np.ones(3)}, r"`state\['w'\]`: an array of shape \(3,\)"),
        (
            {"w": np.ones(2, np.float32)},
            r"`state\['w'\]`: .* dtype float32 is proposed",
        ),
        ({"w": 1.0}, r"`state\['w'\]`: float is proposed"),
        ({"v": np.ones(2)}, r"`state`: dict of \['v'\] is proposed"),
        ({"w": None}, r"`state\['w'\]`: NoneType is proposed"),
        ((np.ones(2),), "tuple of 1 is proposed"),
    ],
)
def test_states_of_different_forms_are_refused(proposed, words):
    """The message has the place."""
    with pytest.raises(kc.ShapeError, match=words):
        kc.steps.select(np.asarray(True), proposed, {"w": np.ones(2)})
