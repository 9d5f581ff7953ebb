"""``A + shift I`` and ``diag(a) + shift I``: every product against the dense matrix."""

import numpy as np
import pytest

from kfac_core.errors import FactorizationError, NotReadyError
from kfac_core.linalg import damped
from kfac_core.linalg.damped import damped_matrix
from kfac_core.linalg.diagonal import damped_diagonal
from kfac_core.linalg.symmetric import SymmetricMatrix

from ..builders import reference
from ..builders.tolerances import assert_close

ALL = ("inverse", "cholesky", "eigenbasis")
EXPONENTS = [-1.0, -0.5, -0.25, 0.5, 2.0]


def full(backend, dtype, A, shift, factorizations=ALL, check="raise", **options):
    """Make ``A + shift I``, of which the upper triangle holds garbage."""
    garbage = np.triu(np.full_like(A, 3.0), 1)
    lower = backend.asarray(np.tril(A) + garbage, dtype)
    M = damped_matrix(SymmetricMatrix(lower, full_storage=False), shift, **options)
    return M.prepared(*factorizations, check=check, name="fc1/input")


def diagonal(backend, dtype, A, shift, factorizations=ALL, check="raise", **options):
    """Make ``diag(a) + shift I`` from the diagonal of A."""
    M = damped_diagonal(backend.asarray(np.diag(A), dtype), shift, **options)
    return M.prepared(*factorizations, check=check, name="fc1/input")


@pytest.fixture(params=[full, diagonal], ids=["full", "diagonal"])
def make(request):
    """Make either kind of damped factor."""
    return request.param


def dense_of(make, A):
    """Return the matrix that the kind of factor stands for."""
    return A if make is full else np.diag(np.diag(A))


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_powers_are_the_dense_powers(backend, dtype, rng, make, exponent):
    """Any real power is that of the dense matrix, in its eigenbasis."""
    A, v = reference.spd(rng, 4), rng.normal(size=(4, 3))

    got = make(backend, dtype, A, 0.05).power(backend.asarray(v, dtype), exponent)

    M = dense_of(make, A) + 0.05 * np.eye(4)
    expected = reference.matrix_power(M, exponent) @ v
    assert_close(backend.to_numpy(got), expected, "power", dtype)


def test_the_basis_turns_there_and_back(backend, dtype, rng):
    """In its basis A is the diagonal matrix of its eigenvalues."""
    A, v = reference.spd(rng, 4), rng.normal(size=(4, 3))

    M = full(backend, dtype, A, 0.05)
    in_basis = M.to_basis(backend.asarray(v, dtype))
    scaled = M.eigenvalues(shifted=False)[:, None] * in_basis
    product = M.from_basis(scaled)
    back = backend.xp.matmul(M.eigenvectors(), in_basis)

    assert_close(backend.to_numpy(product), A @ v, "eigenvalues", dtype)
    assert_close(backend.to_numpy(back), v, "eigenvalues", dtype)


def test_a_later_inverse_does_not_change_the_factor(backend, rng):
    """Where the inverse needs float64 and L does not, L is the same with and without."""
    A = reference.spd(rng, 64, condition=1e5)
    V = backend.asarray(rng.normal(size=(64, 1)), "float32")

    without = full(backend, "float32", A, 0.0, ("cholesky",))
    with_inverse = full(backend, "float32", A, 0.0, ("cholesky", "inverse"))

    got = backend.to_numpy(with_inverse.lower_multiply(V, transpose=False))
    expected = backend.to_numpy(without.lower_multiply(V, transpose=False))
    assert np.array_equal(got, expected)


@pytest.mark.parametrize("prepared", [(), ("inverse",)])
def test_narrow_products_are_factorized_wide(backend, rng, make, prepared):
    """A float64 matrix applied in float32 is factorized in float64, sooner or later."""
    A = reference.spd(rng, 4, condition=1e8)
    v = rng.normal(size=(4, 1))

    M = make(backend, "float64", A, 0.0, prepared, apply_dtype=backend.dtype("float32"))
    got = M.solve(backend.asarray(v, "float32"))

    expected = np.linalg.solve(dense_of(make, A), np.float32(v).astype(np.float64))
    assert got.dtype == backend.dtype("float32")
    assert_close(backend.to_numpy(got), expected, "product", "float32")


def test_missing_factorizations_are_made_on_demand(backend, dtype, rng):
    """However the matrix was made; a failure is then an error of the product."""
    A = reference.spd(rng, 4)
    v = np.ones((4, 1))
    M = full(backend, dtype, A, 0.1, ("inverse",), check="status")
    singular = full(backend, dtype, 0.0 * A, 0.0, (), check="status")

    got = backend.to_numpy(M.power(backend.asarray(v, dtype), 0.5))

    expected = reference.matrix_power(A + 0.1 * np.eye(4), 0.5) @ v
    assert_close(got, expected, "power", dtype)
    with pytest.raises(FactorizationError):
        singular.solve(backend.asarray(v, dtype))


@pytest.mark.parametrize("product", ["power", "solve", "lower_solve"])
def test_nothing_is_made_while_a_program_is_traced(backend, rng, monkeypatch, product):
    """A product whose factorization was not asked for is an error that says which."""
    M = full(backend, "float64", reference.spd(rng, 4), 0.1, ())
    monkeypatch.setattr(damped.finite, "is_readable", lambda x, *, xp: False)
    arguments, options = {
        "power": ((0.5,), {}),
        "solve": ((), {}),
        "lower_solve": ((), {"transpose": False}),
    }[product]

    with pytest.raises(NotReadyError, match=r"Add '.*' to `factorizations`"):
        getattr(M, product)(backend.asarray(np.ones((4, 1))), *arguments, **options)


def test_stacks_are_damped_one_by_one(backend, dtype, rng, make):
    """Leading axes are independent matrices, each with its own shift."""
    A = np.stack([reference.spd(rng, 4) for _ in range(3)])
    v, shifts = rng.normal(size=(3, 4, 2)), np.array([0.1, 0.0, 2.0])
    shift = backend.asarray(shifts, dtype)
    if make is full:
        whole = SymmetricMatrix(backend.asarray(A, dtype), full_storage=True)
        M = damped_matrix(whole, shift).prepared(*ALL)
        dense = A + shifts[:, None, None] * np.eye(4)
    else:
        entries = np.einsum("kii->ki", A)
        M = damped_diagonal(backend.asarray(entries, dtype), shift).prepared(*ALL)
        dense = entries[:, :, None] * np.eye(4) + shifts[:, None, None] * np.eye(4)
    V = backend.asarray(v, dtype)

    got = {p: backend.to_numpy(M.power(V, p)) for p in (-0.5, 2.0)}
    solved, logdet = backend.to_numpy(M.solve(V)), backend.to_numpy(M.logdet())

    assert_close(solved, np.linalg.solve(dense, v), "inverse", dtype)
    assert_close(logdet, np.linalg.slogdet(dense)[1], "logdet", dtype)
    for p, product in got.items():
        expected = [
            reference.matrix_power(d, p) @ x for d, x in zip(dense, v, strict=True)
        ]
        assert_close(product, np.stack(expected), "power", dtype)


def test_a_singular_matrix_is_refused_when_it_must_be_inverted(backend, dtype, make):
    """Without damping a zero direction is an error in every product that divides."""
    V = backend.asarray(np.ones((4, 1)), dtype)
    M = make(backend, dtype, np.diag([1.0, 1.0, 1.0, 0.0]), 0.0, ())

    for attempt in (
        lambda: M.solve(V),
        lambda: M.power(V, -0.5),
        lambda: M.lower_solve(V, transpose=False),
        M.logdet,
    ):
        with pytest.raises(FactorizationError, match="Increase `damping`"):
            attempt()

    undivided = backend.to_numpy(M.power(V, 0.5))
    assert_close(undivided, [[1.0], [1.0], [1.0], [0.0]], "power", dtype)
