"""IKFAC follows the inverse of the average to second order (A16)."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.array.structure import replaced
from kfac_core.roots.factor_root import factor_root
from kfac_core.roots.inverse_free import (
    ikfac_updated,
    precondition_by_roots,
)

from ..builders.tolerances import assert_close, assert_differs

d, p, k = 4, 3, 6
LAM = 0.3


def begin(backend, K, form="dense", dtype="float64"):
    """Return a root that holds the given array."""
    like = backend.asarray(np.zeros(1), dtype)
    made = factor_root(len(K), form=form, scale=1.0, like=like)
    return replaced(made, root=backend.asarray(K, dtype))


def inverse_of(backend, root):
    """Return ``K K^T``."""
    K = backend.to_numpy(root.root)
    K = np.diag(K) if root.form == "diagonal" else K
    return K @ K.T


def near_root(A, lam, form):
    """Return a root of an inverse near ``(A + lam I)^-1``, of the form."""
    size = len(A)
    if form == "diagonal":
        return np.linspace(0.9, 1.1, size) * np.diag(A + lam * np.eye(size)) ** -0.5
    other = A + lam * np.eye(size) + np.diag(np.linspace(0.1, 0.3, size)) + 0.1
    root = np.linalg.cholesky(np.linalg.inv(other))
    return root if form == "lower" else root @ np.linalg.qr(other)[0]


def test_a_step_is_the_formula(backend, dtype, rng):
    """``K (I - b m)`` with ``m = (K^T A K + lam K^T K - I) / 2``, written out."""
    x, K = rng.normal(size=(k, d)), np.eye(d) + 0.1 * rng.normal(size=(d, d))
    root = begin(backend, K, dtype=dtype)

    made = ikfac_updated(
        root, backend.asarray(x, dtype), scale=1 / k, damping=LAM, step=0.1
    )

    m = 0.5 * (K.T @ (x.T @ x / k) @ K + LAM * K.T @ K - np.eye(d))
    expected = K @ (np.eye(d) - 0.1 * m)
    assert_close(backend.to_numpy(made.root), expected, "product", dtype)
    residual = np.linalg.norm(m) / np.sqrt(d)
    assert_close(float(made.residual), residual, "product", dtype)
    got = inverse_of(backend, made)
    assert_close(got, expected @ expected.T, "product", dtype)
    assert int(made.flags) == 0


@pytest.mark.parametrize("form", ["dense", "lower", "diagonal"])
def test_it_follows_the_inverse_of_the_average_to_second_order(backend, rng, form):
    """A16: a tenth of the step has a hundredth of the error."""
    x = rng.normal(size=(k, d))
    A = x.T @ x / k
    K = near_root(A, LAM, form)
    inverse = np.diag(K * K) if form == "diagonal" else K @ K.T
    target = A + LAM * np.eye(d)
    if form == "diagonal":
        target = np.diag(np.diag(target))
    errors = []
    for step in (1e-2, 1e-3):
        made = ikfac_updated(
            begin(backend, K, form),
            backend.asarray(x),
            scale=1 / k,
            damping=LAM,
            step=step,
        )
        average = (1 - step) * np.linalg.inv(inverse) + step * target
        got = inverse_of(backend, made)
        errors.append(np.linalg.norm(got - np.linalg.inv(average)))
        assert np.linalg.norm(got - inverse) > 10 * errors[-1]

    assert 80 < errors[0] / errors[1] < 125


def test_a_fixed_point_stays(backend, rng):
    """Where ``K K^T`` is the damped inverse already, nothing moves; elsewhere it comes."""
    x = rng.normal(size=(k, d))
    A = x.T @ x / k + LAM * np.eye(d)
    root = begin(backend, np.linalg.cholesky(np.linalg.inv(A)))
    rows = backend.asarray(x)
    options = {"scale": 1 / k, "damping": LAM}

    made = ikfac_updated(root, rows, step=0.5, **options)
    other = factor_root(d, form="dense", scale=0.3, like=rows)
    for _ in range(60):
        other = ikfac_updated(other, rows, step=0.5, **options)

    assert float(made.residual) < 1e-14
    for state in (made, other):
        got = inverse_of(backend, state)
        assert_close(got, np.linalg.inv(A), "inverse", "float64")


def test_a_vector_is_preconditioned_from_both_sides(backend, dtype, rng):
    """``K K^T V C C^T``."""
    K, C = (np.eye(s) + 0.1 * rng.normal(size=(s, s)) for s in (d, p))
    V = rng.normal(size=(d, p))
    roots = begin(backend, K, dtype=dtype), begin(backend, C, dtype=dtype)

    got = precondition_by_roots(*roots, backend.asarray(V, dtype))

    assert_close(backend.to_numpy(got), K @ K.T @ V @ C @ C.T, "product", dtype)
    assert_differs(backend.to_numpy(got), V)


@pytest.mark.parametrize("form", ["lower", "diagonal"])
def test_structured_roots_stay_so(backend, rng, form):
    """A lower root is the dense step's to first order; a diagonal one its diagonal."""
    x = rng.normal(size=(k, d))
    K = near_root(x.T @ x / k, LAM, form)

    made = ikfac_updated(
        begin(backend, K, form), backend.asarray(x), scale=1 / k, damping=LAM, step=1e-4
    )

    got = backend.to_numpy(made.root)
    dense_K = np.diag(K) if form == "diagonal" else K
    m = 0.5 * (dense_K.T @ (x.T @ x / k + LAM * np.eye(d)) @ dense_K - np.eye(d))
    if form == "diagonal":
        assert_close(got, K * (1 - 1e-4 * np.diag(m)), "product", "float64")
    else:
        assert np.array_equal(got, np.tril(got))
        twice = np.tril(m) + np.tril(m, -1)
        assert_close(got, K @ (np.eye(d) - 1e-4 * twice), "product", "float64")
        change = (got @ got.T - K @ K.T) / 1e-4
        assert_close(change, -2 * K @ m @ K.T, "inverse", "float64", condition=1e7)


@pytest.mark.parametrize("form", ["dense", "lower", "diagonal"])
def test_a_step_that_is_too_long_is_not_taken(backend, form):
    """Where an eigenvalue of ``b m`` reaches 1: an error, or a flag and the old root."""
    x = backend.asarray(10 * np.eye(d)[1:2])
    largest = 0.5 * (100 + LAM - 1)
    root = factor_root(d, form=form, scale=1.0, like=x)
    options = {"scale": 1.0, "damping": LAM}

    taken = ikfac_updated(root, x, step=0.99 / largest, **options)
    with pytest.raises(kc.FactorizationError, match="too long"):
        ikfac_updated(root, x, step=1.01 / largest, **options)
    kept = ikfac_updated(root, x, step=1.01 / largest, check="status", **options)

    assert int(taken.flags) == 0
    assert int(kept.flags) == kc.Status.INACCURATE
    got, was = backend.to_numpy(kept.root), backend.to_numpy(root.root)
    assert np.array_equal(got, was)


def test_rows_that_are_not_finite_change_nothing(backend, rng):
    """The root does not move where one row is damaged."""
    x = rng.normal(size=(k, d))
    x[1, 2] = np.nan
    rows, root = backend.asarray(x), begin(backend, 0.3 * np.eye(d))
    options = {"scale": 1 / k, "damping": LAM, "step": 0.1}

    with pytest.raises(kc.NotFiniteError, match="Nothing was changed"):
        ikfac_updated(root, rows, **options)
    kept = ikfac_updated(root, rows, check="status", **options)

    assert int(kept.flags) == kc.Status.INPUTS_NOT_FINITE
    got = backend.to_numpy(kept.root)
    assert np.array_equal(got, backend.to_numpy(root.root))


@pytest.mark.parametrize("lam", [1e-12, 1e12])
def test_tiny_and_huge_dampings_are_ordinary(backend, rng, lam):
    """Rank-deficient moments and one row included, the formula holds."""
    x = rng.normal(size=(1, d))
    A = x.T @ x
    scale = (np.trace(A) + lam) ** -0.5
    root = factor_root(d, form="dense", scale=scale, like=backend.asarray(x))

    made = ikfac_updated(root, backend.asarray(x), scale=1.0, damping=lam, step=0.1)

    inner = scale**2 * (A + lam * np.eye(d)) - np.eye(d)
    expected = scale * (np.eye(d) - 0.05 * inner)
    assert_close(backend.to_numpy(made.root), expected, "product", "float64")


def test_a_size_of_one_is_ordinary(backend):
    """Every form of one number is the same."""
    x = backend.asarray([[2.0]])
    for form in ("dense", "lower", "diagonal"):
        root = factor_root(1, form=form, scale=0.5, like=x)
        made = ikfac_updated(root, x, scale=1.0, damping=1.0, step=0.2)
        expected = 0.5 * (1 - 0.1 * (0.25 * 5 - 1))
        assert abs(float(backend.to_numpy(made.root).ravel()[0]) - expected) < 1e-15


def test_narrow_rows_are_widened(backend, rng):
    """Rows of float32 enter a float64 root's dtype; the result is the root's."""
    x = rng.normal(size=(k, d)).astype(np.float32)
    root = factor_root(d, form="dense", scale=0.3, like=backend.asarray(np.zeros(1)))

    made = ikfac_updated(root, backend.asarray(x), scale=1 / k, damping=LAM, step=0.1)

    assert made.root.dtype == backend.dtype("float64")
    again = ikfac_updated(
        root, backend.asarray(x.astype(np.float64)), scale=1 / k, damping=LAM, step=0.1
    )
    assert np.array_equal(backend.to_numpy(made.root), backend.to_numpy(again.root))


def test_arguments_that_make_no_sense_are_refused(backend, rng):
    """Each with the argument's name."""
    x = backend.asarray(rng.normal(size=(k, d)))
    root = factor_root(d, form="dense", scale=0.3, like=x)
    other = factor_root(p, form="dense", scale=0.3, like=x)
    options = {"scale": 1 / k, "step": 0.1}
    with pytest.raises(kc.ConventionError, match="`form`"):
        factor_root(d, form="upper", scale=1.0, like=x)
    with pytest.raises(kc.ShapeError, match="nonzero `scale`"):
        factor_root(d, form="dense", scale=0.0, like=x)
    with pytest.raises(kc.ShapeError, match=r"`rows` to have shape \(k, 3\)"):
        ikfac_updated(other, x, damping=LAM, **options)
    with pytest.raises(kc.DampingError, match="damping"):
        ikfac_updated(root, x, damping=-1.0, **options)
    with pytest.raises(kc.ShapeError, match="`vector`"):
        precondition_by_roots(root, other, backend.asarray(np.ones((p, d))))
    with pytest.raises(kc.ShapeError, match="`v`"):
        root.multiply_inverse(backend.asarray(np.ones(d)))


def test_a_compiled_update_is_the_eager_one(requires_backend, rng):
    """The update runs inside a compiled program, with its flags."""
    jax_backend = requires_backend("jax", adapter=True)
    import jax

    x = jax_backend.asarray(rng.normal(size=(k, d)))
    root = factor_root(d, form="lower", scale=0.3, like=x)

    @jax.jit
    def step(state, rows):
        return ikfac_updated(
            state, rows, scale=1 / k, damping=LAM, step=0.1, check="status"
        )

    one = step(root, x)
    two = ikfac_updated(root, x, scale=1 / k, damping=LAM, step=0.1)
    got, expected = (jax_backend.to_numpy(r.root) for r in (one, two))
    assert_close(got, expected, "product", "float64")
    assert int(one.flags) == 0
