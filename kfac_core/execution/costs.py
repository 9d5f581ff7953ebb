"""Costs of a block's stages, and the cheaper method of solving.

Conventions.  Costs are in flops of a matrix product: an operation of c flops at a rate r,
relative to that of a matrix product on the same machine, costs ``c / r``.  For a damped
factor of n rows that is applied to k columns at each step,

=====================  ==================================  ====================
way of solving         at a refresh                        at a step
=====================  ==================================  ====================
explicit inverse       ``n^3/3 / potrf + 2n^3/3 / potri``  ``2 n^2 k / symm``
triangular solves      ``n^3/3 / potrf``                   ``2 n^2 k / trsm``
eigenbasis             ``9 n^3 / eigh``                    ``4 n^2 k``
=====================  ==================================  ====================

Triangular solves are cheaper while there are fewer steps between refreshes than the
break-even interval, from which an explicit inverse is cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kfac_core.block import Block
from kfac_core.constraints import checked, require_one_of, require_options, validated
from kfac_core.errors import ConventionError
from kfac_core.linalg.factorizations import Solving

__all__ = ["BlockCosts", "CostTable", "Rates", "block_costs", "solving_of"]


@checked
@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of operations, relative to a matrix product of the same sizes.

    The defaults were measured in float32 on one core with OpenBLAS, at 500 to 3000 rows;
    `benchmarks` measures those of a machine.

    Parameters
    ----------
    syrk, potrf, potri, symm, trsm, eigh : float
        Rate of each kernel, positive.

    Raises
    ------
    ConventionError
        For a rate that is not positive.
    """

    syrk: float = 0.85
    potrf: float = 0.65
    potri: float = 0.55
    symm: float = 0.95
    trsm: float = 0.65
    eigh: float = 1.0

    def __post_init__(self) -> None:
        require_options(self)


@dataclass(frozen=True)
class BlockCosts:
    """The costs of one block's stages, in flops of a matrix product.

    Attributes
    ----------
    sizes : tuple of int
        The rows of its full factors, of each group.
    groups : int
        How many there are.
    statistics_per_row : float
        Flops of an update with a symmetric rank-k kernel.
    refresh : dict of {"inverse", "triangular", "eigenbasis"} to float
        Flops by method of solving.
    precondition : dict of {"inverse", "triangular", "eigenbasis"} to float
        Flops by method of solving.
    """

    sizes: tuple[int, ...]
    groups: int
    statistics_per_row: float
    refresh: Mapping[str, float]
    precondition: Mapping[str, float]

    @property
    def break_even(self) -> float:
        """Number of steps between refreshes from which an explicit inverse is cheaper."""
        once = self.refresh["inverse"] - self.refresh["triangular"]
        each = self.precondition["triangular"] - self.precondition["inverse"]
        return once / each if each > 0 else math.inf

    @validated
    def cheaper(self, interval: float, /) -> Solving:
        """Return the cheaper method of solving for a number of steps between refreshes."""
        return "triangular" if interval < self.break_even else "inverse"


@dataclass(frozen=True)
class CostTable:
    """The costs of the blocks of an estimator; ``print`` shows them.

    Attributes
    ----------
    blocks : dict of str to BlockCosts
        Costs by name; blocks whose approximation declares no full factors are left out.
    solving : dict of str to str
        What was chosen for each.
    interval : float or None
        The number of steps that it was chosen for.
    """

    blocks: Mapping[str, BlockCosts]
    solving: Mapping[str, Solving]
    interval: float | None

    def __str__(self) -> str:
        head = ("block", "factors", "statistics", "refresh", "step", "break-even", "")
        rows = [head]
        for name, costs in self.blocks.items():
            way = self.solving[name]
            groups = f"{costs.groups} x " if costs.groups > 1 else ""
            rows.append(
                (
                    name,
                    groups + ", ".join(map(str, costs.sizes)),
                    f"{costs.statistics_per_row:.1e} a row",
                    f"{costs.refresh[way]:.1e}",
                    f"{costs.precondition[way]:.1e}",
                    f"{costs.break_even:.1f} steps",
                    way,
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))
            for row in rows
        ]
        interval = "not given" if self.interval is None else self.interval
        return "\n".join(
            [
                f"Flops of a matrix product; steps between refreshes: {interval}.",
                *(line.rstrip() for line in lines),
            ]
        )


def block_costs(block: Block, rates: Rates, /) -> BlockCosts | None:
    """Return the costs of a block's stages; None if it declares no full factors.

    Parameters
    ----------
    block : Block
        Description of the block.
    rates : Rates
        Rates of the machine.

    Returns
    -------
    BlockCosts or None
        Costs in flops; None if the approximation declares no full factors.
    """
    shapes = block.approximation.factor_shapes(block.layer).values()
    if not shapes:
        return None
    groups = block.layer.groups
    cubes = float(sum(n**3 for n, _ in shapes))
    uses = float(sum(2 * n**2 * k for n, k in shapes))
    factor = cubes / 3 / rates.potrf
    refresh = {
        "inverse": factor + 2 * cubes / 3 / rates.potri,
        "triangular": factor,
        "eigenbasis": 9 * cubes / rates.eigh,
    }
    precondition = {
        "inverse": uses / rates.symm,
        "triangular": uses / rates.trsm,
        "eigenbasis": 2 * uses,
    }
    return BlockCosts(
        tuple(n for n, _ in shapes),
        groups,
        groups * sum(n**2 for n, _ in shapes) / rates.syrk,
        {way: groups * cost for way, cost in refresh.items()},
        {way: groups * cost for way, cost in precondition.items()},
    )


def solving_of(
    costs: BlockCosts | None,
    solving: Literal["inverse", "triangular", "cheaper"],
    interval: float | None,
    /,
) -> Solving:
    """Return how a block is solved.

    Parameters
    ----------
    costs : BlockCosts or None
        Costs of the block.
    solving : {"inverse", "triangular", "cheaper"}
        What was asked for; the last asks `costs`.
    interval : float or None
        The steps between refreshes, for ``"cheaper"``.

    Returns
    -------
    {"inverse", "triangular"}
        ``"inverse"`` for a block without costs.

    Raises
    ------
    ConventionError
        For an unknown way, or ``"cheaper"`` without an interval.
    """
    require_one_of("solving", solving, ("inverse", "triangular", "cheaper"))
    if solving == "cheaper" and interval is None:
        raise ConventionError(
            "solving='cheaper' needs `interval`, the number of steps between refreshes."
        )
    if costs is None or solving == "inverse":
        return "inverse"
    if solving == "triangular" or interval is None:
        return "triangular"
    return costs.cheaper(interval)
