"""Vectors of parameters: inner products, combinations, and what is refused."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.errors import ArgumentError, DtypeError, ShapeError, UnsupportedError
from kfac_core.steps import inner_product, linear_combination

from ..builders.steps_reference import SIZE, flat, put, tree
from ..builders.tolerances import assert_close


def test_the_inner_product_is_that_of_the_flat_vectors(backend, dtype, rng):
    """It sums over blocks and parameters, in the vectors' dtype."""
    a, b = rng.normal(size=(2, SIZE))

    got = inner_product(put(backend, a, dtype), put(backend, b, dtype))

    assert got.dtype == backend.dtype(dtype)
    assert got.shape == ()
    assert_close(backend.to_numpy(got), a @ b, "roundoff", dtype)


def test_a_combination_is_that_of_the_flat_vectors(backend, dtype, rng):
    """Coefficients may be numbers, 0-d arrays, or one array."""
    a, b = rng.normal(size=(2, SIZE))
    vectors = put(backend, a, dtype), put(backend, b, dtype)
    c = backend.asarray([0.3, -2.0], dtype)

    listed = linear_combination([0.3, c[1]], vectors)
    together = linear_combination(c, vectors)

    expected = 0.3 * a - 2.0 * b
    for got in (listed, together):
        assert got["fc1"]["weight"].dtype == backend.dtype(dtype)
        assert_close(flat(backend, got), expected, "roundoff", dtype)


def test_half_precision_is_widened_before_it_is_summed(rng):
    """A float16 sum of 1e5 squares would be infinite, and its small terms lost."""
    x = np.full((1000, 100), 3.0, np.float16)
    vector = {"fc": {"weight": x}}

    got = inner_product(vector, vector)
    half = linear_combination([1e-3, 1.0], [vector, vector])

    assert got.dtype == np.float32
    assert got == 9e5
    assert half["fc"]["weight"].dtype == np.float16
    np.testing.assert_allclose(half["fc"]["weight"], 3.003, rtol=1e-3)


WHOLE = tree(np.ones(SIZE))


def changed(block, name, value):
    """Return the vector of ones with one array replaced (left out where None)."""
    parameters = {**WHOLE[block], name: value}
    return {**WHOLE, block: {n: x for n, x in parameters.items() if x is not None}}


@pytest.mark.parametrize(
    ("other", "error", "words"),
    [
        (
            changed("fc1", "bias", None),
            ShapeError,
            r"`right\['fc1'\]\['bias'\]` has shape None",
        ),
        ({"fc1": WHOLE["fc1"]}, ShapeError, r"`right\['fc2'\].* has shape None"),
        (
            changed("fc1", "bias", np.ones(3)),
            ShapeError,
            r"\['bias'\]` has shape \(3,\)",
        ),
        (
            changed("fc1", "bias", np.ones(2, int)),
            DtypeError,
            r"right\['fc1'\]\['bias'\]",
        ),
        (changed("fc1", "bias", [1.0, 1.0]), DtypeError, r"right\['fc1'\]\['bias'\]"),
        (np.ones(SIZE), ArgumentError, "Expected `right` to be a mapping"),
        (
            changed("fc2", "weight", kc.Batch(np.ones((2, 2)), np.ones((2, 2)))),
            UnsupportedError,
            "Batch",
        ),
    ],
)
def test_vectors_that_do_not_go_together_are_named(other, error, words):
    """The message has the block, the parameter and what was there."""
    with pytest.raises(error, match=words):
        inner_product(WHOLE, other)


def test_the_first_vector_decides_the_dtypes(backend, rng):
    """float32 parameters stay that, whatever the step and the coefficients are."""
    a, b = rng.normal(size=(2, SIZE))
    theta, step = put(backend, a, "float32"), put(backend, b, "float64")
    c = backend.asarray([1.0, 0.5], "float64")

    got = linear_combination(c, [theta, step])
    product = inner_product(theta, step)

    assert got["fc2"]["weight"].dtype == backend.dtype("float32")
    assert product.dtype == backend.dtype("float64")
    assert_close(flat(backend, got), a + 0.5 * b, "roundoff", "float32")
