"""Series operators as snapshots: checks, precision, tracing and state."""

import dataclasses

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.approximations.series import Series
from kfac_core.array.structure import leaves
from kfac_core.linalg import series_chain
from kfac_core.linalg.fallback import Fallback, fallback_of

from ..builders.one_block import SUM, operator_for
from ..builders.series_reference import (
    damped,
    infinite_block,
    moments,
    sequences,
    symmetric_block,
)
from ..builders.tolerances import assert_close, assert_differs

N, T, n, m, DAMPING = 12, 5, 3, 2, 0.1
LAYER = kc.Dense(in_features=n, out_features=m, bias=False, weight_layout="io")
BLOCKS = {
    "symmetric": kc.Block(LAYER, Series(variant="symmetric", steps=T)),
    "infinite": kc.Block(LAYER, Series(variant="infinite")),
    "independent": kc.Block(LAYER, Series(variant="independent")),
}
chains = pytest.mark.parametrize("variant", ["symmetric", "infinite"])


@pytest.fixture
def data(rng):
    """Positively correlated x and g."""
    x = sequences(rng, (N, T, n), correlation=0.8)
    return x, sequences(rng, (N, T, m), correlation=0.8)


def statistics_of(backend, variant, data, dtype="float64"):
    x, g = (backend.asarray(a, dtype) for a in data)
    return kc.batch_moments(BLOCKS[variant], kc.Batch(x, g), conventions=SUM)


def dense_of(variant, data, damping=DAMPING):
    stats = damped(moments(data[0], data[1][None], bias=False), damping)
    if variant == "infinite":
        return infinite_block(stats)
    return symmetric_block(stats, [T])


@chains
def test_float32_statistics_may_be_computed_in_float64(backend, data, rng, variant):
    """Storage, computing and applying are three choices."""
    statistics = statistics_of(backend, variant, data, "float32")
    V = rng.normal(size=(n, m))
    precision = kc.Precision(compute="float64", apply="float64")

    made = operator_for(
        BLOCKS[variant], statistics, damping=DAMPING, precision=precision
    )

    got = backend.to_numpy(made.multiply_inverse(backend.asarray(V)))
    expected = np.linalg.solve(dense_of(variant, data), V.ravel()).reshape(n, m)
    assert_close(got, expected, "gram", "float32", condition=10.0)
    assert made.scale.dtype == backend.dtype("float64")


@chains
def test_what_float32_cannot_certify_is_made_in_float64(
    backend, data, rng, variant, monkeypatch
):
    """The operator says by which fallback it was made, and is in the statistics' dtype."""
    monkeypatch.setattr(series_chain, "RESIDUAL_LIMIT", 1e-9)
    statistics = statistics_of(backend, variant, data, "float32")
    V = rng.normal(size=(n, m))

    made = operator_for(BLOCKS[variant], statistics, damping=DAMPING)

    assert fallback_of(made) == Fallback.FLOAT64
    assert made.scale.dtype == backend.dtype("float32")
    got = backend.to_numpy(made.multiply_inverse(backend.asarray(V, "float32")))
    expected = np.linalg.solve(dense_of(variant, data), V.ravel()).reshape(n, m)
    assert_close(got, expected, "gram", "float32", condition=10.0)
    flagged = operator_for(BLOCKS[variant], statistics, damping=DAMPING, check="status")
    assert kc.Status.INACCURATE in kc.Status(int(flagged.status()))


@chains
def test_operators_are_snapshots(backend, data, variant):
    """Making one changes no statistics, and a chain is another block than K-FAC's."""
    statistics = statistics_of(backend, variant, data)
    before = {path: backend.to_numpy(a).copy() for path, a in leaves(statistics)}

    made = operator_for(BLOCKS[variant], statistics, damping=DAMPING)

    for path, after in leaves(statistics):
        assert np.array_equal(backend.to_numpy(after), before[path]), path
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.scale = None
    independent = statistics_of(backend, "independent", data)
    kfac = operator_for(BLOCKS["independent"], independent, damping=DAMPING)
    assert_differs(
        backend.to_numpy(made.to_dense()), backend.to_numpy(kfac.to_dense()), by=0.1
    )
