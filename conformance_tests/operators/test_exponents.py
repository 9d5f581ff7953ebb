"""Exponents of matrix powers, NumPy's scalars as losses, and rows in half precision."""

from __future__ import annotations

import math

import numpy as np
import pytest

import kfac_core as kc
from kfac_core.steps import reduction_ratio

from ..builders.adapters import looks_at_values
from ..builders.estimators import make_estimator
from ..builders.one_block import learn, operator_for

n, m = 4, 3
BLOCKS = {
    "factored": (kc.Kronecker(), "factored"),
    "exact": (kc.Kronecker(), "exact"),
    "diagonal": (kc.Diagonal(), "exact"),
}


def operator(backend, kind):
    rng = np.random.default_rng(5)
    approximation, rule = BLOCKS[kind]
    layer = kc.Dense(in_features=n, out_features=m, bias=False, weight_layout="io")
    estimator = make_estimator(
        {"fc": kc.Block(layer, approximation)},
        **{"damping": 0.1, "damping_rule": rule, "decay": 0.9, "reduction": "sum"},
    )
    x, g = (
        backend.asarray(10 * rng.normal(size=(9, size)), "float64") for size in (n, m)
    )
    estimator.update({"fc": kc.Batch(x, g)})
    estimator.refresh()
    return estimator.operator("fc"), backend.asarray(np.ones((n, m)), "float64")


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize(
    ("exponent", "error"),
    [
        (math.nan, kc.ConventionError),
        (math.inf, kc.ConventionError),
        (-math.inf, kc.ConventionError),
        ("x", kc.ConventionError),
        (None, kc.ConventionError),
        (1j, kc.ConventionError),
        (True, kc.ConventionError),
        ([0.5], kc.ConventionError),
    ],
)
def test_exponents_must_be_finite(backend, kind, exponent, error):
    """Whatever the operator, by name."""
    made, v = operator(backend, kind)

    with pytest.raises(error, match="exponent"):
        made.multiply_matpower(v, exponent)


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_power_that_overflows_raises(backend, kind):
    """The power 1000 of a block with eigenvalues above 100."""
    made, v = operator(backend, kind)

    with np.errstate(all="ignore"):
        if looks_at_values(backend):
            with pytest.raises(kc.NotFiniteError):
                made.multiply_matpower(v, 1e3)
            return
        found = backend.to_numpy(made.multiply_matpower(v, 1e3))
    assert not np.all(np.isfinite(found))


@pytest.mark.parametrize("number", [float, np.float64, np.float32])
def test_numpy_scalars_are_numbers_in_a_reduction_ratio(number):
    """The result is a float, which every backend takes."""
    found = reduction_ratio(number(2.0), number(1.0), predicted=number(-2.0))

    assert type(found) is float
    assert found == 0.5
    assert kc.levenberg_marquardt(0.1, found, decay=0.5) == 0.1


def test_half_precision_rows_of_a_scale_are_widened_first(backend):
    """Products of 300 by 300 overflow float16, and those of others lose digits."""
    if not hasattr(backend.xp, "float16"):
        pytest.skip("no dtype of 16 bits")
    rng = np.random.default_rng(6)
    half = backend.xp.float16
    x, g = (
        backend.xp.astype(
            backend.asarray(300 * rng.normal(size=(9, n)), "float32"), half
        )
        for _ in range(2)
    )
    block = kc.Block(kc.ScaleShift(scale_shape=(n,), shift_shape=(n,)), kc.Full())

    statistics = learn(block, kc.Batch(x, g), block.initial(x))

    X, G = (backend.to_numpy(a).astype(np.float64) for a in (x, g))
    rows = np.concatenate([X * G, G], axis=1)
    operator = operator_for(
        block, statistics, damping=1.0, rule="exact", factorizations=()
    )
    got = backend.to_numpy(operator.to_dense(damped=False))
    expected = rows.T @ rows / len(rows)
    assert np.linalg.norm(got - expected) <= 1e-6 * np.linalg.norm(expected)
