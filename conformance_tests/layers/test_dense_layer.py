"""The dense layer's geometry: parameters as one matrix, and back."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.errors import ConventionError, DtypeError, MixedArraysError, ShapeError

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


def test_the_two_layouts_are_transposes(backend, dtype, rng):
    """A square weight tells the layouts apart only by what was said."""
    square = {"in_features": 3, "out_features": 3, "bias": False}
    W = rng.normal(size=(3, 3))
    parameters = {"weight": backend.asarray(W, dtype)}

    io, oi = (
        kc.Dense(**square, weight_layout=layout).parameters_to_matrix(parameters)
        for layout in ("io", "oi")
    )

    assert_close(backend.to_numpy(io), np.asarray(W, dtype), "exact", dtype)
    assert_close(backend.to_numpy(oi), np.asarray(W.T, dtype), "exact", dtype)


def test_shapes_are_those_of_the_layout():
    """Parameter shapes follow the layout; the matrix shape does not."""
    io, oi = layer(layout="io"), layer(layout="oi")

    assert io.parameter_shapes == {"weight": (IN, OUT), "bias": (OUT,)}
    assert oi.parameter_shapes == {"weight": (OUT, IN), "bias": (OUT,)}
    assert io.matrix_shape == oi.matrix_shape == (IN + 1, OUT)
    assert layer(bias=False).matrix_shape == (IN, OUT)


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


@pytest.mark.parametrize(
    ("shapes", "named"),
    [
        ({"weight": (IN, OUT)}, "bias"),
        ({"weight": (IN, OUT), "bias": (OUT,), "scale": (OUT,)}, "scale"),
        ({"weight": (OUT, IN), "bias": (OUT,)}, "weight"),
        ({"weight": (IN, OUT), "bias": (OUT, 1)}, "bias"),
        ({"weight": (IN * OUT,), "bias": (OUT,)}, "weight"),
        ({"kernel": (IN, OUT), "bias": (OUT,)}, "kernel"),
    ],
)
def test_parameters_that_do_not_fit_are_named(backend, shapes, named):
    """Missing, unknown and misshapen parameters are errors that name them."""
    parameters = {name: backend.asarray(np.ones(s)) for name, s in shapes.items()}

    with pytest.raises(ShapeError, match=named):
        layer().parameters_to_matrix(parameters)


@pytest.mark.parametrize("shape", [(IN, OUT), (OUT, IN + 1), (IN + 1, OUT, 1)])
def test_a_matrix_that_does_not_fit_is_an_error(backend, shape):
    """A matrix without the bias row, or transposed, is refused."""
    with pytest.raises(ShapeError, match="`matrix`"):
        layer().matrix_to_parameters(backend.asarray(np.ones(shape)))


@pytest.mark.parametrize("kind", ["int64", "bool"])
def test_integers_are_no_parameters(backend, kind):
    """Integer and boolean parameters are refused by name."""
    parameters = {
        "weight": backend.asarray(np.ones((IN, OUT)), kind),
        "bias": backend.asarray(np.ones(OUT)),
    }

    with pytest.raises(DtypeError, match="weight"):
        layer().parameters_to_matrix(parameters)


def test_parameters_of_two_libraries_are_refused(backend):
    """A bias of another library is an error that names both."""
    other = np.ones(OUT)
    if backend.name == "numpy":
        other = pytest.importorskip("array_api_strict").asarray(other)
    parameters = {"weight": backend.asarray(np.ones((IN, OUT))), "bias": other}

    with pytest.raises(MixedArraysError, match=r"weight.*bias"):
        layer().parameters_to_matrix(parameters)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"in_features": 0}, ShapeError),
        ({"out_features": -1}, ShapeError),
        ({"weight_layout": "HWIO"}, ConventionError),
    ],
)
def test_descriptions_that_make_no_sense_are_refused(options, error):
    """A width below one and an unknown layout are errors where they are written."""
    good = {
        "in_features": IN,
        "out_features": OUT,
        "bias": True,
        "weight_layout": "io",
    }

    with pytest.raises(error):
        kc.Dense(**(good | options))
