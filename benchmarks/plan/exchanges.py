"""What the stages of an estimator send, call by call, before anything is run.

Conventions.  As `kfac_core.distributed.communicator.Traffic` counts; of a refresh whose
operators have the forms of the last one, and without failures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kfac_core.array.backend import Array
from kfac_core.distributed.communicator import Operation, Traffic
from kfac_core.distributed.executor import vote_length
from kfac_core.distributed.options import Distributed
from kfac_core.distributed.placement import Placement
from kfac_core.distributed.reduction import Item, bytes_of
from kfac_core.distributed.transport import (
    BYTES,
    buckets,
    dtype_name,
    lengths_of,
    narrower,
    pack,
    packed_matrices,
)
from kfac_core.distributed.whole_batch import counts_first
from kfac_core.network import Network, NetworkState

__all__ = ["predicted_traffic"]


def predicted_traffic(
    network: Network,
    options: Distributed,
    placement: Placement,
    /,
    *,
    rank: int,
    like: Array,
) -> dict[str, Traffic]:
    """Return the calls and bytes of one rank, by stage.

    Parameters
    ----------
    network : Network
        The blocks, of which all have rows.
    options : Distributed
        Its communicator is not used.
    placement : Placement
        Owners and holders.
    rank : int
        Whose.
    like : array
        Array of the library and dtype of batches and gradients.

    Returns
    -------
    dict of str to Traffic
        ``"update"``, ``"refresh"`` and ``"precondition"`` of all blocks.

    Notes
    -----
    Computes the operators of empty statistics, to count their numbers.  Of the gradients
    of bare parameters it counts one backpropagated vector.
    """
    state = network.initial(like, damping=1.0)
    if any(block.approximation.has_bases for block in network.blocks.values()):
        state = network.rebase(state, moments="kronecker")
    state = network.refresh(state, damping=1.0)
    update, refresh, step = Traffic(), Traffic(), Traffic()
    p, names = placement.size, [*network.blocks]
    _add_update(update, network, options, placement, state, like)
    _vote(refresh, network, p)
    if options.reduce == "refresh":
        _add_sums(refresh, network, options, placement, _averages(state))
    _vote(refresh, network, p)
    if placement.holders > 1:
        group = placement.groups[rank // placement.holders]
        refresh.count("all_gather", 8 * len(group), len(group))
        lengths: dict[str, int] = {}
        for member in group:
            own = {n: state[n].operator for n in placement.owned_by(member)}
            for dtype, length in lengths_of(pack(own, shared=True).form).items():
                lengths[dtype] = lengths.get(dtype, 0) + length
        for dtype, length in lengths.items():
            wire = narrower(dtype, options.operators_dtype)
            refresh.count("all_gather", length * BYTES[wire], len(group))
    if placement.holders < p:
        _vote(step, network, p)
        members = p // placement.holders
        size = BYTES[narrower(dtype_name(like), options.directions_dtype)]
        numbers = {
            name: _numbers(block.layer.parameter_shapes)
            for name, block in network.blocks.items()
        }
        for message in placement.messages(names, options.bucket_bytes):
            length = members + sum(numbers[n] for of_rank in message for n in of_rank)
            step.count("all_gather", length * size, members)
    return {"update": update, "refresh": refresh, "precondition": step}


def _add_update(
    update: Traffic,
    network: Network,
    options: Distributed,
    placement: Placement,
    state: NetworkState,
    like: Array,
) -> None:
    p = placement.size
    if counts_first(network, options.loss):
        _vote(update, network, p)
        for block in network.blocks.values():
            if block.layer.kind == "parameters":
                numbers = _numbers(block.layer.parameter_shapes)
                update.count("all_reduce", numbers * BYTES[dtype_name(like)], p)
    _vote(update, network, p)
    # What one block takes from another is not sent.
    averages = {
        name: {side: x for side, x in sides.items() if (name, side) not in pairs}
        for name, sides in _averages(state).items()
        for pairs in [network.shared_factors.pairs]
    }
    if options.reduce == "update":
        _add_sums(update, network, options, placement, averages, everywhere=True)
    elif options.reduce == "owner":
        for names in buckets(
            network.blocks,
            lambda name: 8 * placement.loads[name].statistics,
            options.bucket_bytes,
        ):
            packed = packed_matrices({name: averages[name] for name in names})
            _add_sums(update, network, options, placement, packed)
        _vote(update, network, p)


def _add_sums(
    traffic: Traffic,
    network: Network,
    options: Distributed,
    placement: Placement,
    averages: Mapping[str, Mapping[str, Any]],
    *,
    everywhere: bool = False,
) -> None:
    """Count the averages of some blocks that are added up."""
    p = placement.size
    sums: dict[str, Item] = {}
    for name, sides in averages.items():
        for side, average in sides.items():
            giver = network.shared_factors.pairs.get((name, side))
            key = f"{name}/{side}" if giver is None else "/".join(giver)
            sums.setdefault(key, Item(key, placement.owners[name], average))
    operation: Operation = "all_reduce" if everywhere else "reduce_scatter"
    for bucket in buckets(sums.values(), bytes_of, options.bucket_bytes):
        for dtype, length in _lengths(
            {item.key: item.average for item in bucket}
        ).items():
            asked = options.statistics_dtype
            wire = asked if asked and "float" in dtype else dtype
            traffic.count(operation, length * BYTES[wire], p)


def _numbers(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _averages(state: NetworkState) -> dict[str, Mapping[str, Any]]:
    return {
        name: block.known_statistics(name).averages
        for name, block in state.blocks.items()
    }


def _lengths(value: Any) -> dict[str, int]:
    return lengths_of(pack(value, shared=False).form)


def _vote(traffic: Traffic, network: Network, p: int) -> None:
    traffic.count("all_reduce", 8 * vote_length(network), p)
