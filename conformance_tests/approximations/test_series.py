"""The series operators against dense block Toeplitz matrices."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.approximations.series import Series

from ..builders.one_block import SUM, operator_for
from ..builders.reference import matrix_power
from ..builders.series_reference import (
    damped,
    infinite_block,
    moments,
    sequences,
    symmetric_block,
)
from ..builders.tolerances import assert_close, assert_differs, relative_error

n, m, DAMPING = 3, 2, 0.1


def made(backend, dtype, variant, x, g, mask=None, *, damping=DAMPING, **options):
    """Return the operator of one batch without a bias; options as `RefreshOptions`."""
    layer = kc.Dense(in_features=n, out_features=m, bias=False, weight_layout="io")
    steps = {"steps": x.shape[1]} if variant == "symmetric" else {}
    block = kc.Block(layer, Series(variant=variant, **steps))
    mask = None if mask is None else backend.asarray(mask)
    x, g = backend.asarray(x, dtype), backend.asarray(g, dtype)
    statistics = kc.batch_moments(block, kc.Batch(x, g, mask), conventions=SUM)
    options = {"rule": "factored"} | options
    return operator_for(block, statistics, damping=damping, **options)


def data(rng, T, correlation, *, N=25):
    """Return x and g, both correlated over time, so that x g^T is, positively."""
    x = sequences(rng, (N, T, n), correlation=correlation)
    return x, sequences(rng, (N, T, m), correlation=abs(correlation))


def dense_of(variant, x, g, *, mask=None, damping=DAMPING):
    stats = damped(moments(x, g[None], bias=False, mask=mask), damping)
    if variant == "infinite":
        return infinite_block(stats)
    if variant == "independent":
        return stats["S"] * np.kron(stats["A0"], stats["G0"])
    N, T = x.shape[:2]
    lengths = np.full(N, T) if mask is None else mask.sum(axis=1)
    return symmetric_block(stats, lengths)


def assert_products(backend, operator, F, dtype, rng):
    """Compare F v and F^-1 v, and the dense form, with the dense matrix."""
    V = rng.normal(size=(n, m))
    v = backend.asarray(V, dtype)

    forward = backend.to_numpy(operator.multiply(v))
    back = backend.to_numpy(operator.multiply_inverse(v))
    dense = backend.to_numpy(operator.to_dense())

    assert_close(forward, (F @ V.ravel()).reshape(n, m), "product", dtype)
    assert_close(back, np.linalg.solve(F, V.ravel()).reshape(n, m), "inverse", dtype)
    assert_close(dense, F, "product", dtype)
    assert int(operator.status()) == 0


@pytest.mark.parametrize("correlation", [0.9, -0.9])
@pytest.mark.parametrize(
    ("variant", "T"),
    [
        *(("symmetric", T) for T in range(1, 21)),
        *(("infinite", T) for T in (1, 2, 3, 5, 12, 20)),
    ],
)
def test_it_is_the_sum_over_lags(backend, dtype, rng, variant, T, correlation):
    """Option 1: the covariance of T steps, block by block, summed over all pairs.

    Option 2: V_0 and all lags on both sides, summed until nothing is left.
    """
    x, g = data(rng, T, correlation)

    operator = made(backend, dtype, variant, x, g)

    assert_products(backend, operator, dense_of(variant, x, g), dtype, rng)


@pytest.mark.parametrize("variant", ["symmetric", "infinite", "independent"])
def test_random_lengths_average_the_block(backend, dtype, rng, variant):
    """Sequences of 1 to 6 steps: the mean of their blocks, and not that of mean T."""
    x, g = data(rng, 6, 0.9)
    mask = np.arange(6) < rng.integers(1, 7, size=25)[:, None]

    operator = made(backend, dtype, variant, x, g, mask)

    F = dense_of(variant, x, g, mask=mask)
    assert_products(backend, operator, F, dtype, rng)
    if variant == "symmetric":
        stats = damped(moments(x, g[None], bias=False, mask=mask), DAMPING)
        mean = symmetric_block(stats, [round(float(mask.sum(axis=1).mean()))])
        assert_differs(backend.to_numpy(operator.to_dense()), mean, by=0.01)


@pytest.mark.parametrize("variant", ["symmetric", "infinite"])
def test_without_damping_moments_may_be_singular(backend, rng, variant):
    """A unit that is always zero has no correlation, and nothing to divide by."""
    x, g = data(rng, 4, 0.8)
    x[:, :, 0] = 0.0
    op = made(backend, "float64", variant, x, g)

    dense = backend.to_numpy(op.to_dense(damped=False)).reshape(n, m, n, m)

    stats = moments(x[:, :, 1:], g[None], bias=False)
    lengths = [x.shape[1]]
    F = infinite_block(stats) if variant == "infinite" else None
    F = symmetric_block(stats, lengths) if F is None else F
    assert_close(dense[1:, :, 1:].reshape(len(F), -1), F, "identity", "float64")
    assert not np.any(dense[0])
    # A damping in units of the mean eigenvalue is that of the same matrix.
    relative = made(
        backend, "float64", variant, x, g, damping_scaling="mean_eigenvalue"
    )
    absolute = DAMPING * np.trace(F) / (n * m)
    expected = dense_of(variant, x, g, damping=absolute)
    got = backend.to_numpy(relative.to_dense())
    assert_close(got, expected, "product", "float64")


@pytest.mark.parametrize("variant", ["symmetric", "infinite"])
@pytest.mark.parametrize("T", [1, 5])
def test_without_lag_one_it_is_kfac_over_the_steps(backend, dtype, rng, variant, T):
    """One step, or sequences that are zero after it: A_1 = 0, and F = T A_0 (x) G_0."""
    x, g = data(rng, T, 0.5)
    x[:, 1:] = 0.0

    operator = made(backend, dtype, variant, x, g)

    assert_products(backend, operator, dense_of("independent", x, g), dtype, rng)


def test_time_may_run_backwards_on_both_sides_but_not_on_one(backend, dtype, rng):
    """Transposing both moments of lag 1 changes nothing; one alone is another block."""
    x, g = data(rng, 4, 0.3)
    x[:, 1:, 0] = x[:, :-1, 1]
    g[:, 1:, 0] = g[:, :-1, 1]

    forward = made(backend, dtype, "infinite", x, g).to_dense()
    both = made(backend, dtype, "infinite", x[:, ::-1], g[:, ::-1]).to_dense()
    one = made(backend, dtype, "infinite", x[:, ::-1], g).to_dense()

    forward = backend.to_numpy(forward)
    assert_close(backend.to_numpy(both), forward, "product", dtype)
    assert_differs(backend.to_numpy(one), forward, by=0.01)


def test_correlations_keep_their_sign_defect_tfkfac_9_1(backend, dtype, rng):
    """Anticorrelated inputs: with ``|psi|`` the inverse is another matrix."""
    x, g = data(rng, 6, -0.9)
    op = made(backend, dtype, "symmetric", x, g)

    inverse = np.linalg.inv(backend.to_numpy(op.to_dense()))

    assert relative_error(inverse, np.linalg.inv(dense_of("symmetric", x, g))) < 2e-3
    stats = damped(moments(x, g[None], bias=False), DAMPING)
    unsigned = symmetric_block(stats | absolute(stats), [6])
    assert_differs(inverse, np.linalg.inv(unsigned), by=0.05)


def absolute(stats):
    """The moments of lag 1 with the absolute values of their correlations."""
    made = {}
    for zero, one in (("A0", "A1"), ("G0", "G1")):
        root = matrix_power(stats[zero], 0.5)
        inverse = matrix_power(stats[zero], -0.5)
        P = inverse @ (0.5 * (stats[one] + stats[one].T)) @ inverse
        w, Q = np.linalg.eigh(P)
        made[one] = root @ (Q * np.abs(w)) @ Q.T @ root
    return made


def test_variants_do_not_change_each_other_defect_tfkfac_9_8(backend, rng):
    """Option 1 symmetrizes lag 1 for itself; option 2 of the same statistics does not."""
    x, g = data(rng, 4, 0.3)
    x[:, 1:, 0] = x[:, :-1, 1]
    layer = kc.Dense(in_features=n, out_features=m, bias=False, weight_layout="io")
    symmetric = kc.Block(layer, Series(variant="symmetric", steps=4))
    infinite = kc.Block(layer, Series(variant="infinite"))
    batch = kc.Batch(backend.asarray(x), backend.asarray(g))
    statistics = kc.batch_moments(symmetric, batch, conventions=SUM)
    averages = {k: v for k, v in statistics.averages.items() if k != "lengths"}
    same = kc.Statistics(averages, statistics.status)

    operator_for(symmetric, statistics, damping=DAMPING)
    after = operator_for(infinite, same, damping=DAMPING)

    F = dense_of("infinite", x, g)
    assert_close(backend.to_numpy(after.to_dense()), F, "product", "float64")
