"""Operators, continued: what must change no product (C5), scalars, dtypes, errors."""

from dataclasses import replace

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.array.structure import replaced
from kfac_core.errors import FactorizationError, MixedArraysError

from ..builders import reference
from ..builders.one_block import operator_for
from ..builders.tolerances import assert_close, assert_differs
from ..linalg.test_operators import ALL, RULES, make_case


@pytest.fixture
def plain(backend, dtype):
    """Full factors and six shared positions."""
    return make_case(backend, dtype, S=6)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["array", "wider", "numpy", "int"])
def test_the_damping_may_be_any_scalar(plain, rng, rule, kind):
    """0-d arrays, of whichever dtype, NumPy scalars and integers do what a float does."""
    damping = {
        "array": plain.vector(2.0),
        "wider": plain.backend.asarray(2.0, "float64"),
        "numpy": np.float64(2.0),
        "int": 2,
    }[kind]
    V = rng.normal(size=(4, 3))

    got = plain.operator(rule, damping=damping).multiply_inverse(plain.vector(V))

    assert got.dtype == plain.backend.dtype(plain.dtype)
    plain.close(got, np.linalg.inv(plain.dense(rule, 2.0)), V)


def everything(case, operator, V):
    """Return the bits of all products."""
    made = [
        operator.multiply(V),
        operator.multiply_inverse(V),
        operator.multiply_matpower(V, -0.25),
        operator.multiply_cholesky(V),
        operator.multiply_cholesky_inverse(V, transpose=True),
        operator.sample(V),
        operator.logdet(),
        operator.eigenvalues(),
    ]
    return [case.backend.to_numpy(x).tobytes() for x in made]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kinds", [("full", "full"), ("diagonal", "full")])
@pytest.mark.parametrize("apply", [None, "float32"])
def test_no_result_depends_on_what_was_prepared(
    backend, dtype, rng, rule, kinds, apply
):
    """Every product is bitwise the same, whatever was factorized before, and when."""
    case = make_case(backend, dtype, S=6, kinds=kinds)
    V, options = case.vector(rng.normal(size=(4, 3))), {}
    if apply is not None:
        options["precision"] = kc.Precision(apply=apply)

    operators = [
        case.operator(rule, factorizations=some, **options)
        for some in ((), ("inverse",), ("cholesky",), ("eigenbasis",), ALL)
    ]
    operators.append(operators[1].prepared("cholesky", "eigenbasis"))

    first, *others = (everything(case, operator, V) for operator in operators)
    assert all(other == first for other in others)


def rotated(case, factor, Q):
    """Return a factor, or its basis, rotated by Q (columns to columns)."""
    basis = getattr(factor, "basis", factor)
    vectors = case.backend.to_numpy(basis.eigenvectors) @ Q
    other = replaced(basis, eigenvectors=case.vector(vectors))
    return other if factor is basis else replaced(factor, basis=other)


@pytest.mark.parametrize("rule", RULES)
def test_rotations_inside_an_eigenspace_do_not_matter(backend, dtype, rng, rule):
    """C5: any signs, and with a triple eigenvalue any basis of its space."""
    case = make_case(backend, dtype)
    Q, _ = np.linalg.qr(rng.normal(size=(4, 4)))
    A = (Q * [0.5, 2.0, 2.0, 2.0]) @ Q.T
    averages = dict(case.statistics.averages)
    total = replaced(averages["input"].sum, array=case.vector(A), full_storage=True)
    averages["input"] = kc.factors.Average(total, case.vector(1.0))
    case = replace(case, statistics=replaced(case.statistics, averages=averages), A=A)
    turn, _ = np.linalg.qr(rng.normal(size=(3, 3)))
    R, mixed = np.eye(4), np.eye(4)
    R[0, 0], R[1:, 1:], mixed[:3, :3] = -1.0, turn, turn
    V = rng.normal(size=(4, 3))
    operator = case.operator(rule, factorizations=ALL)

    inside = replaced(
        operator,
        input=rotated(case, operator.input, R),
        output=rotated(case, operator.output, np.diag([-1.0, 1.0, -1.0])),
    )
    across = replaced(operator, input=rotated(case, operator.input, mixed))

    for p in (-1.0, 2.0, -0.5):
        expected = reference.matrix_power(case.dense(rule), p)
        case.close(inside.multiply_matpower(case.vector(V), p), expected, V, "power")
    wrong = backend.to_numpy(across.multiply_matpower(case.vector(V), -0.5))
    assert_differs(wrong, (expected @ V.ravel()).reshape(V.shape), by=0.01)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
def test_the_dtype_of_the_vector_comes_back(plain, rng, rule, kind):
    """Products are computed in the operator's dtype and returned in the vector's."""
    if not hasattr(plain.backend.xp, kind):
        pytest.skip(f"{plain.backend.name} has no {kind}")
    V = plain.backend.xp.astype(
        plain.vector(rng.normal(size=(4, 3))), plain.backend.dtype(kind)
    )
    operator = plain.operator(rule)

    got = [
        operator.multiply(V),
        operator.multiply_inverse(V),
        operator.multiply_matpower(V, 0.5),
        operator.multiply_cholesky(V),
        operator.multiply_cholesky_inverse(V),
        operator.sample(V),
    ]

    assert all(x.dtype == plain.backend.dtype(kind) for x in got)
    host = plain.backend.to_numpy(V)
    expected = np.linalg.solve(plain.dense(rule), host.ravel()).reshape(4, 3)
    assert np.allclose(plain.backend.to_numpy(got[1]), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("apply", ["float32", "float64"])
def test_wide_factorizations_applied_narrow_are_accurate(backend, rule, apply):
    """Computing in float64 makes the inverse of float32 statistics that of float64.

    The statistics are ill-conditioned, so that a float32 factorization cannot pass.
    """
    case = make_case(backend, "float32", S=1)
    averages = dict(case.statistics.averages)
    spread = reference.spd(np.random.default_rng(3), 4, condition=1e6)
    total = replaced(
        averages["input"].sum, array=case.vector(spread), full_storage=True
    )
    averages["input"] = kc.factors.Average(total, case.vector(1.0))
    A = backend.to_numpy(total.full())
    G = backend.to_numpy(averages["output"].sum.full())
    statistics = replaced(case.statistics, averages=averages)
    V = np.random.default_rng(1).normal(size=(4, 3))
    precision = kc.Precision(compute="float64", apply=apply)

    operator = operator_for(
        case.block, statistics, damping=1e-8, rule=rule, precision=precision
    )
    got = operator.multiply_inverse(backend.asarray(V, "float64"))

    F = reference.damped_block(A, G, 1.0, damping=1e-8, rule=rule)
    expected = np.linalg.solve(F, V.ravel()).reshape(V.shape)
    assert_close(backend.to_numpy(got), expected, "product", "float32")


@pytest.mark.parametrize("rule", RULES)
def test_nothing_to_invert_is_an_error_that_names_the_block(backend, dtype, rule):
    """Statistics of nothing without damping raise; with damping they are ``lam I``."""
    case = make_case(backend, dtype)
    empty = case.block.initial(case.vector(np.zeros((1, 3))))
    V = np.ones((4, 3))

    with pytest.raises(FactorizationError, match=r"fc1.*Increase `damping`"):
        operator_for(case.block, empty, damping=0.0, rule=rule, name="fc1")
    operator = operator_for(case.block, empty, damping=0.5, rule=rule)

    case.close(operator.multiply_inverse(case.vector(V)), 2.0 * np.eye(12), V)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("damping", [-1.0, np.nan])
def test_a_bad_damping_in_an_array_is_flagged(plain, rule, damping):
    """In the status, since its value may not be readable."""
    with np.errstate(invalid="ignore"):
        flagged = plain.operator(
            rule, damping=plain.vector(damping), factorizations=ALL, check="status"
        )

    assert int(flagged.status()) != 0


@pytest.mark.parametrize("rule", RULES)
def test_the_damping_on_another_device_is_refused(plain, rule):
    """A 0-d damping that lies elsewhere is an error that says so."""
    if plain.backend.name != "array_api_strict":
        pytest.skip(f"{plain.backend.name} has one device in these tests")
    device = plain.backend.adapter.device("device2")
    damping = plain.backend.xp.asarray(0.5, device=device)

    with pytest.raises(MixedArraysError):
        plain.operator(rule, damping=damping)
