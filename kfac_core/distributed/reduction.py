r"""Statistics of several processes as those of all their rows.

Conventions.  One update of rank r adds to each average, with R_r the weight of its rows
and R that of all ranks' rows (an average over examples has examples for rows),

.. math:: s_r \leftarrow d \, s_r + \frac{w}{R} \sum_{i \in r} c_i, \qquad
    w_r \leftarrow d \, w_r + w \frac{R_r}{R},

so that :math:`\sum_r s_r` and :math:`\sum_r w_r` are the sum and the weight of one process
with all rows, whatever the shares were.  A rank without rows only decays.  The sums are
added up at a refresh, and nothing else needs them.

Averages are packed (of a symmetric matrix one triangle) and sent in buckets, so that many
small ones are one message and large ones overlap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kfac_core.array import Array, Scalar
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import leaves
from kfac_core.distributed.communicator import Communicator
from kfac_core.distributed.transport import buckets, pack, unpack
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


def absorbed_share(
    statistics: Statistics,
    moments: Statistics,
    /,
    *,
    decay: Scalar,
    weight: Scalar,
    decays: Mapping[str, float],
    totals: Mapping[str, float] | None,
) -> Statistics:
    """Return this rank's statistics after an update with its part of a batch.

    Parameters
    ----------
    statistics : Statistics
        Statistics of this rank; not modified.
    moments : Statistics
        Sums over this rank's rows, weighted by their number.
    decay, weight : float or 0-d array
        Coefficients of the update.
    decays : mapping of str to float
        Decays of averages that have their own.
    totals : mapping of str to float, or None
        Weight of all ranks' rows, by average; None where `moments` are those of all.

    Returns
    -------
    Statistics
        New statistics.
    """
    averages = {
        name: average.absorbed(
            moments.averages[name],
            decay=decays.get(name, decay),
            weight=weight,
            total=None if totals is None else totals[name],
        )
        for name, average in statistics.averages.items()
    }
    return Statistics(averages, moments.status, statistics.bases)


def summed(
    communicator: Communicator,
    items: Iterable[Item],
    /,
    *,
    bucket_bytes: int,
    mark: float | None = None,
) -> tuple[dict[str, Average], float]:
    """Return the sums over all ranks of averages, each on its owner.

    Parameters
    ----------
    communicator : Communicator
        Communicator of all ranks.
    items : iterable of Item
        The same keys, owners and shapes on all ranks.
    bucket_bytes : int
        Size from which a message is sent.
    mark : float, optional
        A number of this rank that goes to all ranks with the last of the messages.

    Returns
    -------
    sums : dict of str to Average
        By key, in the layout of this rank's averages.
    marks : float
        Sum of all ranks' marks; zero without.
    """
    started = []
    filled = buckets(items, bytes_of, bucket_bytes)
    for number, bucket in enumerate(filled, 1):
        of_owners: list[dict[str, Average]] = [{} for _ in communicator.ranks]
        for item in bucket:
            of_owners[item.owner][item.key] = item.average
        parts = [pack(averages, shared=False) for averages in of_owners]
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
        sums |= unpack(form, arrived)
    if mark is None:
        return sums, 0.0
    return sums, float(arrived[max(arrived)][-1])


def bytes_of(item: Item, /) -> int:
    """Return about how many bytes an average has, as `summed` fills its messages."""
    # Those of float64: messages need not be full.
    return sum(math.prod(x.shape) * 8 for _, x in leaves(item.average))
