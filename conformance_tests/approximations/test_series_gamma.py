"""The sum over all lags of a chain, and its reciprocal gamma."""

from fractions import Fraction

import numpy as np
import pytest

from kfac_core.linalg.series import series_gamma, series_sum

from ..builders.tolerances import assert_close, assert_differs, tolerance

NEGATIVE = (-1.0, -0.99999, -0.999, -0.9, -0.5, -1e-3, -1e-8)
POSITIVE = (1e-8, 1e-3, 0.3, 0.9, 0.999, 1 - 1e-4, 1 - 1e-6, 1.0)
CORRELATIONS = (*NEGATIVE, 0.0, *POSITIVE)


def exact_sum(x: float, T: int) -> float:
    """The definition in exact rational arithmetic."""
    x = Fraction(float(x))
    return float(sum((T - abs(d)) * x ** abs(d) for d in range(1 - T, T)))


def closed_form(x: np.ndarray, T: int) -> np.ndarray:
    """The closed form of the paper, in the dtype of x."""
    T = x.dtype.type(T)
    return (1 - x) ** 2 / (T * (1 - x**2) - 2 * x * (1 - x**T))


@pytest.mark.parametrize("T", [*range(1, 21), 100])
def test_gamma_is_the_reciprocal_of_the_exact_sum(backend, dtype, T):
    """To roundoff at every correlation in (-1, 1], the ends included."""
    x = np.array(CORRELATIONS, dtype)
    expected = np.array([exact_sum(value, T) for value in x])
    x, expected = x[expected > 0], expected[expected > 0]

    gamma = backend.to_numpy(series_gamma(backend.asarray(x), steps=T))

    assert np.max(np.abs(gamma * expected - 1)) <= tolerance("roundoff", dtype)


@pytest.mark.parametrize("T", [2, 4, 20])
def test_the_sum_is_exactly_zero_only_at_minus_one(backend, dtype, T):
    """An even number of steps that alternate exactly cancels, and nothing else does."""
    x = backend.asarray([-1.0, np.nextafter(np.array(-1, dtype), np.array(0, dtype))])
    x = backend.xp.astype(x, backend.dtype(dtype))
    shares = backend.asarray(np.eye(T)[-1], dtype)

    total = backend.to_numpy(series_sum(x, shares, xp=backend.xp))

    assert total[0] == 0.0
    assert total[1] > 0.0


def test_gamma_at_one_is_finite_defect_tfkfac_9_11(backend, dtype):
    """At x = 1 it is 1/T^2; TensorFlow's K-FAC has 0/0 there."""
    x = np.ones((1,), dtype)

    gamma = backend.to_numpy(series_gamma(backend.asarray(x), steps=20))

    assert_close(gamma, [1 / 400], "roundoff", dtype)
    with np.errstate(invalid="ignore"):
        assert np.isnan(closed_form(x, 20))[0]


def test_the_closed_form_differs_in_float32_defect_tfkfac_9_11(backend):
    """Near x = 1 the closed form has lost its digits, long before 0/0."""
    x = np.array([1 - 1e-4, 1 - 1e-6], np.float32)

    gamma = backend.to_numpy(series_gamma(backend.asarray(x), steps=100))

    expected = [1 / exact_sum(value, 100) for value in x]
    assert_close(gamma, expected, "roundoff", "float32")
    with np.errstate(invalid="ignore", divide="ignore"):
        wrong = closed_form(x, 100)
    for i in range(2):
        assert_differs(wrong[i], expected[i], by=5e-3)


def test_gamma_keeps_the_sign_of_the_correlation(backend, dtype):
    """Anticorrelated steps cancel: the absolute value is another function."""
    x = np.array([-0.5, -0.9], dtype)

    gamma = backend.to_numpy(series_gamma(backend.asarray(x), steps=5))

    assert_differs(gamma, 1 / np.array([exact_sum(abs(v), 5) for v in x]), by=0.5)


def test_lengths_average_the_reciprocal_of_gamma(backend, dtype):
    """Random lengths average the sum; the mean length in its place is something else."""
    lengths = np.array([1, 3, 3, 8, 20, 0])
    x = np.array(CORRELATIONS, dtype)

    gamma = series_gamma(backend.asarray(x), steps=20, lengths=backend.asarray(lengths))

    expected = np.array([np.sum([exact_sum(v, T) for T in lengths]) / 6 for v in x])
    gamma = backend.to_numpy(gamma)
    assert np.max(np.abs(gamma * expected - 1)) <= tolerance("roundoff", dtype)
    mean_length = round(float(np.mean(lengths)))
    plugged_in = 1 / np.array([exact_sum(v, mean_length) for v in x[x > 0]])
    assert_differs(gamma[x > 0], plugged_in, by=0.01)
