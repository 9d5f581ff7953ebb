"""Vectors of parameters: inner products, combinations, and what is refused."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.errors import (
    DtypeError,
    MixedArraysError,
    ShapeError,
    UnsupportedError,
)
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


def test_the_order_of_names_means_nothing(backend, rng):
    """A vector whose blocks and parameters come in another order is the same."""
    a, b = rng.normal(size=(2, SIZE))
    transposed = {
        block: dict(reversed(parameters.items()))
        for block, parameters in reversed(put(backend, b, "float64").items())
    }

    got = inner_product(put(backend, a, "float64"), transposed)

    assert_close(backend.to_numpy(got), a @ b, "roundoff", "float64")


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


def test_views_and_empty_arrays_are_arrays(rng):
    """Arrays that are not contiguous, or hold nothing, give the same sums."""
    wide = rng.normal(size=(6, 4))
    view = wide[::2, ::-1]
    vector = {"fc": {"weight": view, "none": np.zeros((0, 3))}}

    got = inner_product(vector, vector)
    doubled = linear_combination([2.0], [vector])

    np.testing.assert_allclose(got, np.sum(view * view), rtol=1e-14)
    np.testing.assert_array_equal(doubled["fc"]["weight"], 2.0 * view)
    assert doubled["fc"]["none"].shape == (0, 3)


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
            r"right\['fc1'\].*holds \['weight'\]",
        ),
        ({"fc1": WHOLE["fc1"]}, ShapeError, r"`right` holds \['fc1'\]"),
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
        (np.ones(SIZE), DtypeError, "Expected `right` to be a mapping"),
        (
            changed("fc2", "weight", kc.SparseRows(np.arange(2), np.ones((2, 2)))),
            UnsupportedError,
            "SparseRows",
        ),
    ],
)
def test_vectors_that_do_not_go_together_are_named(other, error, words):
    """The message has the block, the parameter and what was there."""
    with pytest.raises(error, match=words):
        inner_product(WHOLE, other)


def test_libraries_are_not_mixed(requires_backend):
    """A PyTorch step and NumPy parameters raise, naming both arrays."""
    torch = requires_backend("torch")

    with pytest.raises(MixedArraysError, match=r"vectors\[0\].*vectors\[1\]"):
        linear_combination([1.0, 1.0], [WHOLE, put(torch, np.ones(SIZE), "float64")])


def test_coefficients_are_counted():
    """One coefficient for each vector; no vector at all is an error too."""
    with pytest.raises(ShapeError, match=r"Expected 2 `coefficients`.*got 1"):
        linear_combination([1.0], [WHOLE, WHOLE])
    with pytest.raises(ShapeError, match=r"shape \(2,\)"):
        linear_combination(np.ones(3), [WHOLE, WHOLE])
    with pytest.raises(ShapeError, match="at least one of `vectors`"):
        linear_combination([], [])
    with pytest.raises(ShapeError, match="to hold arrays"):
        inner_product({}, {})
