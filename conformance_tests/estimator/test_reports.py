"""What an estimator says of its blocks: conditions, splits, residual checks and ages."""

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.linalg.condition import estimated_norm

from ..builders import reference
from ..builders.block_kinds import CONV, DENSE, PAIRS, fed
from ..builders.estimators import make_estimator
from ..builders.tolerances import assert_close

DAMPING = 0.3


def make(block, **options):
    """Return an estimator of one block."""
    settings = {"decay": 0.8, "damping": DAMPING, "reduction": "sum"}
    return make_estimator({"a": block}, **(settings | options))


@pytest.mark.parametrize("pair", PAIRS)
def test_every_block_has_a_condition_and_a_certificate(backend, rng, pair):
    """The condition is the dense one's in the 1-norm, from below by at most a third."""
    layer, approximation = PAIRS[pair]
    rule = "exact" if approximation.name == "ekfac" else "factored"
    estimator = make(kc.Block(layer, approximation), damping_rule=rule)
    empty = estimator.report()["a"]
    assert (empty.condition, empty.residual, empty.factors) == (None, None, {})
    estimator.update({"a": fed(backend, rng, layer)})
    if approximation.name == "ekfac":
        estimator.rebase(moments="kronecker")
    estimator.refresh()

    report = estimator.report()["a"]

    F = backend.to_numpy(estimator.operator("a").to_dense())
    condition = np.linalg.cond(F, 1)
    assert condition / 9 <= report.condition <= condition * (1 + 1e-6)
    assert 0.0 <= report.residual < 1e-10
    counts = {"scaled identity": 1, "tnt of an array": 3, "diagonal": 1, "full": 1}
    assert len(report.factors) == counts.get(pair, 2)
    for factor in report.factors.values():
        assert 0.0 <= factor.residual < 1e-10


def test_the_report_says_what_was_done(backend, rng):
    """Ages, dampings, splits, conditions and residuals are the dense ones."""
    estimator = make(
        kc.Block(DENSE, kc.Kronecker()), factorizations=("inverse", "eigenbasis")
    )
    x, g = rng.normal(size=(10, 4)), rng.normal(size=(10, 3))
    batch = kc.Batch(backend.asarray(x), backend.asarray(g))
    estimator.update({"a": batch})
    estimator.refresh()
    estimator.update({"a": batch})

    report = estimator.report()["a"]

    A, G, _ = reference.kronecker_factors(x, g[None], bias=False)
    pi = np.sqrt((np.trace(A) / 4) / (np.trace(G) / 3))
    shift = pi * np.sqrt(DAMPING)
    assert (report.updates, report.age, report.failures) == (2, 1, 0)
    assert report.basis_age is None
    assert report.damping == DAMPING
    assert_close(report.factors["input"].shift, shift, "product", "float64")
    condition = np.linalg.cond(A + shift * np.eye(4))
    assert_close(report.factors["input"].condition, condition, "inverse", "float64")
    assert 0.0 <= report.factors["input"].residual < 1e-10
    assert report.factors["output"].fallback == "working"


def test_a_factor_of_uncorrelated_positions_has_its_own_condition(backend, rng):
    """Its split is the dense factor's, and so is its condition."""
    block = kc.Block(CONV, kc.Kronecker(input="uncorrelated"))
    estimator = make(block)
    estimator.update({"a": fed(backend, rng, CONV)})
    estimator.refresh()

    factor = estimator.report()["a"].factors["input"]

    part = estimator.operator("a").input
    condition = np.linalg.cond(backend.to_numpy(part.dense(shifted=True)), 1)
    assert factor.size == 5
    assert factor.shift == float(part.shift)
    assert condition / 9 <= factor.condition <= condition * (1 + 1e-6)


def test_a_singular_block_that_nothing_prepared_has_no_condition(backend, rng):
    """One example and no damping: the report says so, and does not raise."""
    block = kc.Block(DENSE, kc.Kronecker())
    estimator = make(block, damping=0.0, factorizations=())
    x, g = backend.asarray(np.ones((1, 4))), backend.asarray(np.ones((1, 3)))
    estimator.update({"a": kc.Batch(x, g)})
    estimator.refresh()

    report = estimator.report()["a"]

    assert report.condition == np.inf
    assert report.residual is None


def test_the_estimated_norm_is_a_close_lower_bound(backend, rng):
    """Of many symmetric matrices, never above the 1-norm and never below a third."""
    for size in (1, 2, 7):
        for _ in range(20):
            root = rng.normal(size=(size, size)) ** 3
            M = root + root.T
            on_backend = backend.asarray(M)
            norm = estimated_norm(
                lambda v, M=on_backend: backend.xp.matmul(M, v),
                on_backend,
                shape=(size, 1),
                xp=backend.xp,
            )
            exact = np.abs(M).sum(axis=0).max()
            assert exact / 3 <= norm <= exact * (1 + 1e-12)
