"""Reports of each block: condition, damping, residual check and age.

Conventions.  A condition number is of a damped matrix: exact from an eigenbasis or a
diagonal, in the 1-norm from an inverse, and otherwise the estimate of
`kfac_core.linalg.condition`, which is a lower bound, seldom by more than a factor of
three.  A residual is relative; see `kfac_core.linalg.certificate`.  A block whose factors
were not kept has the product of their conditions, and the sum of their residuals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import array_api_compat

from kfac_core import errors
from kfac_core.array import Array, Namespace
from kfac_core.array import namespaces as ns
from kfac_core.block import Block
from kfac_core.factors.factor import Damped
from kfac_core.linalg.certificate import probe
from kfac_core.linalg.condition import Product, estimated_norm, measured_residual
from kfac_core.linalg.diagonal import DampedDiagonal
from kfac_core.linalg.factorizations import Eigendecomposition
from kfac_core.linalg.fallback import fallback_of
from kfac_core.linalg.rank_one import DampedRankOne
from kfac_core.operators.operator import CurvatureOperator
from kfac_core.state import BlockState

__all__ = ["BlockReport", "FactorReport", "Report", "report_of"]


@dataclass(frozen=True)
class FactorReport:
    """One damped factor of an operator, or one basis of it.

    Attributes
    ----------
    size : int
        Number of rows.
    shift : float
        Shift of the diagonal by the damping; the largest, of a stack.  Zero if the
        damping is added to the block instead.
    condition : float or None
        Condition number of the damped factor; None where nothing was prepared, and of a
        basis.
    residual : float or None
        The relative residual of its factorization.
    fallback : str or None
        The name of the fallback by which it was made; ``"working"`` without one.
    clipped : float
        The sum of negative eigenvalues that were set to zero.
    uncertain : int or None
        How many eigenvalues are below the roundoff of storage, and were raised to it; None
        without an eigendecomposition.
    """

    size: int
    shift: float
    condition: float | None
    residual: float | None
    fallback: str | None
    clipped: float
    uncertain: int | None = None


@dataclass(frozen=True)
class BlockReport:
    """One block of an estimator.

    Attributes
    ----------
    layer, approximation : str
        Kind of layer, and name of the approximation.
    updates, age, failures : int
        See `BlockState`.
    basis_age : int or None
        How many updates came after the bases were computed; None without bases.
    damping : float or None
        The damping of its operator.
    condition : float or None
        Estimated condition number of the damped block; None before the first refresh.
    residual : float or None
        ``|F F^-1 z - z| / |z|`` of the damped block, for a fixed probe z; None where
        there is no inverse, and where `condition` is None.
    factors : dict of str to FactorReport
        Reports by side; empty before the first refresh, and where a block has no factors.
    """

    layer: str
    approximation: str
    updates: int
    age: int
    failures: int
    basis_age: int | None
    damping: float | None
    condition: float | None
    residual: float | None
    factors: dict[str, FactorReport]


class Report(dict[str, BlockReport]):
    """The reports of a network's blocks, by name; ``print`` shows a table."""

    def __str__(self) -> str:
        head = ("block", "kind", "updates", "age", "damping", "condition", "residual")
        rows: list[tuple[str, ...]] = [head]
        for name, block in self.items():
            numbers = (block.damping, block.condition, block.residual)
            cells = ["" if x is None else f"{x:.1e}" for x in numbers]
            kind = f"{block.layer}, {block.approximation}"
            rows.append((name, kind, str(block.updates), str(block.age), *cells))
        return "\n".join(aligned(rows))

    __repr__ = __str__


def aligned(rows: Sequence[tuple[str, ...]], /) -> list[str]:
    """Return the lines of a table, with each column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def report_of(block: Block, state: BlockState, /) -> BlockReport:
    """Return the report of one block; this synchronizes with the device.

    Parameters
    ----------
    block : Block
        Description of the block.
    state : BlockState
        State of the block.

    Returns
    -------
    BlockReport
        Plain numbers.

    Notes
    -----
    About a dozen products with the block and as many with its inverse, which is made
    for it where it was not prepared.
    """
    operator = state.operator
    factors: dict[str, FactorReport] = {}
    parts = {} if operator is None else operator.parts()
    for side, part in parts.items():
        if isinstance(part, Eigendecomposition):
            factors[side] = _basis(part)
        else:
            factors[side] = _factor(part)
    if operator is not None and state.statistics is not None:
        bases = state.statistics.bases.items()
        factors |= {side: _basis(basis) for side, basis in bases}
    # Without the matrices there is no product, only the reports of the factors.
    known = operator is None or "multiply" not in operator.unsupported_products
    condition, residual = _of_block(operator) if known else _of_factors(factors)
    return BlockReport(
        block.layer.kind,
        block.approximation.name,
        int(state.updates),
        int(state.age),
        int(state.failures),
        int(state.basis_age) if int(state.basis_age) >= 0 else None,
        None if state.damping is None else float(state.damping),
        condition,
        residual,
        factors,
    )


def _of_block(operator: CurvatureOperator | None) -> tuple[float | None, float | None]:
    """Return the condition and the residual of a damped block, by its products."""
    if operator is None:
        return None, None
    try:
        prepared = operator.prepared("inverse")
    except errors.FactorizationError:
        # Nothing was prepared at the refresh, and the inverse does not exist.
        return float("inf"), None
    like = prepared.trace()
    xp = array_api_compat.array_namespace(like)
    if bool(prepared.status() != 0):
        return float("nan"), float("inf")
    n, m = prepared.vector_shape
    # What is applied is the inverse of the whole block, in the dtype of application; small
    # residuals of both factors do not bound its residual.
    z = probe(n * m, dtype=like.dtype, device=ns.device_of(like), xp=xp)
    z = xp.reshape(z, (n, m))
    return (
        _estimated_condition(prepared.multiply, prepared.multiply_inverse, z, xp),
        measured_residual(prepared.multiply, prepared.multiply_inverse, z, xp=xp),
    )


def _of_factors(factors: dict[str, FactorReport]) -> tuple[float | None, float | None]:
    """Return the condition and the residual of a Kronecker product, by its factors."""
    conditions = [part.condition or 1.0 for part in factors.values()]
    # The condition number of a Kronecker product is the product of its factors'; to
    # first order their relative errors add up.
    return math.prod(conditions), sum(part.residual or 0.0 for part in factors.values())


def _estimated_condition(
    product: Product, inverse: Product, z: Array, xp: Namespace
) -> float:
    shape = tuple(z.shape)
    norms = [estimated_norm(f, z, shape=shape, xp=xp) for f in (product, inverse)]
    return norms[0] * norms[1]


def _basis(basis: Eigendecomposition) -> FactorReport:
    xp = array_api_compat.array_namespace(basis.eigenvalues)
    size = int(basis.eigenvalues.shape[-1])
    residual, clipped = float(xp.max(basis.residual)), float(xp.max(basis.clipped))
    fallback = fallback_of(basis).name.lower()
    uncertain = _uncertain(basis, xp)
    return FactorReport(size, 0.0, None, residual, fallback, clipped, uncertain)


def _uncertain(basis: Eigendecomposition, xp: Namespace) -> int:
    """Return the number of eigenvalues that may be roundoff alone."""
    # `settled_eigenvalues` raised these to half of their error.
    raised = (basis.eigenvalues > 0) & (basis.eigenvalues <= 0.5 * basis.error)
    return int(xp.sum(xp.astype(raised, xp.int32)))


def _factor(part: Damped) -> FactorReport:
    xp = array_api_compat.array_namespace(part.shift)
    shift = float(xp.max(part.shift))
    if isinstance(part, DampedRankOne):
        return _rank_one(part, shift, xp)
    if isinstance(part, DampedDiagonal):
        condition = _spread(part.eigenvalues(shifted=True), xp)
        return FactorReport(part.size, shift, condition, 0.0, "working", 0.0)
    factorization = part.inverse or part.cholesky or part.basis
    if factorization is None:
        return FactorReport(part.size, shift, None, None, None, 0.0)
    return FactorReport(
        part.size,
        shift,
        float(xp.max(part.condition())),
        float(xp.max(factorization.residual)),
        fallback_of(factorization).name.lower(),
        float(xp.max(factorization.clipped)),
        None if part.basis is None else _uncertain(part.basis, xp),
    )


def _rank_one(part: DampedRankOne, shift: float, xp: Namespace) -> FactorReport:
    """Return the report of equal blocks and one vector, whose products are cheap."""
    block = _factor(part.block)
    if block.residual is None:
        return FactorReport(part.size, shift, None, None, None, 0.0)
    z = probe(part.size, dtype=part.dtype, device=ns.device_of(part.shift), xp=xp)

    def product(v: Array) -> Array:
        return part.multiply(v, shifted=True)

    return FactorReport(
        part.size,
        shift,
        _estimated_condition(product, part.solve, z, xp),
        measured_residual(product, part.solve, z, xp=xp),
        block.fallback,
        block.clipped,
    )


def _spread(eigenvalues: Array, xp: Namespace) -> float:
    """Return the largest over the smallest eigenvalue, of the worst of a stack."""
    smallest, largest = xp.min(eigenvalues, axis=-1), xp.max(eigenvalues, axis=-1)
    worst = float(xp.min(smallest))
    return float(xp.max(largest / smallest)) if worst > 0 else float("inf")
