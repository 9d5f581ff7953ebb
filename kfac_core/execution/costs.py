"""Costs of a block's stages, by which blocks are divided among processes.

Conventions.  Costs are in flops of a matrix product: an operation of c flops at a rate r,
relative to that of a matrix product on the same machine, costs ``c / r``.  For a damped
factor of n rows that is applied to k columns at each step,

=====================  ==================================  ====================
way of solving         at a refresh                        at a step
=====================  ==================================  ====================
explicit inverse       ``n^3/3 / potrf + 2n^3/3 / potri``  ``2 n^2 k / symm``
triangular solves      ``n^3/3 / potrf``                   ``2 n^2 k / trsm``
eigenbasis             ``9 n^3``                           ``4 n^2 k``
=====================  ==================================  ====================

The rates were measured in float32 on one core with OpenBLAS, at 500 to 3000 rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kfac_core.block import Block

SYRK, POTRF, POTRI, SYMM, TRSM = 0.85, 0.65, 0.55, 0.95, 0.65
"""Rates relative to a matrix product of the same sizes."""


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


def block_costs(block: Block, /) -> BlockCosts | None:
    """Return the costs of a block's stages; None if it declares no full factors.

    Parameters
    ----------
    block : Block
        Description of the block.

    Returns
    -------
    BlockCosts or None
        Costs in flops; None if the approximation declares no full factors.
    """
    shapes = block.approximation.factor_shapes(block.layer).values()
    if not shapes:
        return None
    groups = block.layer.groups
    # Flops over the share of peak speed that each routine reaches: POTRF n^3/3, POTRI
    # 2n^3/3, SYEV about 9n^3.
    cubes = float(sum(n**3 for n, _ in shapes))
    uses = float(sum(2 * n**2 * k for n, k in shapes))
    factor = cubes / 3 / POTRF
    refresh = {
        "inverse": factor + 2 * cubes / 3 / POTRI,
        "triangular": factor,
        "eigenbasis": 9 * cubes,
    }
    precondition = {
        "inverse": uses / SYMM,
        "triangular": uses / TRSM,
        "eigenbasis": 2 * uses,
    }
    return BlockCosts(
        tuple(n for n, _ in shapes),
        groups,
        groups * sum(n**2 for n, _ in shapes) / SYRK,
        {way: groups * cost for way, cost in refresh.items()},
        {way: groups * cost for way, cost in precondition.items()},
    )
