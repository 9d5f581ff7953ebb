"""Patches against loops that visit every pixel, and against other libraries."""

import functools
import math
import tracemalloc

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from kfac_core.array.namespaces import namespace_of
from kfac_core.errors import ConventionError, ShapeError
from kfac_core.linalg.patches import (
    choose_patches,
    extract_patches,
    extract_patches_at,
    output_size,
    resolve_padding,
)

from ..builders import conv_reference as reference
from ..builders.tolerances import assert_close, assert_differs

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


def compiled(backend, function):
    """Return a function compiled, where else each slice would be compiled alone."""
    if backend.name != "jax":
        return function
    import jax

    return jax.jit(function)


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


def test_leading_axes_are_carried_along(backend, rng):
    """Any axes may stand before the spatial ones."""
    x = rng.normal(size=(2, 3, 7, 2))
    geometry = Geometry((3,), (2,), "same", (1,))

    got = backend.to_numpy(extract(backend.asarray(x), geometry))

    for i in range(2):
        expected = reference.patches(x[i], geometry).reshape(got[i].shape)
        assert_close(got[i], expected, "exact", "float64")


def test_array_that_is_a_view_gives_the_same_patches(backend, rng):
    """Images of which the axes were permuted need no copy first."""
    x = rng.normal(size=(2, 4, 6, 5))
    geometry = Geometry((2, 2), (1, 2), "same", (1, 1))
    permuted = backend.xp.permute_dims(backend.asarray(x), (0, 2, 3, 1))

    got = backend.to_numpy(extract(permuted, geometry))

    expected = reference.patches(np.moveaxis(x, 1, -1), geometry).reshape(got.shape)
    assert_close(got, expected, "exact", "float64")


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


def test_one_pixel_kernels_need_no_copy(backend, rng):
    """A 1 by 1 kernel gives the strided pixels themselves."""
    x = rng.normal(size=(2, 5, 4, 3))

    got = extract(backend.asarray(x), Geometry((1, 1), (2, 1), "valid", (1, 1)))

    assert_close(backend.to_numpy(got), x[:, ::2], "exact", "float64")


def test_selected_patches_are_those_of_all(backend, dtype, rng):
    """Extracting some equals extracting all and then choosing."""
    x = rng.normal(size=(2, 4, 6, 5, 3)).astype(dtype)
    for geometry in reference.geometries(2)[::5]:
        S = reference.elements(reference.output_size((6, 5), geometry))
        row_indices = choose_patches((4, S), keep=(3, 5), seed=7)

        got = extract_patches_at(
            backend.asarray(x), row_indices, **window(geometry), xp=backend.xp
        )

        for i in range(2):
            P = reference.patches(x[i], geometry).reshape(4 * S, -1)
            assert_close(backend.to_numpy(got)[i], P[row_indices], "exact", dtype)


def test_choice_depends_on_its_seed_alone():
    """The same seed chooses the same rows; the global generator is not touched."""
    first = choose_patches((6, 20), keep=(3, 4), seed=(5, 0))
    np.random.seed(1)
    state = np.random.get_state()[1].copy()
    again = choose_patches((6, 20), keep=(3, 4), seed=(5, 0))
    other = choose_patches((6, 20), keep=(3, 4), seed=(5, 1))

    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert np.array_equal(np.random.get_state()[1], state)


def test_choice_has_each_row_once_and_one_example_a_row():
    """Nothing is drawn twice, and each line of the choice is of one example."""
    row_indices = choose_patches((6, 20), keep=(4, 9), seed=3)

    assert row_indices.shape == (4, 9)
    assert len(np.unique(row_indices)) == 36
    assert np.all(row_indices // 20 == row_indices[:, :1] // 20)


def test_choice_of_everything_is_everything():
    """Keeping as many as there are, or more, keeps all in order."""
    row_indices = choose_patches((3, 4), keep=(9, 4), seed=0)

    assert np.array_equal(row_indices, np.arange(12).reshape(3, 4))


def test_every_row_is_equally_likely():
    """Over many seeds each row is drawn as often as the others, up to chance."""
    counts = np.zeros(4 * 5)
    for seed in range(2000):
        counts[choose_patches((4, 5), keep=(2, 2), seed=seed)] += 1

    # 2000 draws of 4 rows among 20: 400 each, with a standard deviation of 18.
    assert np.all(np.abs(counts - 400) < 90)


@pytest.mark.parametrize("padding", [((1, 1),), ((1, 1), (0, -1)), ((1, 1), (0, 0, 0))])
def test_padding_of_wrong_form_is_named(padding):
    """Too few pairs, a negative number and a triple are refused."""
    with pytest.raises(ShapeError, match="`padding`"):
        output_size((5, 5), **window(Geometry((2, 2), (1, 1), padding, (1, 1))))


def test_unknown_padding_is_named():
    """A rule that is none says which there are."""
    with pytest.raises(ConventionError, match="'same', 'valid' or pairs"):
        output_size((5,), **window(Geometry((2,), (1,), "full", (1,))))


def test_array_with_too_few_axes_is_refused(backend):
    """An array without the spatial axes of the kernel says so."""
    with pytest.raises(ShapeError, match="2 spatial axes"):
        extract(
            backend.asarray(np.ones((3, 2))), Geometry((2, 2), (1, 1), "same", (1, 1))
        )


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_little_is_made_beside_the_result(padding, rng):
    """NumPy's peak memory is the result, and patches along one of two axes."""
    x = rng.normal(size=(4, 40, 40, 8))
    geometry = Geometry((5, 5), (1, 1), padding, (1, 1))
    extract(x, geometry)

    tracemalloc.start()
    got = extract(x, geometry)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    # With "same", the rows of the image that is padded are 44 and not 40.
    assert peak < got.nbytes + 1.1 * got.nbytes / 5 + 2**16


def test_patches_agree_with_unfold(backend, rng):
    """PyTorch's own im2col finds the same pixels, channels before kernel positions."""
    if backend.name != "torch":
        pytest.skip("compares with the library under test; needs --backend=torch")
    from torch.nn.functional import unfold

    x = backend.asarray(rng.normal(size=(2, 7, 6, 3)))
    geometry = Geometry((3, 2), (2, 1), ((2, 2), (1, 1)), (2, 3))

    got = extract(x, geometry)

    expected = unfold(x.movedim(-1, 1), (3, 2), (2, 3), (2, 1), (2, 1))
    expected = expected.reshape(2, 3, 6, -1).permute(0, 3, 2, 1).reshape(got.shape)
    assert_close(backend.to_numpy(got), backend.to_numpy(expected), "exact", "float64")


def test_patches_are_traced_by_jit(backend, rng):
    """The compiled function gives what the plain one does, selected rows too."""
    if backend.name != "jax":
        pytest.skip("needs --backend=jax")
    import jax

    x = backend.asarray(rng.normal(size=(3, 7, 6, 2)))
    geometry = Geometry((3, 2), (2, 1), "same", (1, 2))
    row_indices = choose_patches((3, 24), keep=(2, 5), seed=0)

    def some(x):
        return extract_patches_at(x, row_indices, **window(geometry), xp=backend.xp)

    for function in (lambda x: extract(x, geometry), some):
        assert np.array_equal(jax.jit(function)(x), function(x))
