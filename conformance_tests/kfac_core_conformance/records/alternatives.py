"""Which other convention gives a wrong answer: it is tried, one after the other.

A damped answer is not proportional to a factor, so that its ratio to the right one says
nothing.  But most wrong answers are right ones of a slightly different problem: output
gradients of the mean loss, a factor that is a sum over examples, another damping rule, a
damping that was not divided by the number of shared positions.  Each is recomputed, and
named if it gives the answer of the record.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import get_args

import msgspec
import numpy as np

from kfac_core.damping import DampingRule
from kfac_core.errors import KFACError
from kfac_core_conformance.records.answers import (
    Answer,
    Place,
    Recomputation,
    damping_key,
)
from kfac_core_conformance.records.diagnosis import CLOSE, distance
from kfac_core_conformance.records.record import Record, Seen

_FAILURES = (KFACError, ArithmeticError, RuntimeError, np.linalg.LinAlgError)


@dataclass(frozen=True)
class _Change:
    """A problem that differs from the record's in one convention."""

    says: str
    gradients: float = 1.0  # what output gradients are multiplied by
    damping: float | None = None
    rule: DampingRule | None = None
    answers: float = 1.0  # what its answer is multiplied by


def alternative(
    record: Record, name: str, index: int, place: Place, expected: Answer, /
) -> str | None:
    """Name the convention by which a damped answer of a record can be computed.

    Parameters
    ----------
    record : Record
        The record.
    name : str
        The block.
    index : int
        The number of the check, which needs a damping.
    place : Place
        Backend, device and dtype.
    expected : mapping of str to numpy.ndarray
        The answer in the record.

    Returns
    -------
    str or None
        One sentence, or None if no change of one convention gives the answer.
    """
    check = record.document.checks[index]
    recorded = record.blocks[name]
    # The split has shifts of the factors, which the exact rule does not have.
    if not check.needs_damping or check.tag() == "damping_split":
        return None
    if sum(part.size for part in expected.values()) < 2:
        return None
    damping, rule = damping_key(check)
    for change in _changes(recorded.updates, damping, rule):
        checks = list(record.document.checks)
        checks[index] = msgspec.structs.replace(
            check,
            damping=damping if change.damping is None else change.damping,
            damping_rule=change.rule or rule,
        )
        updates = tuple(_scaled(seen, change.gradients) for seen in recorded.updates)
        changed = replace(
            record,
            document=msgspec.structs.replace(record.document, checks=tuple(checks)),
            blocks={name: replace(recorded, updates=updates)},
        )
        with contextlib.suppress(*_FAILURES), np.errstate(all="ignore"):
            got = Recomputation(changed, name, place).answer(index)
            if distance(got, expected, change.answers) < CLOSE:
                return f"the record's answer is ours {change.says}"
    return None


def _changes(
    updates: tuple[Seen, ...], damping: float, rule: DampingRule
) -> Iterator[_Change]:
    """Return what is tried, the commonest defects first."""
    examples = {seen.batch_size for seen in updates}
    N = examples.pop() if len(examples) == 1 else 1
    if N > 1:
        yield _Change(
            f"with output gradients of a mean loss: multiply them by N = {N}", 1 / N
        )
        yield _Change(
            f"with output gradients that are N = {N} times too large", float(N)
        )
        root = math.sqrt(N)
        yield _Change(
            f"with one factor a sum: divide it by N = {N}, its examples", root
        )
        yield _Change(
            f"with one factor divided by N = {N} once more than the format does",
            1 / root,
        )
    for other in get_args(DampingRule):
        if other != rule:
            yield _Change(f'with damping_rule="{other}"', rule=other)
    yield _Change(
        "with the damping added to each factor: the rule adds its square root",
        damping=damping**2,
        rule="factored_unit_pi",
    )
    yield _Change("without damping", damping=0.0)
    S = _positions(updates)
    if S > 1:
        yield _Change(
            f"with a block that lacks the factor S = {S}, the shared positions",
            damping=damping * S,
            answers=float(S),
        )
        yield _Change(
            f"with a damping that was not divided by S = {S}, the shared positions",
            damping=damping * S,
        )


def _positions(updates: tuple[Seen, ...]) -> int:
    """Return the number of shared positions of an example; 1 where it is not one."""
    numbers = set()
    for seen in updates:
        if seen.output_grads is None or seen.mask is not None:
            return 1
        numbers.add(math.prod(seen.output_grads.shape[2:-1]))
    return numbers.pop() if len(numbers) == 1 else 1


def _scaled(seen: Seen, scale: float) -> Seen:
    if scale == 1.0:
        return seen
    grads = None if seen.output_grads is None else seen.output_grads * scale
    gradients = {name: part * scale for name, part in seen.gradients.items()}
    return replace(seen, output_grads=grads, gradients=gradients)
