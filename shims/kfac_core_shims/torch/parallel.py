"""What several processes of ``torch.distributed`` mean for a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.nn.parallel import DataParallel, DistributedDataParallel

import kfac_core as kc
from kfac_core_shims.torch import private

if TYPE_CHECKING:
    from kfac_core_shims.torch.sharded import Division

TIMEOUT = 1800.0
"""Seconds to wait for other processes: those of ``torch.distributed`` by default."""


def inner(model: torch.nn.Module, /) -> torch.nn.Module:
    """Return the module itself, without ``torch.compile`` and what runs it in parallel.

    Parameters
    ----------
    model : torch.nn.Module
        Module, or what wraps it.

    Returns
    -------
    torch.nn.Module
        Whose forward pass the wrappers call.
    """
    model = private.unwrapped(model)
    # On one device at most, DataParallel calls its module as it is.
    is_alone = isinstance(model, DataParallel) and len(model.device_ids) < 2
    if is_alone or isinstance(model, DistributedDataParallel):
        model = private.unwrapped(model.module)
    return model


def execution_of(
    model: torch.nn.Module, communicator: Any, execution: Any, /, *, interval: int
) -> tuple[Any, kc.distributed.Communicator | None, Division | None]:
    """Return an estimator's execution, and the processes that it is of.

    Parameters
    ----------
    model : torch.nn.Module
        Model, or its DistributedDataParallel.
    communicator : Communicator, str or None
        As `kfac_core.distributed.execution_for`; None takes all processes of
        ``torch.distributed``.
    execution : Execution, Distributed, Executor or None
        What the user gave.
    interval : int
        Steps between refreshes.

    Returns
    -------
    execution : Execution, Distributed, Executor or None
        For the estimator.
    communicator : Communicator or None
        None for one process.
    division : Division or None
        How parameters are divided among the processes.

    Raises
    ------
    kfac_core.ConventionError
        For a communicator beside a `Distributed`, which has one.
    kfac_core.UnsupportedError
        For a model on some of the processes only, or an executor of one's own beside
        others.
    """
    if isinstance(execution, kc.distributed.Distributed):
        if communicator is not None:
            raise kc.ConventionError(
                "Distributed has a communicator, and `communicator` was given too. Leave "
                "one of the two out."
            )
        processes = execution.communicator
        _require_same_processes(model, processes.size)
        dtype = execution.directions_dtype
        return execution, processes, _division(model, processes, dtype)
    divided = any(hasattr(p, "placements") for p in model.parameters())
    if communicator is None and (divided or _processes() > 1):
        communicator = "torch"
    # Before others are waited for, who may not come.
    _require_same_processes(model, _size_of(communicator))
    options: dict[str, Any] = {"loss": "ddp", "interval": interval}
    like: Any = next((p.detach() for p in model.parameters()), None)
    if divided:
        # Who divides parameters has no room for all statistics and operators.
        options |= {"holders": 1, "reduce": "owner"}
        like = like.to_local() if hasattr(like, "placements") else like
    options["like"] = like
    if isinstance(execution, kc.Execution):
        options["execution"] = execution
    distributed_execution = kc.distributed.execution_for(
        communicator,
        timeout=TIMEOUT,
        **options,
    )
    if distributed_execution is None:
        return execution, None, _division(model, None)
    if execution is not None and not isinstance(execution, kc.Execution):
        raise kc.UnsupportedError(
            f"Several processes divide the blocks, and `execution` is a "
            f"{type(execution).__name__}. Pass a kfac_core.Execution, or "
            "communicator='alone'."
        )
    return (
        distributed_execution,
        distributed_execution.communicator,
        _division(model, distributed_execution.communicator),
    )


def _division(
    model: torch.nn.Module,
    communicator: kc.distributed.Communicator | None,
    directions_dtype: str | None = None,
) -> Division | None:
    """Return how parameters are divided; refuse what cannot be."""
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise kc.UnsupportedError(
                f"The module {name!r} is a FullyShardedDataParallel, which hides its "
                "parameters. Use fully_shard."
            )
    if not any(hasattr(p, "placements") for p in model.parameters()):
        return None
    # What imports DTensor takes a second, and most models have none.
    from kfac_core_shims.torch import sharded

    return sharded.division_of(model, communicator, directions_dtype)


def require_one_process(why: str, /) -> None:
    """Raise `UnsupportedError` where ``torch.distributed`` has more than one rank.

    Parameters
    ----------
    why : str
        Why only one will do, and the next step.
    """
    if (ranks := _processes()) > 1:
        raise kc.UnsupportedError(f"torch.distributed has {ranks} ranks, and {why}.")


def processes_of(communicator: Any, /) -> kc.distributed.Communicator | None:
    """Return the processes of a communicator, or of one that is named; None for one."""
    if communicator is None and _processes() > 1:
        communicator = "torch"
    if isinstance(communicator, str) and communicator != "alone":
        communicator = kc.distributed.connect(communicator, timeout=TIMEOUT)
    if communicator is None or communicator == "alone" or communicator.size == 1:
        return None
    return communicator  # type: ignore[no-any-return]


def require_all_take_part() -> None:
    """Refuse a forward pass of DistributedDataParallel within its ``join()``.

    Processes that have no batches left answer there to what DistributedDataParallel sends,
    and to nothing else.
    """
    if private.replicas_may_leave():
        raise kc.UnsupportedError(
            "DistributedDataParallel.join() leaves out processes that have no batches "
            "left, and K-FAC needs all of them in each step. Leave join() out, and run "
            "the model there on a batch without rows, model(x[:0])."
        )


def _processes() -> int:
    """Return the number of processes of ``torch.distributed``; 1 where it is not used."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return int(distributed.get_world_size())


def _size_of(communicator: Any, /) -> int:
    """Return the number of processes of a communicator, or of one that is named."""
    if communicator is None or communicator == "alone":
        return 1
    return _processes() if isinstance(communicator, str) else int(communicator.size)


def _require_same_processes(model: torch.nn.Module, size: int, /) -> None:
    """Refuse a model whose gradients are averages over others than K-FAC's processes."""
    model = private.unwrapped(model)
    if not isinstance(model, DistributedDataParallel):
        return
    averaged = distributed.get_world_size(model.process_group)
    if averaged != size:
        raise kc.ConventionError(
            f"The model's DistributedDataParallel averages gradients over {averaged} "
            f"processes, and `communicator` has {size} of {_processes()}. For all "
            "processes leave out `process_group` and `communicator`; for a model of some "
            "of them, say communicator=connect('torch').split(groups) with the ranks of "
            "all groups; for a model of this process alone pass the module itself."
        )
