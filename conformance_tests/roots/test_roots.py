"""Inverse p-th roots against dense powers; their residual checks and fallbacks."""

import numpy as np
import pytest

from kfac_core.array.namespaces import namespace_of
from kfac_core.array.status import Status
from kfac_core.array.structure import leaves
from kfac_core.errors import DampingError, FactorizationError, NotFiniteError
from kfac_core.linalg.certificate import probe_of
from kfac_core.linalg.fallback import Fallback, fallback_of
from kfac_core.linalg.symmetric import ScaledMatrix, SymmetricMatrix
from kfac_core.roots.gradient_side import GradientFactors
from kfac_core.roots.roots import inverse_root, root_residual

from ..array.test_fake_cuda import fake_cuda
from ..builders import reference
from ..builders.tolerances import CERTIFICATE_FACTOR, assert_close
from ..builders.tracing import compiler_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"
)


def expected_root(A, damping, degree):
    """Return the dense root of each matrix of a stack."""
    M = A + np.asarray(damping)[..., None, None] * np.eye(A.shape[-1])
    w, Q = np.linalg.eigh(M)
    return (Q * w[..., None, :] ** (-1.0 / degree)) @ np.swapaxes(Q, -1, -2)


def dense(backend, made):
    return backend.to_numpy(made.matrix.full())


@pytest.mark.parametrize("check", ["raise", "status"])
@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_a_root_is_the_dense_one(backend, dtype, rng, degree, check):
    """X is (A + lam I)^(-1/p), symmetric, without a fallback, with a small residual."""
    A = reference.spd(rng, 6)

    made = inverse_root(
        backend.asarray(A, dtype), damping=0.01, degree=degree, check=check
    )

    X = dense(backend, made)
    assert fallback_of(made) == Fallback.WORKING
    assert made.degree == degree
    assert int(made.status) == Status.OK
    assert made.matrix.array.dtype == backend.dtype(dtype)
    assert_close(X, expected_root(A, 0.01, degree), "inverse", dtype)
    assert np.array_equal(X, X.T)
    assert float(made.residual) < (1e-3 if dtype == "float32" else 1e-11)


def test_a_rank_deficient_matrix_has_a_damped_root(backend, dtype, rng):
    """Where A has no inverse, A + lam I has a root."""
    A = reference.spd(rng, 6, rank=2)

    made = inverse_root(backend.asarray(A, dtype), damping=1e-3, degree=4)

    assert_close(dense(backend, made), expected_root(A, 1e-3, 4), "inverse", dtype)


def test_each_matrix_of_a_stack_has_its_own_damping(backend, rng):
    """A stack is as many problems."""
    A = np.stack([reference.spd(rng, 6, condition=c) for c in (1.0, 10.0, 1e4)])
    damping = np.array([0.0, 0.1, 1e-5])

    made = inverse_root(backend.asarray(A), damping=backend.asarray(damping), degree=2)

    expected = expected_root(A, damping, 2)
    assert_close(dense(backend, made), expected, "inverse", "float64")
    assert made.residual.shape == made.status.shape == (3,)


@pytest.mark.parametrize("spoiled", [0.0, 0.05])
def test_the_residual_is_truthful(backend, dtype, rng, spoiled):
    """It is |M X^p - I|_F / sqrt(n) of the X that is there, up to the stated factor."""
    A = reference.spd(rng, 6)
    X = expected_root(A, 0.01, 4) * (1.0 + 0.01)
    E = rng.normal(size=(6, 6))
    X = X + spoiled * (E + E.T)

    M = A + 0.01 * np.eye(6)
    z = probe_of(backend.asarray(A, dtype), backend.xp)
    problem = ScaledMatrix(
        SymmetricMatrix(backend.asarray(A, dtype), full_storage=True),
        backend.asarray(1.0, dtype),
        backend.asarray(0.01, dtype),
    )
    residual = root_residual(
        problem,
        SymmetricMatrix(backend.asarray(X, dtype), full_storage=True),
        z,
        degree=4,
        xp=backend.xp,
    )

    true = np.linalg.norm(M @ np.linalg.matrix_power(X, 4) - np.eye(6)) / np.sqrt(6)
    assert 1 / CERTIFICATE_FACTOR < float(residual) / true < CERTIFICATE_FACTOR


def test_float64_helps_where_float32_does_not_hold(backend, rng):
    """A condition number of 1e7 is too much for a root in float32."""
    A = reference.spd(rng, 6, condition=1e7).astype(np.float32)

    made = inverse_root(backend.asarray(A, "float32"), damping=0.0, degree=4)

    expected = expected_root(A.astype(np.float64), 0.0, 4)
    assert fallback_of(made) == Fallback.FLOAT64
    assert made.matrix.array.dtype == backend.dtype("float32")
    assert_close(dense(backend, made), expected, "product", "float32")


def test_a_condition_beyond_float32_is_reported(backend, rng):
    """With check="status" there is no fallback, and it says so."""
    A = reference.spd(rng, 6, condition=1e8)

    made = inverse_root(
        backend.asarray(A, "float32"), damping=0.0, degree=4, check="status"
    )

    assert int(made.status) & (Status.INACCURATE | Status.NOT_POSITIVE)


def test_an_indefinite_matrix_is_clipped(backend, dtype, rng):
    """The last fallback takes the nearest semidefinite A, and says what it cut off."""
    Q, _ = np.linalg.qr(rng.normal(size=(6, 6)))
    w = np.array([1.0, 0.8, 0.5, 0.25, 0.1, -0.125])
    A = (Q * w) @ Q.T

    made = inverse_root(backend.asarray(A, dtype), damping=0.01, degree=2)

    expected = (Q * (np.maximum(w, 0) + 0.01) ** -0.5) @ Q.T
    assert fallback_of(made) == Fallback.EIGENDECOMPOSITION
    assert_close(float(made.clipped), 0.125, "product", dtype)
    assert_close(dense(backend, made), expected, "inverse", dtype)


@pytest.mark.parametrize(
    ("A", "damping", "flag"),
    [
        pytest.param(np.full((6, 6), np.nan), 0.1, Status.MATRIX_NOT_FINITE, id="nan"),
        pytest.param(np.eye(6), -1.0, Status.BAD_DAMPING, id="negative-damping"),
        pytest.param(np.eye(6), np.nan, Status.BAD_DAMPING, id="nan-damping"),
    ],
)
def test_bad_values_raise_or_are_reported(backend, A, damping, flag):
    """NaN reaches no factorization; what comes out is NaN, with a flag."""
    error = DampingError if flag == Status.BAD_DAMPING else NotFiniteError
    with pytest.raises(error, match="fc1"):
        inverse_root(backend.asarray(A), damping=damping, degree=2, name="fc1")

    made = inverse_root(backend.asarray(A), damping=damping, degree=2, check="status")

    assert int(made.status) == flag
    assert np.all(np.isnan(dense(backend, made)))


def test_a_singular_matrix_has_no_root(backend):
    """Zero without damping: an error that says to increase it, or a flag."""
    zero = backend.asarray(np.zeros((6, 6)))
    with pytest.raises(FactorizationError, match=r"fc1.*Increase `damping`"):
        inverse_root(zero, damping=0.0, degree=4, name="fc1")

    made = inverse_root(zero, damping=0.0, degree=4, check="status")

    assert int(made.status) & (Status.INACCURATE | Status.NOT_POSITIVE)


@pytest.mark.parametrize("library", ["jax", "torch"])
def test_a_root_runs_inside_a_compiled_program(requires_backend, rng, library):
    """One program, no value looked at, and the flag comes out of it."""
    backend = requires_backend(library, adapter=True)
    compiler = compiler_of(library)

    def program(A, damping):
        made = inverse_root(A, damping=damping, degree=4, check="status")
        return made.matrix.array, made.status

    A = reference.spd(rng, 6)
    compiled = compiler(program)
    X, status = compiled(backend.asarray(A), backend.asarray(0.01))
    _, bad = compiled(backend.asarray(A), backend.asarray(-1.0))

    assert int(status) == Status.OK
    assert int(bad) == Status.BAD_DAMPING
    assert_close(backend.to_numpy(X), expected_root(A, 0.01, 4), "inverse", "float64")


def test_nothing_waits_for_the_device(requires_backend):
    """With check="status" no number of a CUDA tensor is asked for, and all stay there."""
    requires_backend("torch", adapter=True)
    import torch

    namespace_of(a=torch.ones(1))
    with fake_cuda(torch):
        A, V = torch.ones(2, 4, 4, device="cuda"), torch.ones(3, 4, device="cuda")
        eyes = [torch.ones(k, k, device="cuda") for k in (3, 4)]
        status = {"check": "status"}
        made = [inverse_root(A, damping=A[:, 0, 0], degree=4, **status)]
        factors = GradientFactors(shape=(3, 4))
        start = factors.initial(V)
        made.append(factors.updated(start, V, decay=0.9, roots=eyes, **status))

    arrays = [array for thing in made for _, array in leaves(thing)]
    assert len(arrays) > 10
    assert {array.device.type for array in arrays} == {"cuda"}
