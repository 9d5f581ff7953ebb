"""What there is to say of each block: condition, damping, certificate and age."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import array_api_compat

from kfac_core.backend import Array, Namespace
from kfac_core.block import Block
from kfac_core.block_state import BlockState
from kfac_core.linalg.shifted import ShiftedMatrix
from kfac_core.linalg.shifted_diagonal import ShiftedDiagonal

__all__ = ["BlockReport", "FactorReport", "report_of"]


@dataclass(frozen=True)
class FactorReport:
    """One damped factor of an operator.

    Attributes
    ----------
    size : int
        Its number of rows.
    shift : float
        What the damping added to its diagonal; the largest, of a stack.
    condition : float or None
        Of the damped factor: exact from an eigenbasis or a diagonal, in the 1-norm
        from an inverse; None where nothing was prepared.
    residual : float or None
        The certificate of its factorization.
    rung : str or None
        The rung of the ladder on which it was made.
    clipped : float
        The sum of negative eigenvalues that were set to zero.
    """

    size: int
    shift: float
    condition: float | None
    residual: float | None
    rung: str | None
    clipped: float


@dataclass(frozen=True)
class BlockReport:
    """One block of an estimator.

    Attributes
    ----------
    layer, approximation : str
        What it is.
    updates, age, failures : int
        As in `BlockState`.
    damping : float or None
        The damping of its operator.
    factors : dict of str to FactorReport
        By side; empty before the first refresh.
    """

    layer: str
    approximation: str
    updates: int
    age: int
    failures: int
    damping: float | None
    factors: dict[str, FactorReport]


def report_of(block: Block, state: BlockState, /) -> BlockReport:
    """Return the report of one block; this waits for its device.

    Parameters
    ----------
    block : Block
        Its description.
    state : BlockState
        What the estimator holds for it.

    Returns
    -------
    BlockReport
        Plain numbers.
    """
    operator: Any = state.operator
    factors: dict[str, FactorReport] = {}
    parts = {s: getattr(operator, s, None) for s in ("input", "output", "block")}
    for side, part in (parts | getattr(operator, "factors", {})).items():
        if isinstance(part, ShiftedMatrix | ShiftedDiagonal):
            factors[side] = _factor(part)
    return BlockReport(
        block.layer.kind,
        block.approximation.name,
        state.updates,
        state.age,
        state.failures,
        None if state.damping is None else float(state.damping),
        factors,
    )


def _factor(part: ShiftedMatrix | ShiftedDiagonal) -> FactorReport:
    xp = array_api_compat.array_namespace(part.shift)
    shift = float(xp.max(part.shift))
    if isinstance(part, ShiftedDiagonal):
        condition = _spread(part.eigenvalues(shifted=True), xp)
        return FactorReport(part.size, shift, condition, 0.0, "working", 0.0)
    made = part.inverse or part.positive or part.basis
    if made is None:
        return FactorReport(part.size, shift, None, None, None, 0.0)
    return FactorReport(
        part.size,
        shift,
        _condition(part, xp),
        float(xp.max(made.residual)),
        made.rung,
        float(xp.max(made.clipped)),
    )


def _condition(part: ShiftedMatrix, xp: Namespace) -> float | None:
    if part.basis is not None:
        return _spread(part.eigenvalues(shifted=True), xp)
    if part.inverse is None:
        return None
    norms = [
        xp.max(xp.sum(xp.abs(matrix), axis=-2), axis=-1)
        for matrix in (part.dense(shifted=True), part.inverse.matrix.full())
    ]
    return float(xp.max(norms[0] * norms[1]))


def _spread(eigenvalues: Array, xp: Namespace) -> float:
    """Return the largest over the smallest eigenvalue, of the worst of a stack."""
    smallest, largest = xp.min(eigenvalues, axis=-1), xp.max(eigenvalues, axis=-1)
    worst = float(xp.min(smallest))
    return float(xp.max(largest / smallest)) if worst > 0 else float("inf")
