"""B11: factorial statistics, for which K-FAC is exact and no network is needed.

Where every input x_i occurs together with every output gradient g_j, the two are
uncorrelated in the data, and the mean of ``(x g^T)(x g^T)^T`` over all pairs is the
Kronecker product of the two factors.  The pairs may be examples, shared positions or
sources.  The dense reference is a loop over the pairs.
"""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.operators import kronecker_operator

from ..builders import reference
from ..builders.one_block import learn, operator_for
from ..builders.tolerances import assert_close, assert_differs

INPUTS, GRADS = 4, 5
IN, OUT = 3, 2

losses = pytest.mark.parametrize("loss", ["sum", "mean", "mean_rows"])
biases = pytest.mark.parametrize("bias", [True, False])


def levels(rng):
    """Return the x_i and the g_j."""
    return rng.normal(size=(INPUTS, IN)), rng.normal(size=(GRADS, OUT))


def all_pairs(x, g):
    """Return inputs and output gradients in which each x_i meets each g_j once."""
    return np.repeat(x, len(g), axis=0), np.tile(g, (len(x), 1))


def dense_block(x, g, *, bias):
    """Return the sum of ``vec(x g^T) vec(x g^T)^T`` over rows, row-major."""
    size = (x.shape[1] + bias) * g.shape[1]
    F = np.zeros((size, size))
    for row, grad in zip(x, g, strict=True):
        row = np.append(row, 1.0) if bias else row
        v = np.outer(row, grad).ravel()
        F += np.outer(v, v)
    return F


def kronecker_block(
    backend, batch, *, bias, sharing="expand", loss="sum", sources="sum"
):
    """Return the library's undamped block of one batch of host arrays."""
    layer = kc.Dense(in_features=IN, out_features=OUT, bias=bias, weight_layout="io")
    block = kc.Block(layer, kc.Kronecker(sharing=sharing))
    x, g, mask, M = batch
    fed = kc.Batch(
        backend.asarray(x),
        backend.asarray(g),
        mask=None if mask is None else backend.asarray(mask),
        sources=M,
    )
    statistics = learn(
        block, fed, conventions=kc.Conventions(reduction=loss, sources=sources)
    )
    operator = operator_for(
        block, statistics, damping=0.0, rule="exact", factorizations=("eigenbasis",)
    )
    return backend.to_numpy(operator.to_dense(damped=False))


@losses
@biases
def test_factorial_examples_are_exact(backend, rng, loss, bias):
    """For every x_i with every g_j, the block is the mean over all pairs."""
    x, g = all_pairs(*levels(rng))
    N = len(x)
    given = g if loss == "sum" else g / N

    got = kronecker_block(backend, (x, given, None, None), bias=bias, loss=loss)

    assert_close(got, dense_block(x, g, bias=bias) / N, "identity", "float64")


def test_an_incomplete_design_is_not_exact(backend, rng):
    """With a few pairs missing, inputs and gradients correlate and the block differs."""
    x, g = all_pairs(*levels(rng))
    x, g = x[3:], g[3:]

    got = kronecker_block(backend, (x, g, None, None), bias=True)

    assert_differs(got, dense_block(x, g, bias=True) / len(x))


@losses
@biases
def test_factorial_positions_are_exact_for_expand(backend, rng, loss, bias):
    """If x varies over examples and g over positions, expand is the sum over positions."""
    x, g = levels(rng)
    pairs = all_pairs(x, g)
    wide_x = np.repeat(x[:, None], GRADS, axis=1)
    wide_g = np.repeat(g[None], INPUTS, axis=0)
    scale = {"sum": 1, "mean": INPUTS, "mean_rows": INPUTS * GRADS}[loss]

    got = kronecker_block(
        backend, (wide_x, wide_g / scale, None, None), bias=bias, loss=loss
    )

    assert_close(got, dense_block(*pairs, bias=bias) / INPUTS, "identity", "float64")


def spread(rows, noise):
    """Return positions for each row, of which the row is the mean."""
    return rows[:, None] + noise - np.mean(noise, axis=1, keepdims=True)


@pytest.mark.parametrize("loss", ["sum", "mean"])
@biases
def test_factorial_examples_are_exact_for_reduce(backend, rng, loss, bias):
    """If mean inputs and summed gradients are factorial, reduce is exact, not expand."""
    x, g = all_pairs(*levels(rng))
    N, S = len(x), 3
    wide_x = spread(x, rng.normal(size=(N, S, IN)))
    wide_g = spread(g / S, rng.normal(size=(N, S, OUT)))
    batch = wide_x, wide_g / {"sum": 1, "mean": N}[loss], None, None

    reduced = kronecker_block(backend, batch, bias=bias, loss=loss, sharing="reduce")
    expanded = kronecker_block(backend, batch, bias=bias, loss=loss)

    dense = dense_block(x, g, bias=bias) / N
    assert_close(reduced, dense, "identity", "float64")
    assert_differs(expanded, dense)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("sources", ["sum", "mean"])
@biases
def test_factorial_sources_are_exact(backend, rng, sharing, sources, bias):
    """If every example has the same sources, the block is exact, summed or averaged."""
    x, g = levels(rng)
    N, M = len(x), len(g)
    batch = x, np.repeat(g[:, None], N, axis=1), None, M

    got = kronecker_block(backend, batch, bias=bias, sharing=sharing, sources=sources)

    total = dense_block(*all_pairs(x, g), bias=bias)
    expected = total / {"sum": N, "mean": N * M}[sources]
    assert_close(got, expected, "identity", "float64")


@losses
def test_the_estimator_averages_factorial_batches(backend, rng, loss):
    """One batch for each g_j, averaged plainly by the estimator, is the whole design."""
    x, g = levels(rng)
    layer = kc.Dense(in_features=IN, out_features=OUT, bias=True, weight_layout="io")
    estimator = kc.Estimator(
        {"fc": kc.Block(layer, kc.Kronecker())},
        decay=1.0,
        damping=0.1,
        damping_rule="factored",
        reduction=loss,
        refreshing=kc.Refreshing(factorizations=()),
    )

    for grad in g:
        given = np.tile(grad if loss == "sum" else grad / len(x), (len(x), 1))
        batch = kc.Batch(backend.asarray(x), backend.asarray(given))
        estimator.update({"fc": batch})
    estimator.refresh()

    got = backend.to_numpy(estimator.operator("fc").to_dense(damped=False))
    expected = dense_block(*all_pairs(x, g), bias=True) / (len(x) * len(g))
    assert_close(got, expected, "identity", "float64")


@biases
def test_tnt_is_exact_on_a_factorial_design(backend, rng, bias):
    """TNT is the dense block too where every input meets every output gradient."""
    x, g = all_pairs(*levels(rng))

    got = other_block(backend, kc.TNT(), x, g, bias=bias)

    expected = dense_block(x, g, bias=bias) / len(x)
    assert_close(got, expected, "identity", "float64")


def test_eigenvalue_correction_changes_nothing_on_a_factorial_design(backend, rng):
    """EKFAC's second moments are the products of the factors' eigenvalues."""
    x, g = all_pairs(*levels(rng))
    eigen = kc.EKFAC()
    layer = kc.Dense(in_features=IN, out_features=OUT, bias=True, weight_layout="io")
    block = kc.Block(layer, eigen)
    fed = kc.Batch(backend.asarray(x), backend.asarray(g))
    conventions = kc.Conventions(reduction="sum", sources="sum")
    start = learn(block, fed)

    statistics = eigen.corrected(
        kc.rebase_block(block, start, "zero", "raise"),
        layer.rows(fed),
        conventions=conventions,
        decay=0.0,
        weight=1.0,
    )

    moments = backend.to_numpy(statistics.averages["block"].value(debias=True))
    rows = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    a = np.linalg.eigvalsh(rows.T @ rows / len(x))[::-1]
    b = np.linalg.eigvalsh(g.T @ g / len(g))[::-1]
    assert_close(moments, np.outer(a, b), "identity", "float64")


def test_tnt_recovers_a_covariance_from_its_sigma_points(backend, rng):
    """A24: gradients ``+-sqrt(n m) L_A e_i e_j^T L_B^T`` give back ``A (x) B``."""
    A, B = reference.spd(rng, IN), reference.spd(rng, OUT)
    columns, others = np.linalg.cholesky(A).T, np.linalg.cholesky(B).T
    x, g = all_pairs(columns, np.sqrt(IN * OUT) * others)
    x, g = np.concatenate([x, x]), np.concatenate([g, -g])

    got = other_block(backend, kc.TNT(), x, g, bias=False)

    assert_close(got, np.kron(A, B), "identity", "float64")


def test_a_covariance_is_the_fixed_point_of_kl_shampoo(backend, rng):
    """A24: ``E[D B^-1 D^T] / d_B = A`` and ``E[D^T A^-1 D] / d_A = B`` on those points."""
    A, B = reference.spd(rng, IN), reference.spd(rng, OUT)
    columns, others = np.linalg.cholesky(A).T, np.linalg.cholesky(B).T
    x, g = all_pairs(columns, np.sqrt(IN * OUT) * others)
    D = np.einsum("ni,no->nio", x, g)
    left = kronecker_operator(None, backend.asarray(A), damping=0.0)
    right = kronecker_operator(None, backend.asarray(B), damping=0.0)

    rows = backend.asarray(D.reshape(-1, OUT).T)
    solved = backend.to_numpy(right**-1 @ rows).T.reshape(D.shape)
    columns = backend.asarray(D.transpose(1, 0, 2).reshape(IN, -1))
    other = backend.to_numpy(left**-1 @ columns)
    other = other.reshape(IN, -1, OUT).transpose(1, 0, 2)

    new_left = np.einsum("nio,njo->ij", solved, D) / len(D) / OUT
    new_right = np.einsum("nio,nip->op", other, D) / len(D) / IN
    assert_close(new_left, A, "identity", "float64")
    assert_close(new_right, B, "identity", "float64")


def other_block(backend, approximation, x, g, *, bias):
    """Return the undamped block of another approximation."""
    layer = kc.Dense(in_features=IN, out_features=OUT, bias=bias, weight_layout="io")
    block = kc.Block(layer, approximation)
    fed = kc.Batch(backend.asarray(x), backend.asarray(g))
    statistics = learn(block, fed)
    operator = operator_for(block, statistics, damping=0.0, factorizations=())
    return backend.to_numpy(operator.to_dense(damped=False))
