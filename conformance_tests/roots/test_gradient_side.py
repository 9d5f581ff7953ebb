"""Gradient-side factors against loops, and the identities of what is made of them."""

import functools

import numpy as np
import pytest

import kfac_core as kc

from ..builders import reference
from ..builders.tolerances import assert_close, assert_differs, relative_error
from ..builders.tracing import compiler_of

SHAPES = [(4,), (3, 4), (2, 3, 2)]


def unfolded(V, axis):
    """Return V as a matrix with an axis for its rows."""
    return np.moveaxis(V, axis, 0).reshape(V.shape[axis], -1)


def dense_factor(V, axis, metrics=None):
    """Return one factor of one gradient; metrics are the products of the roots."""
    U = unfolded(V, axis)
    if metrics is None:
        return U @ U.T
    others = [P for i, P in enumerate(metrics) if i != axis]
    middle = functools.reduce(np.kron, others, np.eye(1))
    return U @ middle @ U.T / U.shape[1]


def dense(backend, factors, statistics, *, debias=True):
    return [
        backend.to_numpy(F.full()) for F in factors.values(statistics, debias=debias)
    ]


def sigma_points(rng, A, B):
    """Return matrices whose mean is zero and whose covariance is exactly A (x) B."""
    n, m = len(A), len(B)
    L = (
        np.linalg.cholesky(np.kron(A, B))
        @ np.linalg.qr(rng.normal(size=(n * m,) * 2))[0]
    )
    points = np.sqrt(n * m) * L.T.reshape(n * m, n, m)
    return np.concatenate([points, -points])


def fed(backend, gradients, dtype="float64", **options):
    """Return the description and the statistics after some gradients."""
    factors = kc.roots.GradientFactors(shape=gradients[0].shape)
    statistics = factors.initial(backend.asarray(gradients[0], dtype))
    for V in gradients:
        statistics = factors.updated(statistics, backend.asarray(V, dtype), **options)
    return factors, statistics


@pytest.mark.parametrize("shape", SHAPES)
def test_a_running_sum_is_the_loop_over_gradients(backend, dtype, rng, shape):
    """sum_i <- decay sum_i + V_(i) V_(i)^T, along every axis, and the weights with it."""
    gradients = rng.normal(size=(3, *shape))

    factors, statistics = fed(backend, gradients, dtype, decay=0.9)

    weight = 1 + 0.9 + 0.81
    sums, means = (dense(backend, factors, statistics, debias=d) for d in (False, True))
    for axis in range(len(shape)):
        expected = sum(
            0.9 ** (2 - t) * dense_factor(V, axis) for t, V in enumerate(gradients)
        )
        assert_close(sums[axis], expected, "gram", dtype)
        assert_close(means[axis], expected / weight, "gram", dtype)
    assert len(sums) == len(shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_roots_whiten_the_other_axes(backend, dtype, rng, shape):
    """C_i = V_(i) (P_j (x) ...) V_(i)^T / prod n_j, with roots that are not symmetric."""
    V = rng.normal(size=shape)
    roots = [rng.normal(size=(n, n)) for n in shape]

    factors, statistics = fed(
        backend,
        [V],
        dtype,
        decay=0.5,
        weight=0.5,
        roots=[backend.asarray(R, dtype) for R in roots],
    )

    sums = dense(backend, factors, statistics, debias=False)
    metrics = [R @ R.T for R in roots]
    for axis in range(len(shape)):
        expected = 0.5 * dense_factor(V, axis, metrics)
        assert_close(sums[axis], expected, "gram", dtype)


def test_several_gradients_at_once_are_averaged(backend, rng):
    """A leading axis of samples is a mean, and one update."""
    V = rng.normal(size=(5, 3, 4))
    factors = kc.roots.GradientFactors(shape=(3, 4))
    start = factors.initial(backend.asarray(V))

    statistics = factors.updated(start, backend.asarray(V), decay=0.9, samples=5)

    for axis, got in enumerate(dense(backend, factors, statistics)):
        expected = np.mean([dense_factor(v, axis) for v in V], axis=0)
        assert_close(got, expected, "gram", "float64")
    assert float(statistics.averages["axis0"].weight) == 1.0


def test_shampoo_of_one_gradient_is_its_polar_factor(backend, rng):
    """A22: L^-1/4 V R^-1/4 = U W for V = U diag(s) W."""
    V = rng.normal(size=(4, 4)) + 2 * np.eye(4)

    factors, statistics = fed(backend, [V], decay=0.0)

    roots = [
        kc.roots.inverse_root(F, damping=0.0, degree=4).matrix.full()
        for F in factors.values(statistics, debias=True)
    ]
    got = backend.to_numpy(kc.linalg.kronecker_multiply(roots, backend.asarray(V)))
    U, _, W = np.linalg.svd(V)
    assert_close(got, U @ W, "inverse", "float64")
    assert_differs(got, V / np.linalg.norm(V, 2))


def test_shampoo_of_one_wide_gradient(backend, rng):
    """A22 where one side is singular: a small damping is enough, and changes nothing."""
    V = rng.normal(size=(3, 4))

    factors, statistics = fed(backend, [V], decay=0.0)

    left, right = (
        kc.operators.kronecker_operator(None, F, damping=1e-13, factorizations=())
        for F in factors.values(statistics, debias=True)
    )
    product = left**-0.25 @ backend.asarray(V)
    flipped = backend.xp.matrix_transpose(product)
    got = backend.xp.matrix_transpose(right**-0.25 @ flipped)
    U, _, W = np.linalg.svd(V, full_matrices=False)
    assert_close(backend.to_numpy(got), U @ W, "inverse", "float64")


def test_shampoo_with_square_roots_is_adafactor_in_its_eigenbasis(backend, rng):
    """A23: (tr L)^1/2 L^-1/2 V R^-1/2 divides by the root of rank-one second moments."""
    gradients = rng.normal(size=(6, 4, 4))
    V = gradients[-1]

    factors, statistics = fed(backend, gradients, decay=1.0)

    values = factors.values(statistics, debias=True)
    roots = [
        kc.roots.inverse_root(F, damping=0.0, degree=2).matrix.full() for F in values
    ]
    product = kc.linalg.kronecker_multiply(roots, backend.asarray(V))
    got = backend.to_numpy(product) * np.sqrt(float(values[0].trace()))

    # Adafactor: row and column means of the squares of the gradients in the bases.
    _, Q = np.linalg.eigh(sum(g @ g.T for g in gradients))
    _, P = np.linalg.eigh(sum(g.T @ g for g in gradients))
    squares = np.mean([(Q.T @ g @ P) ** 2 for g in gradients], axis=0)
    moments = np.outer(squares.sum(1), squares.sum(0)) / squares.sum()
    expected = Q @ ((Q.T @ V @ P) / np.sqrt(moments)) @ P.T
    assert_close(got, expected, "inverse", "float64")
    # Adam in that basis has another second moment: the two must differ.
    assert_differs(got, Q @ ((Q.T @ V @ P) / np.sqrt(squares)) @ P.T)


def kl_sweeps(backend, points, count):
    """Return the two factors after updates with each other's inverse roots.

    The average is half the old and half the new, from the identity: for exact statistics
    its scale follows Heron's rule for a square root.
    """
    factors = kc.roots.GradientFactors(shape=points[0].shape)
    start = backend.asarray(points)
    statistics = factors.initial(start)
    roots = [backend.asarray(np.eye(n)) for n in factors.shape]
    for _ in range(count):
        statistics = factors.updated(
            statistics, start, decay=0.5, roots=roots, samples=len(points)
        )
        values = factors.values(statistics, debias=True)
        roots = [kc.roots.inverse_root(F, damping=0.0, degree=2).matrix for F in values]
    return dense(backend, factors, statistics)


def test_kl_shampoo_recovers_a_kronecker_product(backend, rng):
    """A24: from gradients of covariance A (x) B, S (x) T is A (x) B."""
    A, B = reference.spd(rng, 3), 5.0 * reference.spd(rng, 4)
    points = sigma_points(rng, A, B)

    S, T = kl_sweeps(backend, points, 12)

    assert_close(np.kron(S, T), np.kron(A, B), "inverse", "float64")
    # The unwhitened moments are A tr B and B tr A: another scale altogether.
    plain = [np.mean([dense_factor(V, i) for V in points], axis=0) for i in (0, 1)]
    assert_differs(np.kron(*plain), np.kron(A, B))


def test_kl_shampoo_is_nearest_in_divergence(backend, rng):
    """For any gradients it is a fixed point, with less divergence than TNT's product."""
    points = rng.normal(size=(40, 3, 4)) * rng.uniform(0.1, 3.0, size=(3, 4))

    S, T = kl_sweeps(backend, points, 60)

    again = [
        np.mean([V @ np.linalg.inv(T) @ V.T / 4 for V in points], axis=0),
        np.mean([V.T @ np.linalg.inv(S) @ V / 3 for V in points], axis=0),
    ]
    assert relative_error(S, again[0]) < 1e-6
    assert relative_error(T, again[1]) < 1e-6
    left, right = (
        np.mean([dense_factor(V, i) for V in points], axis=0) for i in (0, 1)
    )
    tnt = np.kron(left, right) / np.trace(left)
    moment = np.mean([np.outer(V, V) for V in points], axis=0)
    assert divergence(np.kron(S, T), moment) < divergence(tnt, moment) - 1e-2
    for bump in (0.99, 1.01):
        assert divergence(np.kron(S, bump * T), moment) > divergence(
            np.kron(S, T), moment
        )


def divergence(F, moment):
    """Return twice the divergence from N(0, moment) to N(0, F), up to a constant."""
    return np.linalg.slogdet(F)[1] + np.trace(np.linalg.solve(F, moment))


def test_nonfinite_input_changes_nothing(backend, rng):
    """A gradient or a root: an error, or a flag and the statistics of before."""
    V, eyes = rng.normal(size=(3, 4)), [np.eye(3), np.eye(4)]
    factors, statistics = fed(backend, [V], decay=0.9)
    cases = (
        (V * np.nan, eyes, kc.Status.OUTPUT_GRADS_NOT_FINITE),
        (V, [eyes[0], np.full((4, 4), np.nan)], kc.Status.MATRIX_NOT_FINITE),
    )
    for gradient, roots, flag in cases:
        given = [backend.asarray(R) for R in roots]
        options = {"decay": 0.9, "roots": given, "name": "fc1"}
        with pytest.raises(kc.NotFiniteError, match="fc1"):
            factors.updated(statistics, backend.asarray(gradient), **options)

        kept = factors.updated(
            statistics, backend.asarray(gradient), check="status", **options
        )

        assert int(kept.status) == flag
        pairs = zip(
            dense(backend, factors, kept),
            dense(backend, factors, statistics),
            strict=True,
        )
        assert all(np.array_equal(new, old) for new, old in pairs)


def test_roots_may_be_symmetric_matrices_in_one_triangle(backend, rng):
    """What an `InverseRoot` holds is taken as it is."""
    V, R = rng.normal(size=(3, 4)), reference.spd(rng, 4)
    half = kc.linalg.SymmetricMatrix(backend.asarray(np.tril(R)), full_storage=False)
    eye = backend.asarray(np.eye(3))

    factors, statistics = fed(backend, [V], decay=0.0, roots=[eye, half])

    got = dense(backend, factors, statistics)[0]
    assert_close(got, V @ R @ R @ V.T / 4, "gram", "float64")


@pytest.mark.filterwarnings(
    "ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"
)
@pytest.mark.parametrize("library", ["jax", "torch"])
def test_an_update_runs_inside_a_compiled_program(requires_backend, rng, library):
    """Statistics in and out, traced coefficients, and flags as an array."""
    backend = requires_backend(library, adapter=True)
    factors = kc.roots.GradientFactors(shape=(3, 4))
    V, roots = rng.normal(size=(3, 4)), [reference.spd(rng, n) for n in (3, 4)]
    given = [backend.asarray(R) for R in roots]
    start = factors.initial(backend.asarray(V))

    @compiler_of(library)
    def program(statistics, V, decay):
        return factors.updated(statistics, V, decay=decay, roots=given, check="status")

    first = program(start, backend.asarray(V), backend.asarray(0.9))
    second = program(first, backend.asarray(2 * V), backend.asarray(0.5))
    bad = program(first, backend.asarray(V), backend.asarray(1.5))

    metrics = [R @ R.T for R in roots]
    for axis, got in enumerate(dense(backend, factors, second, debias=False)):
        expected = 4.5 * dense_factor(V, axis, metrics)
        assert_close(got, expected, "gram", "float64")
    assert [int(s.status) for s in (first, second, bad)] == [0, 0, kc.Status.BAD_DECAY]
