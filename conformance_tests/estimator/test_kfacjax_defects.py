"""Defects that were confirmed in kfac-jax, one test each, named for them.

The numbers are those of section 6 of the reference notes.  6.1, 6.3, 6.4, 6.9 and 6.10 are
tested with all approximations; 6.6, 6.7 and 6.12 cannot occur: they are of an optimizer, or
of a release.
"""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.operators import kronecker_operator

from ..builders import reference
from ..builders.defect_cases import dense_block, dense_data, fed
from ..builders.one_block import operator_for
from ..builders.tolerances import assert_close, assert_differs


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


@pytest.mark.parametrize("n", [1, 2, 5])
def test_kfacjax_6_8_small_and_zero_factors_have_their_spectrum(backend, n):
    """Eigenvalues and trace exist for tiny factors, and for zero."""
    zeros = backend.asarray(np.zeros((n, n)))
    zero = kronecker_operator(None, zeros, damping=0.5)

    eigenvalues = backend.to_numpy(zero.eigenvalues(damped=True))

    assert_close(eigenvalues, np.full(n, 0.5), "roundoff", "float64")
    assert float(zero.trace(damped=False)) == 0.0


def test_kfacjax_6_5_a_diagonal_blocks_sums_are_sums(backend, rng):
    """Trace and log-determinant of a block of several arrays add up over them."""
    shapes = {"w": (3, 2), "b": (2,)}
    block = kc.Block(kc.Parameters(shapes=shapes), kc.Diagonal())
    v = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    batch = kc.GradientBatch({name: backend.asarray(x) for name, x in v.items()}, 2)

    operator = operator_for(block, fed(block, batch), damping=0.5, rule="exact")

    entries = np.concatenate([x.ravel() for x in v.values()]) ** 2 / 2 + 0.5
    assert_close(float(operator.trace()), entries.sum(), "product", "float64")
    assert_close(float(operator.logdet()), np.log(entries).sum(), "logdet", "float64")


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
