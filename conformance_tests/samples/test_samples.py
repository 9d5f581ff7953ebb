"""The space of samples against the dense Jacobian, for layers of every kind."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.samples import (
    Jacobian,
    damped_kernel,
    nystrom_kernel,
    sample_curvature,
    sample_gram,
)

from ..builders.memory import PeakMemory
from ..builders.spectral_cases import EXAMPLES, OUTPUTS, case_of, make_case
from ..builders.tolerances import assert_close, assert_differs

SHAPE = (EXAMPLES, OUTPUTS)
DAMPING = 0.05


class Problem:
    """A network's Jacobian as the library has it, and as one dense matrix."""

    def __init__(self, backend, dtype, cases, given):
        self.backend, self.dtype = backend, dtype
        self.layers = {str(i): case.block.layer for i, case in enumerate(cases)}
        self.J = Jacobian.of(self.layers, dict(enumerate_names(given)))
        flat = [case.jacobians.reshape(EXAMPLES * OUTPUTS, -1) for case in cases]
        self.dense = np.concatenate(flat, axis=1)

    def parameters(self, flat):
        """Return a flat vector as the network's parameters."""
        stack, start = {}, 0
        for name, layer in self.layers.items():
            n, m = layer.matrix_shape
            matrix = flat[start : start + n * m].reshape(n, m)
            arrays = layer.matrix_to_parameters(matrix)
            stack[name] = {
                key: self.backend.asarray(x, self.dtype) for key, x in arrays.items()
            }
            start += n * m
        return stack

    def flat(self, parameters):
        """Return the network's parameters as a flat vector on the host."""
        return np.concatenate(
            [
                np.reshape(
                    layer.parameters_to_matrix(
                        {k: self.host(x) for k, x in parameters[name].items()}
                    ),
                    (-1,),
                )
                for name, layer in self.layers.items()
            ]
        )

    def host(self, x):
        return self.backend.to_numpy(x)

    def array(self, values):
        return self.backend.asarray(values, self.dtype)

    def assert_parameters(self, parameters, expected, operation):
        assert_close(self.flat(parameters), expected, operation, self.dtype)


def enumerate_names(values):
    return ((str(i), value) for i, value in enumerate(values))


def rows_of(case):
    return case.batch(case.derivatives, sources=OUTPUTS)


def derivatives_of(case):
    return case.parameters(case.matrices(case.jacobians))


@pytest.fixture(
    params=[
        ("kronecker", "rows"),
        ("shared", "rows"),
        ("grouped", "rows"),
        ("embedding", "rows"),
        ("shared", "derivatives"),
        ("kronecker", "shared", "rows"),
        ("grouped", "embedding", "mixed"),
    ],
    ids="-".join,
)
def problem(request, backend, dtype):
    """Networks of one layer of each kind, and of several, by rows and by derivatives."""
    *kinds, form = request.param
    cases = [case_of(request, backend, dtype, kind) for kind in kinds]
    given = [derivatives_of(c) if form == "derivatives" else rows_of(c) for c in cases]
    if form == "mixed":
        given[0] = derivatives_of(cases[0])
    return Problem(backend, dtype, cases, given)


@pytest.mark.parametrize("bound", [None, 1])
def test_the_gram_matrix_is_that_of_the_dense_jacobian(problem, bound):
    K = sample_gram(problem.J, max_elements=bound).full()

    assert_close(
        problem.host(K), problem.dense @ problem.dense.T, "gram", problem.dtype
    )


def test_products_are_those_of_the_dense_jacobian(problem):
    rng = np.random.default_rng(3)
    d = rng.normal(size=problem.dense.shape[1])
    c = rng.normal(size=SHAPE)

    along = problem.J.multiply(problem.parameters(d))
    combined = problem.J.multiply_transposed(problem.array(c))

    expected = (problem.dense @ d).reshape(SHAPE)
    assert_close(problem.host(along), expected, "product", problem.dtype)
    problem.assert_parameters(combined, problem.dense.T @ c.reshape(-1), "product")


def test_the_operator_is_the_dense_matrix(problem):
    """Direction, products, trace, log-determinant and diagonal of ``J^T J/N + lam I``."""
    rng = np.random.default_rng(4)
    v, r = rng.normal(size=problem.dense.shape[1]), rng.normal(size=SHAPE)
    undamped = problem.dense.T @ problem.dense / EXAMPLES
    dense = undamped + DAMPING * np.eye(len(v))
    gradient = problem.dense.T @ r.reshape(-1) / EXAMPLES

    F = sample_curvature(problem.J, damping=DAMPING)

    vector, residuals = problem.parameters(v), problem.array(r)
    problem.assert_parameters(
        F.direction(residuals), np.linalg.solve(dense, gradient), "inverse"
    )
    problem.assert_parameters(
        F.multiply_inverse(vector), np.linalg.solve(dense, v), "inverse"
    )
    problem.assert_parameters(F.multiply(vector), dense @ v, "product")
    problem.assert_parameters(F.multiply(vector, damped=False), undamped @ v, "product")
    problem.assert_parameters(F.diagonal(), np.diag(dense), "product")
    logdet = np.linalg.slogdet(dense)[1]
    assert_close(problem.host(F.logdet()), logdet, "logdet", problem.dtype)
    assert_close(problem.host(F.trace()), np.trace(dense), "product", problem.dtype)
    assert int(F.status()) == 0


def test_the_direction_with_momentum_minimizes_its_model(problem):
    """SPRING: ``argmin |J d - r|^2 / N + lam |d - mu phi|^2``."""
    rng = np.random.default_rng(5)
    r, phi = rng.normal(size=SHAPE), rng.normal(size=problem.dense.shape[1])
    J, mu = problem.dense, 0.8

    F = sample_curvature(problem.J, damping=DAMPING)
    step = F.direction(problem.array(r), last=problem.parameters(phi), momentum=mu)

    dense = J.T @ J / EXAMPLES + DAMPING * np.eye(J.shape[1])
    right = J.T @ r.reshape(-1) / EXAMPLES + DAMPING * mu * phi
    problem.assert_parameters(step, np.linalg.solve(dense, right), "inverse")


def test_a_centered_jacobian_has_no_mean(problem):
    rng = np.random.default_rng(6)
    r = rng.normal(size=SHAPE)
    per_example = problem.dense.reshape(EXAMPLES, OUTPUTS, -1)
    J = (per_example - per_example.mean(axis=0)).reshape(EXAMPLES * OUTPUTS, -1)
    dense = J.T @ J / EXAMPLES + DAMPING * np.eye(J.shape[1])
    expected = np.linalg.solve(dense, J.T @ r.reshape(-1) / EXAMPLES)

    F = sample_curvature(problem.J, damping=DAMPING, centered=True)

    direction = F.direction(problem.array(r))
    problem.assert_parameters(direction, expected, "inverse")
    logdet = np.linalg.slogdet(dense)[1]
    assert_close(problem.host(F.logdet()), logdet, "logdet", problem.dtype)
    plain = sample_curvature(problem.J, damping=DAMPING).direction(problem.array(r))
    assert_differs(problem.flat(plain), expected)
    with pytest.raises(kc.UnsupportedError, match="centered=False"):
        F.diagonal()


def test_samples_have_the_covariance_of_the_inverse(problem):
    """Linear in the noise: the matrix of the map times its transpose is ``F^-1``."""
    J = problem.dense
    R, P = J.shape
    dense = J.T @ J / EXAMPLES + DAMPING * np.eye(P)
    F = sample_curvature(problem.J, damping=DAMPING)
    columns = []
    for i in range(P + R):
        noise = np.eye(P + R)[i]
        zeta, epsilon = noise[:P], noise[P:].reshape(SHAPE)
        sample = F.sample(problem.parameters(zeta), problem.array(epsilon))
        columns.append(problem.flat(sample))
    root = np.stack(columns, axis=1)

    assert_close(root @ root.T, np.linalg.inv(dense), "power", problem.dtype)


def test_another_damping_needs_no_other_gram_matrix(backend):
    case = make_case(backend, "float64", "shared")
    J = Jacobian.of({"a": case.block.layer}, {"a": rows_of(case)})
    K = sample_gram(J)
    r = backend.asarray(np.ones(SHAPE), "float64")

    again = damped_kernel(J, K, damping=0.7).direction(r)["a"]["weight"]

    expected = sample_curvature(J, damping=0.7).direction(r)["a"]["weight"]
    got, expected = backend.to_numpy(again), backend.to_numpy(expected)
    assert_close(got, expected, "exact", "float64")


@pytest.mark.parametrize("rank", [1, 6])
def test_conjugate_gradients_solve_as_the_factorization_does(backend, rank):
    """Without K; the residual says how well."""
    cases = [make_case(backend, "float64", kind) for kind in ("kronecker", "shared")]
    problem = Problem(backend, "float64", cases, [rows_of(case) for case in cases])
    rng = np.random.default_rng(9)
    R = EXAMPLES * OUTPUTS
    probes = backend.asarray(rng.normal(size=(R, rank)), "float64")
    r = backend.asarray(rng.normal(size=SHAPE), "float64")

    F = damped_kernel(problem.J, nystrom_kernel(problem.J, probes), damping=DAMPING)

    expected = sample_curvature(problem.J, damping=DAMPING)
    w = F.solve_kernel(r)
    got, solution = backend.to_numpy(w), backend.to_numpy(expected.solve_kernel(r))
    assert np.linalg.norm(got - solution) < 1e-7 * np.linalg.norm(solution)
    assert float(F.residual(r, w)) < 1e-9
    assert float(F.residual(r, 1.1 * w)) > 1e-2
    flat = problem.flat(F.direction(r)), problem.flat(expected.direction(r))
    assert np.linalg.norm(flat[0] - flat[1]) < 1e-7 * np.linalg.norm(flat[1])
    with pytest.raises(kc.UnsupportedError, match="sample_gram"):
        F.logdet()


def test_a_nystrom_approximation_of_full_rank_is_the_gram_matrix(backend):
    case = make_case(backend, "float64", "kronecker")
    J = Jacobian.of({"a": case.block.layer}, {"a": rows_of(case)})
    R = EXAMPLES * OUTPUTS
    probes = np.random.default_rng(0).normal(size=(R, R))

    approximation = nystrom_kernel(J, backend.asarray(probes, "float64"))

    U, eigenvalues = map(
        backend.to_numpy, (approximation.vectors, approximation.eigenvalues)
    )
    dense = case.jacobians.reshape(R, -1)
    assert_close((U * eigenvalues) @ U.T, dense @ dense.T, "inverse", "float64")


def test_uses_of_one_weight_and_masks_add_up(backend):
    """Two uses of a layer, one with padding, against derivatives formed by hand."""
    rng = np.random.default_rng(7)
    layer = kc.Dense(in_features=3, out_features=2, bias=True, weight_layout="io")
    first, second = rng.normal(size=(5, 4, 3)), rng.normal(size=(5, 3))
    g_first, g_second = rng.normal(size=(5, 4, 2)), rng.normal(size=(5, 2))
    mask = rng.random((5, 4)) < 0.6
    place = backend.asarray
    uses = [
        kc.Batch(
            place(first, "float64"), place(g_first, "float64"), mask=place(mask, "bool")
        ),
        kc.Batch(place(second, "float64"), place(g_second, "float64")),
    ]
    ones = np.ones((5, 4, 1))
    rows = np.concatenate([first, ones], axis=2) * mask[:, :, None]
    D = np.einsum("nsi,nsj->nij", rows, g_first)
    D += np.einsum("ni,nj->nij", np.concatenate([second, ones[:, 0]], axis=1), g_second)
    D = D.reshape(5, -1)

    K = sample_gram(Jacobian.of({"a": layer}, {"a": uses})).full()

    assert_close(backend.to_numpy(K), D @ D.T, "gram", "float64")


def test_the_formed_and_the_factored_way_agree(backend):
    """A narrow layer with many positions, whose derivatives are formed a few at a time."""
    rng = np.random.default_rng(8)
    layer = kc.Dense(in_features=4, out_features=2, bias=False, weight_layout="io")
    x, g = rng.normal(size=(6, 9, 4)), rng.normal(size=(3, 6, 9, 2))
    batch = kc.Batch(
        backend.asarray(x, "float64"), backend.asarray(g, "float64"), sources=3
    )
    D = np.einsum("nsi,cnsj->ncij", x, g).reshape(18, -1)

    J = Jacobian.of({"a": layer}, {"a": batch})

    for bound in (None, 40):
        K = backend.to_numpy(sample_gram(J, max_elements=bound).full())
        assert_close(K, D @ D.T, "gram", "float64")


def test_residuals_without_an_axis_of_outputs_have_none(backend):
    case = make_case(backend, "float64", "kronecker")
    J = Jacobian.of({"a": case.block.layer}, {"a": case.batch(case.derivatives[0])})

    F = sample_curvature(J, damping=0.1)

    assert J.sample_shape == (EXAMPLES,)
    weight = F.direction(backend.asarray(np.ones(EXAMPLES), "float64"))["a"]["weight"]
    dense = case.jacobians[:, 0]
    inverse = np.linalg.inv(dense.T @ dense / EXAMPLES + 0.1 * np.eye(dense.shape[1]))
    expected = case.matrices(inverse @ dense.sum(axis=0) / EXAMPLES)
    expected = case.block.layer.matrix_to_parameters(expected)["weight"]
    assert_close(backend.to_numpy(weight), expected, "inverse", "float64")


def test_mismatched_arguments_are_named(backend):
    case = make_case(backend, "float64", "kronecker")
    layers, rows = {"a": case.block.layer}, {"a": rows_of(case)}
    J = Jacobian.of(layers, rows)

    with pytest.raises(kc.UnknownBlockError, match="'b'"):
        Jacobian.of(layers, {"b": rows["a"]})
    one_output = case.batch(case.derivatives[0])
    with pytest.raises(kc.ShapeError, match="same examples and outputs"):
        Jacobian.of({"a": layers["a"], "b": layers["a"]}, rows | {"b": one_output})
    with pytest.raises(kc.ShapeError, match="space of samples"):
        sample_curvature(J, damping=0.1).direction(backend.asarray([1.0], "float64"))
    bare = kc.Parameters(shapes={"a": (3,)})
    whole = kc.GradientBatch({"a": backend.asarray([1.0, 2, 3], "float64")}, 5)
    with pytest.raises(kc.UnsupportedError, match="each output"):
        Jacobian.of({"a": bare}, {"a": whole})
    with pytest.raises(kc.DampingError):
        sample_curvature(J, damping=-1.0)


@pytest.mark.parametrize("centered", [False, True])
def test_no_second_array_of_the_size_of_the_gram_matrix(
    backend, centered, requires_adapters
):
    """K and its factor share one; of the rows a fifth may be copied."""
    if backend.name != "numpy":
        pytest.skip("other libraries allocate unseen")
    pytest.importorskip("scipy")
    R, width = 1200, 40
    rng = np.random.default_rng(0)
    layer = kc.Dense(
        in_features=width, out_features=width, bias=False, weight_layout="io"
    )
    x, g, r = rng.normal(size=(R, width)), rng.normal(size=(R, width)), np.ones(R)
    J = Jacobian.of({"a": layer}, {"a": kc.Batch(x, g)})
    with PeakMemory() as memory:
        F = sample_curvature(J, damping=1e-3, centered=centered)
        F.direction(r)

    assert memory.peak < 1.3 * r.itemsize * R * R
