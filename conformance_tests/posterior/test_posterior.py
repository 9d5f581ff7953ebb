"""Posteriors of blocks: A7, A8 and A9 against dense matrices, and what is refused."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.array.status import Status
from kfac_core.layers.parameter_stacks import matrices_to_stack, stack_to_matrices
from kfac_core.operators.spectral_rows import row_products, row_squares
from kfac_core.posterior import (
    Posterior,
    block_posterior,
    covariance_of_coordinates,
    covariance_of_rows,
    functional_covariance,
    functional_variance,
    variance_of_rows,
)

from ..builders.layers import conv_layer, dense_layer
from ..builders.one_block import learn, operator_for
from ..builders.spectral_cases import EXAMPLES, KINDS, OUTPUTS, case_of, make_case
from ..builders.tolerances import assert_close, assert_differs

N, TAU = 50.0, 0.2


@pytest.fixture(params=KINDS)
def case(request, backend, dtype):
    """A block of each kind that has an eigenbasis."""
    return case_of(request, backend, dtype, request.param)


@pytest.fixture
def plain(backend):
    """A Kronecker product in float64."""
    return make_case(backend, "float64", "kronecker")


def posterior_of(case, examples=N, prior_precision=TAU, **options):
    return block_posterior(
        case.operator(), examples=examples, prior_precision=prior_precision, **options
    )


def precision_of(case, examples=N, prior_precision=TAU):
    """Return the dense ``N F + tau I``."""
    return examples * case.dense + prior_precision * np.eye(len(case.dense))


def map_of(case, product):
    """Return a linear map as a matrix, from a stack of all unit vectors at once."""
    units = np.eye(len(case.dense)).reshape(-1, *case.shape)
    images = case.backend.to_numpy(product(case.array(units)))
    return images.reshape(len(units), -1).T


def test_the_precision_is_that_of_the_dense_block(case):
    """P v and P^-1 v, for a whole stack of vectors, whatever damped the operator."""
    posterior, P = posterior_of(case), precision_of(case)

    product = map_of(case, posterior.multiply)
    inverse = map_of(case, posterior.multiply_inverse)

    assert_close(product, P, "product", case.dtype, condition=10)
    assert_close(inverse, np.linalg.inv(P), "inverse", case.dtype)


def test_the_sampler_has_the_posterior_covariance(case):
    """A9: the Gram matrix of the map from noise is ``P^-1``; no random numbers."""
    root = map_of(case, posterior_of(case).sample)

    expected = np.linalg.inv(precision_of(case))
    assert_close(root @ root.T, expected, "inverse", case.dtype)
    assert_close(root, root.T, "power", case.dtype)


@pytest.mark.parametrize("name", ["factored", "tnt", "uncorrelated", "identity"])
def test_other_blocks_have_the_basis_of_their_dense_form(backend, rng, request, name):
    """Whatever the damping and its rule: ``Q diag(s) Q^T`` is the undamped operator."""
    layer = kc.Dense(in_features=3, out_features=3, bias=True, weight_layout="oi")
    kind = {"tnt": kc.TNT(), "identity": kc.ScaledIdentity(scale=2.0)}.get(
        name, kc.Kronecker()
    )
    shape = (EXAMPLES,)
    if name == "uncorrelated":
        request.getfixturevalue("compiles_long")
        shape, kind = (EXAMPLES, 2), kc.Kronecker(input="uncorrelated")
        layer = conv_layer(3, 3, (2,), padding="same")
    block = kc.Block(layer, kind)
    batch = kc.Batch(
        backend.asarray(rng.normal(size=(*shape, 3))),
        backend.asarray(rng.normal(size=(*shape, 3))),
    )
    statistics = learn(block, batch)
    operator = operator_for(block, statistics, damping=0.4, factorizations=())

    posterior = block_posterior(operator, examples=3.0, prior_precision=0.5)

    F = backend.to_numpy(operator.to_dense(damped=False))
    units = backend.asarray(np.eye(len(F)).reshape(-1, *layer.matrix_shape))
    got = backend.to_numpy(posterior.multiply(units)).reshape(len(F), -1)
    assert_close(got, 3.0 * F + 0.5 * np.eye(len(F)), "identity", "float64")


def test_log_determinants_follow_the_prior(case):
    """A7: ``sum log(N s + tau)`` for several tau and N, of one decomposition."""
    posterior = posterior_of(case)

    for N_new, tau in [(N, TAU), (N, 3.0), (7.0, 1e4), (500.0, 0.5)]:
        changed = posterior.with_examples(N_new).with_prior(tau)
        expected = np.linalg.slogdet(precision_of(case, N_new, tau))[1]
        got = case.backend.to_numpy(changed.logdet())
        prior = case.backend.to_numpy(changed.logdet_prior())
        assert_close(got, expected, "logdet", case.dtype, condition=10)
        assert_close(prior, len(case.dense) * np.log(tau), "logdet", case.dtype)
        assert changed.curvature is posterior.curvature
    assert_differs(got, case.backend.to_numpy(posterior.logdet()))


def test_functional_covariances_are_the_dense_ones(case):
    """A8: ``J P^-1 J^T`` from Jacobians, from their coordinates, and from rows."""
    posterior = posterior_of(case)
    J = case.jacobians
    expected = J @ np.linalg.inv(precision_of(case)) @ np.swapaxes(J, 1, 2)
    variances = np.diagonal(expected, axis1=1, axis2=2)
    jacobians = case.array(case.matrices(J))
    rows = case.block.layer.rows(case.batch(case.derivatives, sources=OUTPUTS))

    R = posterior.curvature.to_basis(jacobians)
    covariances = [
        functional_covariance(posterior, jacobians),
        covariance_of_coordinates(posterior, R),
        covariance_of_rows(posterior, rows),
    ]
    diagonals = [
        functional_variance(posterior, jacobians),
        variance_of_rows(posterior, rows),
    ]

    for got in covariances:
        assert_close(case.backend.to_numpy(got), expected, "inverse", case.dtype)
    for got in diagonals:
        assert_close(case.backend.to_numpy(got), variances, "inverse", case.dtype)


def test_coordinates_serve_every_prior(plain):
    """A8: Jacobians that were transformed once give the covariance of another tau."""
    J = plain.jacobians
    posterior = posterior_of(plain)
    R = posterior.curvature.to_basis(plain.array(plain.matrices(J)))

    got = covariance_of_coordinates(posterior.with_prior(4.0), R)

    P = precision_of(plain, prior_precision=4.0)
    expected = J @ np.linalg.inv(P) @ np.swapaxes(J, 1, 2)
    assert_close(plain.backend.to_numpy(got), expected, "inverse", "float64")


def test_the_variance_of_one_row_factorizes(plain, rng):
    """A8: ``(x (x) g)^T (A (x) G)^-1 (x (x) g) = (x^T A^-1 x) (g^T G^-1 g)``."""
    operator = plain.operator()
    A, G = (
        plain.backend.to_numpy(part.dense(shifted=False))
        for part in operator.parts().values()
    )
    rows = plain.block.layer.rows(plain.batch(plain.derivatives, sources=OUTPUTS))
    x = np.concatenate([plain.inputs, np.ones((EXAMPLES, 1))], axis=1)
    g = plain.derivatives

    F = operator.spectral()
    squares = plain.backend.to_numpy(row_squares(F, 1.0 / F.spectrum, rows))
    products = plain.backend.to_numpy(row_products(F, 1.0 / F.spectrum, rows))

    left = np.einsum("ni,ij,nj->n", x, np.linalg.inv(A), x)
    right = np.einsum("kni,ij,lnj->nkl", g, np.linalg.inv(G), g)
    assert_close(products, left[:, None, None] * right, "inverse", "float64")
    assert_close(
        squares.T, np.diagonal(products, axis1=1, axis2=2), "identity", "float64"
    )


def test_masked_rows_add_nothing(backend):
    """Rows that do not count leave the covariance alone, with one position or several."""
    for kind in ("kronecker", "shared"):
        case = make_case(backend, "float64", kind)
        posterior, g = posterior_of(case), case.derivatives
        keep = np.ones(case.inputs.shape[:-1], bool)
        keep[1] = False
        batch = kc.Batch(
            case.array(case.inputs),
            case.array(g),
            mask=backend.asarray(keep),
            sources=OUTPUTS,
        )

        got = backend.to_numpy(covariance_of_rows(posterior, case.block.rows(batch)))

        whole = case.block.rows(case.batch(g, sources=OUTPUTS))
        expected = backend.to_numpy(covariance_of_rows(posterior, whole)).copy()
        expected[1] = 0.0
        assert_close(got, expected, "identity", "float64")


def test_a_block_of_rank_one_has_a_posterior(backend, dtype):
    """One example: the curvature is singular, and the prior makes up for it."""
    layer = dense_layer(4, 3, bias=False)
    x, g = np.array([[1.0, 2.0, -1.0, 0.0]]), np.array([[0.5, 0.0, -1.0]])
    block = kc.Block(layer, kc.Kronecker())
    batch = kc.Batch(backend.asarray(x, dtype), backend.asarray(g, dtype))
    statistics = learn(block, batch)
    operator = operator_for(
        block, statistics, damping=0.0, rule="exact", factorizations=()
    )

    posterior = block_posterior(operator, examples=1, prior_precision=0.5)

    v = np.outer(x, g)
    P = np.outer(v, v) + 0.5 * np.eye(12)
    got = backend.to_numpy(posterior.multiply_inverse(backend.asarray(v, dtype)))
    assert_close(got.ravel(), np.linalg.inv(P) @ v.ravel(), "inverse", dtype)
    logdet = backend.to_numpy(posterior.logdet())
    assert_close(logdet, np.linalg.slogdet(P)[1], "logdet", dtype)


@pytest.mark.parametrize("kind", ["kronecker", "grouped", "embedding"])
def test_stacks_of_parameters_are_stacks_of_matrices(request, backend, rng, kind):
    """Every layout, with any leading axes, and from arrays that are not contiguous."""
    case = case_of(request, backend, "float64", kind)
    layer = case.block.layer
    V = rng.normal(size=(2, 3, *case.shape))
    stack = case.parameters(V)

    got = stack_to_matrices(layer, stack)
    back = matrices_to_stack(layer, got)
    single = stack_to_matrices(layer, {k: x[1, 2, ...] for k, x in stack.items()})
    transposed = {k: backend.xp.moveaxis(x, 0, 1) for k, x in stack.items()}
    moved = stack_to_matrices(layer, transposed)

    assert_close(backend.to_numpy(got), V, "exact", "float64")
    assert_close(backend.to_numpy(single), V[1, 2], "exact", "float64")
    assert_close(backend.to_numpy(moved), np.swapaxes(V, 0, 1), "exact", "float64")
    for name, x in stack.items():
        assert_close(
            backend.to_numpy(back[name]), backend.to_numpy(x), "exact", "float64"
        )


def test_a_status_tells_of_bad_numbers(plain):
    """With ``check="status"`` a traced tau cannot raise, and is reported."""
    posterior = posterior_of(plain, prior_precision=plain.array(1.0), check="status")
    bad = posterior.with_prior(plain.array(-1.0))

    assert int(posterior.status()) == 0
    assert int(bad.status()) == int(Status.BAD_DAMPING)
    assert int(bad.with_prior(plain.array(2.0)).status()) == 0


@pytest.mark.parametrize(
    "approximation",
    [kc.Series(variant="infinite")],
    ids=lambda approximation: type(approximation).__name__,
)
def test_a_block_without_such_a_basis_is_refused_for_that_reason(
    backend, rng, approximation
):
    """It was a factorization that failed, with the advice to increase the damping."""
    layer = dense_layer(4, 3)
    block = kc.Block(layer, approximation)
    rows = [backend.asarray(rng.normal(size=(6, 2, width))) for width in (4, 3)]
    summed = kc.Conventions(reduction="sum", sources="sum")
    statistics = kc.batch_moments(block, kc.Batch(*rows), conventions=summed)
    with pytest.raises(kc.UnsupportedError, match=r"Block 'a': expected .* eigenbasis"):
        Posterior.of_statistics(
            {"a": block}, {"a": statistics}, examples=N, prior_precision=TAU
        )


def test_a_posterior_can_be_traced(requires_backend, rng):
    """Inside `jax.jit`, tau and Jacobians traced, and the status instead of an error."""
    backend = requires_backend("jax", adapter=True)
    import jax

    plain = make_case(backend, "float64", "kronecker")
    posterior = posterior_of(plain, check="status")
    J = plain.array(plain.matrices(plain.jacobians))

    @jax.jit
    def of_prior(posterior, tau, J):
        made = posterior.with_prior(tau)
        return made.logdet(), functional_variance(made, J), made.status()

    logdet, variance, status = of_prior(posterior, plain.array(0.7), J)

    made = posterior_of(plain, prior_precision=0.7)
    expected = plain.backend.to_numpy(functional_variance(made, J))
    assert_close(backend.to_numpy(variance), expected, "identity", "float64")
    assert_close(
        backend.to_numpy(logdet), backend.to_numpy(made.logdet()), "identity", "float64"
    )
    assert int(status) == 0
    assert int(of_prior(posterior, plain.array(-0.7), J)[2]) == int(Status.BAD_DAMPING)


def test_invalid_arguments_raise(plain):
    """Shapes, libraries, operators without a basis, and blocks that are missing."""
    posterior = posterior_of(plain)
    stack = plain.parameters(np.ones((2, *plain.shape)))
    uneven = stack | {"bias": stack["bias"][0, ...]}
    blocks, statistics = {"a": plain.block}, {"a": plain.statistics}
    network = Posterior.of_statistics(
        blocks, statistics, examples=N, prior_precision=TAU
    )

    with pytest.raises(kc.ShapeError, match=r"\(\.\.\., 4, 3\)"):
        posterior.multiply(plain.array(np.ones((3, 4))))
    with pytest.raises(kc.DtypeError, match="vectors"):
        posterior.multiply([[1.0]])
    with pytest.raises(kc.UnknownBlockError, match=r"jacobians.*missing"):
        network.functional_variance({})
    with pytest.raises(kc.UnknownBlockError, match="prior_precision"):
        network.with_prior({"b": 1.0})
    with pytest.raises(kc.ShapeError, match="`bias` to have shape"):
        network.functional_variance({"a": uneven})
