"""The quadratic model on the span of two directions, against dense float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kfac_core as kc

from ..builders import reference
from ..builders.steps_reference import SIZE, put
from ..builders.tolerances import assert_close, assert_differs


@pytest.fixture
def problem(rng):
    """A curvature matrix, a gradient and three directions, dense."""
    F = reference.spd(rng, SIZE, condition=30.0)
    return (F, *rng.normal(size=(4, SIZE)))


def on(backend, dtype, F, grad, *directions, damping):
    """Return the model that the library makes of dense products."""
    vectors = [put(backend, d, dtype) for d in directions]
    products = [put(backend, F @ d, dtype) for d in directions]
    return kc.steps.quadratic_model(
        put(backend, grad, dtype),
        vectors,
        curvature=kc.steps.curvature_of_products(vectors, products),
        damping=damping,
    )


def made(backend, slope, matrix, dtype="float64", damping=0.0):
    """Return a model of given numbers."""
    arrays = (slope, matrix, np.eye(len(slope)), damping)
    return kc.steps.QuadraticModel(*(backend.asarray(x, dtype) for x in arrays))


def dense_minimum(F, grad, D, *, damping):
    """Return the minimizer over the columns of D, by the definition."""
    return -np.linalg.solve(D.T @ (F + damping * np.eye(len(F))) @ D, D.T @ grad)


@pytest.mark.parametrize("damping", [0.0, 0.3, 1e-12, 1e12])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_minimum_is_that_of_the_dense_system(backend, dtype, problem, k, damping):
    """alpha, mu and the predicted change are those of the paper's formula."""
    F, grad, *directions = problem
    D = np.stack(directions[:k], axis=1)

    model = on(backend, dtype, F, grad, *directions[:k], damping=damping)
    found = model.minimize()
    changes = [model.change(found.coefficients, damped=d) for d in (True, False)]

    c = dense_minimum(F, grad, D, damping=damping)
    delta = D @ c
    expected = grad @ delta + 0.5 * delta @ F @ delta
    assert found.coefficients.dtype == backend.dtype(dtype)
    assert int(found.status) == 0
    assert_close(backend.to_numpy(found.coefficients), c, "inverse", dtype)
    damped = expected + 0.5 * damping * delta @ delta
    got = [backend.to_numpy(change) for change in changes]
    assert_close(got, [damped, expected], "identity", dtype)


def test_the_decrease_is_half_the_slope(backend, dtype, problem):
    """B17: at the minimum ``M(delta) - M(0) = 1/2 grad . delta``, and nowhere else."""
    F, grad, *directions = problem

    model = on(backend, dtype, F, grad, *directions, damping=0.2)
    best = model.minimize().coefficients
    delta = kc.steps.linear_combination(
        best, [put(backend, d, dtype) for d in directions]
    )
    half = 0.5 * kc.steps.inner_product(put(backend, grad, dtype), delta)

    half = backend.to_numpy(half)
    assert_close(
        backend.to_numpy(model.change(best, damped=True)), half, "identity", dtype
    )
    shorter = model.change(0.5 * best, damped=True)
    assert_differs(backend.to_numpy(shorter), 0.5 * half)
    assert_differs(backend.to_numpy(model.change(best, damped=False)), half)


def test_a_fixed_momentum_leaves_the_best_learning_rate(backend, dtype, problem):
    """``alpha = -(slope_0 + mu C_01) / C_00``, and likewise for mu at fixed alpha."""
    F, grad, a, b, _ = problem
    C = F + 0.2 * np.eye(SIZE)

    model = on(backend, dtype, F, grad, a, b, damping=0.2)
    rate = model.minimize(fixed=(None, 0.9)).coefficients
    momentum = model.minimize(fixed=(backend.asarray(0.1, dtype), None)).coefficients
    both = model.minimize(fixed=(0.1, 0.9)).coefficients

    alpha = -(grad @ a + 0.9 * a @ C @ b) / (a @ C @ a)
    mu = -(grad @ b + 0.1 * a @ C @ b) / (b @ C @ b)
    assert_close(backend.to_numpy(rate), [alpha, 0.9], "inverse", dtype)
    assert_close(backend.to_numpy(momentum), [0.1, mu], "inverse", dtype)
    assert_close(backend.to_numpy(both), [0.1, 0.9], "roundoff", dtype)


NOT_POSITIVE = int(kc.Status.NOT_POSITIVE)

TROUBLE = {
    # name: (slope, damped curvature, coefficients, status)
    "zero step before": ([-3.0, 0.0], [[2.0, 0.0], [0.0, 0.0]], [1.5, 0.0], 0),
    "parallel": ([-3.0, -6.0], [[2.0, 4.0], [4.0, 8.0]], [1.5, 0.0], NOT_POSITIVE),
    "indefinite": ([-3.0, 1.0], [[2.0, 5.0], [5.0, 2.0]], [1.5, 0.0], NOT_POSITIVE),
    "bad D": ([-3.0, 1.0], [[-2.0, 1.0], [1.0, 2.0]], [0.0, -0.5], NOT_POSITIVE),
    "all bad": ([-3.0, 1.0], [[-2.0, 0.0], [0.0, -2.0]], [0.0, 0.0], NOT_POSITIVE),
    "no gradient": ([0.0, 0.0], [[0.0, 0.0], [0.0, 0.0]], [0.0, 0.0], 0),
    "flat slope": ([-3.0, -1.0], [[2.0, 0.0], [0.0, 0.0]], [1.5, 0.0], NOT_POSITIVE),
    "tiny": ([-3e-30, 0.0], [[2e-30, 0.0], [0.0, 1e-30]], [1.5, 0.0], 0),
    "overflow": ([-1e30, 0.0], [[1e-30, 0.0], [0.0, 1.0]], None, NOT_POSITIVE),
}


@pytest.mark.parametrize("name", TROUBLE)
def test_degenerate_models_give_finite_flagged_steps(backend, dtype, name):
    """What cannot take part gets the coefficient zero, and a flag unless it is flat."""
    slope, matrix, expected, status = TROUBLE[name]
    if expected is None and dtype == "float64":
        expected, status = [1e60, 0.0], 0

    found = made(backend, slope, matrix, dtype).minimize()

    expected = [0.0, 0.0] if expected is None else expected
    assert_close(backend.to_numpy(found.coefficients), expected, "roundoff", dtype)
    assert int(found.status) == status


def test_roundoff_does_not_count_as_curvature(backend, dtype):
    """A parallel step before whose pivot is a few units of roundoff has no say.

    With that pivot taken for curvature, mu would be 1e6 in float32 and 1e15 in float64.
    """
    almost = 8.0 * (1.0 + 8.0 * np.finfo(dtype).eps)

    found = made(backend, [-3.0, -7.0], [[2.0, 4.0], [4.0, almost]], dtype).minimize()

    assert_close(backend.to_numpy(found.coefficients), [1.5, 0.0], "roundoff", dtype)
    assert int(found.status) == NOT_POSITIVE


def test_one_direction_without_curvature_is_not_taken(backend, dtype):
    """k = 1 has the same rule."""
    for curvature in (0.0, -1.0):
        found = made(backend, [-1.0], [[curvature]], dtype).minimize()

        assert backend.to_numpy(found.coefficients).tolist() == [0.0]
        assert int(found.status) == NOT_POSITIVE


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["slope", "curvature"])
def test_a_model_that_is_not_finite_raises_or_is_flagged(backend, bad, where):
    """Never a silent NaN: an error, or zeros with a flag."""
    slope, matrix = [-1.0, 0.5], np.eye(2)
    if where == "slope":
        slope = [bad, 0.5]
    else:
        matrix[1, 1] = bad
    model = made(backend, slope, matrix)
    good = made(backend, [-1.0, 0.5], np.eye(2))

    found = model.minimize(check="status")

    assert int(found.status) == kc.Status.MATRIX_NOT_FINITE
    assert backend.to_numpy(found.coefficients).tolist() == [0.0, 0.0]
    with pytest.raises(kc.NotFiniteError, match="quadratic model is not finite"):
        model.minimize()
    fixed = good.minimize(fixed=(None, bad), check="status")
    assert int(fixed.status) == kc.Status.MATRIX_NOT_FINITE
    assert backend.to_numpy(fixed.coefficients).tolist() == [0.0, 0.0]


@settings(max_examples=60, deadline=None)
@given(
    exponent=st.floats(0.0, 9.0),
    scale=st.floats(-6.0, 6.0),
    slopes=st.tuples(st.integers(-9, 9), st.integers(-9, 9)),
    name=st.sampled_from(["float32", "float64"]),
)
def test_nearly_parallel_directions_never_do_worse_than_one(
    exponent, scale, slopes, name
):
    """Whatever the angle and the lengths, the step is no worse than D's own.

    The true model is the one that the rounded numbers describe; the bound has a few
    units of roundoff of the change itself.
    """
    angle, length = 10.0**-exponent, 10.0**scale
    u = np.array([1.0, 0.0])
    v = length * np.array([np.cos(angle), np.sin(angle)])
    D = np.stack([u, v], axis=1)
    grad = np.array(slopes, float)
    slope, C = (grad @ D).astype(name), (D.T @ D).astype(name)

    model = kc.steps.QuadraticModel(slope, C, np.eye(2, dtype=name), np.zeros((), name))
    c = model.minimize().coefficients.astype(float)

    delta = D @ c
    change = grad @ delta + 0.5 * delta @ delta
    alone = -0.5 * grad[0] ** 2
    assert np.all(np.isfinite(c))
    assert change <= alone + 1e-2 * grad @ grad
    if angle > 0.1:
        np.testing.assert_allclose(delta, -grad, atol=1e-4 * np.linalg.norm(grad))


def test_products_and_outputs_give_one_curvature(backend, dtype, rng):
    """``d . F d'`` from products, from ``J d`` and ``H J d``, and from ``B^T J d``."""
    J = rng.normal(size=(10, 3, SIZE))
    H = np.stack([reference.spd(rng, 3) for _ in range(10)])
    B = np.linalg.cholesky(H)
    F = np.einsum("nip,nij,njq->pq", J, H, J) / 10
    directions = rng.normal(size=(2, SIZE))
    changes = [J @ d for d in directions]
    multiplied = [np.einsum("nij,nj->ni", H, x) for x in changes]
    factors = [np.einsum("nij,ni->nj", B, x) for x in changes]

    def put_all(arrays):
        return [backend.asarray(x, dtype) for x in arrays]

    got = {
        "products": kc.steps.curvature_of_products(
            [put(backend, d, dtype) for d in directions],
            [put(backend, F @ d, dtype) for d in directions],
        ),
        "outputs": kc.steps.curvature_of_outputs(
            put_all(changes), put_all(multiplied), examples=10
        ),
        "factors": kc.steps.curvature_of_outputs(
            put_all(factors), put_all(factors), examples=backend.asarray(10.0, dtype)
        ),
    }

    for found in got.values():
        expected = directions @ F @ directions.T
        assert_close(backend.to_numpy(found), expected, "product", dtype)


def test_an_empty_batch_has_no_curvature():
    """No examples are an error, not 0/0; one example is a batch."""
    vector = {"fc": {"weight": np.ones((2, 2))}}
    change = [np.full((1, 3), 2.0)]

    got = kc.steps.curvature_of_outputs(change, change, examples=1)

    assert got == 12.0
    assert (
        kc.steps.quadratic_model(vector, [vector], curvature=got, damping=0.0).slope
        == 4.0
    )
    with pytest.raises(kc.ShapeError, match="`examples` to be a finite number > 0"):
        kc.steps.curvature_of_outputs(
            [np.zeros((0, 3))], [np.zeros((0, 3))], examples=0
        )


def test_only_the_symmetric_part_counts(backend):
    """Products of F that roundoff made asymmetric give a symmetric model."""
    vectors = [put(backend, v, "float64") for v in np.eye(SIZE)[:2]]
    C = np.array([[2.0, 1.5], [0.5, 3.0]])

    model = kc.steps.quadratic_model(
        vectors[0], vectors, curvature=backend.asarray(C), damping=0.0
    )

    expected = [[2.0, 1.0], [1.0, 3.0]]
    np.testing.assert_array_equal(backend.to_numpy(model.curvature), expected)


def test_arguments_that_cannot_be_used_are_named():
    """Each message has the argument and what was expected."""
    model = kc.steps.QuadraticModel(np.ones(2), np.eye(2), np.eye(2), np.zeros(()))
    vector = {"fc": {"weight": np.ones((2, 2))}}
    common = {"curvature": np.eye(1), "damping": 0.0}

    with pytest.raises(kc.ShapeError, match=r"number of directions.*coefficients.*3"):
        model.change([1.0, 2.0, 3.0], damped=True)
    with pytest.raises(
        kc.ShapeError, match=r"number of directions.*coefficients.*\(\)"
    ):
        model.change(1.0, damped=True)
    with pytest.raises(kc.DtypeError, match=r"`coefficients\[1\]`.*None"):
        model.change([1.0, None], damped=True)
    with pytest.raises(kc.ShapeError, match=r"number of directions.*fixed"):
        model.minimize(fixed=[0.9])
    with pytest.raises(kc.ShapeError, match=r"number of directions.*fixed.*\(\)"):
        model.minimize(fixed=0.9)
    with pytest.raises(kc.ConventionError, match="`check`"):
        model.minimize(check="ignore")
    with pytest.raises(kc.ShapeError, match=r"`curvature` to have shape \(1, 1\)"):
        kc.steps.quadratic_model(vector, [vector], curvature=np.eye(2), damping=0.0)
    with pytest.raises(kc.DtypeError, match="`curvature`"):
        kc.steps.quadratic_model(vector, [vector], curvature=[[1.0]], damping=0.0)
    with pytest.raises(kc.DampingError, match="`damping`"):
        kc.steps.quadratic_model(vector, [vector], curvature=np.eye(1), damping=-1.0)
    with pytest.raises(kc.ShapeError, match="at least one of `directions`"):
        kc.steps.quadratic_model(vector, [], **common)
    with pytest.raises(kc.ShapeError, match=r"directions.*products"):
        kc.steps.curvature_of_products([vector], [])
    with pytest.raises(kc.ShapeError, match=r"`multiplied\[0\]` to have shape \(3,\)"):
        kc.steps.curvature_of_outputs([np.ones(3)], [np.ones(2)], examples=3)
