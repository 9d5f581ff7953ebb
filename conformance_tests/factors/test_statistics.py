"""Kronecker statistics of one batch, against loops that write the definition down."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.array.structure import leaves, static_fields

from ..builders import reference
from ..builders.one_block import learn
from ..builders.tolerances import assert_close

N, IN, OUT = 5, 4, 3
SHARED = [(), (2,), (2, 3)]


def block(*, bias=True, **options):
    """Return a dense block of the tests' widths."""
    layer = kc.Dense(in_features=IN, out_features=OUT, bias=bias, weight_layout="io")
    return kc.Block(layer, kc.Kronecker(**options))


def data(rng, shared=(), sources=1):
    """Return inputs and output gradients with a leading axis of sources."""
    x = rng.normal(size=(N, *shared, IN))
    return x, rng.normal(size=(sources, N, *shared, OUT))


def statistics_of(
    backend,
    made,
    x,
    g,
    *,
    mask=None,
    sources=None,
    loss="sum",
    combine="sum",
    decay=0.0,
    weight=1.0,
):
    """Return the statistics of one update with arrays of the backend."""
    batch = kc.Batch(x, g, mask, sources)
    return learn(
        made,
        batch,
        made.initial(x),
        conventions=kc.Conventions(reduction=loss, sources=combine),
        decay=decay,
        weight=weight,
    )


def factor(backend, statistics, side):
    """Return a factor (a matrix or a diagonal) on the host."""
    value = statistics.averages[side].value(debias=True)
    return backend.to_numpy(value.full() if hasattr(value, "full") else value)


def assert_factors(backend, statistics, A, G, S, dtype):
    """Compare A, G and S; a diagonal factor with the diagonal."""
    for side, expected in (("input", A), ("output", G)):
        got = factor(backend, statistics, side)
        expected = np.diag(expected) if got.ndim == 1 else expected
        assert_close(got, expected, "gram", dtype)
    repeats = statistics.averages["repeats"].value(debias=True)
    assert_close(backend.to_numpy(repeats), S, "roundoff", dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("masked", [False, True])
def test_factors_are_the_definition(backend, dtype, rng, bias, sharing, shared, masked):
    """A, G and S for every number of shared axes, masked or not, with NaN as padding."""
    x, g = data(rng, shared)
    mask = rng.uniform(size=(N, *shared)) < 0.6 if masked else None
    if masked:
        mask.reshape(N, -1)[0], mask.reshape(N, -1)[1] = True, False
    expected = reference.kronecker_factors(x, g, bias=bias, mask=mask, sharing=sharing)
    if masked:
        x[~mask], g[:, ~mask] = np.nan, np.inf

    got = statistics_of(
        backend,
        block(bias=bias, sharing=sharing),
        backend.asarray(x, dtype),
        backend.asarray(g[0], dtype),
        mask=None if mask is None else backend.asarray(mask),
    )

    assert_factors(backend, got, *expected, dtype)


def test_the_three_losses_differ_by_squares(backend, dtype, rng):
    """The same gradients, declared in three ways: factors 1, N^2 and (N S)^2."""
    x, g = data(rng, (2,))
    fed = backend.asarray(x, dtype), backend.asarray(g[0], dtype)

    G = {
        loss: factor(
            backend, statistics_of(backend, block(), *fed, loss=loss), "output"
        )
        for loss in ("sum", "mean", "mean_rows")
    }

    assert_close(G["mean"], N**2 * G["sum"], "gram", dtype)
    assert_close(G["mean_rows"], (2 * N) ** 2 * G["sum"], "gram", dtype)


def test_an_update_keeps_the_form_and_the_dtypes(backend, dtype, rng):
    """Statistics of any number of updates can be combined, and cross a boundary alike."""
    layer = kc.Dense(in_features=5, out_features=3, bias=True, weight_layout="io")
    made = kc.Block(layer, kc.Kronecker())
    x = backend.asarray(rng.normal(size=(8, 5)), dtype)
    g = backend.asarray(rng.normal(size=(8, 3)), dtype)
    start = made.initial(x)

    once = statistics_of(backend, made, x, g)

    for side in ("input", "output"):
        sums = [held.averages[side].sum for held in (start, once)]
        assert static_fields(sums[0]) == static_fields(sums[1])
    for (path, one), (_, two) in zip(leaves(start), leaves(once), strict=True):
        assert (one.shape, one.dtype) == (two.shape, two.dtype), path


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_half_precision_is_accumulated_in_float32(backend, rng, kind, sharing):
    """Half-precision rows give the factors of those rows, to float32 roundoff."""
    if not hasattr(backend.xp, kind):
        pytest.skip(f"{backend.name} has no {kind}")
    x, g = rng.normal(size=(64, 2, IN)), rng.normal(size=(1, 64, 2, OUT))
    half = [
        backend.xp.astype(backend.asarray(a, "float32"), backend.dtype(kind))
        for a in (x, g[0])
    ]
    exact = [backend.to_numpy(backend.xp.astype(a, backend.xp.float32)) for a in half]

    got = statistics_of(backend, block(sharing=sharing), *half)

    A, G, S = reference.kronecker_factors(
        exact[0], exact[1][None], bias=True, sharing=sharing
    )
    assert got.dtype == backend.dtype("float32")
    assert_factors(backend, got, A, G, S, "float32")


@pytest.mark.parametrize(
    ("data_dtype", "storage"), [("float32", "float64"), ("float64", "float32")]
)
def test_the_storage_dtype_is_the_one_asked_for(backend, rng, data_dtype, storage):
    """Statistics are kept in the storage dtype, whatever the data are."""
    made, (x, g) = block(), data(rng)
    fed = kc.Batch(backend.asarray(x, data_dtype), backend.asarray(g[0], data_dtype))
    precision = kc.Precision(storage=storage)

    got = learn(made, fed, made.initial(fed.inputs, precision=precision))

    rounded = [np.asarray(a, data_dtype).astype(np.float64) for a in (x, g)]
    expected = reference.kronecker_factors(*rounded, bias=True)
    assert got.dtype == backend.dtype(storage)
    assert_factors(backend, got, *expected, storage)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_the_last_row_is_the_mean_and_one(backend, dtype, rng, sharing, masked):
    """C4: the last row of A is ``[mean x, 1]``, over the rows that count."""
    x, g = data(rng, (2,))
    mask = np.ones((N, 2), bool)
    mask[1:, 1] = not masked

    got = statistics_of(
        backend,
        block(sharing=sharing),
        backend.asarray(x, dtype),
        backend.asarray(g[0], dtype),
        mask=backend.asarray(mask) if masked else None,
    )

    if sharing == "expand":
        mean = x[mask].mean(axis=0)
    else:
        mean = np.mean([x[i][mask[i]].mean(axis=0) for i in range(N)], axis=0)
    A = factor(backend, got, "input")
    assert_close(A[-1], [*mean, 1.0], "gram", dtype)
