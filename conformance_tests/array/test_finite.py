"""Whether an array is finite, whatever its numbers and its shape are."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.array.finite import all_finite, is_plain, known_finite, known_true
from kfac_core.linalg.gram import gram_update
from kfac_core.linalg.symmetric import SymmetricMatrix


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0), (3, 2)])
def test_one_nonfinite_number_is_detected(backend, dtype, rng, bad, place):
    """Wherever it stands, with either sign."""
    x = rng.normal(size=(4, 3))
    x[place] = bad

    assert not bool(all_finite(backend.asarray(x, dtype), xp=backend.xp))


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


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(4, 3), (0, 3), (2, 70, 80)])
def test_is_known_true_is_conservative(backend, dtype, rng, bad, shape):
    """A backend may say that it does not know, but never that what is not is."""
    x = rng.normal(size=shape)
    xp = backend.xp
    own = backend.asarray(x, dtype)
    good = xp.isfinite(own)
    assert isinstance(known_true(good, xp=xp), bool)
    # Whoever has numbers at hand knows, and only then.
    assert known_finite(own, xp=xp) is is_plain(own, xp=xp)
    x = np.concatenate([x, np.ones((*shape[:-2], 1, shape[-1]))], axis=-2)
    x[..., -1, 1] = bad

    own = backend.asarray(x, dtype)
    assert known_true(xp.isfinite(own), xp=xp) is False
    assert known_finite(own, xp=xp) is False
    largest = xp.full_like(own, float(np.finfo(dtype).max))
    assert known_finite(largest, xp=xp) is is_plain(own, xp=xp)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scale", [0.5, 0.0])
@pytest.mark.parametrize("lead", [(), (2,)])
@pytest.mark.parametrize("d", [3, 150])
@pytest.mark.parametrize("tail", [False, True])
def test_a_gram_matrix_shows_rows_that_are_not_finite(
    backend, dtype, rng, bad, scale, lead, d, tail
):
    """On its diagonal, whichever kernel makes it: updates do not read their rows twice."""
    x = rng.normal(size=(*lead, 40, d))
    x[..., 7, d - 1] = bad
    eye = np.broadcast_to(np.eye(d + tail), (*lead, d + tail, d + tail))
    total = SymmetricMatrix(backend.asarray(np.array(eye), dtype), full_storage=True)
    ones = backend.asarray(np.ones((*lead, 40)), dtype) if tail else None

    with np.errstate(invalid="ignore"):
        array, _ = gram_update(
            *(total, backend.asarray(x, dtype)),
            **{"tail": ones, "decay": 0.9, "scale": scale, "xp": backend.xp},
        )

    diagonal = np.einsum("...ii->...i", backend.to_numpy(array))
    assert not np.isfinite(diagonal[..., d - 1]).any()


@pytest.mark.parametrize("d", [3, 150])
def test_overflowing_squares_differ_from_nan_rows(backend, d):
    """A diagonal that is not finite is no reason to call the rows so."""
    layer = kc.Dense(in_features=d, out_features=2, bias=False, weight_layout="io")
    block = kc.Block(layer, kc.Kronecker())
    x = backend.asarray(np.full((2, d), 1e30), "float32")
    batch = kc.Batch(x, backend.asarray(np.ones((2, 2)), "float32"))
    conventions = kc.Conventions(reduction="sum", sources="sum")

    with np.errstate(over="ignore"):
        options = kc.UpdateOptions(conventions, 0.9, check="status")
        new = kc.update_block(block, block.initial(x), batch, options)

    assert int(new.status) == kc.Status.OVERFLOWED
