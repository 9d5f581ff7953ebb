"""Products that are not finite: refused by name where the host has the numbers."""

from __future__ import annotations

import numpy as np
import pytest

import kfac_core as kc

from ..builders.adapters import looks_at_values
from ..builders.estimators import make_estimator
from ..builders.one_block import learn, operator_for

N, n, m = 12, 4, 3
LAYER = kc.Dense(in_features=n, out_features=m, bias=False, weight_layout="io")
BLOCKS = {
    "kronecker": (kc.Kronecker(), "factored"),
    "exact": (kc.Kronecker(), "exact"),
    "full": (kc.Full(), "exact"),
    "diagonal": (kc.Diagonal(), "exact"),
}


def refreshed(backend, block, *, dtype="float64", damping=0.1, scale=1.0):
    rng = np.random.default_rng(3)
    approximation, rule = BLOCKS[block]
    estimator = make_estimator(
        {"fc": kc.Block(LAYER, approximation)},
        **{"damping": damping, "damping_rule": rule, "decay": 0.9, "reduction": "sum"},
    )
    x, g = (scale * rng.normal(size=(N, size)) for size in (n, m))
    estimator.update(
        {"fc": kc.Batch(backend.asarray(x, dtype), backend.asarray(g, dtype))}
    )
    estimator.refresh()
    return estimator


def given(backend, value, *, dtype="float64"):
    v = np.ones((n, m))
    v[1, 2] = value
    return {"fc": {"weight": backend.asarray(v, dtype)}}


@pytest.mark.parametrize(
    ("product", "scale"), [("multiply", 10.0), ("multiply_inverse", 1e-4)]
)
@pytest.mark.parametrize("block", BLOCKS)
def test_a_product_beyond_the_range_is_refused(backend, block, product, scale):
    """A vector of 1e308, multiplied by a large block or divided by a small one."""
    estimator = refreshed(backend, block, damping=1e-3, scale=scale)
    vectors = {"fc": {"weight": backend.asarray(np.full((n, m), 1e308), "float64")}}

    with np.errstate(all="ignore"):
        if looks_at_values(backend):
            with pytest.raises(kc.NotFiniteError, match="beyond the range"):
                estimator.apply(product, vectors)
            return
        found = estimator.apply(product, vectors)
    assert not np.all(np.isfinite(backend.to_numpy(found["fc"]["weight"])))


@pytest.mark.parametrize("block", BLOCKS)
def test_a_damping_that_float32_cannot_hold_is_refused(backend, block):
    """1e-40 has five digits left in float32, and its inverse is infinite."""
    with pytest.raises(kc.DampingError, match="smallest"):
        refreshed(backend, block, dtype="float32", damping=1e-40)


def test_a_result_in_the_dtype_of_a_narrow_vector_is_looked_at(backend):
    """A float16 vector is multiplied in float32, and its result may overflow."""
    if not looks_at_values(backend):
        pytest.skip("products are not looked at")
    estimator = refreshed(backend, "exact", dtype="float32", scale=1e3)
    v = backend.xp.astype(
        backend.asarray(np.ones((n, m)), "float32"), backend.xp.float16
    )

    with np.errstate(all="ignore"), pytest.raises(kc.NotFiniteError, match="float16"):
        estimator.apply("multiply", {"fc": {"weight": v}})


@pytest.mark.parametrize(("block", "size"), [("kronecker", 1e-30), ("exact", 1e-30)])
def test_a_product_below_the_range_is_refused(backend, block, size):
    """A vector of 1e-30 divided by 1e30: float32 has no number but zero for it."""
    if not looks_at_values(backend):
        pytest.skip("products are not looked at")
    estimator = refreshed(backend, block, dtype="float32", damping=1e30)
    vectors = {"fc": {"weight": backend.asarray(np.full((n, m), size), "float32")}}

    with pytest.raises(kc.NotFiniteError, match="below the range"):
        estimator.apply("multiply_inverse", vectors)

    zeros = {"fc": {"weight": backend.asarray(np.zeros((n, m)), "float32")}}
    found = estimator.apply("multiply_inverse", zeros)["fc"]["weight"]
    assert not np.any(backend.to_numpy(found))


def test_factors_whose_inverses_vanish_are_refused(backend):
    """Rows of 1e15, a damping of 1e30: both inverses are normal, their product is not."""
    if not looks_at_values(backend):
        pytest.skip("products are not looked at")
    estimator = make_estimator(
        {"fc": kc.Block(LAYER, kc.Kronecker())},
        damping=1e30,
        damping_rule="factored_unit_pi",
        decay=0.9,
        reduction="sum",
    )
    rng = np.random.default_rng(3)
    x, g = 1e15 * rng.normal(size=(N, n)), rng.normal(size=(N, m))
    rows = (backend.asarray(a, "float32") for a in (x, g))
    estimator.update({"fc": kc.Batch(*rows)})
    estimator.refresh()

    with pytest.raises(kc.NotFiniteError, match="below the range"):
        estimator.apply("multiply_inverse", given(backend, 1.0, dtype="float32"))


def test_a_spectrum_beyond_the_range_is_refused(backend):
    """Both factors are finite in float32, and their eigenvalues' products are not."""
    rng = np.random.default_rng(3)
    x, g = (1e10 * rng.normal(size=(N, size)) for size in (n, m))
    batch = kc.Batch(backend.asarray(x, "float32"), backend.asarray(g, "float32"))
    block = kc.Block(LAYER, kc.Kronecker())
    with np.errstate(all="ignore"):
        statistics = learn(block, batch)
        operator = operator_for(
            block, statistics, damping=1.0, rule="exact", check="status"
        )

    assert kc.Status.MATRIX_NOT_FINITE in kc.Status(int(operator.status()))
