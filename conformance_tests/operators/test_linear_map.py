"""Many vectors at once, flat vectors, powers, norms and determinants, and SciPy."""

import itertools
import math

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.operators import LinearMap

from ..builders.block_kinds import DENSE, KINDS, PAIRS, fed
from ..builders.layers import conv_layer, dense_layer
from ..builders.one_block import learn, operator_for
from ..builders.tolerances import assert_close

PREPARED = ("inverse", "cholesky", "eigenbasis")
LAMBDA = 0.3
GROUPED = conv_layer(4, 6, (1,), groups=2)

OTHERS = {
    "grouped": (GROUPED, kc.Kronecker()),
    "grouped eigen": (GROUPED, kc.EKFAC()),
    "diagonal input": (DENSE, kc.Kronecker(input="diagonal")),
}
EVERY = [*KINDS, *itertools.product(OTHERS, ("factored", "exact"))]


def operator_of(backend, rng, kind, rule, *, dtype="float64", prepared=PREPARED):
    """Return the operator of one block of a kind, from random rows."""
    layer, approximation = {**PAIRS, **OTHERS}[kind]
    if layer is GROUPED:
        x, g = rng.normal(size=(6, 5, 4)), rng.normal(size=(6, 5, 6))
        batch = kc.Batch(backend.asarray(x, dtype), backend.asarray(g, dtype))
    else:
        batch = fed(backend, rng, layer)
    block = kc.Block(layer, approximation)
    like = backend.asarray(np.ones(1), dtype)
    statistics = learn(block, batch, block.initial(like))
    if approximation.has_bases:
        statistics = kc.rebase_block(block, statistics, "kronecker")
        statistics = learn(block, batch, statistics, decay=0.5)
    return operator_for(
        block, statistics, damping=LAMBDA, rule=rule, factorizations=prepared
    )


def chain_operator(backend, rng):
    """Return the operator of a chain of two layers."""
    layer = dense_layer(3, 3)
    estimator = kc.Estimator(
        {name: kc.Block(layer, kc.Kronecker()) for name in ("one", "two")},
        reduction="sum",
        damping=LAMBDA,
        coupling=kc.Coupling(chains={"both": ("one", "two")}),
    )
    x, g = (
        {n: backend.asarray(rng.normal(size=(9, 3))) for n in ("one", "two")}
        for _ in range(2)
    )
    estimator.update({n: kc.Batch(x[n], g[n]) for n in x})
    estimator.refresh()
    return estimator.operator("both")


def made(backend, rng, kind, rule):
    if kind == "chain":
        return chain_operator(backend, rng)
    return operator_of(backend, rng, kind, rule)


def power_of(F, exponent):
    w, Q = np.linalg.eigh(F)
    return (Q * w**exponent) @ Q.T


@pytest.mark.parametrize(
    ("kind", "rule"), [*EVERY, ("chain", "factored")], ids=lambda made: str(made)
)
def test_many_vectors_are_multiplied_at_once_by_every_operator(
    backend, rng, kind, rule
):
    """``operator @ V`` and ``operator**p @ V`` are products of dense matrices."""
    operator = made(backend, rng, kind, rule)
    assert isinstance(operator, LinearMap)
    F = backend.to_numpy(operator.to_dense())
    p = F.shape[0]
    assert operator.shape == (p, p)
    V = rng.normal(size=(p, 5))
    v = backend.asarray(V)

    assert_close(backend.to_numpy(operator @ v), F @ V, "product", "float64")
    one = backend.to_numpy(operator @ backend.asarray(V[:, 0]))
    assert_close(one, F @ V[:, 0], "product", "float64")
    lacks = operator.unsupported_products
    for exponent in (-1, -0.5, 0.5, 2):
        if exponent != -1 and "multiply_matpower" in lacks:
            continue
        got = backend.to_numpy(operator**exponent @ v)
        assert_close(got, power_of(F, exponent) @ V, "power", "float64")

    # The same as matrices, with two axes in front.
    n, m = operator.vector_shape
    many = backend.asarray(V.T.reshape(5, 1, n, m))
    got = backend.to_numpy(operator.multiply_inverse(many))
    assert got.shape == (5, 1, n, m)
    expected = np.linalg.solve(F, V).T.reshape(5, 1, n, m)
    assert_close(got, expected, "inverse", "float64")
    if "multiply_cholesky" not in lacks and kind not in ("uncorrelated",):
        L = np.linalg.cholesky(F)
        for transpose in (False, True):
            options = {"transpose": transpose}
            got = backend.to_numpy(operator.multiply_cholesky(many, **options))
            expected = ((L.T if transpose else L) @ V).T.reshape(5, 1, n, m)
            assert_close(got, expected, "cholesky", "float64")
            got = backend.to_numpy(operator.multiply_cholesky_inverse(many, **options))
            expected = np.linalg.solve(L.T if transpose else L, V)
            assert_close(got, expected.T.reshape(5, 1, n, m), "cholesky", "float64")
    # Draws: R R^T is the inverse, R from the columns of the identity.
    eye = backend.asarray(np.eye(p).reshape(p, n, m))
    R = backend.to_numpy(operator.sample(eye)).reshape(p, p).T
    assert_close(R @ R.T, np.linalg.inv(F), "inverse", "float64")


@pytest.mark.usefixtures("compiles_long")
@pytest.mark.parametrize(
    ("kind", "rule"), [*EVERY, ("chain", "factored")], ids=lambda made: str(made)
)
def test_norms_and_determinants_are_those_of_the_dense_matrix(backend, rng, kind, rule):
    """Frobenius norm, determinant and its logarithm, with the damping and without."""
    operator = made(backend, rng, kind, rule)
    for damped in (True, False) if kind != "chain" else (True,):
        F = backend.to_numpy(operator.to_dense(damped=damped))
        norm = float(operator.frobenius_norm(damped=damped))
        assert_close(norm, np.linalg.norm(F), "product", "float64")
        w = np.linalg.eigvalsh(F)
        if w[0] < 1e-10 * w[-1]:
            assert float(operator.logdet(damped=damped)) == -math.inf
            assert float(operator.det(damped=damped)) == 0.0
            continue
        logdet = np.linalg.slogdet(F)[1]
        assert_close(
            float(operator.logdet(damped=damped)), logdet, "inverse", "float64"
        )
        det = float(operator.det(damped=damped))
        assert_close(det, np.linalg.det(F), "inverse", "float64")


def test_flat_vectors_of_another_length_are_refused_with_both_forms_named(backend):
    """A matrix form goes to `multiply`, which the message says."""
    A = backend.asarray(np.eye(3))
    operator = kc.operators.kronecker_operator(A, A, damping=0.1)
    with pytest.raises(kc.ShapeError, match=r"\(9,\).*\(3, 3\) goes to `multiply`"):
        operator @ A
    for exponent in ("x", None, math.nan, 1j):
        with pytest.raises(kc.KFACError, match="exponent"):
            operator**exponent


@pytest.mark.parametrize("kind", ["kronecker", "eigen", "full", "chain"])
def test_an_operator_is_one_of_scipy(backend, rng, kind):
    """`aslinearoperator` takes an operator of NumPy arrays, and its inverse for CG."""
    sparse = pytest.importorskip("scipy.sparse.linalg")
    if backend.name != "numpy":
        pytest.skip("SciPy has arrays of NumPy")
    operator = made(backend, rng, kind, "factored")
    F, p = operator.to_dense(), operator.shape[0]
    linear = sparse.aslinearoperator(operator)
    V = rng.normal(size=(p, 3))

    assert linear.shape == (p, p)
    assert linear.dtype == np.float64
    assert_close(linear @ V, F @ V, "product", "float64")
    assert_close(linear.matvec(V[:, 0]), F @ V[:, 0], "product", "float64")
    assert_close(linear.rmatvec(V[:, 0]), F @ V[:, 0], "product", "float64")
    assert_close(linear.T @ V, F @ V, "product", "float64")
    inverse = sparse.aslinearoperator(operator**-1)
    found, failed = sparse.cg(linear, V[:, 0], M=inverse, rtol=1e-12, maxiter=3)
    assert failed == 0
    assert_close(found, np.linalg.solve(F, V[:, 0]), "inverse", "float64")
