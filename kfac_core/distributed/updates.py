r"""Updates of statistics with the rows of all ranks.

Conventions.  One update of rank r adds to each average, with R_r the weight of its rows
and R that of all ranks' rows (an average over examples has examples for rows),

.. math:: s_r \leftarrow d \, s_r + \frac{w}{R} \sum_{i \in r} c_i, \qquad
    w_r \leftarrow d \, w_r + w \frac{R_r}{R},

so that :math:`\sum_r s_r` and :math:`\sum_r w_r` are the sum and the weight of one process
with all rows, whatever the shares were.  A rank without rows only decays.  The sums are
added up at a refresh, and nothing else needs them; with ``reduce="owner"`` they go to the
blocks' owners at each update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from kfac_core.approximations.options import UpdateOptions
from kfac_core.array import Array, replaced
from kfac_core.array.backend import backend_of
from kfac_core.block import Block
from kfac_core.distributed import reduction, transport, whole_batch
from kfac_core.distributed.exchange import SentDirections
from kfac_core.distributed.partition import Partition, int32
from kfac_core.errors import KFACError
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.example_gradients import GradientBatch
from kfac_core.layers.feeding import BatchLike, is_empty, raise_for_flags
from kfac_core.layers.rows import Batch
from kfac_core.stages import Stage, Task, Tasks
from kfac_core.state import require_same_form

Moments: TypeAlias = tuple[dict[str, Any], Exception | None]
"""Statistics of this rank's rows by block, or what was raised instead."""


def update(
    partition: Partition, stage: Stage[Statistics], tasks: Tasks, /
) -> dict[str, Statistics]:
    """Return the statistics of blocks after an update with this rank's rows."""
    tasks = _with_statistics(partition, tasks)
    batches = {n: task[2] for n, task in tasks.items() if not is_empty(task[2])}
    if whole_batch.counts_first(partition.network, partition.options.loss):
        like = next(task[1].like for task in tasks.values())
        batches = whole_batch.in_whole_batch(partition, batches, like)

    def moments_of(empties: Mapping[str, Statistics]) -> Moments:
        local = {}
        for name in [name for name in empties if name in batches]:
            block, _, _, options = tasks[name]
            # Bare sums over rows: decay and weight apply once, to the sums of all
            # ranks.
            alone = replaced(options, decay=0.0, weight=None)
            local[name] = (block, empties[name], batches[name], alone)
        return partition.attempt(stage, local)

    if partition.owners_only:
        return _absorbed_by_owners(partition, tasks, set(batches), moments_of)
    empties = {name: tasks[name][1].emptied() for name in batches}
    return _absorbed(partition, tasks, *moments_of(empties))


def absorb(
    partition: Partition, stage: Stage[Statistics], tasks: Tasks, /
) -> dict[str, Statistics]:
    """Return the statistics of blocks after this rank's moments are merged into them."""
    tasks = _with_statistics(partition, tasks)
    moments = {n: task[2] for n, task in tasks.items() if task[2] is not None}
    if not partition.owners_only:
        return _absorbed(partition, tasks, moments, None)

    def moments_of(empties: Mapping[str, Statistics]) -> Moments:
        of_names = {}
        try:
            for name in [name for name in empties if name in moments]:
                part = moments[name]
                if callable(part):
                    part = part(empties[name])
                    require_same_form(name, part, empties[name])
                of_names[name] = part
        except Exception as error:
            return {}, error
        return of_names, None

    return _absorbed_by_owners(partition, tasks, set(moments), moments_of)


def _absorbed_by_owners(
    partition: Partition,
    tasks: Tasks,
    here: set[str],
    moments_of: Callable[[Mapping[str, Statistics]], Moments],
) -> dict[str, Statistics]:
    """Return statistics after an update whose sums go to the owners of the blocks.

    So many blocks at a time that their sums fill a message.  The last message says
    whether all rows were finite; if not, a second vote raises.
    """
    # A block without rows on any rank is left out, as one process leaves it out.
    any_rows = [float(name in here) for name in tasks]
    total = partition.agreement.vote(_update_step(tasks), any_rows)
    with_rows = [name for name, ranks in zip(tasks, total, strict=True) if ranks]
    updated: dict[str, Statistics] = {}
    flags = dict.fromkeys(with_rows, 0)
    error: Exception | None = None
    failed = 0.0
    filled = transport.buckets(
        with_rows,
        lambda name: 8 * partition.placement.loads[name].statistics,
        partition.message_bytes,
    )
    for names in filled:
        empties = _empties(partition, {name: tasks[name][:2] for name in names})
        moments: dict[str, Any] = {}
        # After a failure the messages are still exchanged, as zeros: the others
        # wait for them.
        if error is None:
            moments, error = moments_of(empties)
        parts = {}
        for name in names:
            # Full matrices are freed as soon as they are packed.
            part = moments.pop(name, None) or empties[name]
            flags[name] = int(part.status)
            averages = transport.packed_matrices(part.averages)
            parts[name] = replaced(part, averages=averages)
        own_sides = {
            n: reduction.without_taken(partition, n, part) for n, part in parts.items()
        }
        # The mark rides with the last message, so that a good update costs no
        # second vote.
        mark = float(error is not None or any(flags.values()))
        sums, failed = reduction.summed(
            partition, own_sides, mark=mark if names is filled[-1] else None
        )
        for name in names:
            statistics = partition.owned_part(name, tasks[name][1])
            if partition.owns(name):
                added = reduction.with_sums(partition, name, own_sides[name], sums)
                averages = {**parts[name].averages, **added.averages}
                moments_of_all = replaced(parts[name], averages=averages)
                block, _, *others = tasks[name]
                task = block, statistics, *others
                statistics = _share(task, moments_of_all, None)
            updated[name] = statistics
    # Nothing has been assigned yet: after a failure all ranks keep their
    # statistics.
    if failed:
        partition.agreement.vote("added up", error=error)
        return _flagged(partition, tasks, flags)
    return updated


def _absorbed(
    partition: Partition,
    tasks: Tasks,
    moments: Mapping[str, Statistics],
    error: Exception | None,
) -> dict[str, Statistics]:
    """Return statistics after an update with this rank's part of the batch."""
    local = [_weights_of(task[1], moments.get(n)) for n, task in tasks.items()]
    step = _update_step(tasks)
    total = partition.agreement.vote(step, np.concatenate(local), error=error)
    # The vote itself carries the weights: one message says what all ranks have and
    # agree.
    stops = np.cumsum([len(part) for part in local])[:-1]
    weights = dict(zip(tasks, np.split(total, stops), strict=True))
    with_rows = [name for name, numbers in weights.items() if numbers[0] > 0]
    if any(numbers[1] > 0 for numbers in weights.values()):
        flags = {n: int(moments[n].status) if n in moments else 0 for n in with_rows}
        return _flagged(partition, tasks, flags)
    updated: dict[str, Statistics] = {}
    for name in with_rows:
        statistics = tasks[name][1]
        rows = weights[name][2:].tolist()
        totals = dict(zip(statistics.averages, rows, strict=True))
        part = moments.get(name) or statistics.emptied()
        updated[name] = _share(tasks[name], part, totals)
    return updated


def _update_step(tasks: Tasks) -> str:
    """Return what an update of all ranks has in common."""
    # Traced coefficients cannot be compared.
    numbers = {
        number
        for task in tasks.values()
        for number in _coefficients(task)
        if type(number) is float
    }
    dtypes = sorted({transport.dtype_name(task[1].like) for task in tasks.values()})
    # A dtype that differs would otherwise be a message of another length.
    return f"update with {sorted(numbers)}; {', '.join(dtypes)}"


def _share(
    task: Task, moments: Statistics, totals: Mapping[str, float] | None
) -> Statistics:
    """Return this rank's statistics after an update with its part of a batch.

    Parameters
    ----------
    task : tuple
        Block, its statistics on this rank, and what is updated how.
    moments : Statistics
        Sums over this rank's rows, weighted by their number.
    totals : mapping of str to float, or None
        Weight of all ranks' rows, by average; None where `moments` are those of all.
    """
    (block, statistics, *_), (decay, weight) = task, _coefficients(task)
    averages = {
        name: average.absorbed(
            moments.averages[name],
            decay=block.approximation.decays.get(name, decay),
            weight=weight,
            total=None if totals is None else totals[name],
        )
        for name, average in statistics.averages.items()
    }
    return Statistics(averages, moments.status, statistics.bases)


def _flagged(
    partition: Partition, tasks: Tasks, flags_here: Mapping[str, int]
) -> dict[str, Statistics]:
    """Raise for rows that are not finite on some rank, or return their flags."""
    names = [*flags_here]
    local = np.asarray([*flags_here.values()], np.int64)
    of_ranks = partition.agreement.gathered(local, length=len(names))
    # Merged moments were read before; an update says whether its flags are.
    options = tasks[names[0]][3]
    if not isinstance(options, UpdateOptions) or options.check == "raise":
        for rank, flags in zip(partition.communicator.ranks, of_ranks, strict=True):
            for name, flag in zip(names, flags.tolist(), strict=True):
                if not flag:
                    continue
                try:
                    raise_for_flags(flag, name=name)
                except KFACError as error:
                    raise type(error)(f"Rank {rank}: {error}") from None
    # Every rank gets the flags of all, as one process with all rows would.
    combined = np.bitwise_or.reduce(np.stack(of_ranks), axis=0)
    flagged: dict[str, Statistics] = {}
    for name, flag in zip(names, combined.tolist(), strict=True):
        statistics = tasks[name][1]
        flagged[name] = replaced(statistics, status=int32(flag, statistics.like))
    return flagged


def _with_statistics(partition: Partition, tasks: Tasks) -> dict[str, Task]:
    """Return tasks with zero statistics where there are none yet."""
    if all(task[1] is not None for task in tasks.values()):
        return dict(tasks)
    likes = [task[1].like for task in tasks.values() if task[1] is not None]
    likes += [like for task in tasks.values() for like in _arrays_of(task[2])]
    like = likes[0] if likes else partition.options.like
    if like is None:
        error = whole_batch.no_arrays(partition.communicator.rank)
        partition.agreement.vote("update", error=error)
    filled: dict[str, Task] = {}
    for name, (block, statistics, *others) in tasks.items():
        if statistics is None:
            statistics = block.initial(like, precision=partition.network.precision)
            if partition.owners_only:
                statistics = partition.owned_part(name, statistics)
        filled[name] = (block, statistics, *others)
    return filled


def _empties(
    partition: Partition, blocks: Mapping[str, tuple[Block, Statistics]]
) -> dict[str, Statistics]:
    """Return zero statistics of blocks, in the bases of their owners; collective.

    Of bases every rank gets the eigenvectors, which is all that moments need.
    """
    owners = partition.placement.owners
    of_ranks: list[list[str]] = [[] for _ in partition.communicator.ranks]
    empties, vectors, local = {}, {}, {}
    for name, (block, statistics) in blocks.items():
        precision = partition.network.precision
        empties[name] = block.initial(statistics.like, precision=precision)
        if not empties[name].bases:
            continue
        of_ranks[owners[name]].append(name)
        vectors[name] = _eigenvectors(empties[name])
        if partition.owns(name):
            local[name] = _eigenvectors(statistics)
    if not vectors:
        return empties
    sent = SentDirections(
        *(partition.communicator, of_ranks, vectors, local),
        failed=False,
        dtype=partition.options.operators_dtype,
    )
    for name, received in sent.wait()[0].items():
        bases = {
            side: replaced(basis, eigenvectors=received[side])
            for side, basis in empties[name].bases.items()
        }
        empties[name] = replaced(empties[name], bases=bases)
    return empties


def _coefficients(task: Task) -> tuple[Any, Any]:
    """Return decay and weight of an update, or of merged moments."""
    if isinstance(task[3], UpdateOptions):
        return task[3].decay, task[3].weight
    return task[3], task[4]


def _weights_of(
    statistics: Statistics, moments: Statistics | None
) -> np.ndarray[Any, Any]:
    """Return whether there are rows, whether they are invalid, and their weights."""
    numbers = np.zeros(2 + len(statistics.averages))
    if moments is None:
        return numbers
    xp = moments.namespace
    weights = [average.weight for average in moments.averages.values()]
    flag = xp.astype(moments.status != 0, moments.dtype)
    numbers[0] = 1
    # Weights of rows that are not finite are finite: they are counts.
    numbers[1:] = backend_of(xp).to_numpy(xp.stack([flag, *weights]))
    return numbers


def _eigenvectors(statistics: Statistics) -> dict[str, Array]:
    return {side: basis.eigenvectors for side, basis in statistics.bases.items()}


def _arrays_of(batch: BatchLike | Statistics | None) -> list[Array]:
    """Return an array of a batch, or of each of several, also where it is empty."""
    if batch is None or callable(batch):
        return []
    if isinstance(batch, Batch | GradientBatch | Statistics):
        return [batch.like]
    uses = batch.values() if isinstance(batch, Mapping) else batch
    return [x for use in uses for x in _arrays_of(use)]
