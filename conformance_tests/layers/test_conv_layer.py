"""The convolution as a dense layer on patches, in every combination of its options."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.errors import ConventionError
from kfac_core.layers.conv import Conv

from ..builders import conv_reference as naive
from ..builders import reference
from ..builders.one_block import learn, operator_for
from ..builders.tolerances import assert_close, assert_differs
from ..builders.tracing import compiled

C, OUT, N, M = 4, 8, 2, 2
BIASES = (True, False)
WEIGHT_LAYOUTS = ("spatial_io", "oi_spatial")


def layer_of(geometry, *, bias=True, weight="spatial_io", data="channels_last", **more):
    options = {
        "in_channels": C,
        "out_channels": OUT,
        "kernel_size": geometry.kernel,
        "strides": geometry.strides,
        "padding": geometry.padding,
        "dilation": geometry.dilation,
        "groups": geometry.groups,
        "bias": bias,
        "weight_layout": weight,
        "data_layout": data,
    }
    return Conv(**(options | more))


@functools.cache
def problem(geometry, spatial):
    """Return x, g of M sources, and each source's weight gradient, by loops."""
    rng = np.random.default_rng([20160204, *spatial, *geometry.strides])
    out = naive.output_size(spatial, geometry)
    x, g = rng.normal(size=(N, *spatial, C)), rng.normal(size=(M, N, *out, OUT))
    return x, g, np.stack([naive.weight_gradient(x, one, geometry) for one in g])


def batch_of(backend, x, g, data, dtype="float64", mask=None):
    """Return a batch in a data layout, from arrays with their channels last."""
    if data == "channels_first":
        x, g = np.moveaxis(x, -1, 1), np.moveaxis(g, -1, 2)
    mask = None if mask is None else backend.asarray(mask)
    x, g = backend.asarray(x, dtype), backend.asarray(g, dtype)
    return kc.Batch(x, g, mask, sources=int(g.shape[0]))


def all_rows(layers, batches):
    return [layer.rows(batch) for layer, batch in zip(layers, batches, strict=True)]


def summed(backend, rows):
    """Return sum over examples and positions of x g^T, shape (M, n(+1), out)."""
    x, g = backend.to_numpy(rows.inputs), backend.to_numpy(rows.output_grads)
    if x.ndim == 3:
        x, g = x[None], g[None]
    if rows.homogeneous:
        x = np.concatenate([x, np.ones((*x.shape[:-1], 1))], axis=-1)
    D = np.einsum("qnsi,qmnso->miqo", x, g)
    return D.reshape(*D.shape[:2], -1)


def in_layout(W, weight):
    """Return a weight (*kernel, c, out) in the layout of a framework."""
    return W if weight == "spatial_io" else np.moveaxis(W, (-1, -2), (0, 1))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("data", ["channels_last", "channels_first"])
def test_weight_gradient_is_the_sum_over_rows(backend, dims, data):
    """Sum of x g^T is d/dW of sum(y * g), in each option with each other."""
    combinations = itertools.product(naive.geometries(dims), BIASES, WEIGHT_LAYOUTS)
    cases = [
        (layer_of(geometry, bias=bias, weight=weight, data=data), geometry)
        for geometry, bias, weight in combinations
    ]
    layers = [layer for layer, _ in cases]
    problems = [problem(geometry, naive.SPATIAL[dims]) for _, geometry in cases]
    batches = [batch_of(backend, x, g, data) for x, g, _ in problems]

    every = compiled(backend, functools.partial(all_rows, layers))(batches)

    for layer, rows, (_, g, W) in zip(layers, every, problems, strict=True):
        D, weight = summed(backend, rows), layer.weight_layout
        assert D.shape[1:] == layer.matrix_shape
        for m in range(M):
            got = layer.matrix_to_parameters(backend.asarray(D[m]))
            shapes = {name: tuple(value.shape) for name, value in got.items()}
            assert shapes == layer.parameter_shapes
            got = {name: backend.to_numpy(value) for name, value in got.items()}
            assert_close(got["weight"], in_layout(W[m], weight), "product", "float64")
            if layer.bias:
                expected = g[m].reshape(-1, OUT).sum(axis=0)
                assert_close(got["bias"], expected, "product", "float64")


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_weight_gradient_is_that_of_the_framework(backend, dims):
    """The library's own convolution, differentiated, gives the same gradient."""
    if backend.name not in naive.FRAMEWORKS:
        pytest.skip("needs --backend=torch or jax: a library that has convolutions")
    geometries = naive.geometries(dims)
    options = {"weight": "oi_spatial", "data": "channels_first"}
    layers = [layer_of(geometry, **options) for geometry in geometries]
    problems = [problem(geometry, naive.SPATIAL[dims]) for geometry in geometries]
    batches = [batch_of(backend, x, g, "channels_first") for x, g, _ in problems]

    def differentiate(batches):
        return [
            naive.FRAMEWORKS[backend.name](
                batch.inputs,
                batch.output_grads[0],
                layer.parameter_shapes["weight"],
                geometry,
            )
            for layer, batch, geometry in zip(layers, batches, geometries, strict=True)
        ]

    every = compiled(backend, functools.partial(all_rows, layers))(batches)
    gradients = compiled(backend, differentiate)(batches)

    for layer, rows, gradient in zip(layers, every, gradients, strict=True):
        D = backend.asarray(summed(backend, rows)[0])
        got = backend.to_numpy(layer.matrix_to_parameters(D)["weight"])
        assert_close(got, backend.to_numpy(gradient), "product", "float64")


def test_channels_of_a_group_stand_together(backend):
    """Output channel o is of group o // m; dealing channels out in turn differs."""
    geometry = naive.Geometry((3, 2), (1, 1), "same", (1, 1), groups=2)
    x, g, W = problem(geometry, (6, 5))
    dealt = np.concatenate([g[..., 0::2], g[..., 1::2]], axis=-1)

    D = summed(
        backend, layer_of(geometry, bias=False).rows(batch_of(backend, x, g, ""))
    )
    wrong = layer_of(geometry, bias=False).rows(batch_of(backend, x, dealt, ""))

    assert_close(D.reshape(W.shape), W, "product", "float64")
    assert_differs(summed(backend, wrong).reshape(W.shape), W)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_block_is_that_of_the_patches(backend, dtype, groups, masked, rng):
    """A Kronecker block of a convolution, by loops over patches, inverted densely."""
    geometry = naive.Geometry((2, 2), (2, 1), "same", (1, 1), groups)
    x, g, _ = problem(geometry, (6, 5))
    mask = rng.random(size=g.shape[1:-1]) < 0.7 if masked else None
    block = kc.Block(layer_of(geometry), kc.Kronecker())
    batch = batch_of(backend, x, g, "channels_last", dtype, mask)
    V = rng.normal(size=block.layer.matrix_shape)

    statistics = learn(block, batch, decay=0.5)
    operator = operator_for(block, statistics, damping=0.3)
    got = backend.to_numpy(operator.multiply_inverse(backend.asarray(V, dtype)))

    A, G, S = naive.kronecker_factors(x, g, geometry, bias=True, mask=mask)
    for q, columns in enumerate(np.split(np.arange(OUT), groups)):
        F = reference.damped_block(A[q], G[q], S, damping=0.3, rule="factored")
        expected = np.linalg.solve(F, V[:, columns].ravel()).reshape(-1, len(columns))
        assert_close(got[:, columns], expected, "inverse", dtype)


@pytest.mark.parametrize("groups", [1, 2])
def test_masked_rows_are_zero(backend, groups, rng):
    """NaN in masked output gradients, and patches that are masked, are gone."""
    geometry = naive.Geometry((3, 2), (1, 1), "valid", (1, 1), groups)
    x, g, _ = problem(geometry, (6, 5))
    mask = rng.random(size=g.shape[1:-1]) < 0.5
    x, g = x.copy(), np.where(mask[..., None], g, np.nan)
    mask[0], x[0], g[:, 0] = False, np.nan, np.inf

    rows = layer_of(geometry).rows(batch_of(backend, x, g, "channels_last", mask=mask))

    inputs, grads = naive.group_rows(x, g, geometry)
    keep = mask.reshape(N, -1, 1)
    inputs, grads = np.where(keep, inputs, 0.0), np.where(keep, grads, 0.0)
    got = backend.to_numpy(rows.inputs), backend.to_numpy(rows.output_grads)
    assert_close(got[0].reshape(inputs.shape), inputs, "exact", "float64")
    assert_close(got[1].reshape(grads.shape), grads, "exact", "float64")
    assert np.array_equal(backend.to_numpy(rows.mask), keep[..., 0])


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("budget", [1, 2, 5, 100])
def test_chunks_are_the_rows_within_a_budget(backend, groups, budget, rng):
    """No chunk holds more patch elements than stated; together they are all rows."""
    geometry = naive.Geometry((3, 2), (1, 2), "same", (1, 1), groups)
    out = naive.output_size((6, 5), geometry)
    one = naive.elements(out) * 6 * C
    x, g = rng.normal(size=(5, 6, 5, C)), rng.normal(size=(M, 5, *out, OUT))
    layer = layer_of(geometry)
    mask = rng.random(size=(5, *out)) < 0.7
    batch = batch_of(backend, x, g, "channels_last", mask=mask)

    limit = budget * one + one // 2
    chunks = list(layer.row_chunks(batch, max_patch_elements=limit))

    whole = layer.rows(batch)
    assert len(chunks) == -(-5 // budget)
    for name, axis in (("inputs", -3), ("output_grads", -3), ("mask", 0)):
        parts = [backend.to_numpy(getattr(chunk, name)) for chunk in chunks]
        joined = np.concatenate(parts, axis=axis)
        expected = backend.to_numpy(getattr(whole, name))
        assert_close(joined, expected, "exact", "float64")
    assert max(naive.elements(chunk.inputs.shape) for chunk in chunks) <= limit


def test_tfkfac_9_3_nothing_is_sub_sampled_unasked(backend):
    """Every row comes, twice the same; and no option can be given by position."""
    geometry = naive.Geometry((3, 2), (1, 1), "same", (1, 1))
    x, g, _ = problem(geometry, (6, 5))
    layer, batch = layer_of(geometry), batch_of(backend, x, g, "channels_last")

    first, second = layer.rows(batch), layer.rows(batch)

    assert (first.examples, first.positions) == (N, 30)
    got = backend.to_numpy(first.inputs), backend.to_numpy(second.inputs)
    assert np.array_equal(*got)
    with pytest.raises(TypeError, match="positional"):
        layer.rows(batch, 7)
    with pytest.raises(TypeError, match="positional"):
        Conv(3, 4, (3, 3))


def test_tfkfac_9_5_positions_heed_dilation_and_any_number_of_axes(backend):
    """S is 16 and not 36 with dilation 2; one stride an axis, in 1 to 3 axes."""
    for dims in (1, 2, 3):
        layer = layer_of(naive.Geometry((3,) * dims, (1,) * dims, "valid", (2,) * dims))
        x, g = np.ones((1, *(8,) * dims, C)), np.ones((1, 1, *(4,) * dims, OUT))

        rows = layer.rows(batch_of(backend, x, g, "channels_last"))

        assert layer.output_size((8,) * dims) == (4,) * dims
        assert rows.positions == 4**dims


def test_frameworks_with_channels_first_and_last_describe_one_layer():
    """The same geometry from either order of the weight, in that order's layouts."""
    options = {"strides": 2, "padding": [1, 0], "dilation": (1, 2), "groups": 2}
    last, first = (
        kc.integration.framework_conv(shape, **options, bias=True, channels=channels)
        for shape, channels in (((3, 2, 4, 6), "last"), ((6, 4, 3, 2), "first"))
    )

    expected = Conv(
        in_channels=8,
        out_channels=6,
        kernel_size=(3, 2),
        strides=(2, 2),
        padding=[(1, 1), (0, 0)],
        dilation=(1, 2),
        groups=2,
        bias=True,
        weight_layout="oi_spatial",
        data_layout="channels_first",
    )
    assert first == expected
    assert last == dataclasses.replace(
        expected, weight_layout="spatial_io", data_layout="channels_last"
    )
    with pytest.raises(ConventionError, match="channels"):
        kc.integration.framework_conv(
            (1, 1, 1), padding=0, bias=True, channels="middle"
        )
