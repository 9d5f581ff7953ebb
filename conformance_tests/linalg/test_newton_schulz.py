"""Warm-started Newton-Schulz inverses: quadratic, guarded, and certified."""

import functools

import numpy as np
import pytest

from kfac_core.array.status import Status
from kfac_core.errors import (
    ConventionError,
    DampingError,
    FactorizationError,
    MixedArraysError,
    NotFiniteError,
    ShapeError,
)
from kfac_core.linalg.symmetric import SymmetricMatrix
from kfac_core.roots.newton_schulz import refreshed_inverse

from ..builders import reference
from ..builders.tolerances import assert_close, assert_differs

pytestmark = pytest.mark.filterwarnings(
    "ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"
)

N, DAMPING = 8, 0.05


def damped_inverse(A, damping=DAMPING):
    return np.linalg.inv(A + np.asarray(damping)[..., None, None] * np.eye(A.shape[-1]))


def drifted(rng, A, share):
    """Return A with a share of it replaced by another matrix of its kind."""
    return (1 - share) * A + share * reference.spd(rng, len(A))


def dense(backend, made):
    return backend.to_numpy(made.inverse.matrix.full())


def test_an_inverse_follows_a_small_drift(backend, dtype, rng):
    """A few products make the new inverse from the old, to roundoff."""
    old = reference.spd(rng, N)
    new = drifted(rng, old, 0.02)
    previous = damped_inverse(old)

    made = refreshed_inverse(
        backend.asarray(previous, dtype),
        backend.asarray(new, dtype),
        damping=DAMPING,
        max_steps=8,
    )

    start = np.linalg.norm(np.eye(N) - (new + DAMPING * np.eye(N)) @ previous)
    assert made.method == "newton-schulz"
    assert 1 <= int(made.steps) <= 6
    assert float(made.start) <= start * (1 + 1e-3) < 1
    assert int(made.inverse.status) == Status.OK
    assert float(made.inverse.residual) < (1e-4 if dtype == "float32" else 1e-12)
    assert_close(dense(backend, made), damped_inverse(new), "inverse", dtype)
    assert_differs(previous, damped_inverse(new))


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_each_step_squares_the_residual(backend, rng, steps):
    """After k steps M X is I - R^(2^k), and neither more nor less."""
    old = reference.spd(rng, N)
    new = drifted(rng, old, 0.05)
    M, previous = new + DAMPING * np.eye(N), damped_inverse(old)

    made = refreshed_inverse(
        backend.asarray(previous),
        backend.asarray(new),
        damping=DAMPING,
        max_steps=steps,
        check="status",
    )

    R = np.linalg.matrix_power(np.eye(N) - M @ previous, 2**steps)
    assert int(made.steps) == steps
    assert_close(M @ dense(backend, made), np.eye(N) - R, "inverse", "float64")
    assert np.linalg.norm(R) > 1e-12


def test_a_stale_inverse_is_not_started_from(backend, dtype, rng):
    """Where |I - M X_0| >= 1 the ladder's Cholesky inverse is taken, and it is right."""
    old, new = reference.spd(rng, N), 9.0 * reference.spd(rng, N)
    previous = damped_inverse(old)

    made = refreshed_inverse(
        backend.asarray(previous, dtype),
        backend.asarray(new, dtype),
        damping=DAMPING,
        max_steps=8,
    )

    assert made.method == "cholesky"
    assert float(made.start) > 1
    assert int(made.steps) == 0
    assert_close(dense(backend, made), damped_inverse(new), "inverse", dtype)


def test_without_the_guard_the_steps_would_diverge(backend, rng):
    """The row that must differ: the formula alone, from that same start."""
    old, new = reference.spd(rng, N), 9.0 * reference.spd(rng, N)
    M, X = new + DAMPING * np.eye(N), damped_inverse(old)
    previous = X
    for _ in range(4):
        X = X @ (2 * np.eye(N) - M @ X)

    made = refreshed_inverse(
        backend.asarray(previous),
        backend.asarray(new),
        damping=DAMPING,
        max_steps=4,
        check="status",
    )

    assert np.linalg.norm(np.eye(N) - M @ X) > 1e3
    assert int(made.inverse.status) == Status.INACCURATE
    assert np.array_equal(dense(backend, made), previous)


def test_too_few_steps_fall_back(backend, rng):
    """A certificate above the limit is no inverse, though the guard held."""
    new = reference.spd(rng, N)
    M = new + DAMPING * np.eye(N)
    Q, _ = np.linalg.qr(rng.normal(size=(N, N)))
    previous = np.linalg.inv(M) @ (np.eye(N) - 0.3 * (Q * np.sign(Q[0])) @ Q.T)

    made = refreshed_inverse(
        backend.asarray(previous), backend.asarray(new), damping=DAMPING, max_steps=1
    )
    reported = refreshed_inverse(
        backend.asarray(previous),
        backend.asarray(new),
        damping=DAMPING,
        max_steps=1,
        check="status",
    )

    assert float(made.start) < 1
    assert made.method == "cholesky"
    assert int(reported.inverse.status) == Status.INACCURATE
    assert_close(dense(backend, made), np.linalg.inv(M), "inverse", "float64")


def test_a_stack_is_guarded_matrix_by_matrix(backend, rng):
    """With "status" one stale inverse of a stack stays as it was; the others are new."""
    old = np.stack([reference.spd(rng, N) for _ in range(3)])
    new = np.stack([drifted(rng, A, 0.02) for A in old])
    new[1] *= 9.0
    damping = np.array([0.05, 0.1, 0.2])
    previous = damped_inverse(old, damping)
    given = [backend.asarray(x) for x in (previous, new, damping)]

    def program(start, A, lam):
        made = refreshed_inverse(start, A, damping=lam, max_steps=8, check="status")
        return made.inverse.matrix.array, made.inverse.status

    if backend.name == "jax":  # one program compiles faster than its operations
        import jax

        program = jax.jit(program)
    X, flags = map(backend.to_numpy, program(*given))

    expected = damped_inverse(new, damping)
    assert flags.tolist() == [0, Status.INACCURATE, 0]
    assert_close(X[::2], expected[::2], "inverse", "float64")
    assert np.array_equal(X[1], previous[1])
    if backend.name != "jax":
        made = refreshed_inverse(*given[:2], damping=given[2], max_steps=8)
        assert made.method == "cholesky"
        assert_close(dense(backend, made), expected, "inverse", "float64")


def test_lower_triangles_are_enough(backend, rng):
    """Both matrices may be kept in one triangle."""
    old = reference.spd(rng, N)
    new = drifted(rng, old, 0.02)
    noise = np.triu(rng.normal(size=(N, N)), k=1)
    half = [
        SymmetricMatrix(backend.asarray(np.tril(x) + noise), whole=False)
        for x in (damped_inverse(old), new)
    ]

    made = refreshed_inverse(*half, damping=DAMPING, max_steps=8)

    assert made.method == "newton-schulz"
    assert_close(dense(backend, made), damped_inverse(new), "inverse", "float64")


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0])
def test_a_useless_start_is_no_trouble(backend, rng, bad):
    """From NaN, infinity or zero the ladder starts afresh."""
    A = reference.spd(rng, N)

    made = refreshed_inverse(
        backend.asarray(np.full((N, N), bad)),
        backend.asarray(A),
        damping=DAMPING,
        max_steps=8,
    )

    assert made.method == "cholesky"
    assert_close(dense(backend, made), damped_inverse(A), "inverse", "float64")


@pytest.mark.parametrize("value", [1e-20, 3.0, 1e20])
@pytest.mark.usefixtures("compiles_long")
def test_a_number_is_a_matrix(backend, dtype, value):
    """Width 1, and sizes whose squares float32 does not have."""
    made = refreshed_inverse(
        backend.asarray([[0.9 / value]], dtype),
        backend.asarray([[value]], dtype),
        damping=0.0,
        max_steps=8,
    )

    assert made.method == "newton-schulz"
    assert_close(dense(backend, made), [[1 / value]], "roundoff", dtype)


def test_bad_values_raise_or_are_reported(backend, rng):
    """A matrix or a damping that does not fit is named, or flagged with the start kept."""
    previous = damped_inverse(reference.spd(rng, N))
    eye, nan = backend.asarray(np.eye(N)), backend.asarray(np.full((N, N), np.nan))
    start = backend.asarray(previous)
    options = {"max_steps": 4, "name": "fc1"}
    with pytest.raises(NotFiniteError, match="fc1"):
        refreshed_inverse(start, nan, damping=0.1, **options)
    with pytest.raises(DampingError, match="fc1"):
        refreshed_inverse(start, eye, damping=-0.1, **options)
    with pytest.raises(FactorizationError, match="fc1"):
        refreshed_inverse(start, 0.0 * eye, damping=0.0, **options)

    for A, damping, flag in (
        (nan, 0.1, Status.MATRIX_NOT_FINITE),
        (eye, -0.1, Status.BAD_DAMPING),
    ):
        made = refreshed_inverse(start, A, damping=damping, check="status", **options)
        assert int(made.inverse.status) == flag
        assert np.array_equal(dense(backend, made), previous)


def test_arguments_that_do_not_fit_are_named(backend):
    """Shapes, counts and libraries."""
    eye = backend.asarray(np.eye(3))
    with pytest.raises(ShapeError, match=r"`previous`.*\(3, 3\).*\(2, 2\)"):
        refreshed_inverse(backend.asarray(np.eye(2)), eye, damping=0.1, max_steps=1)
    with pytest.raises(ConventionError, match="max_steps"):
        refreshed_inverse(eye, eye, damping=0.1, max_steps=0)
    if backend.name != "numpy":
        with pytest.raises(MixedArraysError, match="previous"):
            refreshed_inverse(np.eye(3), eye, damping=0.1, max_steps=1)


@pytest.mark.parametrize("library", ["jax", "torch"])
def test_a_refresh_runs_inside_a_compiled_program(requires_backend, rng, library):
    """One program for every start, with a flag where the guard fails."""
    backend = requires_backend(library, adapter=True)
    if library == "jax":
        import jax

        compiler = jax.jit
    else:
        import torch

        torch._dynamo.reset()
        compiler = functools.partial(torch.compile, fullgraph=True, backend="eager")

    def program(X, A, damping):
        made = refreshed_inverse(X, A, damping=damping, max_steps=6, check="status")
        return made.inverse.matrix.array, made.inverse.status

    old = reference.spd(rng, N)
    new = drifted(rng, old, 0.02)
    compiled = compiler(program)
    previous, damping = backend.asarray(damped_inverse(old)), backend.asarray(DAMPING)
    X, status = compiled(previous, backend.asarray(new), damping)
    _, stale = compiled(previous, backend.asarray(9.0 * new), damping)

    assert int(status) == Status.OK
    assert int(stale) == Status.INACCURATE
    expected = damped_inverse(new)
    assert_close(backend.to_numpy(X), expected, "inverse", "float64")
