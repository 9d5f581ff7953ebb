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


@pytest.mark.parametrize("copies", [1, 2500])
def test_the_largest_numbers_are_finite(backend, dtype, copies):
    """Their sum and their squares are not."""
    largest = np.finfo(dtype).max
    x = np.tile([largest, -largest, largest, largest], copies)

    assert bool(all_finite(backend.asarray(x, dtype), xp=backend.xp))


@pytest.mark.parametrize("bad", [None, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("layout", ["C", "F", "every other", "three axes"])
def test_many_numbers_are_all_read(backend, dtype, rng, bad, layout):
    """The last of ten thousand is found, however they lie in memory."""
    x = rng.normal(size=(100, 101))
    if bad is not None:
        x[99, 100] = bad
    x = backend.asarray(x, dtype)
    if layout == "F":
        x = backend.xp.asarray(x.T, copy=True).T
    if layout == "every other":
        x = x[1::2, ::2]
    if layout == "three axes":
        x = backend.xp.permute_dims(backend.xp.reshape(x, (10, 10, 101)), (2, 0, 1))

    assert bool(all_finite(x, xp=backend.xp)) == (bad is None)
