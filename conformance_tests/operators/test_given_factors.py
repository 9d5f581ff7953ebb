"""Operators of factors and of bases that are given, and the least shift of a factor."""

import math

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.operators import kronecker_operator, spectral_operator

from ..builders.tolerances import assert_close

N, M, S, LAMBDA = 5, 4, 3.0, 0.2


def factors(rng):
    x, g = rng.normal(size=(20, N)), rng.normal(size=(20, M))
    return x.T @ x / 20, g.T @ g / 20


def shifts_of(A, G, rule, least=0.0):
    """Return the shifts of Martens and Grosse (2015), section 6.3."""
    root = math.sqrt(LAMBDA / S)
    pi = 1.0
    if rule == "factored":
        pi = math.sqrt(np.trace(A) / len(A) / (np.trace(G) / len(G)))
    return max(root * pi, least), max(root / pi, least)


def dense(A, G, rule, least=0.0):
    if rule == "exact":
        return S * np.kron(A, G) + LAMBDA * np.eye(len(A) * len(G))
    a, g = shifts_of(A, G, rule, least)
    return S * np.kron(A + a * np.eye(len(A)), G + g * np.eye(len(G)))


def assert_is(operator, F, backend, dtype, rng):
    v = rng.normal(size=(F.shape[0], 3))
    got = backend.asarray(v, dtype)
    assert_close(backend.to_numpy(operator.to_dense()), F, "product", dtype)
    assert_close(backend.to_numpy(operator @ got), F @ v, "product", dtype)
    solved = backend.to_numpy(operator**-1 @ got)
    assert_close(solved, np.linalg.solve(F, v), "inverse", dtype)


@pytest.mark.parametrize("form", ["full", "diagonal input", "diagonal output"])
@pytest.mark.parametrize("rule", ["factored", "factored_unit_pi", "exact"])
def test_given_factors_make_the_operator_of_every_rule(backend, dtype, rng, rule, form):
    """Whole factors and diagonals, with a scale; the dense matrix is made by hand."""
    A, G = factors(rng)
    given = [A, G]
    if form != "full":
        side = ("diagonal input", "diagonal output").index(form)
        given[side] = np.diag(given[side])
        A, G = (x if x.ndim == 2 else np.diag(x) for x in given)
    arrays = [backend.asarray(x, dtype) for x in given]
    operator = kronecker_operator(*arrays, damping=LAMBDA, rule=rule, scale=S)
    assert operator.vector_shape == (N, M)
    assert_is(operator, dense(A, G, rule), backend, dtype, rng)


@pytest.mark.usefixtures("compiles_long")
@pytest.mark.parametrize("rule", ["factored", "factored_unit_pi", "exact"])
def test_one_factor_is_damped_exactly_by_every_rule(backend, dtype, rng, rule):
    """The block of a bias, ``S G + lam I``."""
    _, G = factors(rng)
    given = backend.asarray(G, dtype)
    operator = kronecker_operator(None, given, damping=LAMBDA, rule=rule, scale=S)
    assert operator.vector_shape == (1, M)
    assert_is(operator, S * G + LAMBDA * np.eye(M), backend, dtype, rng)


@pytest.mark.usefixtures("compiles_long")
def test_squares_in_given_bases_make_ekfac(backend, dtype, rng):
    """E in the eigenbases of A and G, and K-FAC where E is the outer product."""
    A, G = factors(rng)
    (a, Q_A), (g, Q_G) = np.linalg.eigh(A), np.linalg.eigh(G)
    E = rng.uniform(0.5, 2.0, size=(N, M))
    for spectrum, F in (
        (E, np.kron(Q_A, Q_G) * E.ravel() @ np.kron(Q_A, Q_G).T),
        (np.outer(a, g), np.kron(A, G)),
    ):
        operator = spectral_operator(
            backend.asarray(spectrum, dtype),
            input=backend.asarray(Q_A, dtype),
            output=backend.asarray(Q_G, dtype),
            damping=LAMBDA,
        )
        assert_is(operator, F + LAMBDA * np.eye(N * M), backend, dtype, rng)
    diagonal = spectral_operator(backend.asarray(E, dtype), damping=LAMBDA)
    F = np.diag(E.ravel() + LAMBDA)
    assert_is(diagonal, F, backend, dtype, rng)


@pytest.mark.usefixtures("compiles_long")
@pytest.mark.parametrize("rule", ["factored", "factored_unit_pi", "exact"])
@pytest.mark.parametrize("least", [0.0, 0.4])
def test_no_factor_gets_less_than_the_least_shift(backend, dtype, rng, rule, least):
    """Of given factors, of a block and of an estimator; exact damping ignores it."""
    A, G = factors(rng)
    F = dense(A, 0.01 * G, rule, least)
    if least and rule != "exact":
        assert not np.allclose(F, dense(A, 0.01 * G, rule))
    arrays = [backend.asarray(x, dtype) for x in (A, 0.01 * G)]
    options = {"damping": LAMBDA, "rule": rule}
    operator = kronecker_operator(*arrays, scale=S, least_shift=least, **options)
    assert_is(operator, F, backend, dtype, rng)

    x = rng.normal(size=(20, 3, N))
    g = 0.1 * rng.normal(size=(20, 3, M))
    A, G = (np.einsum("nsi,nsj->ij", v, v) / 60 for v in (x, g))
    layer = kc.Dense(in_features=N, out_features=M, bias=False, weight_layout="io")
    estimator = kc.Estimator(
        {"fc": kc.Block(layer, kc.Kronecker())},
        reduction="sum",
        damping=LAMBDA,
        damping_rule=rule,
        refreshing=kc.Refreshing(least_shift=least),
    )
    batch = kc.Batch(backend.asarray(x, dtype), backend.asarray(g, dtype))
    estimator.update({"fc": batch})
    estimator.refresh()
    F = dense(A, G, rule, least)
    assert_is(estimator.operator("fc"), F, backend, dtype, rng)
    statistics = estimator.state["fc"].statistics
    block = estimator.blocks["fc"]
    made = kc.operator_of(
        block, statistics, kc.RefreshOptions(least_shift=least, **options)
    )
    assert_is(made, F, backend, dtype, rng)


@pytest.mark.usefixtures("compiles_long")
def test_factors_that_cannot_be_are_refused_by_name(backend, rng):
    """Shapes, asymmetry, scales, dampings, bases that are not orthogonal."""
    A, G = (backend.asarray(x) for x in factors(rng))
    for error, match, given, options in (
        (kc.ShapeError, "`input`", (A[:3, :], G), {}),
        (kc.ShapeError, "`output`", (A, G[None, ...]), {}),
        (kc.ConventionError, "`input` to be symmetric", (A + A[0, :], G), {}),
        (kc.ConventionError, "`scale`", (A, G), {"scale": 0.0}),
        (kc.ConventionError, "`rule`", (A, G), {"rule": "pi"}),
        (kc.DampingError, "least_shift", (A, G), {"least_shift": -1.0}),
        (kc.DampingError, "damping", (A, G), {"damping": math.nan}),
        (kc.FactorizationError, "damping", (0.0 * A, G), {"damping": 0.0}),
        (kc.NotFiniteError, "input", (A * math.nan, G), {}),
    ):
        with pytest.raises(error, match=match):
            kronecker_operator(*given, **{"damping": 0.1, **options})
    for rule in ("factored", "exact"):
        given = (A + A[0, :], G)
        made = kronecker_operator(*given, damping=0.1, rule=rule, check="status")
        assert int(made.status()) & kc.Status.MATRIX_NOT_FINITE
        good = kronecker_operator(A, G, damping=0.1, rule=rule, check="status")
        assert int(good.status()) == 0
    E = backend.asarray(np.ones((N, M)))
    with pytest.raises(kc.ConventionError, match="`input` to be orthogonal"):
        spectral_operator(E, input=A, damping=0.1)
    with pytest.raises(kc.ShapeError, match=r"`?output`?.*\(4, 4\)"):
        spectral_operator(E, output=A, damping=0.1)


@pytest.mark.parametrize("condition", [1e2, 1e4])
def test_the_determinant_of_factors_in_float32_is_that_of_their_numbers(
    backend, rng, condition
):
    """The smallest eigenvalues too, which single precision alone would not give."""
    Q = np.linalg.qr(rng.normal(size=(8, 8)))[0]
    A = ((Q * np.geomspace(1.0, 1.0 / condition, 8)) @ Q.T).astype(np.float32)
    A = (A + A.T) / 2
    given = backend.asarray(A, "float32")
    operator = kronecker_operator(given, given, damping=0.0, factorizations=())
    expected = 16 * np.linalg.slogdet(A.astype(np.float64))[1]
    assert float(operator.logdet(damped=False)) == pytest.approx(expected, rel=2e-6)
