"""Whether an array is finite, whatever its numbers and its shape are."""

import numpy as np
import pytest

from kfac_core.linalg.finite import all_finite


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (4, 3)])
def test_ordinary_numbers_are_finite(backend, dtype, rng, shape):
    """Also of a 0-d array, and where there is nothing."""
    x = backend.asarray(rng.normal(size=shape), dtype)

    got = all_finite(x, xp=backend.xp)

    assert got.shape == ()
    assert bool(got)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0), (3, 2)])
def test_one_bad_number_is_found(backend, dtype, rng, bad, place):
    """Wherever it stands, with either sign."""
    x = rng.normal(size=(4, 3))
    x[place] = bad

    assert not bool(all_finite(backend.asarray(x, dtype), xp=backend.xp))


def test_infinities_do_not_cancel(backend, dtype):
    """Nor does a NaN hide behind an infinity."""
    for values in ([np.inf, -np.inf], [np.nan, np.inf], [np.inf, np.nan, -np.inf]):
        x = backend.asarray(np.array(values), dtype)
        assert not bool(all_finite(x, xp=backend.xp))


def test_the_largest_numbers_are_finite(backend, dtype):
    """Nothing is added or squared on the way."""
    largest = np.finfo(dtype).max
    x = backend.asarray(np.array([largest, -largest, largest, largest]), dtype)

    assert bool(all_finite(x, xp=backend.xp))
