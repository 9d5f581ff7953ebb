"""Any layout in memory is taken, is not modified, and gives the same numbers."""

from __future__ import annotations

import numpy as np
import pytest

import kfac_core as kc

from ..builders.layers import dense_layer
from ..builders.states import arrays_of
from ..builders.tolerances import assert_close

N, n, m = 6, 4, 3


def estimator():
    """Return an estimator of one dense block."""
    layer = dense_layer(n, m)
    return kc.Estimator(
        {"fc": kc.Block(layer, kc.Kronecker())}, decay=0.9, damping=0.1, reduction="sum"
    )


def every_other(backend, values):
    """Return the values as every other row and column of a larger array."""
    wide = backend.asarray(np.repeat(np.repeat(values, 2, axis=0), 2, axis=1))
    return wide[::2, ::2]


def transposed(backend, values):
    """Return the values as the transpose of an array."""
    return backend.xp.matrix_transpose(backend.asarray(values.T.copy()))


def reversed_(backend, values):
    """Return the values as a view with negative strides."""
    if backend.name in ("torch", "jax"):
        pytest.skip(f"{backend.name} has no negative strides")
    return backend.asarray(values[::-1, ::-1].copy())[::-1, ::-1]


@pytest.mark.parametrize("layout", [every_other, transposed, reversed_])
def test_any_layout_is_taken(backend, dtype, rng, layout):
    """Layout in memory changes no result, and what was given is not modified."""
    values = [rng.normal(size=(N, k)).astype(dtype) for k in (n, m)]
    given = [layout(backend, v) for v in values]
    V = rng.normal(size=(n + 1, m)).astype(dtype)
    results = []

    for batch, v in (
        (kc.Batch(*given), layout(backend, V)),
        (kc.Batch(*map(backend.asarray, values)), backend.asarray(V)),
    ):
        kept = estimator()
        kept.update({"fc": batch})
        kept.refresh()
        parameters = {"weight": v[:-1, :], "bias": v[-1, :]}
        results.append(kept.precondition({"fc": parameters})["fc"]["weight"])

    for x, value in zip(given, values, strict=True):
        np.testing.assert_array_equal(kc.to_numpy(x), value)
    assert_close(*map(backend.to_numpy, results), "inverse", dtype)


def test_read_only_arrays_are_taken(rng):
    """Read-only NumPy arrays are enough everywhere, and the results are writeable."""
    x, g = rng.normal(size=(N, n)), rng.normal(size=(N, m))
    for array in (x, g):
        array.flags.writeable = False
    kept = estimator()

    kept.update({"fc": kc.Batch(x, g)})
    kept.update({"fc": kc.Batch(x, g)})
    kept.refresh()

    assert arrays_of(kept.state_dict())
    assert all(a.flags.writeable for a in arrays_of(kept.state_dict()))
