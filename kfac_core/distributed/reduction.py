"""Sums of statistics over processes, each on the owner of its block.

Averages are packed (of a symmetric matrix one triangle) and sent in buckets, so that many
small ones are one message and large ones overlap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kfac_core.array import Array, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import leaves
from kfac_core.distributed import transport
from kfac_core.distributed.partition import Partition
from kfac_core.factors.average import Average
from kfac_core.factors.statistics import Statistics


@dataclass(frozen=True)
class Item:
    """An average of one block on this rank.

    Attributes
    ----------
    key : str
        ``"block/average"``.
    owner : int
        Rank that gets the sum.
    average : Average
        This rank's part.
    """

    key: str
    owner: int
    average: Average


def sums_of_owned(
    partition: Partition, step: str, local: Mapping[str, Statistics], /
) -> dict[str, Statistics]:
    """Return the statistics of all rows, of the blocks that this rank owns."""
    owned = [name for name in partition.owned() if name in local]
    if partition.owners_only:
        partition.agreement.meet(step)
        return {name: transport.unpacked_matrices(local[name]) for name in owned}
    forms = [f"{name}: {_form_of(local[name])}" for name in local]
    partition.agreement.meet("; ".join([step, *forms]))
    # A reduce-scatter: no rank holds the sums of blocks that others own.
    sums, _ = summed(partition, local)
    return {name: with_sums(partition, name, local[name], sums) for name in owned}


def without_taken(
    partition: Partition, name: str, statistics: Statistics, /
) -> Statistics:
    """Return statistics without the averages that a block takes from another."""
    taken = partition.network.shared_factors.taken_by(name)
    averages = {k: x for k, x in statistics.averages.items() if k not in taken}
    return replaced(statistics, averages=averages)


def with_sums(
    partition: Partition,
    name: str,
    statistics: Statistics,
    sums: Mapping[str, Average],
    /,
) -> Statistics:
    """Return statistics of a block with sums of `summed` for its averages."""
    averages = {k: sums[partition.key(name, k)] for k in statistics.averages}
    return replaced(statistics, averages=averages)


def _form_of(statistics: Statistics) -> list[tuple[str, tuple[int, ...], str]]:
    """Return the shapes and dtypes of averages, which all ranks must have."""
    return [
        (path, tuple(x.shape), transport.dtype_name(x))
        for path, x in leaves(statistics.averages)
    ]


def summed(
    partition: Partition,
    local: Mapping[str, Statistics],
    /,
    *,
    mark: float | None = None,
) -> tuple[dict[str, Average], float]:
    """Return the sums over all ranks of averages, each on its owner.

    Parameters
    ----------
    partition : Partition
        Owners of the blocks.
    local : mapping of str to Statistics
        This rank's part, of the same blocks with the same shapes on all ranks.
    mark : float, optional
        A number of this rank that goes to all ranks with the last of the messages.

    Returns
    -------
    sums : dict of str to Average
        By `Partition.key`, in the layout of this rank's averages.
    marks : float
        Sum of all ranks' marks; zero without.
    """
    communicator = partition.communicator
    items: dict[str, Item] = {}
    for name, statistics in local.items():
        for side, average in statistics.averages.items():
            key = partition.key(name, side)
            # Blocks that share a factor have the same key: it is summed once.
            items.setdefault(key, Item(key, partition.placement.owners[name], average))
    started = []
    filled = transport.buckets(items.values(), bytes_of, partition.message_bytes)
    for number, bucket in enumerate(filled, 1):
        of_owners: list[dict[str, Average]] = [{} for _ in communicator.ranks]
        for item in bucket:
            of_owners[item.owner][item.key] = item.average
        parts = [transport.pack(averages, shared=False) for averages in of_owners]
        like = bucket[0].average.weight
        xp, handles = ns.own_namespace(like), {}
        # A message has one dtype.
        names = sorted({name for part in parts for name in part.arrays})
        for name in names:
            arrays = [part.flat(name, like) for part in parts]
            counts = [int(array.shape[0]) for array in arrays]
            if mark is not None and number == len(filled) and name == names[-1]:
                # After the numbers of each rank's part, whose form does not mention it.
                last = xp.full(
                    (1,), mark, dtype=arrays[0].dtype, device=ns.device_of(like)
                )
                arrays = [x for array in arrays for x in (array, last)]
                counts = [count + 1 for count in counts]
            flat = xp.concat(arrays) if arrays[1:] else arrays[0]
            handles[name] = communicator.reduce_scatter(flat, counts)
        started.append((parts[communicator.rank].form, handles))
    sums: dict[str, Average] = {}
    arrived: dict[str, Array] = {}
    for form, handles in started:
        arrived = {name: h.wait() for name, h in handles.items()}
        sums |= transport.unpack(form, arrived)
    if mark is None:
        return sums, 0.0
    return sums, float(arrived[max(arrived)][-1])


def bytes_of(item: Item, /) -> int:
    """Return about how many bytes an average has, as `summed` fills its messages."""
    # Those of float64: messages need not be full.
    return sum(math.prod(x.shape) * 8 for _, x in leaves(item.average))
