"""Statistics that are singular, huge, tiny or damaged: accurate, or refused by name."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest

import kfac_core as kc

from ..builders import reference
from ..builders.estimators import make_estimator
from ..builders.layers import dense_layer
from ..builders.states import differences, frozen

N, S, n, m = 8, 3, 5, 4
LAYER = dense_layer(n, m)
TENSOR = kc.Parameters(shapes={"w": (n, m)})
EPS = {"float64": 1.1e-16, "float32": 6e-8}

# name: layer, approximation, damping rule
KINDS: dict[str, tuple[Any, Any, str]] = {
    "kronecker": (LAYER, kc.Kronecker(), "factored"),
    "unit pi": (LAYER, kc.Kronecker(), "factored_unit_pi"),
    "exact": (LAYER, kc.Kronecker(), "exact"),
    "diagonal factors": (
        LAYER,
        kc.Kronecker(input="diagonal", output="diagonal"),
        "factored",
    ),
    "eigen": (LAYER, kc.EKFAC(), "exact"),
    "full": (LAYER, kc.Full(), "exact"),
    "diagonal": (LAYER, kc.Diagonal(), "exact"),
    "symmetric": (LAYER, kc.Series(variant="symmetric", steps=S), "factored"),
    "infinite": (LAYER, kc.Series(variant="infinite"), "factored"),
    "tnt": (TENSOR, kc.TNT(), "factored"),
}


def _rows(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.normal(size=(N, S, size))


def _one_constant(rng: np.random.Generator, size: int) -> np.ndarray:
    rows = _rows(rng, size)
    rows[..., 0] = 3.0
    return rows


def _rank_one(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.normal(size=(N, S, 1)) * rng.normal(size=size)


def _duplicated(rng: np.random.Generator, size: int) -> np.ndarray:
    return np.broadcast_to(_rows(rng, size)[:1, :1], (N, S, size)).copy()


BAD = {
    "zero": lambda rng, size: np.zeros((N, S, size)),
    "one constant feature": _one_constant,
    "rank one": _rank_one,
    "duplicated": _duplicated,
    "1e30": lambda rng, size: 1e30 * _rows(rng, size),
    "1e-30": lambda rng, size: 1e-30 * _rows(rng, size),
    "both scales": lambda rng, size: _rows(rng, size) * np.geomspace(1e-30, 1e30, size),
    "subnormal": lambda rng, size: 1e-310 * _rows(rng, size),
    "subnormal in float32": lambda rng, size: 1e-41 * _rows(rng, size),
}
ORDINARY = ("zero", "one constant feature", "rank one", "duplicated", "1e-30")
"""Where a damped block always has a finite answer."""

RULES = {"kronecker": "factored", "unit pi": "factored_unit_pi", "exact": "exact"}
COUNTS: collections.Counter[str] = collections.Counter()


def estimator_of(kind: str, damping: float) -> kc.Estimator:
    layer, approximation, rule = KINDS[kind]
    return make_estimator(
        {"a": kc.Block(layer, approximation)},
        **{"decay": 0.9, "damping": damping, "damping_rule": rule, "reduction": "sum"},
    )


def fed(kind: str, x: Any, g: Any) -> Any:
    """Return what a block is fed; for an array, a gradient of each example."""
    if kind != "tnt":
        return kc.Batch(x, g)
    with np.errstate(over="ignore"):  # as a framework would make it
        gradients = {"w": np.einsum("nsi,nso->nio", x, g)}
    return kc.GradientBatch(gradients, batch_size=len(x), sources=len(x))


def dense(kind: str, x: np.ndarray, g: np.ndarray, damping: float, dtype: str) -> Any:
    """Return the damped block in float64 from the rows, or None for other kinds."""
    if kind in RULES:
        A, G, scale = reference.kronecker_factors(x, g[None], bias=True)
        # As they are kept: what is below the smallest number of a dtype is zero there.
        A, G = (C.astype(dtype).astype(np.float64) for C in (A, G))
        return reference.damped_block(A, G, scale, damping=damping, rule=RULES[kind])
    if kind not in ("full", "diagonal"):
        return None
    rows = np.concatenate([x, np.ones((N, S, 1))], axis=2)
    per_example = np.einsum("nsi,nso->nio", rows, g).reshape(N, -1)
    if kind == "full":
        return per_example.T @ per_example / N + damping * np.eye(per_example.shape[1])
    return np.diag(np.mean(per_example**2, axis=0) + damping)


def _is_by_storage(refusal: kc.KFACError, dtype: str) -> bool:
    """Whether what is refused is a float32 sum whose roundoff decides on the answer."""
    return dtype == "float32" and 'Precision(storage="float64")' in str(refusal)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", KINDS)
def test_bad_statistics_are_answered_or_refused(kind, bad, dtype):
    """Every kind of block, with little damping and with much; nothing is silent."""
    rng = np.random.default_rng(29)
    with np.errstate(over="ignore", under="ignore"):
        x, g = (BAD[bad](rng, size).astype(dtype) for size in (n, m))
    for damping in (1e-3, 1.0):
        estimator = estimator_of(kind, damping)
        v = rng.normal(size=(n + 1, m)).astype(dtype)
        given = {"weight": v[:-1], "bias": v[-1]}
        if kind == "tnt":
            given = {"w": v[:-1]}
        try:
            with np.errstate(over="ignore", under="ignore"):
                estimator.update({"a": fed(kind, x, g)})
            if kind == "eigen":
                estimator.rebase(moments="kronecker")
            estimator.refresh()
            found = estimator.precondition({"a": given})["a"]
        except kc.KFACError as error:
            refusal = error
        else:
            refusal = None
        if refusal is not None:
            COUNTS[type(refusal).__name__] += 1
            assert bad not in ORDINARY or _is_by_storage(refusal, dtype), refusal
            continue

        got = np.concatenate([np.ravel(part) for part in found.values()])
        assert np.all(np.isfinite(got)), (kind, bad, dtype, damping)
        COUNTS["finite"] += 1
        residual = estimator.report()["a"].residual
        assert residual is not None
        assert np.isfinite(residual)
        wide = x.astype(np.float64), g.astype(np.float64)
        F = dense(kind, *wide, damping, dtype)
        condition = np.inf if F is None else np.linalg.cond(F)
        if condition * EPS[dtype] < 1e-3:
            expected = np.linalg.solve(F, v.astype(np.float64).ravel())
            error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
            assert error <= 200 * condition * EPS[dtype], (error, condition)
            COUNTS["compared"] += 1


def test_one_nan_in_a_million_is_detected():
    """Among 10^6 good numbers, in either argument; the block stays as it was."""
    layer = dense_layer(1000, 1)
    estimator = make_estimator(
        {"a": kc.Block(layer, kc.Diagonal())},
        **{"decay": 0.9, "damping": 0.1, "damping_rule": "exact", "reduction": "sum"},
    )
    x, g = np.ones((1000, 1000), np.float32), np.ones((1000, 1), np.float32)
    estimator.update({"a": kc.Batch(x, g)})
    before = frozen(estimator.state_dict())
    for value in (np.nan, np.inf):
        bad = x.copy()
        bad[617, 331] = value
        with pytest.raises(kc.NotFiniteError, match="`inputs`"):
            estimator.update({"a": kc.Batch(bad, g)})
    assert differences(before, frozen(estimator.state_dict())) == []


def test_an_overflowing_sum_raises_at_the_refresh():
    """Rows that are finite and whose squares are not: the refresh says so, by name."""
    for kind in KINDS:
        estimator = estimator_of(kind, 1.0)
        x = np.full((N, S, n), 1e30, np.float32)
        g = np.full((N, S, m), 1e30, np.float32)
        with np.errstate(over="ignore"), pytest.raises(kc.KFACError):  # noqa: PT012
            estimator.update({"a": fed(kind, x, g)})
            if kind == "eigen":
                estimator.rebase(moments="kronecker")
            estimator.refresh()
