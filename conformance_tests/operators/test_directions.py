"""Directions from batches."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.execution.batch_directions import rows_are_cheaper

from ..builders.reference import damped_block, kronecker_factors
from ..builders.tolerances import assert_close

n, m, DAMPING = 4, 3, 0.3


def estimator_of(bias, loss="sum", layout="io", rule="factored"):
    """Return an estimator of two blocks of different outputs."""
    layers = {
        name: kc.Dense(
            in_features=n, out_features=outputs, bias=bias, weight_layout=layout
        )
        for name, outputs in (("a", m), ("b", m + 1))
    }
    return kc.Estimator(
        {name: kc.Block(layer, kc.Kronecker()) for name, layer in layers.items()},
        decay=0.5,
        damping=DAMPING,
        damping_rule=rule,
        loss=loss,
    )


@pytest.fixture
def statistics_of(rng):
    """The rows that the curvature is made of, by block."""
    return {
        name: (rng.normal(size=(7, n)), rng.normal(size=(7, outputs)))
        for name, outputs in (("a", m), ("b", m + 1))
    }


def fed(backend, dtype, estimator, rows):
    """Return the estimator after an update and a refresh."""
    estimator.update(
        {
            name: kc.Batch(backend.asarray(x, dtype), backend.asarray(g, dtype))
            for name, (x, g) in rows.items()
        }
    )
    estimator.refresh()
    return estimator


def direction(rows, V, bias, scale=1.0, rule="factored"):
    """Return ``F^-1 V`` by a dense solve."""
    x, g = rows
    factors = kronecker_factors(x, scale * g[None], bias=bias)
    F = damped_block(*factors, damping=DAMPING, rule=rule)
    return np.linalg.solve(F, V.ravel()).reshape(V.shape)


def matrix_of(backend, parameters, layout="io"):
    """Return host parameters as the block's matrix."""
    W = backend.to_numpy(parameters["weight"])
    W = W if layout == "io" else W.T
    if "bias" not in parameters:
        return W
    return np.concatenate([W, backend.to_numpy(parameters["bias"])[None]])


@pytest.mark.parametrize("N", [1, 2, 40])
@pytest.mark.parametrize("layout", ["io", "oi"])
@pytest.mark.parametrize("loss", ["sum", "mean"])
def test_a_batch_gives_the_direction_of_its_mean_gradient(
    backend, dtype, rng, statistics_of, N, layout, loss
):
    """With fewer rows than features and with more, for gradients of sum and mean."""
    estimator = fed(backend, dtype, estimator_of(True, loss, layout), statistics_of)
    x, g = rng.normal(size=(N, n)), rng.normal(size=(N, m))
    batch = kc.Batch(backend.asarray(x, dtype), backend.asarray(g, dtype))

    got = estimator.precondition_batches({"a": batch})

    # Gradients of the mean loss carry its 1/N already.
    V = np.concatenate([x, np.ones((N, 1))], axis=1).T @ g / (N if loss == "sum" else 1)
    scale = 7.0 if loss == "mean" else 1.0
    expected = direction(statistics_of["a"], V, True, scale)
    assert list(got) == ["a"]
    assert_close(matrix_of(backend, got["a"], layout), expected, "inverse", dtype)


def test_masked_rows_and_shared_positions_count_as_in_the_gradient(
    backend, dtype, rng, statistics_of
):
    """Padding of NaN is left out of the direction too."""
    estimator = fed(backend, dtype, estimator_of(True), statistics_of)
    x, g = rng.normal(size=(2, 2, n)), rng.normal(size=(2, 2, m))
    keep = np.array([[True, False], [True, True]])
    x[0, 1], g[0, 1] = np.nan, np.inf
    batch = kc.Batch(
        backend.asarray(x, dtype),
        backend.asarray(g, dtype),
        mask=backend.asarray(keep, "bool"),
    )

    got = estimator.precondition_batches({"a": batch})

    ones = np.concatenate([x, np.ones((2, 2, 1))], axis=-1)[keep]
    expected = direction(statistics_of["a"], ones.T @ g[keep] / 2, True)
    assert_close(matrix_of(backend, got["a"]), expected, "inverse", dtype)


def test_exact_damping_and_several_sources_go_through_the_gradient(
    backend, dtype, rng, statistics_of
):
    """What cannot act on rows gives the same answer by the matrix."""
    exact = fed(backend, dtype, estimator_of(False, rule="exact"), statistics_of)
    x, g = rng.normal(size=(1, n)), rng.normal(size=(1, m))
    batch = kc.Batch(backend.asarray(x, dtype), backend.asarray(g, dtype))

    got = exact.precondition_batches({"a": batch})

    expected = direction(statistics_of["a"], x.T @ g, False, rule="exact")
    assert_close(matrix_of(backend, got["a"]), expected, "inverse", dtype)

    factored = fed(backend, dtype, estimator_of(False), statistics_of)
    two = rng.normal(size=(2, 1, m))
    batch = kc.Batch(batch.inputs, backend.asarray(two, dtype), sources=2)

    got = factored.precondition_batches({"a": batch})

    expected = direction(statistics_of["a"], x.T @ two.sum(axis=0), False)
    assert_close(matrix_of(backend, got["a"]), expected, "inverse", dtype)


def test_rows_are_chosen_where_they_take_fewer_flops():
    """The rule is the comparison of the two counts, written out."""
    for R in (1, 3, 50, 900, 5000):
        for n_in, n_out in ((5, 3), (1000, 1000), (785, 1000), (4, 4000)):
            on_rows = 2 * R * (n_in**2 + n_out**2 + n_in * n_out)
            on_matrix = 2 * n_in * n_out * (n_in + n_out + R)
            assert rows_are_cheaper(R, (n_in, n_out)) == (on_rows < on_matrix)


def test_a_batch_that_does_not_fit_is_named(backend, rng, statistics_of):
    """The error names the block; so does that of a block without operator."""
    estimator = fed(backend, "float64", estimator_of(True), statistics_of)
    bad = kc.Batch(
        backend.asarray(rng.normal(size=(2, n + 1)), "float64"),
        backend.asarray(rng.normal(size=(2, m)), "float64"),
    )

    with pytest.raises(kc.ShapeError, match="Block 'a': Expected `inputs`"):
        estimator.precondition_batches({"a": bad})
    with pytest.raises(kc.UnknownBlockError):
        estimator.precondition_batches({"c": bad})
