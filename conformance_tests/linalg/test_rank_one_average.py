"""The inverse of a running average by rank-one updates: exact, and measured (A17)."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.array.structure import replaced
from kfac_core.factors.inverse_average import inverse_average

from ..builders.tolerances import assert_close, assert_differs

d = 5
DAMPING = 0.7


def start(backend, dtype, *, size=d, damping=DAMPING):
    return inverse_average(
        size, damping=damping, like=backend.asarray(np.zeros(1), dtype)
    )


def dense(average, backend):
    """Return M and its inverse as they are kept."""
    host = backend.to_numpy
    return host(average.matrix.full()), host(average.inverse.full())


@pytest.mark.parametrize("k", [1, 3])
def test_the_inverse_is_that_of_the_average(backend, dtype, rng, k):
    """A17: after every update, the inverse of ``decay M + weight sum x x^T``."""
    average, M = start(backend, dtype), DAMPING * np.eye(d)
    for _ in range(6):
        x = rng.normal(size=(k, d))
        M = 0.9 * M + 0.1 / k * x.T @ x

        average = average.updated(backend.asarray(x, dtype), decay=0.9, weight=0.1 / k)

        matrix, inverse = dense(average, backend)
        assert_close(matrix, M, "gram", dtype, condition=10)
        assert_close(inverse, np.linalg.inv(M), "inverse", dtype)
        assert np.array_equal(inverse, inverse.T)
    assert_close(float(average.floor), DAMPING * 0.9**6, "gram", dtype)
    assert int(average.flags) == 0
    assert float(average.residual) < (1e-13 if dtype == "float64" else 1e-4)
    V = rng.normal(size=(d, 2))
    got = backend.to_numpy(average.solve(backend.asarray(V, dtype)))
    assert_close(got, np.linalg.solve(M, V), "inverse", dtype)


def test_one_row_is_the_formula_of_sherman_and_morrison(backend, rng):
    """``(J - w u u^T / (decay + w x^T u)) / decay`` with ``u = J x``."""
    x, decay, weight = rng.normal(size=d), 0.8, 0.3
    J = np.eye(d) / DAMPING

    average = start(backend, "float64").updated(
        backend.asarray(x[None]), decay=decay, weight=weight
    )

    u = J @ x
    expected = (J - weight * np.outer(u, u) / (decay + weight * x @ u)) / decay
    assert_close(dense(average, backend)[1], expected, "product", "float64")
    # The row that must differ: averaging inverses is not inverting averages.
    averaged = decay * J + weight * np.linalg.inv(np.outer(x, x) + DAMPING * np.eye(d))
    assert_differs(expected, averaged)


def test_rows_at_once_are_rows_one_by_one(backend, rng):
    """A block of rows is the same as its rows, the first with the decay."""
    x = rng.normal(size=(3, d))
    first = start(backend, "float64")

    together = first.updated(backend.asarray(x), decay=0.5, weight=0.2)
    for i, decay in enumerate((0.5, 1.0, 1.0)):
        first = first.updated(backend.asarray(x[i : i + 1]), decay=decay, weight=0.2)

    one, two = (dense(average, backend)[1] for average in (together, first))
    assert_close(one, two, "inverse", "float64")


def test_the_damping_shrinks_and_is_put_back(backend, rng):
    """The floor tells when; factorizing anew puts the damping back, and no more."""
    average = start(backend, "float64")
    x = rng.normal(size=(1, d))
    for _ in range(3):
        average = average.updated(backend.asarray(x), decay=0.5, weight=0.5)
    assert bool(average.needs_refactorization(minimum_floor=0.5 * DAMPING))
    assert not bool(average.needs_refactorization(minimum_floor=0.1 * DAMPING))

    made = average.refactorized(damping=DAMPING)

    moment = 0.875 * x.T @ x
    matrix, inverse = dense(made, backend)
    assert_close(matrix, moment + DAMPING * np.eye(d), "gram", "float64")
    assert_close(
        inverse, np.linalg.inv(moment + DAMPING * np.eye(d)), "inverse", "float64"
    )
    assert float(made.floor) == DAMPING
    assert not bool(made.needs_refactorization(minimum_floor=0.5 * DAMPING))


def test_a_wrong_inverse_is_found_by_the_next_update(backend, rng):
    """The certificate is of M itself: damage is seen, flagged, and repaired."""
    x = backend.asarray(rng.normal(size=(1, d)))
    average = start(backend, "float64").updated(x, decay=0.9, weight=0.1)
    wrong = replaced(average, inverse=average.inverse.scaled(1.1))

    found = wrong.updated(x, decay=0.9, weight=0.1)
    repaired = found.refactorized(damping=DAMPING)

    assert float(found.residual) > 0.01
    assert int(found.flags) == kc.Status.INACCURATE
    assert bool(found.needs_refactorization(minimum_floor=0.0))
    assert float(repaired.residual) < 1e-13
    assert int(repaired.flags) == 0
    negative = replaced(average, inverse=average.inverse.scaled(-10.0))
    broken = negative.updated(x, decay=0.9, weight=0.1)
    assert int(broken.flags) & kc.Status.NOT_POSITIVE


def test_rows_that_are_not_finite_change_nothing(backend, rng):
    """An error, or a flag that asks for attention, with the state as it was."""
    average = start(backend, "float64").updated(
        backend.asarray(rng.normal(size=(1, d))), decay=0.9, weight=0.1
    )
    bad = backend.asarray(np.full((1, d), np.inf))

    with pytest.raises(kc.NotFiniteError, match="`rows`"):
        average.updated(bad, decay=0.9, weight=0.1)
    kept = average.updated(bad, decay=0.9, weight=0.1, check="status")
    odd = average.updated(
        backend.asarray(np.ones((1, d))),
        decay=backend.asarray(0.0),
        weight=0.1,
        check="status",
    )

    assert int(kept.flags) == kc.Status.INPUTS_NOT_FINITE
    assert int(odd.flags) == kc.Status.BAD_DECAY
    for state in (kept, odd):
        for one, two in zip(
            dense(state, backend), dense(average, backend), strict=True
        ):
            assert np.array_equal(one, two)


@pytest.mark.parametrize("damping", [1e-6, 1e12])
def test_tiny_and_huge_dampings_are_ordinary(backend, rng, damping):
    """The inverse is right relative to its norm."""
    average, M = start(backend, "float64", damping=damping), damping * np.eye(d)
    for _ in range(3):
        x = rng.normal(size=(1, d))
        M = 0.9 * M + 0.1 * x.T @ x
        average = average.updated(backend.asarray(x), decay=0.9, weight=0.1)

    inverse = dense(average, backend)[1]

    assert_close(inverse, np.linalg.inv(M), "inverse", "float64", condition=1e3)


def test_a_size_of_one_and_repeated_rows_are_ordinary(backend):
    """Width 1; and a direction that is seen again and again."""
    single = start(backend, "float64", size=1).updated(
        backend.asarray([[2.0]]), decay=0.5, weight=0.5
    )
    assert_close(
        dense(single, backend)[1], [[1 / (0.5 * DAMPING + 2)]], "gram", "float64"
    )
    x = np.ones((1, d))
    average, M = start(backend, "float64"), DAMPING * np.eye(d)
    for _ in range(10):
        average = average.updated(backend.asarray(x), decay=0.9, weight=0.1)
        M = 0.9 * M + 0.1 * x.T @ x
    assert_close(dense(average, backend)[1], np.linalg.inv(M), "inverse", "float64")


def test_arguments_that_make_no_sense_are_refused(backend, rng):
    """Each with the argument's name."""
    average = start(backend, "float64")
    x = backend.asarray(rng.normal(size=(1, d)))
    with pytest.raises(kc.DecayError, match=r"`decay` in \(0, 1\], got 0"):
        average.updated(x, decay=0.0, weight=1.0)
    with pytest.raises(kc.DecayError, match="weight"):
        average.updated(x, decay=0.5, weight=0.0)
    with pytest.raises(kc.ShapeError, match=r"\(k, 5\)"):
        average.updated(backend.asarray(np.ones((1, 4))), decay=0.5, weight=0.5)
    with pytest.raises(kc.ShapeError, match="at least one row"):
        average.updated(backend.asarray(np.ones((0, d))), decay=0.5, weight=0.5)
    with pytest.raises(kc.ShapeError, match=r"`v`"):
        average.solve(backend.asarray(np.ones(d)))
    with pytest.raises(kc.DampingError, match="positive"):
        start(backend, "float64", damping=0.0)
    with pytest.raises(kc.ShapeError, match="`size`"):
        start(backend, "float64", size=0)
    with pytest.raises(kc.DtypeError, match="`rows`"):
        average.updated(backend.asarray([[1, 2, 3, 4, 5]]), decay=0.5, weight=0.5)


def test_a_compiled_update_is_the_eager_one(requires_backend, rng):
    """The update runs inside a compiled program, with its flags."""
    jax_backend = requires_backend("jax", adapter=True)
    import jax

    average = start(jax_backend, "float64")
    x = jax_backend.asarray(rng.normal(size=(2, d)))

    @jax.jit
    def step(state, rows):
        return state.updated(rows, decay=0.9, weight=0.05, check="status")

    one, two = step(average, x), average.updated(x, decay=0.9, weight=0.05)
    assert_close(*(dense(s, jax_backend)[1] for s in (one, two)), "inverse", "float64")
    assert int(one.flags) == 0
