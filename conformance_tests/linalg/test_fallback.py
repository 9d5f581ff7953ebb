"""The fallback chain: which step holds, what it reports, and what is refused."""

from types import SimpleNamespace

import numpy as np
import pytest

from kfac_core.array.status import Status
from kfac_core.array.structure import combinable, leaves
from kfac_core.errors import FactorizationError, NotFiniteError
from kfac_core.linalg import factorize
from kfac_core.linalg.factorize import cholesky_factor, damped_inverse
from kfac_core.linalg.fallback import Fallback, fallback_of
from kfac_core.linalg.symmetric import ScaledMatrix, SymmetricMatrix

from ..builders import reference
from ..builders.tolerances import CERTIFICATE_FACTOR, assert_close


def factorized(backend, dtype, A, shift, *, check="raise", inverse=True):
    """Factorize ``A + shift I``; what is checked is the inverse, if there is one."""
    A = np.asarray(A)
    shift = backend.asarray(np.broadcast_to(shift, A.shape[:-2]), dtype)
    # Halved and doubled, so that the factor of the sum takes part exactly.
    matrix = SymmetricMatrix(backend.asarray(0.5 * A, dtype), full_storage=True)
    problem = ScaledMatrix(matrix, backend.xp.full_like(shift, 2.0), shift)
    options = {"check": check, "name": "fc1/input"}
    factor = cholesky_factor(problem, **options)
    last = damped_inverse(problem, factor, **options) if inverse else factor
    if inverse:
        alone = damped_inverse(problem, **options)
        assert fallback_of(alone) == fallback_of(last)
        for one, other in ((alone.status, last.status), (alone.matrix, last.matrix)):
            full = [
                x.full() if isinstance(x, SymmetricMatrix) else x for x in (one, other)
            ]
            np.testing.assert_array_equal(*(backend.to_numpy(x) for x in full))
    return SimpleNamespace(
        lower=factor.lower,
        inverse=last.matrix if inverse else None,
        status=last.status,
        residual=last.residual,
        clipped=last.clipped,
        fallback=last.fallback,
    )


def inverse_of(backend, made):
    return backend.to_numpy(made.inverse.full())


@pytest.mark.parametrize("check", ["raise", "status"])
@pytest.mark.parametrize("n", [1, 4, 128])
def test_a_well_conditioned_matrix_needs_no_fallback(backend, dtype, rng, n, check):
    """L and the inverse are the dense ones, in working precision, nothing clipped."""
    A = reference.spd(rng, n)

    made = factorized(backend, dtype, A, 0.01, check=check)

    M = A + 0.01 * np.eye(n)
    assert fallback_of(made) == Fallback.WORKING
    assert int(made.status) == Status.OK
    assert float(made.clipped) == 0.0
    assert_close(inverse_of(backend, made), np.linalg.inv(M), "inverse", dtype)
    lower = backend.to_numpy(made.lower)
    assert_close(lower, np.linalg.cholesky(M), "cholesky", dtype)


@pytest.mark.parametrize("condition", [1e1, 1e4])
def test_the_certificate_is_that_of_the_inverse(backend, dtype, rng, condition):
    """It is the true residual up to the stated factor and to its own rounding."""
    A = reference.spd(rng, 64, condition=condition)

    made = factorized(backend, dtype, A, 0.0)

    M = np.asarray(A, dtype).astype(np.float64)
    X = inverse_of(backend, made)
    true = np.linalg.norm(M @ X - np.eye(64)) / 8.0
    rounding = np.finfo(dtype).eps * condition
    assert float(made.residual) < CERTIFICATE_FACTOR * (true + rounding)
    assert true < CERTIFICATE_FACTOR * (float(made.residual) + rounding)


def test_float64_helps_where_float32_fails(backend):
    """Ones plus 1e-9 I has no float32 Cholesky factor; the answer comes from float64."""
    A, shift = np.ones((4, 4)), 1e-9
    M = A + shift * np.eye(4)

    made = factorized(backend, "float32", A, shift)

    assert fallback_of(made) == Fallback.FLOAT64
    assert made.lower.dtype == backend.dtype("float32")
    assert int(made.status) == Status.OK
    assert_close(inverse_of(backend, made), np.linalg.inv(M), "product", "float32")
    lower = backend.to_numpy(made.lower)
    assert_close(lower, np.linalg.cholesky(M), "product", "float32")


def test_an_inaccurate_inverse_is_not_accepted(backend, rng):
    """Where Cholesky succeeds but the inverse is bad, float64 does it again."""
    A = reference.spd(rng, 64, condition=2e7) + 1e-7 * np.eye(64)

    made = factorized(backend, "float32", A, 0.0)

    M = np.asarray(A, "float32").astype(np.float64)
    assert fallback_of(made) == Fallback.FLOAT64
    assert_close(inverse_of(backend, made), np.linalg.inv(M), "product", "float32")


@pytest.mark.parametrize("wrong", ["damped_cholesky", "cholesky_inverse"])
def test_factors_that_fail_the_residual_check_are_not_used(
    backend, dtype, rng, monkeypatch, wrong
):
    """A factor or an inverse that is 5% off is found in each fallback, and none is used."""
    A = reference.spd(rng, 4)
    right = getattr(factorize, wrong)

    def off(*args, **options):
        made = right(*args, **options)
        return (made[0] * 1.05, made[1]) if isinstance(made, tuple) else made * 1.05

    monkeypatch.setattr(factorize, wrong, off)

    inverse = wrong == "cholesky_inverse"
    made = factorized(backend, dtype, A, 0.01, inverse=inverse)

    M = A + 0.01 * np.eye(4)
    assert fallback_of(made) == Fallback.EIGENDECOMPOSITION
    lower = backend.to_numpy(made.lower)
    if inverse:
        assert_close(inverse_of(backend, made), np.linalg.inv(M), "inverse", dtype)
    else:
        assert_close(lower, np.linalg.cholesky(M), "cholesky", dtype)


def test_an_indefinite_matrix_is_clipped(backend, dtype, rng):
    """The last fallback inverts the nearest semidefinite A plus the shift, and says so."""
    Q, _ = np.linalg.qr(rng.normal(size=(4, 4)))
    A = (Q * [1.0, 0.5, 0.25, -0.125]) @ Q.T
    clipped = (Q * [1.0, 0.5, 0.25, 0.0]) @ Q.T + 0.01 * np.eye(4)

    made = factorized(backend, dtype, A, 0.01)

    assert fallback_of(made) == Fallback.EIGENDECOMPOSITION
    assert made.lower.dtype == backend.dtype(dtype)
    assert_close(float(made.clipped), 0.125, "product", dtype)
    assert_close(inverse_of(backend, made), np.linalg.inv(clipped), "inverse", dtype)
    lower = backend.to_numpy(made.lower)
    assert_close(lower, np.linalg.cholesky(clipped), "cholesky", dtype)


@pytest.mark.parametrize("check", ["raise", "status"])
def test_the_form_does_not_depend_on_the_data(backend, rng, check):
    """What fell back, and what did not, can be combined array by array."""
    A = reference.spd(rng, 4)
    made = {}
    for name, matrix in (("definite", A), ("indefinite", A - 2.0 * np.eye(4))):
        problem = ScaledMatrix(
            SymmetricMatrix(backend.asarray(matrix, "float64"), full_storage=True),
            backend.asarray(1.0),
            backend.asarray(0.1),
        )
        with np.errstate(invalid="ignore"):
            made[name] = cholesky_factor(problem, check=check, name="")

    assert combinable(made["definite"], made["indefinite"])
    for (path, one), (_, two) in zip(
        *(leaves(made[name]) for name in ("definite", "indefinite")), strict=True
    ):
        assert (one.shape, one.dtype) == (two.shape, two.dtype), path


def test_a_shift_that_makes_it_definite_clips_nothing(backend, dtype, rng):
    """Negative eigenvalues above -shift are inverted as they are, not clipped."""
    Q, _ = np.linalg.qr(rng.normal(size=(4, 4)))
    A = (Q * [1.0, 0.5, 0.25, -0.125]) @ Q.T

    made = factorized(backend, dtype, A, 0.5)

    M = A + 0.5 * np.eye(4)
    assert fallback_of(made) == Fallback.WORKING
    assert_close(inverse_of(backend, made), np.linalg.inv(M), "inverse", dtype)


@pytest.mark.parametrize(
    "A",
    [
        pytest.param(np.zeros((4, 4)), id="zero"),
        pytest.param(-np.eye(4), id="negative"),
        pytest.param(np.ones((4, 4)), id="singular"),
        pytest.param(np.diag([1.0, 1.0, 1.0, 0.0]), id="one-zero"),
    ],
)
def test_singular_matrices_raise(backend, dtype, A):
    """A singular matrix without damping raises, naming the factor and the remedy."""
    with pytest.raises(FactorizationError, match="Increase `damping`") as caught:
        factorized(backend, dtype, A, 0.0)

    assert caught.value.factor == "fc1/input"
    assert "fc1/input" in str(caught.value)
    assert isinstance(caught.value, np.linalg.LinAlgError)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0), (3, 1)])
def test_a_matrix_that_is_not_finite_is_refused(backend, dtype, bad, place):
    """NaN and infinity are an error before any factorization, naming the factor."""
    A = np.eye(4)
    A[place] = A[place[::-1]] = bad

    with pytest.raises(NotFiniteError, match="fc1/input"):
        factorized(backend, dtype, A, 0.1)


@pytest.mark.parametrize(
    ("A", "shift", "flag"),
    [
        pytest.param(np.eye(4) * np.nan, 0.1, Status.MATRIX_NOT_FINITE, id="nan"),
        pytest.param(np.eye(4) * -2.0, 0.1, Status.NOT_POSITIVE, id="negative"),
        pytest.param(np.zeros((4, 4)), 0.0, Status.NOT_POSITIVE, id="zero"),
        pytest.param(np.eye(4), -2.0, Status.BAD_DAMPING, id="bad-shift"),
        pytest.param(np.eye(4), np.nan, Status.BAD_DAMPING, id="nan-shift"),
    ],
)
def test_status_mode_reports_and_never_raises(backend, dtype, A, shift, flag):
    """The flag says what is wrong, and L and the inverse are NaN throughout."""
    with np.errstate(invalid="ignore"):
        made = factorized(backend, dtype, A, shift, check="status")

    assert int(made.status) == flag
    assert np.all(np.isnan(backend.to_numpy(made.lower)))
    assert np.all(np.isnan(inverse_of(backend, made)))


def test_failed_inverses_are_nan(backend, dtype, monkeypatch):
    """Some kernels invert NaN to zeros."""

    def zeros(lower, **_):
        return backend.xp.zeros_like(lower), True

    monkeypatch.setattr(factorize, "cholesky_inverse", zeros)

    made = factorized(backend, dtype, -np.eye(4), 0.0, check="status")

    assert int(made.status) == Status.NOT_POSITIVE
    assert np.all(np.isnan(inverse_of(backend, made)))


def test_status_mode_flags_an_inaccurate_inverse(backend, rng):
    """An inverse above the residual limit is kept, and flagged."""
    A = reference.spd(rng, 64, condition=2e7) + 1e-7 * np.eye(64)

    made = factorized(backend, "float32", A, 0.0, check="status")

    assert fallback_of(made) == Fallback.WORKING
    assert int(made.status) in (Status.INACCURATE, Status.NOT_POSITIVE)


@pytest.mark.parametrize("check", ["raise", "status"])
def test_a_stack_is_factorized_matrix_by_matrix(backend, dtype, rng, check):
    """Each matrix of a stack has its own shift, flags and residual."""
    A = np.stack([reference.spd(rng, 4) for _ in range(3)])
    shifts = np.array([0.0, 0.5, 2.0])

    made = factorized(backend, dtype, A, shifts, check=check)

    expected = np.linalg.inv(A + shifts[:, None, None] * np.eye(4))
    assert backend.to_numpy(made.status).tolist() == [0, 0, 0]
    assert made.residual.shape == (3,)
    assert_close(inverse_of(backend, made), expected, "inverse", dtype)
