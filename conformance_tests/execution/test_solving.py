"""Blocks solved by inverses and by triangular solves have the same directions."""

import numpy as np
import pytest

import kfac_core as kc

from ..builders.estimators import make_estimator
from ..builders.tolerances import assert_close

SETTINGS = {"decay": 0.8, "damping": 0.3, "reduction": "sum"}


def block(n=4, m=3, approximation=None):
    layer = kc.Dense(in_features=n, out_features=m, bias=True, weight_layout="io")
    return kc.Block(layer, approximation or kc.Kronecker())


@pytest.mark.parametrize("approximation", [kc.Kronecker(), kc.TNT()])
def test_both_ways_of_solving_give_one_answer(backend, dtype, rng, approximation):
    """Two triangular solves at use are the inverse; neither is made where the other is."""
    x, g = rng.normal(size=(10, 4)), rng.normal(size=(10, 3))
    batch = kc.Batch(backend.asarray(x, dtype), backend.asarray(g, dtype))
    V = {"weight": rng.normal(size=(4, 3)), "bias": rng.normal(size=3)}
    gradient = {name: backend.asarray(v, dtype) for name, v in V.items()}
    found = {}
    for solving in ("inverse", "triangular"):
        estimator = make_estimator(
            {"a": block(approximation=approximation)},
            refreshing=kc.Refreshing(solving=solving),
            **SETTINGS,
        )
        estimator.update({"a": batch})
        estimator.refresh()
        result = estimator.precondition({"a": gradient})["a"]
        found[solving] = {k: backend.to_numpy(v) for k, v in result.items()}
        part = estimator.operator("a").input
        assert (part.inverse is None) == (solving == "triangular")
        assert (part.cholesky is None) == (solving == "inverse")
        assert estimator.report()["a"].factors["input"].residual < 1e-2
        again = make_estimator({"a": block(approximation=approximation)}, **SETTINGS)
        again.load_state_dict(estimator.state_dict())
        assert again.operator("a").input.solving == solving

    F = backend.to_numpy(estimator.operator("a").to_dense())
    stacked = np.concatenate([V["weight"], V["bias"][None]])
    expected = np.linalg.solve(F, stacked.ravel()).reshape(5, 3)
    for result in found.values():
        got = np.concatenate([result["weight"], result["bias"][None]])
        assert_close(got, expected, "inverse", dtype)
