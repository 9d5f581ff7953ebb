"""How damping is split over factors (A4, A5), and how it is adapted."""

import math

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.array.finite import is_plain
from kfac_core.errors import DampingError

from ..builders import reference
from ..builders.tolerances import assert_close, assert_differs

SIZES = (4, 3, 2)


def shifts_of(backend, dtype, factors, damping, *, scale=1.0, unit_pi=False):
    """Split a damping over dense factors, on the backend."""
    means = [backend.asarray(np.trace(F) / len(F), dtype) for F in factors]
    shifts = kc.damping.factored_shifts(
        means,
        damping,
        scale=backend.asarray(scale, dtype),
        unit_pi=unit_pi,
        xp=backend.xp,
    )
    assert all(shift.dtype == backend.dtype(dtype) for shift in shifts)
    return [float(shift) for shift in shifts]


def damped(factors, shifts):
    """Return the dense product of the damped factors."""
    dense = np.ones((1, 1))
    for F, shift in zip(factors, shifts, strict=True):
        dense = np.kron(dense, F + shift * np.eye(len(F)))
    return dense


@pytest.fixture
def factors(rng):
    """Three factors of very different size."""
    return [
        c * reference.spd(rng, n) for c, n in zip((1.0, 40.0, 0.1), SIZES, strict=True)
    ]


def test_the_cross_terms_are_those_of_the_paper(backend, dtype, factors):
    """A4: it is ``A(x)G + lam I + sqrt(lam) (pi I(x)G + A(x)I / pi)``."""
    A, G = factors[:2]
    lam, n, m = 0.09, len(A), len(G)
    pi = np.sqrt((np.trace(A) / n) / (np.trace(G) / m))

    shifts = shifts_of(backend, dtype, [A, G], lam)

    cross = pi * np.kron(np.eye(n), G) + np.kron(A, np.eye(m)) / pi
    expected = np.kron(A, G) + lam * np.eye(n * m) + np.sqrt(lam) * cross
    assert_close(damped([A, G], shifts), expected, "roundoff", dtype)


@pytest.mark.parametrize("detune", [0.5, 0.9, 1.1, 2.0])
def test_pi_minimizes_the_trace_of_the_cross_terms(backend, dtype, factors, detune):
    """A4b: any other split of the same damping adds more to the trace."""
    A, G = factors[:2]

    a, g = shifts_of(backend, dtype, [A, G], 0.09)

    ours = np.trace(damped([A, G], [a, g]))
    other = np.trace(damped([A, G], [a * detune, g / detune]))
    assert ours < other * (1 - 1e-5)


def test_factored_damping_is_stronger_than_exact(backend, dtype, factors):
    """A4c: factored^-1 <= exact^-1 in the Loewner order, and they are not equal."""
    A, G = factors[:2]

    shifts = shifts_of(backend, dtype, [A, G], 0.09)

    factored = np.linalg.inv(damped([A, G], shifts))
    exact = np.linalg.inv(np.kron(A, G) + 0.09 * np.eye(len(A) * len(G)))
    smallest = np.linalg.eigvalsh(exact - factored)[0]
    assert smallest > -1e-6 * np.linalg.norm(exact, 2)
    assert_differs(factored, exact)


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("c", [1e-3, 1e4])
def test_scaling_between_factors_changes_nothing(backend, dtype, factors, k, c):
    """A5: the damped product is unchanged by ``A -> cA, G -> G/c``, for k factors too."""
    before = factors[:k]
    after = [before[0] * c, before[1] / c, *before[2:]]

    ours = damped(after, shifts_of(backend, dtype, after, 0.09))
    unit_pi = damped(after, shifts_of(backend, dtype, after, 0.09, unit_pi=True))

    expected = damped(before, shifts_of(backend, dtype, before, 0.09))
    assert_close(ours, expected, "identity", dtype)
    assert_differs(unit_pi, expected)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_rule_for_k_factors_is_that_of_kfac_jax(backend, dtype, factors, k):
    """A5: ``c (F/n + lam^(1/k)/c I)``; for two ``pi sqrt(lam)`` and ``sqrt(lam)/pi``."""
    means = [np.trace(F) / len(F) for F in factors[:k]]
    c = np.prod(means) ** (1 / k)

    shifts = shifts_of(backend, dtype, factors[:k], 0.09)

    expected = [n / c * 0.09 ** (1 / k) for n in means]
    assert_close(shifts, expected, "roundoff", dtype)


@pytest.mark.parametrize("unit_pi", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_product_of_the_shifts_is_the_damping(backend, dtype, factors, k, unit_pi):
    """``S prod(shift_i) = lam``: the shared positions' part is divided out."""
    got = shifts_of(backend, dtype, factors[:k], 0.09, scale=6.0, unit_pi=unit_pi)
    without = shifts_of(backend, dtype, factors[:k], 0.09, unit_pi=unit_pi)

    assert_close(6.0 * np.prod(got), 0.09, "roundoff", dtype)
    assert_differs(6.0 * np.prod(without), 0.09)


@pytest.mark.parametrize("k", [2, 3])
def test_a_zero_trace_gives_equal_shifts(backend, dtype, factors, k):
    """Where a factor is zero no ratio is taken: all shifts are ``(lam/S)^(1/k)``."""
    zeroed = [factors[0], 0.0 * factors[1], factors[2]][:k]

    got = shifts_of(backend, dtype, zeroed, 0.09, scale=2.0)

    assert_close(got, [0.045 ** (1 / k)] * k, "roundoff", dtype)


def test_extreme_traces_do_not_overflow(backend, dtype):
    """Traces whose product is outside the range of float32 are balanced all the same."""
    factors = [1e30 * np.eye(2), 1e30 * np.eye(3), 1e-30 * np.eye(2)]

    got = shifts_of(backend, dtype, factors, 1.0)

    assert_close(got, [1e20, 1e20, 1e-40], "identity", dtype)


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (1.0, 0.5),
        (0.7501, 0.5),
        (math.inf, 0.5),
        (0.75, 1.0),
        (0.5, 1.0),
        (0.25, 1.0),
        (0.2499, 2.0),
        (0.0, 2.0),
        (-3.0, 2.0),
        (-math.inf, 2.0),
        (math.nan, 2.0),
    ],
)
def test_levenberg_marquardt_follows_the_table(ratio, expected):
    """Good predictions lower the damping, bad ones and NaN raise it, others keep it."""
    got = kc.levenberg_marquardt(1.0, ratio, decay=0.5)

    assert got == expected


@pytest.mark.parametrize("rho", [1.0, 0.75, 0.5, 0.25, 0.1, -math.inf, math.nan])
@pytest.mark.parametrize("bounds", [{}, {"minimum": 1.9, "maximum": 2.1}])
def test_arrays_are_adapted_as_numbers_are(backend, dtype, rho, bounds):
    """A 0-d damping or ratio gives the same damping, and is not looked at."""
    expected = kc.levenberg_marquardt(2.0, rho, decay=0.5, **bounds)
    lam, ratio = backend.asarray(2.0, dtype), backend.asarray(rho, dtype)
    for arguments in ((lam, ratio), (2.0, ratio), (lam, rho)):
        got = kc.levenberg_marquardt(*arguments, decay=0.5, **bounds)

        assert got.dtype == backend.dtype(dtype)
        assert float(got) == pytest.approx(expected, rel=1e-6)


def test_a_damping_that_is_nan_stays_so(backend, dtype):
    """It is not read, and is no minimum: the refresh flags it."""
    lam = backend.asarray(math.nan, dtype)

    for rho in (1.0, 0.5, 0.1):
        got = kc.levenberg_marquardt(lam, rho, decay=0.5, minimum=0.1, maximum=2.0)
        assert math.isnan(float(got))
    for got in kc.steps.gamma_candidates(lam, factor=0.5, minimum=0.1, maximum=2.0):
        assert math.isnan(float(got))


@pytest.mark.parametrize("value", [-0.1, math.inf, math.nan])
@pytest.mark.parametrize("of_a_block", [False, True])
def test_an_invalid_damping_in_an_array_is_refused(backend, rng, value, of_a_block):
    """By the setter where the array can be read, and else by ``refresh``."""
    layer = kc.Dense(in_features=3, out_features=2, bias=True, weight_layout="io")
    estimator = kc.Estimator(
        {"fc1": kc.Block(layer, kc.Kronecker())}, reduction="sum", damping=0.1
    )
    x, g = rng.normal(size=(6, 3)), rng.normal(size=(6, 2))
    estimator.update({"fc1": kc.Batch(backend.asarray(x), backend.asarray(g))})
    array = backend.asarray(np.asarray(value))
    damping = {"fc1": array} if of_a_block else array

    if is_plain(array, xp=backend.xp):
        with pytest.raises(DampingError, match=r"`damping.*finite number"):
            estimator.damping = damping
        assert estimator.damping == 0.1
        return
    estimator.damping = damping
    with pytest.raises(DampingError, match=r"(?=.*fc1)(?=.*damping).*finite number"):
        estimator.refresh()
