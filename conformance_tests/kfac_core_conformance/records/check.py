"""Verifying a record: every check is recomputed and compared.

An answer agrees if ``|got - expected| <= rtol |expected| + atol`` in the
Frobenius norm, a vector's parameters taken together.  In float64 the tolerance is the
record's.  In float32 it is at least 1e-4, or the bound of
`kfac_core_conformance.records.condition` if the problem is ill-conditioned.  A check that
the library cannot answer differs, with the reason.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kfac_core.array.selection import selected_backend
from kfac_core.errors import KFACError, ShapeError
from kfac_core_conformance.records.alternatives import alternative
from kfac_core_conformance.records.answers import (
    Answer,
    Place,
    Recomputation,
    damping_key,
    sample_answers,
)
from kfac_core_conformance.records.checks import Check
from kfac_core_conformance.records.condition import condition_bound
from kfac_core_conformance.records.diagnosis import diagnosis
from kfac_core_conformance.records.record import Record, norm_of
from kfac_core_conformance.records.samples import condition_of
from kfac_core_conformance.records.text import one_line

CheckDtype = Literal["float64", "float32"]

DOUBLE_TOLERANCE, SINGLE_TOLERANCE = 1e-10, 1e-4
"""The default tolerances, by the dtype of the expected answer."""

# Exceptions of this library and of array libraries that fail one check only.
_FAILURES = (
    KFACError,
    ArithmeticError,
    MemoryError,
    RuntimeError,
    np.linalg.LinAlgError,
)


@dataclass(frozen=True)
class Verdict:
    """The result of one check.

    Attributes
    ----------
    index : int
        The number of the check in its record.
    block, operation, detail : str
        The block, the operation, and the operation's own fields.
    damping, rule : float or None, str or None
        The damping of the block; None if the answer does not depend on it.
    error : float
        ``|got - expected| / |expected|``, or the absolute error if ``|expected|`` is zero;
        infinite if there is no finite answer.
    tolerance : float
        The largest error that agrees.
    problem : str or None
        Why there is no answer.
    diagnosis : str or None
        What explains a difference, such as a factor of N.
    """

    index: int
    block: str
    operation: str
    detail: str
    damping: float | None
    rule: str | None
    error: float
    tolerance: float
    problem: str | None
    diagnosis: str | None = None

    @property
    def agrees(self) -> bool:
        """Whether the error is within the tolerance."""
        return self.problem is None and self.error <= self.tolerance


def check_record(
    record: Record,
    /,
    *,
    backend: str | None = None,
    dtype: CheckDtype = "float64",
) -> tuple[Verdict, ...]:
    """Recompute every check of a record.

    Parameters
    ----------
    record : Record
        The result of `kfac_core_conformance.records.read_record`.
    backend : str, optional
        ``name[:device]``; by default the selected backend.
    dtype : {"float64", "float32"}
        The dtype of the computation.

    Returns
    -------
    tuple of Verdict
        One for each check, in the document's order.

    Raises
    ------
    UnknownBackendError, BackendUnavailableError
        As `kfac_core.array.selected_backend`.
    DtypeError
        If 64-bit floats are disabled in the backend; see `kfac_core.enable_float64`.
    """
    place = Place(selected_backend(backend), dtype)
    # A backend without 64-bit floats is an error of the call, not of a check.
    place.floats(np.zeros(()))
    verdicts: dict[int, Verdict] = {}
    for name, asked in record.document.checks_by_block().items():
        verdicts.update(_check_block(record, name, asked, place))
    of_checks = tuple(verdicts[index] for index in sorted(verdicts))
    return of_checks + _check_samples(record, place)


def _check_samples(record: Record, place: Place) -> tuple[Verdict, ...]:
    """Return the verdicts on the Gram matrix and the direction of all blocks together."""
    samples = record.samples
    if samples is None:
        return ()
    expected: dict[str, Answer] = {
        "gram": {"": samples.gram},
        "direction": {
            f"{block}.{key}": x
            for block, vector in samples.direction.items()
            for key, x in vector.items()
        },
    }
    problem, got = None, None
    try:
        got = sample_answers(record, place)
    except _FAILURES as failure:
        problem = one_line(f"{failure}" or type(failure).__name__)
    verdicts: list[Verdict] = []
    for name, answer in expected.items():
        tolerance = DOUBLE_TOLERANCE
        if place.dtype == "float32":
            roundoff = float(np.finfo(np.float32).eps)
            condition = condition_of(samples) if name == "direction" else 1.0
            tolerance = max(SINGLE_TOLERANCE, roundoff * condition)
        verdicts.append(
            Verdict(
                len(record.document.checks) + len(verdicts),
                "all blocks",
                f"samples.{name}",
                "",
                samples.description.damping if name == "direction" else None,
                "exact" if name == "direction" else None,
                math.inf if got is None else _relative_error(got[name], answer),
                tolerance,
                problem,
            )
        )
    return tuple(verdicts)


def _check_block(
    record: Record, name: str, asked: list[int], place: Place
) -> dict[int, Verdict]:
    """Return the verdicts of one block; checks with the same damping share an operator."""
    checks = record.document.checks
    in_rows = sorted(asked, key=lambda i: damping_key(checks[i]))
    recomputation = Recomputation(record, name, place)
    reference = None
    if place.dtype == "float32":
        reference = Recomputation(
            record, name, Place(selected_backend("numpy"), "float64")
        )
    return {index: _verdict(recomputation, reference, index) for index in in_rows}


def _verdict(
    recomputation: Recomputation, reference: Recomputation | None, index: int
) -> Verdict:
    check = recomputation.record.document.checks[index]
    expected = recomputation.record.answers[index]
    problem, error = None, math.inf
    got: Answer | None = None
    try:
        with np.errstate(all="ignore"):
            answer = recomputation.answer(index)
            error = _relative_error(answer, expected)
            got = answer
    except _FAILURES as failure:
        problem = one_line(f"{failure}" or type(failure).__name__)
    damping, rule = damping_key(check) if check.needs_damping else (None, None)
    tolerance = _tolerance(check, expected, reference, index)
    explained = None
    if got is not None and math.isfinite(error) and error > tolerance:
        explained = diagnosis(
            got,
            expected,
            examples=recomputation.recorded.examples,
            factor=check.tag() == "factor",
        ) or alternative(
            recomputation.record,
            recomputation.name,
            index,
            recomputation.place,
            expected,
        )
    return Verdict(
        index,
        check.block,
        check.tag(),
        check.detail,
        damping,
        rule,
        error,
        tolerance,
        problem,
        explained,
    )


def _tolerance(
    check: Check,
    expected: Answer,
    reference: Recomputation | None,
    index: int,
) -> float:
    """Return the largest relative error that agrees; absolute if zero is expected."""
    double = all(values.dtype == np.float64 for values in expected.values())
    default = DOUBLE_TOLERANCE if double else SINGLE_TOLERANCE
    rtol = default if check.rtol is None else check.rtol
    if reference is not None:
        rtol = max(rtol, SINGLE_TOLERANCE)
        # If no bound can be computed, that for well-conditioned problems is used.
        with contextlib.suppress(*_FAILURES), np.errstate(all="ignore"):
            rtol = max(rtol, condition_bound(reference, index))
    scale = norm_of(expected)
    return rtol + check.atol / scale if scale > 0 else check.atol


def _relative_error(got: Answer, expected: Answer) -> float:
    """Return ``|got - expected| / |expected|``; infinite if it is not finite."""
    for name, values in expected.items():
        if got[name].shape != values.shape:
            raise ShapeError(
                f"the answer has shape {got[name].shape}, expected {values.shape}"
            )
    difference = norm_of({n: got[n] - v for n, v in expected.items()})
    if not math.isfinite(difference):
        return math.inf
    scale = norm_of(expected)
    return difference / scale if scale > 0 else difference
