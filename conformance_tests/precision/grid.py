"""Every approximation, damping rule and dtype over ranks, scales and dampings.

Each case asks a damped block for products, and compares these with 120 digits:

right
    ``|f(F) v - computed| <= C u kappa |f(F)| |v|`` with f the product, the inverse or the
    root of the inverse, u the roundoff of the narrowest dtype, kappa the condition number
    of the damped block (1 for the product; |F|/lam for `ExampleGram`), and C = 64; and
    never more than 0.05.
refused
    A named error, or with ``check="status"`` a flag.
silently wrong
    Anything else.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import mpmath as mp
import numpy as np

import kfac_core as kc

from . import references
from .references import Answer, Side

C = 64.0
CAP = 0.05
n, m = 5, 3
LAYER = kc.Dense(in_features=n, out_features=m, bias=False, weight_layout="io")
TENSOR = kc.Parameters(shapes={"w": (n, m)})
SUMMED = kc.Conventions(reduction="sum", sources="sum")

RANKS = (0, 1, 2, 4, 8, 20)
SCALES = (1.0, 1e-8, 1e-3, 1e3, 1e7)
DAMPINGS = (1e-40, 1e-20, 1e-14, 1e-10, 1e-6, 1e-3, 1.0, 1e10, 1e30)
GRADED = -1
"""A rank that stands for 20 rows whose directions fall by four orders of magnitude."""

PRECISIONS = {
    "float64": ("float64", kc.Precision()),
    "float32": ("float32", kc.Precision()),
    "float32, computed in float64": ("float32", kc.Precision(compute="float64")),
    "float64, applied in float32": ("float64", kc.Precision(apply="float32")),
}


@dataclass(frozen=True)
class Kind:
    """An approximation with a damping rule, and its reference.

    Attributes
    ----------
    layer, approximation, rule
        Of the block.
    sides : callable
        Takes rows x and g; returns the two sides and the scale S of the reference.
    """

    layer: Any
    approximation: Any
    rule: Any
    sides: Callable[[np.ndarray, np.ndarray], tuple[Side, Side, Any]]


def _kronecker(x: np.ndarray, g: np.ndarray) -> tuple[Side, Side, Any]:
    return references.side(x), references.side(g), mp.mpf(1)


def _diagonal_input(x: np.ndarray, g: np.ndarray) -> tuple[Side, Side, Any]:
    X = references.exact(x)
    entries = [mp.fsum(X[k, i] ** 2 for k in range(X.rows)) / X.rows for i in range(n)]
    return references.diagonal(entries), references.side(g), mp.mpf(1)


def _example_rows(x: np.ndarray, g: np.ndarray) -> Any:
    X, G = references.exact(x), references.exact(g)
    rows = mp.matrix(X.rows, n * m)
    for k, i, j in itertools.product(range(X.rows), range(n), range(m)):
        rows[k, i * m + j] = X[k, i] * G[k, j]
    return rows


def _full(x: np.ndarray, g: np.ndarray) -> tuple[Side, Side, Any]:
    rows = _example_rows(x, g)
    F = (rows.T * rows) / rows.rows
    return references.decomposed(F), references.diagonal([mp.mpf(1)]), mp.mpf(1)


def _diagonal(x: np.ndarray, g: np.ndarray) -> tuple[Side, Side, Any]:
    rows = _example_rows(x, g)
    entries = [
        mp.fsum(rows[k, i] ** 2 for k in range(rows.rows)) / rows.rows
        for i in range(n * m)
    ]
    return references.diagonal(entries), references.diagonal([mp.mpf(1)]), mp.mpf(1)


def _eva(x: np.ndarray, g: np.ndarray) -> tuple[Side, Side, Any]:
    a, b = (
        references.exact(np.ones((1, rows.shape[0])))
        * references.exact(rows)
        / rows.shape[0]
        for rows in (x, g)
    )
    return references.decomposed(a.T * a), references.decomposed(b.T * b), mp.mpf(1)


def _tnt(x: np.ndarray, g: np.ndarray) -> tuple[Side, Side, Any]:
    rows = _example_rows(x, g)
    first, second = mp.matrix(n, n), mp.matrix(m, m)
    for k in range(rows.rows):
        D = mp.matrix(n, m)
        for i, j in itertools.product(range(n), range(m)):
            D[i, j] = rows[k, i * m + j]
        first, second = first + D * D.T / rows.rows, second + D.T * D / rows.rows
    left, right = references.decomposed(first), references.decomposed(second)
    trace = mp.fsum(left.w)
    return left, right, 1 / trace if trace > 0 else mp.mpf(1)


_LOW = kc.LowRankKronecker(input_rank=n, output_rank=m)

KINDS = {
    "Kronecker, factored": Kind(LAYER, kc.Kronecker(), "factored", _kronecker),
    "Kronecker, factored_unit_pi": Kind(
        LAYER, kc.Kronecker(), "factored_unit_pi", _kronecker
    ),
    "Kronecker, exact": Kind(LAYER, kc.Kronecker(), "exact", _kronecker),
    "Kronecker(input='diagonal'), factored": Kind(
        LAYER, kc.Kronecker(input="diagonal"), "factored", _diagonal_input
    ),
    "Kronecker(input='diagonal'), exact": Kind(
        LAYER, kc.Kronecker(input="diagonal"), "exact", _diagonal_input
    ),
    "Eigen": Kind(LAYER, kc.Eigen(), "exact", _kronecker),
    "Full": Kind(LAYER, kc.Full(), "exact", _full),
    "Diagonal": Kind(LAYER, kc.Diagonal(), "exact", _diagonal),
    "LowRankKronecker, factored": Kind(LAYER, _LOW, "factored", _kronecker),
    "LowRankKronecker, exact": Kind(LAYER, _LOW, "exact", _kronecker),
    "ExampleGram": Kind(
        LAYER, kc.ExampleGram(gradients=max(RANKS), positions=1), "exact", _full
    ),
    "Eva": Kind(LAYER, kc.Eva(), "exact", _eva),
    "TNT, factored": Kind(TENSOR, kc.TNT(), "factored", _tnt),
    "TNT, exact": Kind(TENSOR, kc.TNT(), "exact", _tnt),
}

STORED = ("Kronecker, factored", "Kronecker, factored_unit_pi", "Kronecker, exact")
"""Blocks whose stored sums can be read for a reference; see `GRADED`."""


@dataclass(frozen=True)
class Case:
    """A point of the grid."""

    kind: str
    precision: str
    check: Any
    rank: int
    scale: float
    damping: float


def cases(
    *,
    kinds: Iterable[str] = tuple(KINDS),
    precisions: Iterable[str] = tuple(PRECISIONS),
    checks: Iterable[str] = ("raise", "status"),
    ranks: Iterable[int] = (*RANKS, GRADED),
    scales: Iterable[float] = SCALES,
    dampings: Iterable[float] = DAMPINGS,
) -> Iterator[Case]:
    """Yield the points of the grid."""
    for point in itertools.product(kinds, precisions, checks, ranks, scales, dampings):
        case = Case(*point)
        if case.rank != GRADED or case.kind in STORED:
            yield case


def verdict(case: Case, xp_name: str) -> tuple[str, str]:
    """Return ``"right"``, ``"refused"`` or ``"silently wrong"``, and what was found."""
    with np.errstate(all="ignore"):
        return _verdict(case, xp_name)


def _verdict(case: Case, xp_name: str) -> tuple[str, str]:
    try:
        operator, answer, vectors = _operator(case, xp_name)
    except kc.KFACError as error:
        return "refused", str(error)
    if case.check == "status" and int(operator.status()):
        return "refused", "status"
    dtype, precision = PRECISIONS[case.precision]
    widths = (dtype, precision.compute or dtype, precision.apply or dtype)
    roundoff = max(float(np.finfo(name).eps) for name in widths)
    if answer.singular:
        return "silently wrong", "a singular block was inverted"
    condition = answer.condition
    if case.kind == "ExampleGram":
        # Woodbury's formula divides by the damping, whatever the block's eigenvalues.
        condition = max(condition, answer.norm / case.damping)
    accurate, bound = C * roundoff, min(C * roundoff * condition, CAP)
    bound = max(accurate, bound)
    products: list[tuple[str, Any, np.ndarray, float, float]] = [
        ("multiply", operator.multiply, answer.product, answer.norm, accurate),
        (
            "multiply_inverse",
            operator.multiply_inverse,
            answer.inverse,
            answer.inverse_norm,
            bound,
        ),
        (
            "multiply_matpower",
            functools.partial(_root, operator),
            answer.root,
            math.sqrt(answer.inverse_norm),
            bound,
        ),
    ]
    refused = ""
    for name, product, expected, norm, limit in products:
        try:
            got = np.stack([kc.to_numpy(product(v)) for v in vectors])
        except kc.KFACError as error:
            refused = f"{name}: {error}"
            continue
        given = np.stack([kc.to_numpy(v) for v in vectors]).astype(np.float64)
        sizes = np.linalg.norm(given.reshape(len(given), -1), axis=1)
        errors = got.astype(np.float64).reshape(expected.shape) - expected
        errors = np.linalg.norm(errors.reshape(len(given), -1), axis=1)
        worst = float(np.max(errors / (norm * sizes)))
        if not worst <= limit:
            return "silently wrong", f"{name}: off by {worst:.1e} (limit {limit:.1e})"
    return ("refused", refused) if refused else ("right", "")


def _root(operator: Any, v: Any) -> Any:
    return operator.multiply_matpower(v, -0.5)


def table(found: dict[Case, str]) -> str:
    """Return the counts by approximation and dtype."""
    verdicts = ("right", "refused", "silently wrong")
    counts: dict[tuple[str, str], Counter[str]] = {}
    for case, result in found.items():
        counts.setdefault((case.kind, case.precision), Counter())[result] += 1
    rows = [("approximation", "dtype", "cases", *verdicts)]
    for (kind, precision), count in counts.items():
        numbers = [count.total(), *(count[v] for v in verdicts)]
        rows.append((kind, precision, *map(str, numbers)))
    total = Counter(found.values())
    numbers = [total.total(), *(total[v] for v in verdicts)]
    rows.append(("all", "", *map(str, numbers)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


@functools.cache
def _rows(rank: int, scale: float, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return rows x and g, exact in their dtype."""
    rng = np.random.default_rng(17)
    if rank == 0:
        x, g = np.zeros((2, n)), np.zeros((2, m))
    elif rank == GRADED:
        x, g = _graded(rng, n), rng.normal(size=(20, m))
    else:
        x, g = rng.normal(size=(rank, n)), rng.normal(size=(rank, m))
    return (scale * x).astype(dtype), (scale * g).astype(dtype)


def _graded(rng: np.random.Generator, size: int) -> np.ndarray:
    Q = np.linalg.qr(rng.normal(size=(size, size)))[0]
    return rng.normal(size=(20, size)) * np.geomspace(1.0, 1e-4, size) @ Q


@functools.cache
def _vectors(rank: int, scale: float, dtype: str) -> np.ndarray:
    """Return two random vectors and one in the range of the block, of size 1."""
    x, g = (rows.astype(np.float64) for rows in _rows(rank, scale, dtype))
    rng = np.random.default_rng(18)
    vectors = [rng.normal(size=(n, m)) for _ in range(2)]
    gradient = x.T @ g
    if np.any(gradient):
        vectors.append(gradient / np.linalg.norm(gradient))
    return np.stack(vectors).astype(np.float32)


@functools.cache
def _sides(sides: Any, rank: int, scale: float, dtype: str) -> tuple[Side, Side, Any]:
    return sides(*_rows(rank, scale, dtype))


@functools.cache
def _answer(
    sides: Any, rule: str, rank: int, scale: float, dtype: str, damping: float
) -> Answer:
    found = _sides(sides, rank, scale, dtype)
    return _damped(*found, rule, damping, _vectors(rank, scale, dtype))


def _damped(
    left: Side, right: Side, S: Any, rule: str, damping: float, vectors: np.ndarray
) -> Answer:
    if rule == "exact":
        spectrum = references.exactly_damped(left, right, S, damping)
    else:
        unit_pi = rule == "factored_unit_pi"
        spectrum = references.factored(left, right, S, damping, unit_pi=unit_pi)
    if len(right.w) == 1:
        vectors = vectors.reshape(len(vectors), -1, 1)
    return references.answer(left, right, spectrum, vectors)


@functools.cache
def _statistics(kind: str, rank: int, scale: float, dtype: str, backend: str) -> Any:
    """Return a block and its statistics after one update."""
    made = KINDS[kind]
    x, g = (kc.asarray(rows) for rows in _rows(rank, scale, dtype))
    batch: Any = kc.Batch(x, g)
    if made.layer is TENSOR:
        x, g = (kc.to_numpy(rows) for rows in (x, g))
        D = np.einsum("ki,ko->kio", x, g)
        batch = kc.GradientBatch(
            {"w": kc.asarray(D)}, batch_size=len(x), sources=len(x)
        )
    block = kc.Block(made.layer, made.approximation)
    statistics = block.update(
        block.initial(batch.like if made.layer is TENSOR else x),
        batch,
        conventions=SUMMED,
        decay=0.0,
    )
    if isinstance(made.approximation, kc.Eigen):
        statistics = block.rebased(statistics, moments="kronecker")
    return block, statistics


def _operator(case: Case, backend: str) -> tuple[Any, Answer, list[Any]]:
    """Return the operator of a case, its reference and the vectors."""
    kind = KINDS[case.kind]
    dtype, precision = PRECISIONS[case.precision]
    key = (case.rank, case.scale, dtype)
    vectors = _vectors(*key)
    block, statistics = _statistics(case.kind, *key, backend)
    if case.rank == GRADED:
        answer = _stored_answer(case, statistics, vectors)
    else:
        answer = _answer(kind.sides, kind.rule, *key, case.damping)
    operator = block.operator(
        statistics,
        damping=case.damping,
        rule=kind.rule,
        factorizations=("inverse", "eigenbasis"),
        check=case.check,
        precision=precision,
    )
    wide = "float64" if "float64" in (dtype, precision.apply) else "float32"
    shaped = vectors.astype(wide)
    if kind.layer is TENSOR:
        shaped = shaped.reshape(len(vectors), n * m, 1)
    return operator, answer, [kc.asarray(v) for v in shaped]


def _stored_answer(case: Case, statistics: Any, vectors: np.ndarray) -> Answer:
    """Return the reference of the sums as they are stored."""
    sides = []
    for side in ("input", "output"):
        average = statistics.averages[side]
        sums = kc.to_numpy(average.sum.array).astype(np.float64)
        lower = np.tril(sums) + np.tril(sums, -1).T
        weight = mp.mpf(float(kc.to_numpy(average.weight)))
        sides.append(references.decomposed(references.exact(lower) / weight))
    return _damped(*sides, mp.mpf(1), KINDS[case.kind].rule, case.damping, vectors)
