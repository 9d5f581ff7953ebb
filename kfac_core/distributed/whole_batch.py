"""What an update needs of the whole batch before a process reads its own rows.

Where a loss is a mean, its gradients depend on the number of all rows; and the gradients of
bare parameters have no rows, but are added up themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from kfac_core import errors
from kfac_core.array import Array, replaced
from kfac_core.array import namespaces as ns
from kfac_core.block import BatchLike, Block
from kfac_core.distributed.communicator import Communicator
from kfac_core.distributed.options import LossScale
from kfac_core.distributed.partition import Partition
from kfac_core.layers.example_gradients import GradientBatch
from kfac_core.network import Network


def counts_first(network: Network, loss: LossScale, /) -> bool:
    """Return whether an update needs the numbers of examples before anything else.

    Parameters
    ----------
    network : Network
        The blocks.
    loss : {"shard", "batch", "ddp"}
        Option of `Distributed`.

    Returns
    -------
    bool
        True where gradients have to be scaled, or are added up themselves.
    """
    if any(block.layer.kind == "parameters" for block in network.blocks.values()):
        return True
    return network.conventions.reduction != "sum" and loss != "shard"


def in_whole_batch(
    partition: Partition, batches: Mapping[str, Any], like: Array, /
) -> dict[str, Any]:
    """Return batches with the output gradients of the loss of the whole batch.

    Collective.

    Parameters
    ----------
    partition : Partition
        Blocks divided among ranks.
    batches : mapping of str to Batch
        This rank's, without empty ones.
    like : array
        Array of the library and the device of the batches.

    Returns
    -------
    dict of str to Batch
        Rank 0 has the gradients of bare parameters, of all ranks.
    """
    network, loss = partition.network, partition.options.loss
    names = list(network.blocks)
    counts = np.zeros((len(names), 4))
    error: Exception | None = None
    for i, name in enumerate(names):
        try:
            if name in batches:
                counts[i] = _counts_of(network.blocks[name], batches[name])
        except errors.KFACError as raised:
            error = type(raised)(f"Block {name!r}: {raised}")
            break
        except Exception as raised:
            error = raised
            break
    summed = partition.agreement.vote("count", counts.reshape(-1), error=error)
    totals = summed.reshape(counts.shape)
    reduction = network.conventions.reduction
    # A mean over rows counts masked rows out; a mean over examples does not.
    column = 1 if reduction == "mean_rows" else 0
    scaled: dict[str, Any] = {}
    for i, name in enumerate(names):
        total = float(totals[i, column])
        here = float(counts[i, column])
        factor = 1.0
        if reduction != "sum" and loss != "shard" and here:
            # Statistics expect the mean over the rows here: turn 1/total into 1/here.
            factor = total / here
            if loss == "ddp":
                # DDP averages over processes, so the loss was multiplied by their
                # number.
                factor /= partition.communicator.size
        batch = batches.get(name)
        if network.blocks[name].layer.kind == "parameters":
            share = factor if reduction == "sum" else factor * here / max(total, 1.0)
            batch = _summed_gradients(
                partition.communicator,
                network.blocks[name].layer.parameter_shapes,
                batch,
                totals[i],
                share,
                like,
            )
        elif batch is not None and factor != 1.0:
            batch = _scaled(batch, factor)
        if batch is not None:
            scaled[name] = batch
    return scaled


def no_arrays(rank: int, /) -> errors.NotReadyError:
    """Return the error of a rank that does not know the library of its arrays."""
    return errors.NotReadyError(
        f"Rank {rank} has neither rows nor statistics, so its array library is "
        "unknown. Pass `like`, an array such as the batches', to `Distributed`, or a "
        "batch of zero examples."
    )


def _summed_gradients(
    communicator: Communicator,
    shapes: Mapping[str, tuple[int, ...]],
    batch: GradientBatch | None,
    counts: np.ndarray[Any, Any],
    share: float,
    like: Array,
) -> GradientBatch | None:
    """Return the gradient of the whole batch, on rank 0 alone."""
    examples, _, sources_of_ranks, ranks = counts.tolist()
    if not examples:
        return None
    # A rank without a batch has no number of sources; those that have one agree.
    sources = round(sources_of_ranks / ranks)
    lead = (sources,) if sources else ()
    if batch is None:
        xp = ns.own_namespace(like)
        zeros = {
            key: xp.zeros((*lead, *shape), dtype=like.dtype, device=ns.device_of(like))
            for key, shape in shapes.items()
        }
        batch = GradientBatch(zeros, 0, sources or None)
    gradients = dict(sorted(batch.gradients.items()))
    xp = ns.namespace_of(**gradients)
    flat = xp.concat([xp.reshape(x, (-1,)) for x in gradients.values()])
    # Statistics of bare parameters square the gradient of the whole batch, which must
    # be added up before.
    total = communicator.all_reduce(flat * share).wait()
    if communicator.rank != 0:
        return None
    summed, start = {}, 0
    for key, x in gradients.items():
        summed[key] = xp.reshape(total[start : start + math.prod(x.shape)], x.shape)
        start += math.prod(x.shape)
    return GradientBatch(summed, int(examples), sources or None)


def _counts_of(block: Block, batch: BatchLike) -> tuple[float, float, float, float]:
    """Return the numbers of examples, of rows that count, of sources (or 0), and 1."""
    if isinstance(batch, GradientBatch):
        examples = float(batch.batch_size)
        return examples, examples, float(batch.sources or 0), 1.0
    rows = block.rows(batch)
    xp = ns.own_namespace(rows.like)
    R, N, _ = rows.counts(rows.like.dtype, xp=xp)
    return float(N), float(R), 0.0, 1.0


def _scaled(batch: Any, factor: float) -> Any:
    """Return a batch, or several, with output gradients times a number."""
    if isinstance(batch, list | tuple):
        return tuple([_scaled(use, factor) for use in batch])
    if isinstance(batch, dict):
        return {name: _scaled(use, factor) for name, use in batch.items()}
    return replaced(batch, output_grads=batch.output_grads * factor)
