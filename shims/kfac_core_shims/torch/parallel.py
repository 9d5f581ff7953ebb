"""What is refused where a model is on more than one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

import kfac_core as kc

__all__ = ["require_one_process", "require_plain_parameters"]


def require_one_process() -> None:
    """Raise `UnsupportedError` where ``torch.distributed`` has more than one rank.

    Each rank would keep the statistics of its own part of the batch, and the parameters
    of the ranks would drift apart.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    ranks = distributed.get_world_size()
    if ranks > 1:
        raise kc.UnsupportedError(
            f"torch.distributed has {ranks} ranks, and the statistics of one rank are not "
            "reduced over the others: parameters would drift apart. Train on one process."
        )


def require_plain_parameters(model: Any, /) -> None:
    """Raise `UnsupportedError` for sharded parameters (FSDP2, tensor parallelism).

    Parameters
    ----------
    model : torch.nn.Module
        Model to check.
    """
    for name, parameter in model.named_parameters():
        if type(parameter.data) is not torch.Tensor and hasattr(
            parameter, "placements"
        ):
            raise kc.UnsupportedError(
                f"The parameter {name!r} is a DTensor (placements "
                f"{parameter.placements}): sharded parameters are not supported. Make KFAC "
                "of a model whose parameters are whole, before fully_shard or "
                "parallelize_module, and on one process."
            )
