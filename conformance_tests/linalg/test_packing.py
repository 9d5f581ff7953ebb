"""One triangle of a symmetric matrix as a rectangle (identity C2)."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.linalg import packing
from kfac_core.linalg.packing import pack_triangle, packed_shape, unpack_triangle


@pytest.mark.parametrize("n", [1, 2, 3, 6, 7])
@pytest.mark.parametrize("lead", [(), (2,)])
def test_a_packed_triangle_comes_back_bit_by_bit(
    backend, dtype, rng, n, lead, monkeypatch
):
    """Every number once, negative zeros and NaN included; above the diagonal unread."""
    values = rng.normal(size=(*lead, n, n)).astype(dtype)
    values[..., -1, 0] = -0.0
    if n > 2:
        values[..., 1, 0] = np.nan
    below = np.tril(np.ones((n, n), bool))
    symmetric = np.where(below, values, np.swapaxes(values, -1, -2))

    packed = pack_triangle(backend.asarray(values), xp=backend.xp)
    got = backend.adapter.to_numpy(unpack_triangle(packed, n, xp=backend.xp))
    monkeypatch.setattr(packing, "_PIECE", 2 * n)  # Two rows at a time.
    pieces = [*packing.Triangle(backend.asarray(values)).pieces()]
    pieces = np.concatenate([backend.adapter.to_numpy(x) for x in pieces])

    assert tuple(packed.shape) == (*lead, *packed_shape(n))
    assert np.prod(packed_shape(n)) == n * (n + 1) // 2
    assert got.tobytes() == symmetric.tobytes()
    assert pieces.tobytes() == backend.adapter.to_numpy(packed).tobytes()


def test_a_rectangle_of_another_size_is_refused(backend):
    packed = backend.asarray(np.zeros((5, 2)))
    with pytest.raises(kc.ShapeError, match=r"\(\.\.\., 5, 3\).*\(5, 2\)"):
        unpack_triangle(packed, 5, xp=backend.xp)
