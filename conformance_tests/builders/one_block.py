"""The two stages of a single block, with the options that most tests have."""

from __future__ import annotations

from typing import Any

import kfac_core as kc

SUM = kc.Conventions(reduction="sum", sources="sum")


def learn(
    block: kc.Block,
    batch: Any,
    statistics: Any = None,
    *,
    name: str = "block",
    **options: Any,
) -> Any:
    """Return the statistics after a batch, by default of it alone; all are summed."""
    if statistics is None:
        first = next(iter(batch.values())) if isinstance(batch, dict) else batch
        statistics = block.initial(first.like)
    settings = {"conventions": SUM, "decay": 0.0} | options
    return kc.update_block(
        block, statistics, batch, kc.UpdateOptions(**settings), name=name
    )


def operator_for(
    block: kc.Block, statistics: Any, *, name: str = "block", **options: Any
) -> Any:
    """Return the operator of statistics, by default damped by the factored rule."""
    settings = {"rule": "factored"} | options
    return kc.operator_of(block, statistics, kc.RefreshOptions(**settings), name=name)
