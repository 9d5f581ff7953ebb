"""An estimator fed with a batch in parts is one that was fed with the whole."""

from __future__ import annotations

import numpy as np
import pytest

import kfac_core as kc

from ..builders.estimators import make_estimator
from ..builders.tolerances import assert_close

LAYER = kc.Dense(in_features=4, out_features=3, bias=True, weight_layout="io")
CUTS = slice(0, 3), slice(3, 4), slice(4, 9)


def made(**options):
    settings = {"decay": 0.7, "damping": 0.1, "reduction": "sum"}
    return make_estimator(
        {"fc": kc.Block(LAYER, kc.Kronecker())}, **settings, **options
    )


def in_parts(estimator, x, g):
    """Absorb a batch in parts of several sizes."""
    block, total = estimator.blocks["fc"], None
    for cut in CUTS:
        part = kc.batch_moments(
            block,
            kc.Batch(x[cut, :], g[cut, :]),
            conventions=estimator.conventions,
            precision=estimator.network.precision,
        )
        total = part if total is None else total.merged(part)
    estimator.absorb({"fc": total})


@pytest.mark.parametrize("burn_in", [0, 2])
def test_absorbed_parts_are_one_update(backend, dtype, rng, burn_in):
    """In the factors by NumPy's own averages, and in every count."""
    estimator, decay = made(burn_in=burn_in), [0.0, 0.7, 0.7]
    if burn_in:
        decay = [1.0, 1.0, 0.7]
    sums, weight = [np.zeros((5, 5)), np.zeros((3, 3))], 0.0
    for beta in decay:
        x, g = rng.normal(size=(9, 4)), rng.normal(size=(9, 3))
        rows = np.concatenate([x, np.ones((9, 1))], axis=1)
        new = rows.T @ rows / 9, g.T @ g / 9
        sums = [beta * a + b for a, b in zip(sums, new, strict=True)]
        weight = beta * weight + 1.0

        in_parts(estimator, backend.asarray(x, dtype), backend.asarray(g, dtype))

    state = estimator.state["fc"]
    for side, expected in zip(("input", "output"), sums, strict=True):
        factor = state.statistics.averages[side].value(debias=True)
        got = backend.to_numpy(factor.full())
        assert_close(got, expected / weight, "gram", dtype, condition=10.0)
    assert state.updates == 3
