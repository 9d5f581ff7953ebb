"""What the stages of an estimator send, call by call, before anything is run.

Conventions.  As `kfac_core.distributed.communicator.Traffic` counts; of a refresh whose
operators have the forms of the last one, and without failures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kfac_core.array import Array
from kfac_core.distributed.communicator import Operation, Traffic
from kfac_core.distributed.options import Distributed
from kfac_core.distributed.partition import vote_length
from kfac_core.distributed.placement import Placement
from kfac_core.distributed.reduction import Item, bytes_of
from kfac_core.distributed.transport import (
    BYTES,
    buckets,
    dtype_name,
    lengths_of,
    message_bytes,
    narrower,
    pack,
    packed_matrices,
)
from kfac_core.distributed.whole_batch import counts_first
from kfac_core.network import Network, NetworkState
from kfac_core_backends.torch_distributed import are_similar


@dataclass(frozen=True)
class Message:
    """One exchange.

    Attributes
    ----------
    operation : str
        The exchange.
    parts : tuple of int
        Lengths of each rank's part, of an all-reduce that of the sum, and of an all-to-all
        what one rank sends to each.
    width : int
        Bytes of a number.
    ranks : int
        How many take part.
    """

    operation: Operation
    parts: tuple[int, ...]
    width: int
    ranks: int

    @property
    def payload(self) -> int:
        """Bytes of all parts together."""
        return self.width * sum(self.parts)

    def sent(self) -> list[float]:
        """Return the bytes that each rank sends, as with NCCL.

        Rings for sums and for parts of similar lengths, which are padded; other parts are
        divided into even shares before they are gathered, or after they were added up.  An
        all-to-all does not say what other ranks send: see `rows_sent`.
        """
        p, length = self.ranks, self.payload
        if self.operation == "all_to_all":
            return [0.0] * p
        if self.operation == "all_reduce":
            return [2 * (p - 1) / p * length] * p
        if are_similar(self.parts):
            return [(p - 1.0) * self.width * max(self.parts)] * p
        share = length / p
        ring = (p - 1) * share
        if self.operation == "reduce_scatter":
            return [ring + share] * p
        return [ring + self.width * part for part in self.parts]

    @property
    def buffer(self) -> int:
        """Bytes of the largest array that a rank holds for it."""
        if self.operation == "all_reduce" or not are_similar(self.parts):
            return self.payload
        return self.ranks * self.width * max(self.parts)


def rows_sent(placement: Placement, /) -> list[int]:
    """Return how many numbers of inverses each rank sends to others at a refresh."""
    sent = [0] * placement.size
    for name, ranges in placement.row_ranges.items():
        sent[placement.owners[name]] += sum(rows.received for rows in ranges.values())
    return sent


def predicted_traffic(
    network: Network,
    options: Distributed,
    placement: Placement,
    /,
    *,
    rank: int,
    like: Array,
) -> dict[str, Traffic]:
    """Return the calls and bytes of one rank, by stage; see `predicted_messages`."""
    traffic: dict[str, Traffic] = {}
    stages = predicted_messages(network, options, placement, rank=rank, like=like)
    for stage, messages in stages.items():
        traffic[stage] = Traffic()
        for message in messages:
            traffic[stage].count(message.operation, message.payload, message.ranks)
    return traffic


def predicted_messages(
    network: Network,
    options: Distributed,
    placement: Placement,
    /,
    *,
    rank: int,
    like: Array,
) -> dict[str, list[Message]]:
    """Return the messages in which one rank takes part, by stage, in their order.

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
    dict of str to list of Message
        ``"update"``, ``"refresh"`` and ``"precondition"`` of all blocks.

    Notes
    -----
    With several holders it computes the operators of empty statistics, to count their
    numbers.  Of the gradients of bare parameters it counts one backpropagated vector.
    """
    state = network.initial(like, damping=1.0)
    p, names = placement.size, [*network.blocks]
    vote = Message("all_reduce", (vote_length(network),), 8, p)
    refresh, step = [vote], []
    if options.reduce == "refresh":
        refresh += _sums(network, options, placement, _averages(state))
    if placement.holders < p:
        refresh.append(vote)
    if placement.holders > 1:
        refresh += _operators(network, options, placement, state, rank)
    if placement.workers:
        send = [0] * p
        for name, ranges in placement.row_ranges.items():
            for rows in ranges.values() if placement.owners[name] == rank else ():
                send[rows.rank] = rows.received
        size = BYTES[dtype_name(like)]
        refresh.append(Message("all_to_all", tuple(send), size, p))
    if placement.holders < p:
        step.append(vote)
        members = p // placement.holders
        size = BYTES[narrower(dtype_name(like), options.directions_dtype)]
        numbers = {
            name: _numbers(block.layer.parameter_shapes)
            for name, block in network.blocks.items()
        }
        for ranges in placement.row_ranges.values():
            numbers |= {key: rows.numbers for key, rows in ranges.items()}
        limit = message_bytes(options.bucket_bytes, p)
        for message in placement.messages(names, limit, placement.workers):
            parts = [1 + sum(numbers[n] for n in of_rank) for of_rank in message]
            step.append(Message("all_gather", tuple(parts), size, members))
    update = _update(network, options, placement, state, like, vote)
    return {"update": update, "refresh": refresh, "precondition": step}


def _operators(
    network: Network,
    options: Distributed,
    placement: Placement,
    state: NetworkState,
    rank: int,
) -> list[Message]:
    """Return the messages with operators to other holders."""
    if any(block.approximation.has_bases for block in network.blocks.values()):
        state = network.rebase(state, moments="kronecker")
    state = network.refresh(state, damping=1.0)
    group = placement.groups[rank // placement.holders]
    messages = [Message("all_gather", (1,) * len(group), 8, len(group))]
    lengths = []
    for member in group:
        own = {n: state[n].operator for n in placement.owned_by(member)}
        lengths.append(lengths_of(pack(own, shared=True).form))
    for dtype in sorted({dtype for own in lengths for dtype in own}):
        size = BYTES[narrower(dtype, options.operators_dtype)]
        parts = tuple(own.get(dtype, 0) for own in lengths)
        messages.append(Message("all_gather", parts, size, len(group)))
    return messages


def _update(
    network: Network,
    options: Distributed,
    placement: Placement,
    state: NetworkState,
    like: Array,
    vote: Message,
) -> list[Message]:
    messages = []
    if counts_first(network, options.loss):
        messages.append(vote)
        for block in network.blocks.values():
            if block.layer.kind == "parameters":
                numbers = _numbers(block.layer.parameter_shapes)
                size = BYTES[dtype_name(like)]
                messages.append(Message("all_reduce", (numbers,), size, placement.size))
    messages.append(vote)
    # What one block takes from another is not sent.
    pairs = network.shared_factors.pairs
    averages = {
        name: {side: x for side, x in sides.items() if (name, side) not in pairs}
        for name, sides in _averages(state).items()
    }
    if options.reduce == "owner":
        for names in buckets(
            network.blocks,
            lambda name: 8 * placement.loads[name].statistics,
            message_bytes(options.bucket_bytes, placement.size),
        ):
            messages += _bases(options, placement, state, names)
            packed = packed_matrices({name: averages[name] for name in names})
            messages += _sums(network, options, placement, packed)
        # With the last one, whether a rank has invalid rows.
        last = messages[-1]
        messages[-1] = replace(last, parts=tuple(n + 1 for n in last.parts))
    return messages


def _bases(
    options: Distributed, placement: Placement, state: NetworkState, names: list[str]
) -> list[Message]:
    """Return the message with the eigenvectors of some blocks to all ranks."""
    # One number says that nothing failed.
    parts = [1] * placement.size
    vectors: list[Any] = []
    for name in names:
        for basis in state.blocks[name].known_statistics(name).bases.values():
            vectors.append(basis.eigenvectors)
            parts[placement.owners[name]] += math.prod(basis.eigenvectors.shape)
    if not vectors:
        return []
    size = BYTES[narrower(dtype_name(vectors[0]), options.operators_dtype)]
    return [Message("all_gather", tuple(parts), size, placement.size)]


def _sums(
    network: Network,
    options: Distributed,
    placement: Placement,
    averages: Mapping[str, Mapping[str, Any]],
) -> list[Message]:
    """Return the messages with averages of some blocks that are added up."""
    p = placement.size
    sums: dict[str, Item] = {}
    for name, sides in averages.items():
        for side, average in sides.items():
            giver = network.shared_factors.pairs.get((name, side))
            key = f"{name}/{side}" if giver is None else "/".join(giver)
            sums.setdefault(key, Item(key, placement.owners[name], average))
    messages = []
    limit = message_bytes(options.bucket_bytes, p)
    for bucket in buckets(sums.values(), bytes_of, limit):
        parts: dict[str, list[int]] = {}
        for item in bucket:
            for dtype, length in _lengths({item.key: item.average}).items():
                parts.setdefault(dtype, [0] * p)[item.owner] += length
        for dtype, of_ranks in sorted(parts.items()):
            messages.append(Message("reduce_scatter", tuple(of_ranks), BYTES[dtype], p))
    return messages


def _numbers(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _averages(state: NetworkState) -> dict[str, Mapping[str, Any]]:
    return {
        name: block.known_statistics(name).averages
        for name, block in state.blocks.items()
    }


def _lengths(value: Any) -> dict[str, int]:
    return lengths_of(pack(value, shared=False).form)
