"""Series: what is refused, what is flagged, and in which precision operators are made."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.linalg import series_chain
from kfac_core.linalg.fallback import Fallback, fallback_of
from kfac_core.linalg.series_infinite import stein_solve
from kfac_core.operators import series as series_blocks

from ..builders import series_reference
from ..builders.layers import dense_layer
from ..builders.one_block import SUM, operator_for
from ..builders.tolerances import assert_close

N, T, n, m, DAMPING = 12, 5, 3, 2, 0.1
LAYER = dense_layer(n, m, bias=False)
BLOCKS = {
    "symmetric": kc.Block(LAYER, kc.Series(variant="symmetric", steps=T)),
    "infinite": kc.Block(LAYER, kc.Series(variant="infinite")),
    "independent": kc.Block(LAYER, kc.Series(variant="independent")),
}
chains = pytest.mark.parametrize("variant", ["symmetric", "infinite"])


@pytest.fixture
def data(rng):
    """Positively correlated x and g."""
    x = series_reference.sequences(rng, (N, T, n), correlation=0.8)
    return x, series_reference.sequences(rng, (N, T, m), correlation=0.8)


def statistics_of(backend, variant, data, dtype="float64"):
    x, g = (backend.asarray(a, dtype) for a in data)
    return kc.batch_moments(BLOCKS[variant], kc.Batch(x, g), conventions=SUM)


def changed(statistics, name, function):
    """Return the statistics with the sum of one average changed."""
    old = statistics.averages[name]
    averages = statistics.averages | {
        name: kc.factors.Average(function(old.sum), old.weight)
    }
    return kc.Statistics(averages, statistics.status)


@chains
def test_exact_damping_is_refused(backend, data, variant):
    """Only A_0 and G_0 are damped; the independent variant takes any rule."""
    statistics = statistics_of(backend, variant, data)

    with pytest.raises(kc.UnsupportedError, match="no exact damping"):
        operator_for(BLOCKS[variant], statistics, damping=DAMPING, rule="exact")
    independent = statistics_of(backend, "independent", data)
    made = operator_for(
        BLOCKS["independent"], independent, damping=DAMPING, rule="exact"
    )
    assert isinstance(made, kc.operators.SpectralOperator)


@chains
def test_lags_of_different_rows_are_refused(backend, data, variant):
    """A lag 1 that is too large for lag 0 is no covariance, and is not clipped away."""
    statistics = statistics_of(backend, variant, data)
    wrong = changed(statistics, "lagged_input", lambda x: 50.0 * x)

    with pytest.raises(kc.FactorizationError, match=r"lag|correlated"):
        operator_for(BLOCKS[variant], wrong, damping=1e-6)
    flagged = operator_for(BLOCKS[variant], wrong, damping=1e-6, check="status")
    assert kc.Status.INACCURATE in kc.Status(int(flagged.status()))
    if variant == "symmetric":
        assert float(flagged.chain.clipped) > 1.0


def test_roundoff_above_one_is_clipped(backend, data):
    """Correlations of 1 are of 1, whatever rounding made of them."""
    statistics = statistics_of(backend, "symmetric", data)
    for side in ("input", "output"):
        zero = statistics.averages[side].sum.full()
        statistics = changed(
            statistics, f"lagged_{side}", lambda _, z=zero: z * (1 + 1e-9)
        )

    made = operator_for(BLOCKS["symmetric"], statistics, damping=0.0)

    assert 0.0 < float(made.chain.clipped) < 1e-8
    W = backend.to_numpy(made.chain.weights)
    assert_close(W, np.full((n, m), float(T**2)), "product", "float64")


@chains
def test_large_blocks_have_no_dense_functions(backend, data, variant, monkeypatch):
    """Above the limit what is dense is refused with the reason; the rest works."""
    monkeypatch.setattr(series_blocks, "DENSE_LIMIT", n * m - 1)
    statistics = statistics_of(backend, variant, data)
    v = backend.asarray(np.ones((n, m)))

    made = operator_for(
        BLOCKS[variant],
        statistics,
        damping=DAMPING,
        factorizations=("inverse", "cholesky", "eigenbasis"),
    )

    for refused in (
        lambda: made.multiply_matpower(v, 0.5),
        lambda: made.multiply_cholesky(v),
        lambda: made.multiply_cholesky_inverse(v),
        lambda: made.eigenvalues(),
    ):
        with pytest.raises(kc.UnsupportedError, match="share no eigenvectors"):
            refused()
    for allowed in (made.multiply, made.multiply_inverse, made.sample):
        assert tuple(allowed(v).shape) == (n, m)


@chains
def test_uncertified_operators_raise(backend, data, variant, monkeypatch):
    """With the remedy in the message."""
    monkeypatch.setattr(series_chain, "RESIDUAL_LIMIT", 1e-18)
    statistics = statistics_of(backend, variant, data)

    with pytest.raises(kc.FactorizationError, match="Increase `damping`"):
        operator_for(BLOCKS[variant], statistics, damping=DAMPING)


@pytest.mark.parametrize("radius", [0.0, 0.5, 0.999, 1 - 1e-5])
def test_doubling_solves_the_equations_of_stein(backend, rng, radius):
    """``X - P X Q^T = V`` and its transpose, up to correlations very near 1."""
    P, Q = (radius * np.linalg.qr(rng.normal(size=(k, k)))[0] for k in (n, m))
    V = rng.normal(size=(n, m))
    arrays = [backend.asarray(a) for a in (P, Q, V)]

    X, Y = (
        backend.to_numpy(a) for a in stein_solve(*arrays, doublings=22, xp=backend.xp)
    )

    condition = 1 / (1 - radius**2)
    assert_close(X - P @ X @ Q.T, V, "inverse", "float64", condition=condition)
    assert_close(Y - P.T @ Y @ Q, V, "inverse", "float64", condition=condition)


def dense_of(variant, data):
    stats = series_reference.damped(
        series_reference.moments(data[0], data[1][None], bias=False), DAMPING
    )
    if variant == "infinite":
        return series_reference.infinite_block(stats)
    return series_reference.symmetric_block(stats, [T])


@chains
def test_float64_is_the_fallback_of_float32(backend, data, rng, variant, monkeypatch):
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
