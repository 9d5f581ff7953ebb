"""Patches against loops that visit every pixel, and against other libraries."""

import functools
import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from kfac_core.array.namespaces import namespace_of
from kfac_core.errors import ShapeError
from kfac_core.linalg.patches import extract_patches, output_size, resolve_padding

from ..builders import conv_reference as reference
from ..builders.memory import PeakMemory
from ..builders.tolerances import assert_close, assert_differs
from ..builders.tracing import compiled

Geometry = reference.Geometry


def window(geometry):
    return {
        "kernel_size": geometry.kernel,
        "strides": geometry.strides,
        "padding": geometry.padding,
        "dilation": geometry.dilation,
    }


def extract(x, geometry):
    return extract_patches(x, **window(geometry), xp=namespace_of(x=x))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_patches_are_what_the_loops_find(backend, dtype, dims, rng):
    """Each entry is the pixel under the kernel, exactly, in every combination."""
    x = rng.normal(size=(2, *reference.SPATIAL[dims], 4)).astype(dtype)
    geometries = reference.geometries(dims)

    @functools.partial(compiled, backend)
    def extract_all(x):
        return [extract(x, geometry) for geometry in geometries]

    for geometry, got in zip(geometries, extract_all(backend.asarray(x)), strict=True):
        out = reference.output_size(x.shape[1:-1], geometry)
        assert tuple(got.shape) == (2, *out, math.prod(geometry.kernel) * 4)
        assert got.dtype == backend.dtype(dtype)
        expected = reference.patches(x, geometry)
        got = backend.to_numpy(got).reshape(expected.shape)
        assert_close(got, expected, "exact", dtype)


def test_patches_have_kernel_positions_before_channels(backend, rng):
    """The other order of a patch's axes, and a flipped kernel, both differ."""
    x = rng.normal(size=(3, 6, 5, 4))
    geometry = Geometry((3, 2), (1, 1), "same", (1, 1))
    P = reference.patches(x, geometry)

    got = backend.to_numpy(extract(backend.asarray(x), geometry)).reshape(P.shape)

    assert_close(got, P, "exact", "float64")
    assert_differs(got, P[:, :, ::-1])
    assert_differs(got, np.swapaxes(P, 2, 3).reshape(P.shape))


sizes = st.integers(1, 5)


@hypothesis.given(
    n=st.integers(1, 12), kernel=sizes, stride=sizes, dilation=sizes, lo=sizes, hi=sizes
)
@hypothesis.settings(deadline=None, max_examples=200)
def test_number_of_positions_is_the_number_of_starts(
    n, kernel, stride, dilation, lo, hi
):
    """The formula counts what trying every start finds, ``same`` included."""
    for padding in ("same", "valid", ((lo, hi),)):
        geometry = Geometry((kernel,), (stride,), padding, (dilation,))
        expected = reference.output_size((n,), geometry)

        if expected == (0,):
            with pytest.raises(ShapeError, match="`kernel_size`"):
                output_size((n,), **window(geometry))
        else:
            assert output_size((n,), **window(geometry)) == expected


def test_same_puts_the_smaller_half_first():
    """An even kernel gets its odd zero behind, as in TensorFlow; first would differ."""
    geometry = Geometry((2, 4), (1, 1), "same", (1, 1))

    assert resolve_padding((5, 5), **window(geometry)) == ((0, 1), (1, 2))


def test_same_pads_by_what_the_stride_leaves():
    """Strides shrink the padding of ``same``, and never below zero."""
    geometry = Geometry((3, 1), (2, 3), "same", (1, 1))

    assert resolve_padding((6, 6), **window(geometry)) == ((0, 1), (0, 0))
    assert output_size((6, 6), **window(geometry)) == (3, 2)


def test_tfkfac_9_5_number_of_locations_heeds_dilation():
    """A 3 by 3 kernel of dilation 2 has 16 positions on 8 by 8 pixels, and not 36."""
    geometry = Geometry((3, 3), (1, 1), "valid", (2, 2))

    assert output_size((8, 8), **window(geometry)) == (4, 4)


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_little_is_made_beside_the_result(padding, rng):
    """NumPy's peak memory is the result, and patches along one of two axes."""
    x = rng.normal(size=(4, 40, 40, 8))
    geometry = Geometry((5, 5), (1, 1), padding, (1, 1))
    extract(x, geometry)

    with PeakMemory() as memory:
        got = extract(x, geometry)

    # With "same", the rows of the image that is padded are 44 and not 40.
    assert memory.peak < got.nbytes + 1.1 * got.nbytes / 5 + 2**16
