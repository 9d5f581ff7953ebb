"""Directions from batches, and into arrays that the caller keeps."""

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
        reduction=loss,
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


def gradients_of(backend, dtype, rng):
    return {
        name: {
            "weight": backend.asarray(rng.normal(size=(n, outputs)), dtype),
            "bias": backend.asarray(rng.normal(size=(outputs,)), dtype),
        }
        for name, outputs in (("a", m), ("b", m + 1))
    }


def writable(backend, dtype, like):
    """Return arrays of ones of the form of gradients, to be written to."""
    return {
        name: {
            p: backend.xp.ones(x.shape, dtype=backend.dtype(dtype), device=x.device)
            for p, x in parameters.items()
        }
        for name, parameters in like.items()
    }


def ones_like(backend, out, size, dtype):
    """Return an array of another shape or dtype on the buffers' device."""
    device = out["a"]["bias"].device
    return backend.xp.ones((size,), dtype=backend.dtype(dtype), device=device)


@pytest.fixture
def mutable(backend):
    """Skip for a library whose arrays cannot be written to."""
    if backend.name == "jax":
        pytest.skip("arrays of jax cannot be written to")


def test_directions_are_written_into_buffers(
    backend, dtype, rng, statistics_of, mutable
):
    """The buffers themselves come back, with the direction in them, step after step."""
    estimator = fed(backend, dtype, estimator_of(True), statistics_of)
    gradients = gradients_of(backend, dtype, rng)
    out = writable(backend, dtype, gradients)

    for _ in range(2):
        got = estimator.precondition(gradients, out=out)

        for name, parameters in gradients.items():
            assert got[name]["weight"] is out[name]["weight"]
            assert got[name]["bias"] is out[name]["bias"]
            V = matrix_of(backend, parameters)
            expected = direction(statistics_of[name], V, True)
            assert_close(matrix_of(backend, out[name]), expected, "inverse", dtype)
        gradients = gradients_of(backend, dtype, rng)


def test_gradients_may_be_their_own_buffers(backend, rng, statistics_of, mutable):
    """What is asked for is done: the gradients become the directions."""
    estimator = fed(backend, "float64", estimator_of(True), statistics_of)
    gradients = writable(backend, "float64", gradients_of(backend, "float64", rng))
    V = np.ones((n + 1, m))

    estimator.precondition(gradients, out=gradients)

    expected = direction(statistics_of["a"], V, True)
    assert_close(matrix_of(backend, gradients["a"]), expected, "inverse", "float64")


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (lambda b, o: o["b"].pop("bias"), kc.ShapeError, "'bias' of block 'b'"),
        (lambda b, o: o.pop("b"), kc.ShapeError, "'weight' of block 'b'"),
        (
            lambda b, o: o["b"].update(bias=ones_like(b, o, m, "float64")),
            kc.ShapeError,
            r"out\['b'\]\['bias'\]` to have shape \(4,\), got \(3,\)",
        ),
        (
            lambda b, o: o["b"].update(bias=ones_like(b, o, m + 1, "float32")),
            kc.DtypeError,
            "to have dtype .*float64",
        ),
    ],
)
def test_a_buffer_that_does_not_fit_leaves_all_as_they_were(
    backend, rng, statistics_of, mutable, spoil, error, words
):
    """Nothing is written before everything is checked."""
    estimator = fed(backend, "float64", estimator_of(True), statistics_of)
    gradients = gradients_of(backend, "float64", rng)
    out = writable(backend, "float64", gradients)
    spoil(backend, out)

    with pytest.raises(error, match=words):
        estimator.precondition(gradients, out=out)

    assert np.all(backend.to_numpy(out["a"]["weight"]) == 1.0)
    assert np.all(backend.to_numpy(out["a"]["bias"]) == 1.0)


def test_arrays_that_cannot_be_written_to_are_refused(backend, rng, statistics_of):
    """Read-only arrays of NumPy, and all of JAX's."""
    if backend.name not in ("numpy", "jax"):
        pytest.skip("this library has no read-only arrays")
    estimator = fed(backend, "float64", estimator_of(True), statistics_of)
    gradients = gradients_of(backend, "float64", rng)  # read-only in every test

    with pytest.raises(kc.UnsupportedError, match="cannot be written to"):
        estimator.precondition(gradients, out=gradients)
