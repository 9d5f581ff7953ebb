"""Defects that were confirmed in kfac-jax, one test each, named for them.

The numbers are those of section 6 of the reference notes.  6.6, 6.7 and 6.12 cannot occur:
they are of an optimizer, or of a release.
"""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.operators import kronecker_operator

from ..builders import reference
from ..builders.defect_cases import dense_block, dense_data, fed
from ..builders.estimators import make_estimator
from ..builders.tolerances import assert_close, assert_differs


@pytest.mark.parametrize("exponent", [0.5, -0.5, -0.25])
def test_kfacjax_6_1_roots_of_the_factored_block_work(backend, rng, exponent):
    """Half powers of the factored block are those of the dense one."""
    x, g = dense_data(rng)
    block = dense_block()
    statistics = fed(block, kc.Batch(backend.asarray(x), backend.asarray(g)))
    operator = kc.operator_of(
        block, statistics, kc.RefreshOptions(damping=0.2, rule="factored")
    )
    V = rng.normal(size=(5, 3))

    got = backend.to_numpy(operator.multiply_matpower(backend.asarray(V), exponent))

    A, G, S = reference.kronecker_factors(x, g[None], bias=True)
    F = reference.damped_block(A, G, S, damping=0.2, rule="factored")
    expected = reference.matrix_power(F, exponent) @ V.ravel()
    assert_close(got, expected.reshape(V.shape), "power", "float64")


def test_kfacjax_6_2_damping_scaled_by_a_block_is_what_inverts(backend, rng):
    """Damping in units of a block's mean eigenvalue reaches the prepared inverse."""
    x, g = dense_data(rng)
    estimator = kc.Estimator(
        {"fc": dense_block()},
        decay=0.5,
        damping=0.3,
        damping_rule="exact",
        reduction="sum",
        refreshing=kc.Refreshing(damping_scaling="mean_eigenvalue"),
    )
    estimator.update({"fc": kc.Batch(backend.asarray(x), backend.asarray(g))})

    estimator.refresh()

    A, G, S = reference.kronecker_factors(x, g[None], bias=True)
    lam = 0.3 * np.trace(np.kron(A, G)) / 15
    F = reference.damped_block(A, G, S, damping=lam, rule="exact")
    V = rng.normal(size=(5, 3))
    got = estimator.operator("fc").multiply_inverse(backend.asarray(V))
    expected = np.linalg.solve(F, V.ravel()).reshape(V.shape)
    assert_close(backend.to_numpy(got), expected, "inverse", "float64")
    assert_close(estimator.report()["fc"].damping, lam, "product", "float64")


def test_kfacjax_6_3_eigenvalues_are_one_flat_list(backend, rng):
    """Eigenvalues of a block with unequal widths are all products, ascending."""
    x, g = dense_data(rng)
    block = dense_block()
    statistics = fed(block, kc.Batch(backend.asarray(x), backend.asarray(g)))

    got = kc.operator_of(
        block, statistics, kc.RefreshOptions(damping=0.2, rule="factored")
    ).eigenvalues()

    A, G, S = reference.kronecker_factors(x, g[None], bias=True)
    F = reference.damped_block(A, G, S, damping=0.2, rule="factored")
    assert_close(backend.to_numpy(got), np.linalg.eigvalsh(F), "eigenvalues", "float64")


def test_kfacjax_6_4_masked_rows_have_no_homogeneous_coordinate(backend, rng):
    """The corner of A is 1 with a mask too: absent rows do not bring their 1."""
    x, g = rng.normal(size=(4, 3, 4)), rng.normal(size=(4, 3, 3))
    mask = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]], bool)
    block = dense_block()
    batch = kc.Batch(backend.asarray(x), backend.asarray(g), mask=backend.asarray(mask))

    statistics = fed(block, batch)

    A = backend.to_numpy(statistics.averages["input"].value(debias=True).full())
    assert_close(A[-1, -1], 1.0, "roundoff", "float64")
    expected, _, _ = reference.kronecker_factors(x, g[None], bias=True, mask=mask)
    assert_close(A, expected, "gram", "float64")


@pytest.mark.parametrize("n", [1, 2, 5])
def test_kfacjax_6_8_small_and_zero_factors_have_their_spectrum(backend, n):
    """Eigenvalues and trace exist for tiny factors, and for zero."""
    zeros = backend.asarray(np.zeros((n, n)))
    zero = kronecker_operator(None, zeros, damping=0.5)

    eigenvalues = backend.to_numpy(zero.eigenvalues(damped=True))

    assert_close(eigenvalues, np.full(n, 0.5), "roundoff", "float64")
    assert float(zero.trace(damped=False)) == 0.0


def test_kfacjax_6_10_every_damping_argument_is_used(backend, rng):
    """Two dampings give two blocks, whichever rule."""
    x, g = dense_data(rng)
    block = dense_block()
    statistics = fed(block, kc.Batch(backend.asarray(x), backend.asarray(g)))
    V = backend.asarray(rng.normal(size=(5, 3)))

    for rule in ("factored", "factored_unit_pi", "exact"):
        results = [
            kc.operator_of(
                block, statistics, kc.RefreshOptions(damping=lam, rule=rule)
            ).multiply_inverse(V)
            for lam in (0.1, 0.4)
        ]
        assert_differs(*map(backend.to_numpy, results))


def test_kfacjax_6_5_a_diagonal_blocks_sums_are_sums(backend, rng):
    """Trace and log-determinant of a block of several arrays add up over them."""
    shapes = {"w": (3, 2), "b": (2,)}
    block = kc.Block(kc.Parameters(shapes=shapes), kc.Diagonal())
    v = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    batch = kc.GradientBatch({name: backend.asarray(x) for name, x in v.items()}, 2)

    operator = kc.operator_of(
        block, fed(block, batch), kc.RefreshOptions(damping=0.5, rule="exact")
    )

    entries = np.concatenate([x.ravel() for x in v.values()]) ** 2 / 2 + 0.5
    assert_close(float(operator.trace()), entries.sum(), "product", "float64")
    assert_close(float(operator.logdet()), np.log(entries).sum(), "logdet", "float64")


def test_kfacjax_6_9_a_state_comes_back(backend, rng):
    """What `state_dict` gives, `load_state_dict` takes, and it computes the same."""
    x, g = dense_data(rng)
    options = {
        "decay": 0.5,
        "damping": 0.1,
        "damping_rule": "exact",
        "reduction": "sum",
    }
    one, other = (make_estimator({"fc": dense_block()}, **options) for _ in range(2))
    one.update({"fc": kc.Batch(backend.asarray(x), backend.asarray(g))})
    one.refresh()

    other.load_state_dict(one.state_dict())

    V = backend.asarray(rng.normal(size=(5, 3)))
    results = [e.operator("fc").multiply_inverse(V) for e in (one, other)]
    assert np.array_equal(*map(backend.to_numpy, results))


@pytest.mark.parametrize("rule", ["factored", "exact"])
@pytest.mark.parametrize("product", ["multiply", "multiply_inverse", "sample"])
def test_kfacjax_6_11_one_contract_of_staleness(backend, rng, product, rule):
    """A new damping changes no product before a refresh, and every one after it."""
    x, g = dense_data(rng)
    estimator = kc.Estimator(
        {"fc": dense_block()},
        decay=0.5,
        damping=0.1,
        damping_rule=rule,
        reduction="sum",
    )
    estimator.update({"fc": kc.Batch(backend.asarray(x), backend.asarray(g))})
    estimator.refresh()
    V = {"fc": {"weight": backend.asarray(x[:4, :3]), "bias": backend.asarray(g[0])}}
    results = [estimator.apply(product, V)]

    estimator.damping = 2.0
    results.append(estimator.apply(product, V))
    estimator.refresh()
    results.append(estimator.apply(product, V))

    before, unrefreshed, after = (backend.to_numpy(r["fc"]["weight"]) for r in results)
    assert np.array_equal(before, unrefreshed)
    assert_differs(after, before)
