"""Every approximation, damping rule and dtype over ranks, scales and dampings.

Each case asks a damped block for its products, and compares these with 120 digits:

right
    ``|f(F) v - computed| <= C u kappa |f(F)| |v|`` with f the product, the inverse, the
    root of the inverse, the Cholesky factor or its inverse; u the roundoff of the
    narrowest dtype; kappa the condition number of the damped block; C = 64; at most 0.05.
    For the product kappa is 1.  A block that is applied by parts (`Series`,
    `BlockTridiagonal`) has the condition number of these parts.  A sample is right where
    the root of the inverse that makes it is; the log-determinant if it is off by no more
    than all its eigenvalues may be, and the roundoff of the logarithms that it sums.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import kfac_core as kc

from . import references
from .kinds import GRADED, KINDS, LARGEST_RANK, SPECTRA, STORED, stored
from .references import Answer, Curvature

C = 64.0
CAP = 0.05
SUMMED = kc.Conventions(reduction="sum", sources="sum")

RANKS = (0, 1, 4, 20)
SCALES = (1.0, 1e-8, 1e7)
DAMPINGS = (1e-40, 1e-14, 1e-10, 1e-6, 1e-3, 1.0, 1e30)

PRECISIONS = {
    "float64": ("float64", kc.Precision()),
    "float32": ("float32", kc.Precision()),
    "float32, computed in float64": ("float32", kc.Precision(compute="float64")),
    "float64, applied in float32": ("float64", kc.Precision(apply="float32")),
}
VERDICTS = ("right", "refused", "silently wrong")


@dataclass(frozen=True)
class Case:
    """A point of the grid."""

    kind: str
    rule: Any
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
    ranks: Iterable[int] = (*RANKS, GRADED, *SPECTRA),
    scales: Iterable[float] = SCALES,
    dampings: Iterable[float] = DAMPINGS,
) -> Iterator[Case]:
    """Yield the points of the grid."""
    for kind in kinds:
        points = itertools.product(
            KINDS[kind].rules, precisions, checks, ranks, scales, dampings
        )
        for point in points:
            case = Case(kind, *point)
            if case.rank != GRADED or kind in STORED:
                yield case


def verdict(case: Case, backend: str) -> tuple[str, str]:
    """Return ``"right"``, ``"refused"`` or ``"silently wrong"``, and what was found."""
    with np.errstate(all="ignore"):
        try:
            operator = operator_of(case, backend)
        except kc.KFACError as error:
            return "refused", str(error)
        if case.check == "status" and int(operator.status()):
            return "refused", "status"
        return judged(case, operator, answer_of(case, backend), vector_dtype(case))


def judged(case: Case, operator: Any, answer: Answer, dtype: str) -> tuple[str, str]:
    """Return the verdict on an operator, and what was found."""
    if case.check == "status" and int(operator.status()):
        return "refused", "status"
    if answer.singular:
        return "silently wrong", "a singular block was inverted"
    limits = limits_of(case, answer)
    refused = ""
    shape, together = KINDS[case.kind].shape, case.check == "raise"
    for name, error in errors_of(operator, answer, dtype, shape, together=together):
        try:
            worst = error(limits[name])
        except kc.UnsupportedError:
            continue
        except kc.KFACError as told:
            refused = f"{name}: {told}"
            continue
        if not worst <= limits[name]:
            return (
                "silently wrong",
                f"{name}: off by {worst:.1e} (limit {limits[name]:.1e})",
            )
    return ("refused", refused) if refused else ("right", "")


def limits_of(case: Case, answer: Answer) -> dict[str, float]:
    """Return the largest error of each product, relative to ``|f(F)| |v|``."""
    dtype, precision = PRECISIONS[case.precision]
    widths = (dtype, precision.compute or dtype, precision.apply or dtype)
    roundoff = max(float(np.finfo(name).eps) for name in widths)
    condition, of_product = answer.condition, 1.0
    if KINDS[case.kind].by_parts:
        condition = of_product = max(condition, answer.parts)
    limit = max(C * roundoff, min(C * roundoff * condition, CAP))
    names = ("multiply_inverse", "multiply_matpower", "sample")
    found = dict.fromkeys(names, limit)
    found["multiply"] = max(C * roundoff, min(C * roundoff * of_product, CAP))
    found["multiply_cholesky"] = found["multiply_cholesky_inverse"] = limit
    found["logdet"] = len(answer.covariance) * limit + C * roundoff * answer.logs
    if KINDS[case.kind].by_samples:
        # K has more rows than F where its smallest eigenvalues are N times the damping.
        of_gram = min(C * roundoff * answer.norm / case.damping, CAP)
        found["logdet"] += len(answer.covariance) * of_gram
    return found


def errors_of(
    operator: Any,
    answer: Answer,
    dtype: str,
    shape: tuple[int, int],
    *,
    together: bool = False,
) -> Iterator[tuple[str, Callable[[float], float]]]:
    """Yield the products by name, each with a function that returns its error.

    Vectors are multiplied one by one, or all together.
    """
    vectors = answer.vectors
    inverse_root = math.sqrt(answer.inverse_norm)

    def images(product: Callable[[Any], Any], given: np.ndarray) -> np.ndarray:
        many = given.reshape(-1, *shape).astype(dtype)
        found = [
            kc.to_numpy(product(kc.asarray(v))) for v in ([many] if together else many)
        ]
        return np.stack(found).reshape(given.shape).astype(np.float64)

    def error(got: np.ndarray, expected: np.ndarray, norm: float) -> float:
        sizes = np.linalg.norm(vectors.astype(np.float64), axis=1)
        # Below the range of normal numbers there are only multiples of the smallest one.
        unit = np.finfo(dtype).smallest_subnormal * math.sqrt(vectors.shape[-1])
        wrong = np.linalg.norm(got - expected, axis=1)
        return float(np.max(np.where(wrong <= unit, 0.0, wrong) / (norm * sizes)))

    def of(name: str, expected: np.ndarray, norm: float, *arguments: Any) -> Any:
        def found(limit: float) -> float:
            product = getattr(operator, name)
            got = images(lambda v: product(v, *arguments), vectors)
            return error(got, expected, norm)

        return name, found

    def sample(limit: float) -> float:
        """Return the error of the root X of the inverse, or of ``X X^T``."""
        got = images(operator.sample, vectors)
        roots = (answer.root, answer.lower_adjoint)
        best = min(error(got, root, inverse_root) for root in roots)
        if best <= limit:
            return best
        X = images(operator.sample, np.eye(vectors.shape[-1]))
        wrong = np.linalg.norm(X.T @ X - answer.covariance, 2) / answer.inverse_norm
        return float(wrong) / 2.0

    def logdet(limit: float) -> float:
        return abs(float(operator.logdet()) - answer.logdet)

    yield of("multiply", answer.product, answer.norm)
    yield of("multiply_inverse", answer.inverse, answer.inverse_norm)
    yield of("multiply_matpower", answer.root, inverse_root, -0.5)
    yield "sample", sample
    yield "logdet", logdet
    yield of("multiply_cholesky", answer.lower, math.sqrt(answer.norm))
    yield of("multiply_cholesky_inverse", answer.lower_inverse, inverse_root)


def table(found: Mapping[Case, str]) -> list[tuple[str, ...]]:
    """Return the counts by approximation and dtype, with a header and a total."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for case, result in found.items():
        counts.setdefault((case.kind, case.precision), Counter())[result] += 1
    rows = [("approximation", "dtype", "cases", *VERDICTS)]
    for (kind, precision), count in counts.items():
        rows.append((kind, precision, *_numbers(count)))
    return [*rows, ("all", "", *_numbers(Counter(found.values())))]


def _numbers(count: Counter[str]) -> tuple[str, ...]:
    return (str(count.total()), *(str(count[verdict]) for verdict in VERDICTS))


@functools.cache
def _rows(kind: str, rank: int, scale: float, dtype: str) -> dict[str, np.ndarray]:
    """Return the rows of a block, exact in their dtype."""
    count = LARGEST_RANK if rank in SPECTRA else rank
    drawn = KINDS[kind].draw(np.random.default_rng(17), count if count else 2)
    if rank in SPECTRA:
        drawn = {
            name: SPECTRA[rank](rows) if name.startswith("x") else rows
            for name, rows in drawn.items()
        }
    if rank == 0:
        drawn = {name: np.zeros_like(rows) for name, rows in drawn.items()}
    return {name: (scale * rows).astype(dtype) for name, rows in drawn.items()}


@functools.cache
def _curvature(kind: str, rank: int, scale: float, dtype: str) -> Curvature:
    return KINDS[kind].curvature(_rows(kind, rank, scale, dtype))


@functools.cache
def _answer(
    kind: str, rule: str, rank: int, scale: float, dtype: str, damping: float
) -> Answer:
    curvature = _curvature(kind, rank, scale, dtype)
    return references.answer(curvature, rule, damping, _vectors(kind))


@functools.cache
def _vectors(kind: str) -> np.ndarray:
    """Return two random vectors."""
    n, m = KINDS[kind].shape
    vectors: np.ndarray = np.random.default_rng(18).normal(size=(2, n * m))
    return vectors.astype(np.float32)


@functools.cache
def _statistics(kind: str, rank: int, scale: float, dtype: str, backend: str) -> Any:
    """Return the statistics of a block after one update."""
    block = KINDS[kind].block
    rows = _rows(kind, rank, scale, dtype)
    batch: Any = KINDS[kind].batch({k: kc.asarray(x) for k, x in rows.items()})
    like = kc.asarray(next(iter(rows.values())))
    statistics = kc.update_block(
        block,
        block.initial(like),
        batch,
        kc.UpdateOptions(conventions=SUMMED, decay=0.0, weight=1.0),
    )
    if block.approximation.has_bases:
        statistics = kc.rebase_block(block, statistics, "kronecker")
    return statistics


def statistics_of(case: Case, backend: str) -> Any:
    """Return the statistics of a case."""
    dtype, _ = PRECISIONS[case.precision]
    return _statistics(case.kind, case.rank, case.scale, dtype, backend)


def answer_of(case: Case, backend: str) -> Answer:
    """Return the reference of a case."""
    if case.rank == GRADED:
        curvature = stored(statistics_of(case, backend))
        vectors = _vectors(case.kind)
        return references.answer(curvature, case.rule, case.damping, vectors)
    dtype, _ = PRECISIONS[case.precision]
    rows = (case.rank, case.scale, dtype)
    return _answer(case.kind, case.rule, *rows, case.damping)


def vector_dtype(case: Case) -> str:
    """Return the dtype of the vectors of a case."""
    dtype, precision = PRECISIONS[case.precision]
    return "float64" if "float64" in (dtype, precision.apply) else "float32"


def factorizations(case: Case) -> tuple[Any, ...]:
    """Return what is prepared; with ``check="raise"`` the rest is made when asked for."""
    if case.check == "raise":
        return ("inverse", "eigenbasis")
    unsupported = KINDS[case.kind].block.approximation.unsupported_products
    made = ("inverse", "eigenbasis", "cholesky")
    return made[:2] if "multiply_cholesky" in unsupported else made


class BySamples:
    """The operator of the space of samples, of one layer with the matrix "weight".

    Parameters
    ----------
    case : Case
        A case of the kind "SampleCurvature".
    """

    def __init__(self, case: Case) -> None:
        dtype, _ = PRECISIONS[case.precision]
        rows = _rows(case.kind, case.rank, case.scale, dtype)
        layer = KINDS[case.kind].block.layer
        batch = KINDS[case.kind].batch({k: kc.asarray(x) for k, x in rows.items()})
        self.curvature = kc.samples.sample_curvature(
            kc.samples.Jacobian.of({"a": layer}, {"a": batch}),
            damping=case.damping,
            check=case.check,
        )
        self.logdet, self.status = self.curvature.logdet, self.curvature.status

    def multiply(self, v: Any) -> Any:
        """Return the product with one matrix, or each of a stack."""
        return self._of_each(self.curvature.multiply, v)

    def multiply_inverse(self, v: Any) -> Any:
        """Return that of the inverse."""
        return self._of_each(self.curvature.multiply_inverse, v)

    def _of_each(self, product: Any, v: Any) -> Any:
        if v.ndim == 2:
            return product({"a": {"weight": v}})["a"]["weight"]
        images = [self._of_each(product, v[i, ...]) for i in range(v.shape[0])]
        return kc.asarray(np.stack([kc.to_numpy(image) for image in images]))

    def __getattr__(self, name: str) -> Any:
        raise kc.UnsupportedError(name)


def operator_of(case: Case, backend: str) -> Any:
    """Return the operator of a case."""
    _, precision = PRECISIONS[case.precision]
    if KINDS[case.kind].by_samples:
        return BySamples(case)
    return kc.operator_of(
        KINDS[case.kind].block,
        statistics_of(case, backend),
        kc.RefreshOptions(
            damping=case.damping,
            rule=case.rule,
            factorizations=factorizations(case),
            check=case.check,
            precision=precision,
        ),
    )
