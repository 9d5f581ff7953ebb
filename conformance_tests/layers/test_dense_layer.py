"""The dense layer's geometry: parameters as one matrix, and back."""

import numpy as np
import pytest

import kfac_core as kc

from ..builders.tolerances import assert_close

IN, OUT = 4, 3


def layer(*, bias=True, layout="io"):
    """Return a dense layer of the tests' widths."""
    return kc.Dense(in_features=IN, out_features=OUT, bias=bias, weight_layout=layout)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", ["io", "oi"])
def test_the_matrix_is_the_weight_over_the_bias(backend, dtype, rng, layout, bias):
    """Rows are inputs in either layout, and the bias is the last row."""
    W, b = rng.normal(size=(IN, OUT)), rng.normal(size=OUT)
    parameters = {"weight": backend.asarray(W if layout == "io" else W.T, dtype)}
    if bias:
        parameters["bias"] = backend.asarray(b, dtype)

    got = layer(bias=bias, layout=layout).parameters_to_matrix(parameters)

    expected = np.vstack([W, b]) if bias else W
    assert got.dtype == backend.dtype(dtype)
    assert_close(backend.to_numpy(got), np.asarray(expected, dtype), "exact", dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layout", ["io", "oi"])
def test_parameters_come_back_bit_by_bit(backend, dtype, rng, layout, bias):
    """C2: to a matrix and back, and from a matrix and back, nothing changes."""
    dense = layer(bias=bias, layout=layout)
    host = {name: rng.normal(size=s) for name, s in dense.parameter_shapes.items()}
    parameters = {name: backend.asarray(x, dtype) for name, x in host.items()}

    matrix = dense.parameters_to_matrix(parameters)
    back = dense.matrix_to_parameters(matrix)
    again = dense.parameters_to_matrix(back)

    assert set(back) == set(host)
    assert tuple(matrix.shape) == dense.matrix_shape
    for name, x in host.items():
        expected = np.asarray(x, dtype)
        assert_close(backend.to_numpy(back[name]), expected, "exact", dtype)
    assert np.array_equal(backend.to_numpy(again), backend.to_numpy(matrix))


def test_the_forward_pass_is_rows_times_the_matrix(backend, dtype, rng):
    """With its 1 appended, a row times the matrix is ``x W + b``."""
    W, b, x = (rng.normal(size=s) for s in ((IN, OUT), (OUT,), (5, IN)))
    parameters = {
        "weight": backend.asarray(W.T, dtype),
        "bias": backend.asarray(b, dtype),
    }

    matrix = backend.to_numpy(layer(layout="oi").parameters_to_matrix(parameters))

    got = np.column_stack([x, np.ones(5)]) @ matrix
    assert_close(got, x @ W + b, "product", dtype)
