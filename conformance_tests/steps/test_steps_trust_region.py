"""Bounds on the length of a step."""

import numpy as np
import pytest

from kfac_core.array.status import Status
from kfac_core.errors import ConventionError, NotFiniteError
from kfac_core.steps import kl_clip, linear_combination
from kfac_core.steps.trust_region import clip_of_product

from ..builders import reference
from ..builders.steps_reference import SIZE, flat, put
from ..builders.tolerances import assert_close


@pytest.fixture
def step(rng):
    """A damped curvature, a gradient and its direction, dense."""
    F = reference.spd(rng, SIZE)
    grad = rng.normal(size=SIZE)
    return F, grad, np.linalg.solve(F, grad)


@pytest.mark.parametrize("lengthen", [False, True])
@pytest.mark.parametrize("bound", [1e-6, 1e-2, 1e6])
def test_the_clipped_step_is_as_long_as_allowed(backend, dtype, step, bound, lengthen):
    """nu is the formula's, and ``|lr nu P grad|^2`` in the norm of F at most the bound.

    Short directions are lengthened to the geometric mean of their square and the bound.
    """
    F, grad, direction = step
    there = put(backend, direction, dtype)
    options = {"learning_rate": 0.1, "bound": bound, "lengthen": lengthen}

    got = kl_clip(put(backend, grad, dtype), there, **options)
    of_number = clip_of_product(float(grad @ direction), **options)
    delta = 0.1 * flat(backend, linear_combination([got.scale], [there]))

    square = grad @ direction
    size = 0.1**2 * square
    longer = np.sqrt(bound * square) if lengthen and square < bound else square
    nu = np.sqrt(min(bound / 0.1**2, longer) / square)
    assert_close(backend.to_numpy(got.scale), nu, "product", dtype)
    assert_close(of_number.scale, nu, "product", dtype)
    assert_close(backend.to_numpy(got.size), size, "product", dtype)
    assert int(got.status) == 0
    assert_close(delta @ F @ delta, nu**2 * size, "inverse", dtype)
    assert (nu > 1.0) == (bound > 1.0 and lengthen)
    assert (nu < 1.0) == (bound < 1.0)


@pytest.mark.parametrize(
    ("size", "scale", "status"),
    [
        (0.0, 1.0, 0),
        (-1.0, 1.0, Status.NOT_POSITIVE),
        (1e-300, 1.0, 0),
        (1e-320, 1.0, 0),
    ],
)
def test_next_to_nothing_is_not_clipped(size, scale, status):
    """No gradient, or one below zero, has the scale of no bound."""
    one, other = {"fc": {"w": np.ones(1)}}, {"fc": {"w": np.full(1, size)}}

    clip = kl_clip(one, other, learning_rate=1.0, bound=0.1, lengthen=size <= 0)

    assert clip.scale == scale
    assert clip.status == status
    # 0 / 0 is a step of no length.
    assert kl_clip(one, one, learning_rate=0.0, bound=0.1).scale == 1.0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_length_that_is_not_finite_raises_or_is_flagged(backend, bad):
    """Never a silent NaN: an error, or zero with a flag."""
    gradient = put(backend, np.full(SIZE, bad), "float64")
    one = put(backend, np.ones(SIZE), "float64")

    clip = kl_clip(gradient, one, learning_rate=1.0, bound=1.0, check="status")

    assert float(clip.scale) == 0.0
    assert int(clip.status) == Status.MATRIX_NOT_FINITE
    with pytest.raises(NotFiniteError, match="length of the step"):
        kl_clip(gradient, one, learning_rate=1.0, bound=1.0)


@pytest.mark.parametrize("wrong", [-1.0, 0.0, np.nan])
@pytest.mark.parametrize("check", ["raise", "status"])
def test_a_nonpositive_bound_in_an_array_is_flagged(backend, wrong, check):
    """Its value is known only with the result: refused, or flagged with no step at all."""
    bad = backend.asarray(np.asarray(wrong))
    vector = {"fc": {"weight": backend.asarray(np.ones((1, 2)))}}

    def clip():
        return kl_clip(vector, vector, learning_rate=0.1, bound=bad, check=check)

    if check == "raise":
        with pytest.raises(ConventionError, match="`bound`"):
            clip()
        return
    region = clip()
    assert float(region.scale) == 0.0
    assert Status.NOT_POSITIVE in Status(int(region.status))
