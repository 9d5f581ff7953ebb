"""Warm-started eigenbases: descending order, residual checks, and 200 steps of drift."""

import functools

import numpy as np
import pytest

from kfac_core.array.status import Status
from kfac_core.array.structure import leaves, replaced
from kfac_core.errors import NotFiniteError
from kfac_core.roots.orthogonal_iteration import (
    OrderedBasis,
    _quotients,
    ordered_basis,
    refreshed_basis,
)

from ..builders import reference
from ..builders.tolerances import assert_close
from ..builders.tracing import compiler_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"
)

N, STEPS = 64, 200
# Spectrum i^-a of the population, and the share of the average that a step replaces.
STREAMS = [(1, 0.01), (1, 0.1), (2, 0.01), (2, 0.1)]
DAMPING = 0.01  # of the largest eigenvalue


@functools.cache
def drift():
    """Return factors in float32, shape (STEPS + 1, streams, N, N).

    Moving averages of the second moments of 256 rows, drawn from a population whose
    eigenbasis turns by 0.05 radians a step.
    """
    rng = np.random.default_rng(5)
    factors = np.empty((STEPS + 1, len(STREAMS), N, N))
    for j, (a, share) in enumerate(STREAMS):
        w = np.arange(1.0, N + 1) ** -a
        Q, _ = np.linalg.qr(rng.normal(size=(N, N)))
        factors[0, j] = (Q * w) @ Q.T
        for t in range(STEPS):
            turn = rng.normal(size=(N, N))
            turn -= turn.T
            Q, _ = np.linalg.qr(Q + 0.05 * Q @ turn / np.linalg.norm(turn, 2))
            rows = rng.normal(size=(256, N)) @ (Q * np.sqrt(w)).T
            new = rows.T @ rows / 256
            factors[t + 1, j] = (1 - share) * factors[t, j] + share * new
    return factors.astype(np.float32)


def dense_ratio(A, Q):
    """Return the off-diagonal ratio in float64, entry by entry."""
    A, Q = np.asarray(A, np.float64), np.asarray(Q, np.float64)
    B = np.swapaxes(Q, -1, -2) @ A @ Q
    outside = B * (1 - np.eye(B.shape[-1]))
    return np.linalg.norm(outside, axis=(-2, -1)) / np.linalg.norm(B, axis=(-2, -1))


def inverse_errors(A, X):
    """Return the relative error of damped inverses of a stack."""
    A = A.astype(np.float64)
    shift = DAMPING * np.linalg.eigvalsh(A)[..., -1:, None]
    exact = np.linalg.inv(A + shift * np.eye(N))
    error = np.linalg.norm(X - exact, axis=(-2, -1))
    return error / np.linalg.norm(exact, axis=(-2, -1))


def top(A):
    return DAMPING * np.linalg.eigvalsh(A)[..., -1].astype(np.float32)


def near(rng, A, angle):
    """Return a basis near that of A, and not ordered by anything."""
    _, Q = np.linalg.eigh(A)
    Q, _ = np.linalg.qr(Q + angle * rng.normal(size=A.shape))
    return Q[:, rng.permutation(len(A))]


def basis_of(backend, Q, like):
    """Return a basis of the library's kind with given columns."""
    return replaced(like, eigenvectors=backend.asarray(Q))


def programs(backend):
    """Return three functions of arrays: a basis, a refresh of it, a damped inverse.

    Under JAX each is one program, which compiles faster than its operations one by one.
    """

    def fields(basis):
        return tuple(array for _, array in leaves(basis))

    def first(A):
        return fields(ordered_basis(A, check="status"))

    def refresh(basis, A):
        return fields(refreshed_basis(OrderedBasis(*basis), A, check="status"))

    def inverse(basis, damping):
        eye = backend.asarray(np.broadcast_to(np.eye(N), basis[1].shape), "float32")
        return OrderedBasis(*basis).multiply_matpower(eye, -1.0, damping=damping)

    if backend.name != "jax":
        return first, refresh, inverse
    import jax

    return tuple(map(jax.jit, (first, refresh, inverse)))


def test_a_refresh_never_raises_the_ratio(backend, request):
    """The one-step row: 200 steps, four streams, float32, no refusal, 5% in the inverse.

    JAX, whose programs the session compiles with no regard to their speed, makes 40.
    """
    factors = drift()
    if backend.name == "jax" and not request.config.getoption("--thorough"):
        factors = factors[:41]
    first, refresh, inverse = programs(backend)
    basis = first(backend.asarray(factors[0]))
    Q = backend.to_numpy(basis[1])
    for t, A in enumerate(factors[1:], 1):
        before = dense_ratio(A, Q)
        basis = refresh(basis, backend.asarray(A))
        Q = backend.to_numpy(basis[1])
        after = dense_ratio(A, Q)
        assert np.all(after < before)

        if t % 10 == 0:
            w, _, residual, refused, status, _ = map(backend.to_numpy, basis)
            assert_close(residual, after, "cholesky", "float32")
            assert not np.any(refused)
            assert not np.any(status)
            assert np.all(np.diff(w, axis=-1) <= 0)
            X = backend.to_numpy(inverse(basis, backend.asarray(top(A))))
            assert np.all(inverse_errors(A, X) < 0.05)


@pytest.mark.parametrize("stream", range(len(STREAMS)))
def test_ascending_order_destroys_the_basis(stream):
    """The row that must differ: the same step from, and back to, ascending order."""
    factors = drift()[:, stream].astype(np.float64)
    _, Q = np.linalg.eigh(factors[0])
    before = dense_ratio(factors[1], Q)
    first = None
    for A in factors[1:21]:
        Q, _ = np.linalg.qr(A @ Q)
        Q = Q[:, np.argsort(np.diag(Q.T @ A @ Q))]
        first = dense_ratio(A, Q) if first is None else first
    w = np.diag(Q.T @ A @ Q)
    X = (Q / (w + top(A))) @ Q.T

    assert first > 10 * before
    assert dense_ratio(A, Q) > 0.1
    assert inverse_errors(A, X) > 0.1


def test_a_basis_in_any_order_is_put_into_descending_order(backend, rng):
    """A step from shuffled or ascending columns converges as from ordered ones."""
    A = reference.spd(rng, 8)
    Q = near(rng, A, 0.01)
    given = backend.asarray(A)
    shuffled = basis_of(backend, Q, ordered_basis(given))

    made = refreshed_basis(shuffled, given)

    new = backend.to_numpy(made.eigenvectors)
    w = backend.to_numpy(made.eigenvalues)
    assert not bool(made.refused)
    assert dense_ratio(A, new) < 0.7 * dense_ratio(A, Q)
    assert np.all(np.diff(w) <= 0)
    assert_close(w, np.diag(new.T @ A @ new), "product", "float64")


def test_a_step_contracts_by_the_ratio_of_eigenvalues(backend, rng):
    """Between eigenvalues 1 and 1/4 each step divides the tangent of the angle by four."""
    angle = 0.01
    R, _ = np.linalg.qr(rng.normal(size=(8, 8)))
    A = (R * [1.0, 0.25, 0.1, 0.08, 0.06, 0.04, 0.02, 0.01]) @ R.T
    turn = np.eye(8)
    turn[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    given = backend.asarray(A)
    basis = basis_of(backend, R @ turn, ordered_basis(given))

    for steps in (1, 3):
        made = refreshed_basis(basis, given, steps=steps)
        first = R.T @ backend.to_numpy(made.eigenvectors)[:, 0]
        tangent = np.abs(first[1] / first[0])
        assert_close(tangent, np.tan(angle) * 0.25**steps, "inverse", "float64")


def test_the_ratio_is_summed_off_the_diagonal(backend, rng):
    """In float32 a ratio of 1e-4 reads 1e-4; the difference of norms does not."""
    B = np.diag(np.geomspace(1.0, 0.1, 8))
    E = np.tril(rng.normal(size=(8, 8)), k=-1)
    B = B + 1e-4 * np.linalg.norm(B) * (E + E.T) / np.linalg.norm(E + E.T)
    eye = backend.asarray(np.eye(8), "float32")

    _, got = _quotients(eye, backend.asarray(B, "float32"), backend.xp)

    assert_close(float(got), 1e-4, "cholesky", "float32")
    B = B.astype(np.float32)
    squares = np.sum(B * B) - np.sum(np.diag(B) ** 2)
    by_difference = np.sqrt(np.maximum(squares, 0) / np.sum(B * B))
    assert abs(by_difference - 1e-4) > 1e-5


def test_a_refresh_that_raises_the_ratio_is_refused(backend, rng):
    """Of an indefinite matrix the dominant direction is the smallest eigenvalue's."""
    w = np.array([0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, -1.0])
    R, _ = np.linalg.qr(rng.normal(size=(8, 8)))
    A = (R * w) @ R.T
    Q, _ = np.linalg.qr(R + 0.01 * rng.normal(size=(8, 8)))
    given = backend.asarray(A)
    basis = basis_of(backend, Q, ordered_basis(backend.asarray(np.eye(8))))
    unguarded, _ = np.linalg.qr(A @ Q)
    assert dense_ratio(A, unguarded) > dense_ratio(A, Q)

    made = refreshed_basis(basis, given)

    kept = backend.to_numpy(made.eigenvectors)
    assert bool(made.refused)
    assert np.array_equal(np.sort(kept[0]), np.sort(Q[0]))
    got, expected = float(made.off_diagonal), dense_ratio(A, Q)
    assert_close(got, expected, "inverse", "float64")
    quotients = np.maximum(np.diag(kept.T @ A @ kept), 0)
    assert_close(backend.to_numpy(made.eigenvalues), quotients, "product", "float64")


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_rank_deficient_matrices(backend, dtype, rng, rank):
    """The columns stay orthonormal, and the power of a damped zero is what it is."""
    A = reference.spd(rng, 8, rank=rank)
    basis = ordered_basis(backend.asarray(reference.spd(rng, 8), dtype))

    made = refreshed_basis(basis, backend.asarray(A, dtype), steps=30)

    Q = backend.to_numpy(made.eigenvectors)
    assert_close(Q.T @ Q, np.eye(8), "roundoff", dtype)
    eye = backend.asarray(np.eye(8), dtype)
    X = made.multiply_matpower(eye, -1.0, damping=0.1)
    expected = np.linalg.inv(A + 0.1 * np.eye(8))
    assert_close(backend.to_numpy(X), expected, "identity", dtype, condition=100)


def test_a_matrix_that_is_not_finite_changes_nothing(backend, rng):
    """It raises, naming the factor, or leaves the basis alone with a flag."""
    A = reference.spd(rng, 8)
    basis = ordered_basis(backend.asarray(A))
    bad = A.copy()
    bad[2, 2] = np.nan
    with pytest.raises(NotFiniteError, match="fc1"):
        refreshed_basis(basis, backend.asarray(bad), name="fc1")
    with pytest.raises(NotFiniteError, match="fc1"):
        ordered_basis(backend.asarray(bad), name="fc1")

    made = refreshed_basis(basis, backend.asarray(bad), check="status")

    assert int(made.status) == Status.MATRIX_NOT_FINITE
    assert bool(made.refused)
    for field in ("eigenvectors", "eigenvalues", "off_diagonal"):
        old, new = (backend.to_numpy(getattr(b, field)) for b in (basis, made))
        assert np.array_equal(old, new)


@pytest.mark.parametrize("library", ["jax", "torch"])
def test_a_refresh_runs_inside_a_compiled_program(requires_backend, rng, library):
    """Basis in, basis out: one program, with refusals and flags in it."""
    backend = requires_backend(library, adapter=True)
    A = reference.spd(rng, 8)
    start = ordered_basis(backend.asarray(A))

    @compiler_of(library)
    def program(Q, A):
        basis = replaced(start, eigenvectors=Q)
        made = refreshed_basis(basis, A, check="status")
        return made.eigenvectors, made.refused, made.status

    Q = near(rng, A, 0.01)
    new, refused, status = program(backend.asarray(Q), backend.asarray(A))
    _, bad_refused, bad = program(backend.asarray(Q), backend.asarray(A * np.nan))

    assert dense_ratio(A, backend.to_numpy(new)) < dense_ratio(A, Q)
    assert (bool(refused), int(status)) == (False, Status.OK)
    assert (bool(bad_refused), int(bad)) == (True, Status.MATRIX_NOT_FINITE)


def test_order_tracks_columns_between_bases(backend, rng):
    """Eigenvalues that cross: what goes with a column is found again by the order."""
    Q = np.linalg.qr(rng.normal(size=(5, 5)))[0]
    first = Q @ np.diag([5.0, 4.0, 3.0, 2.0, 1.0]) @ Q.T
    second = Q @ np.diag([1.0, 4.5, 3.0, 6.0, 2.0]) @ Q.T
    basis = ordered_basis(backend.asarray(first))
    np.testing.assert_array_equal(backend.to_numpy(basis.order), np.arange(5))

    made = refreshed_basis(basis, backend.asarray(second), steps=2)

    np.testing.assert_array_equal(backend.to_numpy(made.order), [3, 1, 2, 4, 0])
    before, after = (backend.to_numpy(b.eigenvectors) for b in (basis, made))
    order = backend.to_numpy(made.order)
    overlaps = np.abs(np.sum(before[:, order] * after, axis=0))
    np.testing.assert_allclose(overlaps, 1.0, atol=1e-8)


def test_squares_permuted_by_the_order_follow_the_published_code(backend, rng):
    """SOAP's published step sorts columns and squares by the old basis, then takes a QR."""
    A = rng.normal(size=(6, 6))
    A = A @ A.T
    basis = ordered_basis(backend.asarray(A))
    squares = rng.uniform(size=(6, 6))
    Q = backend.to_numpy(basis.eigenvectors)
    new = A + 3.0 * np.outer(Q[:, 4], Q[:, 4])
    sort = np.argsort(-np.diag(Q.T @ new @ Q), kind="stable")
    expected = squares[sort]
    expected_Q = np.linalg.qr(new @ Q[:, sort])[0]

    made = refreshed_basis(basis, backend.asarray(new))

    got = backend.to_numpy(made.eigenvectors)
    order = backend.to_numpy(made.order)
    np.testing.assert_allclose(squares[order], expected)
    np.testing.assert_allclose(np.abs(got.T @ expected_Q), np.eye(6), atol=1e-8)
