"""Series operators as snapshots: checks, precision, tracing and state."""

import dataclasses

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.approximations.series import Series
from kfac_core.array.structure import leaves
from kfac_core.linalg import series_chain
from kfac_core.linalg.fallback import Fallback, fallback_of

from ..builders.series_reference import (
    damped,
    infinite_block,
    moments,
    sequences,
    symmetric_block,
)
from ..builders.tolerances import assert_close, assert_differs

SUM = kc.Conventions(reduction="sum", sources="sum")
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
def test_unit_pi_damps_both_sides_alike(backend, data, variant):
    """The other factored rule goes through the same split."""
    statistics = statistics_of(backend, variant, data)

    made = kc.operator_of(
        BLOCKS[variant],
        statistics,
        kc.RefreshOptions(damping=DAMPING, rule="factored_unit_pi"),
    )

    root = np.sqrt(DAMPING / T)
    assert float(made.input.shift) == pytest.approx(root)
    assert float(made.output.shift) == pytest.approx(root)


@chains
def test_status_gives_what_raise_gives(backend, dtype, data, rng, variant):
    """The two ways to make an operator differ in what they look at, not in numbers."""
    statistics = statistics_of(backend, variant, data, dtype)
    V = rng.normal(size=(n, m))
    v = backend.asarray(V, dtype)

    made = kc.operator_of(
        BLOCKS[variant],
        statistics,
        kc.RefreshOptions(
            damping=DAMPING,
            rule="factored",
            check="status",
            factorizations=("inverse", "cholesky", "eigenbasis"),
        ),
    )

    F = dense_of(variant, data)
    assert int(made.status()) == 0
    solved = np.linalg.solve(F, V.ravel()).reshape(n, m)
    assert_close(backend.to_numpy(made.multiply_inverse(v)), solved, "inverse", dtype)
    forward = (F @ V.ravel()).reshape(n, m)
    assert_close(backend.to_numpy(made.multiply(v)), forward, "product", dtype)
    L = np.linalg.cholesky(F)
    lower = (L @ V.ravel()).reshape(n, m)
    assert_close(backend.to_numpy(made.multiply_cholesky(v)), lower, "cholesky", dtype)


@chains
def test_float32_statistics_may_be_computed_in_float64(backend, data, rng, variant):
    """Storage, computing and applying are three choices."""
    statistics = statistics_of(backend, variant, data, "float32")
    V = rng.normal(size=(n, m))
    precision = kc.Precision(compute="float64", apply="float64")

    made = kc.operator_of(
        BLOCKS[variant],
        statistics,
        kc.RefreshOptions(damping=DAMPING, rule="factored", precision=precision),
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

    made = kc.operator_of(
        BLOCKS[variant], statistics, kc.RefreshOptions(damping=DAMPING, rule="factored")
    )

    assert fallback_of(made) == Fallback.FLOAT64
    assert made.scale.dtype == backend.dtype("float32")
    got = backend.to_numpy(made.multiply_inverse(backend.asarray(V, "float32")))
    expected = np.linalg.solve(dense_of(variant, data), V.ravel()).reshape(n, m)
    assert_close(got, expected, "gram", "float32", condition=10.0)
    flagged = kc.operator_of(
        BLOCKS[variant],
        statistics,
        kc.RefreshOptions(damping=DAMPING, rule="factored", check="status"),
    )
    assert kc.Status.INACCURATE in kc.Status(int(flagged.status()))


@chains
def test_operators_are_made_inside_jit(requires_backend, data, rng, variant):
    """With ``check="status"`` nothing depends on a value."""
    backend = requires_backend("jax")
    import jax

    block, V = BLOCKS[variant], rng.normal(size=(n, m))

    @jax.jit
    def solved(x, g, v, damping):
        statistics = block.initial(x)
        statistics = kc.update_block(
            block,
            statistics,
            kc.Batch(x, g),
            kc.UpdateOptions(conventions=SUM, decay=0.9, check="status"),
        )
        made = kc.operator_of(
            block,
            statistics,
            kc.RefreshOptions(damping=damping, rule="factored", check="status"),
        )
        return made.multiply_inverse(v), made.multiply(v), made.status()

    x, g = (backend.asarray(a) for a in data)
    inverse, forward, status = solved(x, g, backend.asarray(V), DAMPING)

    F = dense_of(variant, data)
    assert int(status) == 0
    expected = np.linalg.solve(F, V.ravel()).reshape(n, m)
    assert_close(backend.to_numpy(inverse), expected, "inverse", "float64")
    expected = (F @ V.ravel()).reshape(n, m)
    assert_close(backend.to_numpy(forward), expected, "product", "float64")


@chains
def test_an_estimator_preconditions_and_restores_its_state(backend, data, rng, variant):
    """Through the public door: update, refresh, precondition, save and load."""

    def fresh():
        return kc.Estimator(
            {"rnn": BLOCKS[variant]},
            decay=0.9,
            damping=DAMPING,
            damping_rule="factored",
            reduction="sum",
        )

    V = rng.normal(size=(n, m))
    gradients = {"rnn": {"weight": backend.asarray(V)}}
    x, g = (backend.asarray(a) for a in data)
    first, second = fresh(), fresh()
    first.update({"rnn": kc.Batch(x, g)})
    first.refresh()
    second.load_state_dict(first.state_dict())

    got = [e.precondition(gradients)["rnn"]["weight"] for e in (first, second)]

    expected = np.linalg.solve(dense_of(variant, data), V.ravel()).reshape(n, m)
    for result in got:
        assert_close(backend.to_numpy(result), expected, "inverse", "float64")


@chains
def test_operators_are_snapshots(backend, data, variant):
    """Making one changes no statistics, and a chain is another block than K-FAC's."""
    statistics = statistics_of(backend, variant, data)
    before = {path: backend.to_numpy(a).copy() for path, a in leaves(statistics)}

    made = kc.operator_of(
        BLOCKS[variant], statistics, kc.RefreshOptions(damping=DAMPING, rule="factored")
    )

    for path, after in leaves(statistics):
        assert np.array_equal(backend.to_numpy(after), before[path]), path
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.scale = None
    independent = statistics_of(backend, "independent", data)
    kfac = kc.operator_of(
        BLOCKS["independent"],
        independent,
        kc.RefreshOptions(damping=DAMPING, rule="factored"),
    )
    assert_differs(
        backend.to_numpy(made.to_dense()), backend.to_numpy(kfac.to_dense()), by=0.1
    )
