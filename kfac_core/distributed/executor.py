"""An executor whose blocks are divided among processes.

Conventions.  Every rank has its own part of each batch, possibly none, and calls the same
methods in the same order.  The result is that of one process with all rows, up to rounding:

* `update`: each rank keeps running sums of its own rows.  The ranks exchange one small
  vector with the weights of their rows and whether all are finite.
* `refresh`: sums are added up at the blocks' owners, each of which factorizes its blocks.
  Operators go to the other holders; see `kfac_core.distributed.placement`.
* products: every rank gives the same vectors.  Holders compute, and the results of each
  block go to the ranks that do not hold it.

Whatever fails on one rank is agreed on first, and then raised on all; no state changes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

import kfac_core
from kfac_core.array.backend import Array, backend_of
from kfac_core.array.namespaces import (
    device_of,
    is_finite_number,
    namespace_of,
    own_namespace,
)
from kfac_core.array.structure import leaves, map_structure, replaced
from kfac_core.block import UpdateBlock, emptied
from kfac_core.constraints import checked, require_options
from kfac_core.distributed.agreement import Agreement, told, untold
from kfac_core.distributed.communicator import Communicator
from kfac_core.distributed.placement import (
    Placement,
    block_loads,
    divisors,
    place,
)
from kfac_core.distributed.reduction import (
    Item,
    absorbed_share,
    merged_at_owners,
    summed,
    summed_at_owners,
)
from kfac_core.distributed.remote import RemoteOperator
from kfac_core.distributed.transport import lengths_of, pack, unpack
from kfac_core.errors import (
    ConventionError,
    KFACError,
    NotReadyError,
    ReplicaError,
    UnsupportedError,
)
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.example_gradients import GradientBatch
from kfac_core.layers.feeding import is_empty, raise_for_flags
from kfac_core.network import (
    BlockState,
    Executor,
    Network,
    NetworkState,
    Tasks,
    plain,
)
from kfac_core.operators.sparse_rows import SparseRows
from kfac_core.options import Execution

__all__ = ["Distributed", "DistributedExecutor", "LossScale"]

LossScale = Literal["shard", "batch", "ddp"]
"""What each process's output gradients are gradients of; see `Distributed`."""


@checked
@dataclass(frozen=True, kw_only=True)
class Distributed:
    """How an estimator divides its work among processes.

    ``Estimator(..., execution=Distributed(communicator=c))`` then gives, on every rank, the
    results of one process with the rows of all ranks.  Every rank makes the estimator with
    the same options and calls the same methods in the same order, with its own part of each
    batch; a rank without rows gives ``{}``.  `Estimator.precondition` takes the gradient of
    the whole batch, the same on all ranks.

    Parameters
    ----------
    communicator : Communicator
        Of all ranks, such as from `kfac_core.distributed.connect`.
    holders : int or {"auto", "all"}
        How many ranks hold each operator, a divisor g of the number of ranks p.  With 1 a
        block's owner sends directions at every step: least memory.  With ``"all"`` every
        rank gets every operator at a refresh: least talk where refreshes are rare.
        ``"auto"`` takes the g that sends the fewest numbers for refreshes every `interval`
        steps.
    interval : int
        Steps between refreshes, for ``holders="auto"``.
    reduce : {"refresh", "update"}
        When statistics are added up: at a refresh, at the owners; or at every update, so
        that every rank has the statistics of all rows.
    loss : {"shard", "batch", "ddp"}
        What the output gradients are of, where the estimator's reduction is a mean: the
        mean over this rank's rows; this rank's part of the mean over all rows; or p times
        that, so that the mean of gradients over ranks is the gradient of the whole batch.
        The last two cost one more exchange an update.
    dtype : {"float32", "float64"}, optional
        Dtype of messages with statistics; by default that of the statistics.
    bucket_bytes : int
        Size from which a message is sent.
    memory : int, optional
        How many numbers of statistics and operators an owner has room for.
    like : array, optional
        Array of the library, device and dtype of the batches.  Needed on a rank whose
        first update has no rows at all.
    execution : Execution
        How each rank runs its own blocks.

    Raises
    ------
    ConventionError
        For an option out of range.

    Notes
    -----
    Of an n x n and an m x m factor ``n (n + 1) / 2 + m (m + 1) / 2`` numbers are sent at a
    refresh, to one rank.  An update keeps the sums of one batch beside the running sums
    until the ranks have agreed, and copies both once.
    """

    communicator: Communicator
    holders: int | Literal["auto", "all"] = "auto"
    interval: int = 10
    reduce: Literal["refresh", "update"] = "refresh"
    loss: LossScale = "shard"
    dtype: Literal["float32", "float64"] | None = None
    bucket_bytes: int = 25 * 2**20
    memory: int | None = None
    like: Array = None
    execution: Execution = field(default_factory=Execution)

    def __post_init__(self) -> None:
        require_options(self)
        possible = divisors(self.communicator.size)
        if self.holders not in ("auto", "all", *possible):
            raise ConventionError(
                "Expected `holders` to be 'auto', 'all' or one of "
                f"{possible}, the divisors of the number of ranks, got {self.holders!r}."
            )


class DistributedExecutor:
    """An executor that divides the blocks of a network among ranks.

    Made by `kfac_core.Estimator` from `Distributed`.  Collective: all ranks make one, and
    compare the network, the options and the placement.

    Parameters
    ----------
    network : Network
        Description of the blocks, the same on all ranks.
    options : Distributed
        Communicator and options.
    inner : Executor
        Executor that runs this rank's tasks.

    Attributes
    ----------
    placement : Placement
        Owners and holders; prints as a table.

    Raises
    ------
    UnsupportedError
        For a block whose statistics cannot be put together from those of several
        processes; names the block and the reason.
    ReplicaError
        If ranks have different networks, options or placements.
    """

    updates_all = True

    def __init__(
        self, network: Network, options: Distributed, inner: Executor = plain
    ) -> None:
        self.network, self.options = network, options
        self._inner = inner
        self._communicator = options.communicator
        self._agreement = Agreement(self._communicator)
        _require_reducible(network)
        self.placement = _placement(network, options)
        self._require_same_plan()
        groups, rows = self.placement.groups, self.placement.rows
        self._group = self._communicator.split(groups)
        self._row = self._communicator.split(rows)
        self._group_number = self._communicator.rank // self.placement.holders
        self._background: DistributedExecutor | None = None
        self._forms: dict[int, tuple[tuple[int, ...], list[Any]]] = {}
        self._stages = {
            "update": self._update,
            "absorb": self._absorb,
            "rebase": self._rebase,
            "refresh": self._refresh,
            "product": self._product,
            "prepare": self._prepare,
        }

    def __call__(self, function: Any, tasks: Tasks, /) -> dict[str, Any]:
        """Return the function of each task, by name, as one process would have it."""
        found: dict[str, Any] = self._stages[function.stage](function, tasks)
        return found

    def in_background(self, inner: Executor) -> DistributedExecutor:
        """Return an executor whose exchanges do not mix with those of this one.

        Collective.  Only one thread at a time may use it.
        """
        if self._background is None:
            everyone = [range(self._communicator.size)]
            own = _changed(
                self.options, communicator=self._communicator.split(everyone)
            )
            self._background = DistributedExecutor(self.network, own, inner)
        return self._background

    def gathered(self, state: NetworkState, /) -> NetworkState:
        """Return the state that one process with all rows would have, on every rank.

        Parameters
        ----------
        state : NetworkState
            State of this rank.

        Returns
        -------
        NetworkState
            The same on all ranks, with all operators.
        """
        statistics = {
            name: held.statistics
            for name, held in state.blocks.items()
            if held.statistics is not None
        }
        whole = self._whole(f"gather {list(statistics)}", statistics)
        own = {
            name: (whole.get(name), held.operator)
            for name, held in state.blocks.items()
            if self.placement.owners[name] == self._communicator.rank
        }
        like = next((s.any_weight for s in statistics.values()), None)
        found = own if like is None else self._exchanged(self._communicator, own, like)
        blocks = {
            name: replaced(held, statistics=found[name][0], operator=found[name][1])
            for name, held in state.blocks.items()
            if name in found
        }
        return state.updated(blocks)

    def scattered(self, state: NetworkState, /) -> NetworkState:
        """Return this rank's part of a state of one process.

        Rank 0 takes the sums and the others start at zero, which adds up to the same.

        Parameters
        ----------
        state : NetworkState
            The same on all ranks, such as one loaded from a file.

        Returns
        -------
        NetworkState
            State of this rank.
        """
        blocks: dict[str, BlockState] = {}
        for name, held in state.blocks.items():
            statistics, operator = held.statistics, held.operator
            alone = self._communicator.rank == 0 or self.options.reduce == "update"
            if statistics is not None and not alone:
                statistics = emptied(statistics)
            if operator is not None and not self._holds(name):
                operator = self._remote(name, operator.like, int(operator.status()))
            blocks[name] = replaced(held, statistics=statistics, operator=operator)
        return NetworkState(blocks)

    def check_replicas(
        self, state: NetworkState, /, **arrays: Mapping[str, Any] | Array
    ) -> None:
        """Raise unless all ranks hold the same of what must be the same.

        These are counts, dampings, bases and the operators that several ranks hold, and
        further arrays, such as parameters.

        Parameters
        ----------
        state : NetworkState
            State of this rank.
        **arrays : array or mapping of str to array
            What else must be the same to the bit.

        Raises
        ------
        ReplicaError
            Names what differs, and the ranks.
        """
        common: dict[str, Any] = dict(arrays)
        held_here: dict[str, Any] = {}
        for name, held in state.blocks.items():
            counts = {
                f: _number(getattr(held, f))
                for f in ("updates", "age", "refreshes", "failures", "damping")
            }
            common[f"{name}: counts and damping"] = repr(counts)
            if held.statistics is not None:
                common[f"{name}: bases"] = held.statistics.bases
                if self.options.reduce == "update":
                    common[f"{name}: statistics"] = held.statistics.averages
            if self._holds(name):
                held_here[f"{name}: operator"] = held.operator
        self._compare(self._communicator, common)
        self._compare(self._group, held_here)

    def _update(self, function: UpdateBlock, tasks: Tasks) -> dict[str, Any]:
        error: Exception | None = None
        moments: dict[str, Statistics] = {}
        tasks = self._with_statistics(tasks)
        batches = {n: task[2] for n, task in tasks.items() if not is_empty(task[2])}
        if self._counts_first():
            like = next(task[1].any_weight for task in tasks.values())
            batches = self._in_whole_batch(function, batches, like)
        try:
            own = {
                name: (
                    *(tasks[name][0], emptied(tasks[name][1]), batch, 0.0, None),
                    tasks[name][5],
                )
                for name, batch in batches.items()
            }
            moments = self._inner(function, own) if own else {}
        except Exception as raised:
            error = raised
        coefficients = {name: (task[3], task[4]) for name, task in tasks.items()}
        return self._absorbed("update", function, tasks, moments, coefficients, error)

    def _absorb(self, function: Any, tasks: Tasks) -> dict[str, Any]:
        tasks = self._with_statistics(tasks)
        moments = {n: task[2] for n, task in tasks.items() if task[2] is not None}
        coefficients = {name: (task[3], task[4]) for name, task in tasks.items()}
        return self._absorbed("absorb", function, tasks, moments, coefficients, None)

    def _absorbed(
        self,
        step: str,
        function: Any,
        tasks: Tasks,
        moments: Mapping[str, Statistics],
        coefficients: Mapping[str, tuple[Any, Any]],
        error: Exception | None,
    ) -> dict[str, Statistics]:
        """Return statistics after an update with this rank's part of the batch."""
        told_of = {
            name: _weights_of(task[1], moments.get(name))
            for name, task in tasks.items()
        }
        plain_ones = [
            c for pair in coefficients.values() for c in pair if type(c) is float
        ]
        ballot = np.concatenate(list(told_of.values()))
        total = self._agreement.vote(f"{step} {plain_ones}", ballot, error=error)
        stops = np.cumsum([len(part) for part in told_of.values()])[:-1]
        found = dict(zip(told_of, np.split(total, stops), strict=True))
        fed = [name for name, numbers in found.items() if numbers[0] > 0]
        if any(numbers[1] > 0 for numbers in found.values()):
            return self._flagged(function, fed, tasks, moments)
        totals: dict[str, dict[str, float] | None] = {
            name: dict(
                zip(tasks[name][1].averages, found[name][2:].tolist(), strict=True)
            )
            for name in fed
        }
        parts = {name: moments.get(name) or emptied(tasks[name][1]) for name in fed}
        if self.options.reduce == "update":
            parts = self._summed_everywhere(parts)
            totals = dict.fromkeys(fed)
        return {
            name: absorbed_share(
                tasks[name][1],
                parts[name],
                decay=coefficients[name][0],
                weight=coefficients[name][1],
                decays=tasks[name][0].approximation.decays,
                totals=totals[name],
            )
            for name in fed
        }

    def _flagged(
        self,
        function: Any,
        fed: Sequence[str],
        tasks: Tasks,
        moments: Mapping[str, Statistics],
    ) -> dict[str, Statistics]:
        """Raise for rows that are not finite on some rank, or return their flags."""
        own = np.asarray(
            [int(moments[name].status) if name in moments else 0 for name in fed],
            np.int64,
        )
        of_ranks = self._agreement.gathered(own)
        if getattr(function, "check", "raise") == "raise":
            for rank, flags in enumerate(of_ranks):
                for name, flag in zip(fed, flags.tolist(), strict=True):
                    if not flag:
                        continue
                    try:
                        raise_for_flags(flag, name=name)
                    except KFACError as error:
                        raise type(error)(f"Rank {rank}: {error}") from None
        every = np.bitwise_or.reduce(np.stack(of_ranks), axis=0)
        made: dict[str, Statistics] = {}
        for name, flag in zip(fed, every.tolist(), strict=True):
            old = tasks[name][1]
            made[name] = replaced(old, status=_int32(flag, old.any_weight))
        return made

    def _rebase(self, function: Any, tasks: Tasks) -> dict[str, Any]:
        names = list(tasks)
        given = {name: task[1] for name, task in tasks.items()}
        whole = self._whole(f"rebase {names} {function.moments}", given)
        made: dict[str, Statistics] = {}
        error: Exception | None = None
        try:
            own = {name: (tasks[name][0], whole[name]) for name in whole}
            made = self._inner(function, own) if own else {}
        except Exception as raised:
            error = raised
        self._agreement.vote("rebased", np.zeros(0), error=error)
        news = {
            name: (
                new.bases,
                new.status,
                {
                    key: average
                    for key, average in new.averages.items()
                    if average is not whole[name].averages[key]
                },
            )
            for name, new in made.items()
        }
        like = next((s.any_weight for s in given.values()), None)
        if like is None:
            return {}
        sums_here = self._communicator.rank == 0 or self.options.reduce == "update"
        found: dict[str, Statistics] = {}
        for name, (bases, status, changed) in self._exchanged(
            self._communicator, news, like
        ).items():
            if not sums_here:
                changed = {
                    key: map_structure(lambda x: x * 0, average)
                    for key, average in changed.items()
                }
            averages = {**given[name].averages, **changed}
            found[name] = Statistics(averages, status, bases)
        return {name: found[name] for name in names}

    def _refresh(self, function: Any, tasks: Tasks) -> dict[str, Any]:
        names = list(tasks)
        given = {name: task[1] for name, task in tasks.items()}
        dampings = [task[2] for task in tasks.values() if type(task[2]) is float]
        whole = self._whole(f"refresh {names} {dampings}", given)
        made: dict[str, Any] = {}
        error: Exception | None = None
        try:
            own = {
                name: (tasks[name][0], whole[name], *tasks[name][2:]) for name in whole
            }
            made = self._inner(function, own) if own else {}
        except Exception as raised:
            error = raised
        failed = {n: found for n, found in made.items() if isinstance(found, KFACError)}
        ballot = np.zeros((len(names), 3))
        for i, name in enumerate(names):
            if name in failed:
                ballot[i, 0] = 1
            elif name in made:
                operator, damping = made[name]
                ballot[i] = (0, int(operator.status()), float(damping))
        total = self._agreement.vote("refreshed", ballot.reshape(-1), error=error)
        numbers = dict(zip(names, total.reshape(-1, 3), strict=True))
        errors = self._errors(failed) if total[::3].any() else {}
        held = {n: found[0] for n, found in made.items() if n not in failed}
        if self.placement.holders > 1:
            like = next(iter(given.values())).any_weight
            held = self._exchanged(self._group, held, like)
        results: dict[str, Any] = {}
        for name in names:
            _, status, damping = numbers[name]
            asked = tasks[name][2]
            if type(asked) is float and function.damping_scaling == "none":
                damping = asked
            if name in errors:
                results[name] = errors[name]
            elif name in held:
                results[name] = held[name], float(damping)
            else:
                like = given[name].any_weight
                results[name] = self._remote(name, like, int(status)), float(damping)
        return results

    def _product(self, function: Any, tasks: Tasks) -> dict[str, Any]:
        own = {name: task for name, task in tasks.items() if self._holds(name)}
        if self.placement.holders == self._communicator.size or not tasks:
            return self._inner(function, own)
        error: Exception | None = None
        made: dict[str, Any] = {}
        try:
            made = self._inner(function, own) if own else {}
        except Exception as raised:
            error = raised
        members = range(self._row.size)
        rank = self._row.rank
        names_of = [
            [n for n in tasks if self.placement.group_of(n) == k] for k in members
        ]
        # By dtype, for each member of the row: the arrays that it sends, as (name,
        # parameter, array).
        parts: dict[str, list[list[tuple[str, str, Array]]]] = {}
        for k in members:
            for name in names_of[k]:
                # Where nothing was computed, what was given has the same form.
                for key, vector in (made.get(name) or tasks[name][2]).items():
                    x = vector.rows if isinstance(vector, SparseRows) else vector
                    dtype = str(x.dtype)
                    parts.setdefault(dtype, [[] for _ in members])
                    parts[dtype][k].append((name, key, x))
        handles = []
        for dtype in sorted(parts):
            of_members = parts[dtype]
            like = next(entry[2] for entries in of_members for entry in entries)
            # One more number says whether the member failed.
            counts = [1 + sum(_size(x) for *_, x in entries) for entries in of_members]
            flat = _flat_with_flag(of_members[rank], like, error is not None)
            handles.append((of_members, counts, self._row.all_gather(flat, counts)))
        results: dict[str, dict[str, Any]] = {name: {} for name in tasks}
        anything_failed = False
        for of_members, counts, handle in handles:
            flat, start = handle.wait(), 0
            for entries, count in zip(of_members, counts, strict=True):
                anything_failed = anything_failed or bool(flat[start] != 0)
                at = start + 1
                for name, key, x in entries:
                    stop = at + _size(x)
                    results[name][key] = _shaped(flat[at:stop], x, tasks[name][2][key])
                    at = stop
                start += count
        if anything_failed:
            Agreement(self._row).vote("product", np.zeros(0), error=error)
        return {name: made.get(name) or results[name] for name in tasks}

    def _prepare(self, function: Any, tasks: Tasks) -> dict[str, Any]:
        error: Exception | None = None
        made: dict[str, Any] = {}
        try:
            own = {name: task for name, task in tasks.items() if self._holds(name)}
            made = self._inner(function, own) if own else {}
        except Exception as raised:
            error = raised
        step = f"prepare {list(tasks)} {function.factorization}"
        self._agreement.vote(step, np.zeros(0), error=error)
        return {name: made.get(name, task[1]) for name, task in tasks.items()}

    def _whole(
        self, step: str, given: Mapping[str, Statistics]
    ) -> dict[str, Statistics]:
        """Return the statistics of all rows, of the blocks that this rank owns."""
        forms = {name: _form_of(statistics) for name, statistics in given.items()}
        self._agreement.vote(f"{step} of {forms}", np.zeros(0))
        owners, rank = self.placement.owners, self._communicator.rank
        own = [name for name in given if owners[name] == rank]
        if self.options.reduce == "update":
            return {name: given[name] for name in own}
        sums: dict[str, Item] = {}
        merges: dict[str, Item] = {}
        for name, statistics in given.items():
            kinds = merges if self._merges(name) else sums
            for side, average in statistics.averages.items():
                key = self._key(name, side)
                kinds.setdefault(key, Item(key, owners[name], average))
        found = summed_at_owners(
            self._communicator,
            sums.values(),
            dtype=self.options.dtype,
            bucket_bytes=self.options.bucket_bytes,
        )
        found |= merged_at_owners(self._communicator, merges.values())
        return {
            name: Statistics(
                {side: found[self._key(name, side)] for side in given[name].averages},
                given[name].status,
                given[name].bases,
            )
            for name in own
        }

    def _summed_everywhere(
        self, parts: Mapping[str, Statistics]
    ) -> dict[str, Statistics]:
        """Return the statistics of all ranks' rows on every rank."""
        forms = {name: _form_of(part) for name, part in parts.items()}
        self._agreement.vote(f"sum of {forms}", np.zeros(0))
        sums: dict[str, Item] = {}
        merges: dict[str, Item] = {}
        for name, part in parts.items():
            kinds = merges if self._merges(name) else sums
            for side, average in part.averages.items():
                kinds[f"{name}/{side}"] = Item(f"{name}/{side}", 0, average)
        found = summed(
            self._communicator,
            sums.values(),
            dtype=self.options.dtype,
            bucket_bytes=self.options.bucket_bytes,
        )
        joined = merged_at_owners(self._communicator, merges.values())
        if merges:
            like = next(iter(merges.values())).average.weight
            found |= self._exchanged(self._communicator, joined, like)
        return {
            name: replaced(
                part, averages={s: found[f"{name}/{s}"] for s in part.averages}
            )
            for name, part in parts.items()
        }

    def _counts_first(self) -> bool:
        """Whether an update needs the numbers of examples before anything else."""
        if any(b.layer.kind == "parameters" for b in self.network.blocks.values()):
            return True
        reduced = self.network.conventions.reduction != "sum"
        return reduced and self.options.loss != "shard"

    def _in_whole_batch(
        self, function: UpdateBlock, batches: Mapping[str, Any], like: Array
    ) -> dict[str, Any]:
        """Return batches with output gradients of the loss that each rank stands for."""
        names = list(self.network.blocks)
        counts = np.zeros((len(names), 3))
        error: Exception | None = None
        try:
            for i, name in enumerate(names):
                if name in batches:
                    counts[i] = _counts_of(self.network.blocks[name], batches[name])
        except Exception as raised:
            error = raised
        self._agreement.vote("count", np.zeros(0), error=error)
        of_ranks = np.stack(self._agreement.gathered(counts.reshape(-1)))
        of_ranks = of_ranks.reshape(-1, len(names), 3)
        reduction = function.conventions.reduction
        column = 1 if reduction == "mean_rows" else 0
        made: dict[str, Any] = {}
        for i, name in enumerate(names):
            total = float(of_ranks[:, i, column].sum())
            own = float(counts[i, column])
            factor = 1.0
            if reduction != "sum" and self.options.loss != "shard" and own:
                factor = total / own
                if self.options.loss == "ddp":
                    factor /= self._communicator.size
            batch = batches.get(name)
            if self.network.blocks[name].layer.kind == "parameters":
                share = factor if reduction == "sum" else factor * own / max(total, 1.0)
                batch = self._summed_gradients(name, batch, of_ranks[:, i], share, like)
            elif batch is not None and factor != 1.0:
                batch = _scaled(batch, factor)
            if batch is not None:
                made[name] = batch
        return made

    def _summed_gradients(
        self,
        name: str,
        batch: GradientBatch | None,
        counts: np.ndarray[Any, Any],
        share: float,
        like: Array,
    ) -> GradientBatch | None:
        """Return the gradient of the whole batch, on rank 0 alone."""
        if not counts[:, 0].any():
            return None
        sources = int(counts[:, 2].max())
        shapes = self.network.blocks[name].layer.parameter_shapes
        lead = (sources,) if sources else ()
        if batch is None:
            if like is None:
                raise _no_arrays(self._communicator.rank)
            xp = own_namespace(like)
            zeros = {
                key: xp.zeros((*lead, *shape), dtype=like.dtype, device=device_of(like))
                for key, shape in shapes.items()
            }
            batch = GradientBatch(zeros, 0, sources or None)
        gradients = dict(sorted(batch.gradients.items()))
        xp = namespace_of(**gradients)
        flat = xp.concat([xp.reshape(x, (-1,)) for x in gradients.values()])
        total = self._communicator.all_reduce(flat * share).wait()
        if self._communicator.rank != 0:
            return None
        made, start = {}, 0
        for key, x in gradients.items():
            made[key] = xp.reshape(total[start : start + _size(x)], x.shape)
            start += _size(x)
        return GradientBatch(made, int(counts[:, 0].sum()), sources or None)

    def _with_statistics(self, tasks: Tasks) -> dict[str, tuple[Any, ...]]:
        """Return tasks with zero statistics where there are none yet."""
        if all(task[1] is not None for task in tasks.values()):
            return dict(tasks)
        likes = [task[1].any_weight for task in tasks.values() if task[1] is not None]
        likes += [like for task in tasks.values() for like in _arrays_of(task[2])]
        like = likes[0] if likes else self.options.like
        if like is None:
            raise _no_arrays(self._communicator.rank)
        made: dict[str, tuple[Any, ...]] = {}
        for name, (block, statistics, *rest) in tasks.items():
            own = statistics
            if own is None:
                own = block.initial(like, precision=self.network.precision)
            made[name] = (block, own, *rest)
        return made

    def _exchanged(
        self, communicator: Communicator, own: Mapping[str, Any], like: Array
    ) -> dict[str, Any]:
        """Return the values of all ranks of a communicator, by name."""
        packed = pack(dict(own), shared=True)
        forms = self._forms_of_all(communicator, packed.form)
        lengths = [lengths_of(form) for form in forms]
        handles = {}
        for dtype in sorted({dtype for found in lengths for dtype in found}):
            counts = [found.get(dtype, 0) for found in lengths]
            flat = packed.flat(dtype, like)
            handles[dtype] = counts, communicator.all_gather(flat, counts)
        arrived = {
            dtype: _parts(handle.wait(), counts)
            for dtype, (counts, handle) in handles.items()
        }
        found: dict[str, Any] = {}
        for member, form in enumerate(forms):
            if member == communicator.rank:
                found |= own
            else:
                arrays = {dtype: parts[member] for dtype, parts in arrived.items()}
                found |= unpack(form, arrays)
        return found

    def _forms_of_all(self, communicator: Communicator, form: Any) -> list[Any]:
        """Return the forms of all ranks, which are sent only where they are new."""
        agreement = Agreement(communicator)
        text = json.dumps(form)
        digest = np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], np.int64)
        digests = tuple(int(part[0]) for part in agreement.gathered(digest, length=1))
        known = self._forms.get(id(communicator))
        if known is None or known[0] != digests:
            # All ranks see the same digests, so that all of them send or none.
            known = digests, [json.loads(text) for text in agreement.texts(text)]
            self._forms[id(communicator)] = known
        return known[1]

    def _errors(self, failed: Mapping[str, KFACError]) -> dict[str, KFACError]:
        """Return the errors of all ranks' blocks, on every rank."""
        own = json.dumps({name: told(error) for name, error in failed.items()})
        found: dict[str, KFACError] = {}
        for rank, text in enumerate(self._agreement.texts(own)):
            for name, data in json.loads(text).items():
                found[name] = failed[name] if name in failed else untold(data, rank)
        return found

    def _holds(self, name: str) -> bool:
        return self.placement.group_of(name) == self._group_number

    def _merges(self, name: str) -> bool:
        return self.network.blocks[name].approximation.reduction == "merge"

    def _key(self, name: str, side: str) -> str:
        """Return the name of an average; a shared factor has that of its giver."""
        giver = self.network.shared_factors.pairs.get((name, side))
        return f"{name}/{side}" if giver is None else "/".join(giver)

    def _remote(self, name: str, like: Array, status: int) -> RemoteOperator:
        xp = own_namespace(like)
        zero = xp.zeros((), dtype=like.dtype, device=device_of(like))
        shape = self.network.blocks[name].layer.matrix_shape
        return RemoteOperator(
            self.placement.owners[name], shape, zero, _int32(status, like)
        )

    def _require_same_plan(self) -> None:
        told_of = {
            "the network": repr(self.network._parts),
            "the options": repr(_changed(self.options, communicator=None, like=None)),
            "the placement": self.placement.digest(),
            "the version of kfac_core": kfac_core.__version__,
        }
        self._compare(self._communicator, told_of)

    def _compare(self, communicator: Communicator, values: Mapping[str, Any]) -> None:
        """Raise `ReplicaError` unless values are equal on all ranks."""
        own = {name: _digest(value) for name, value in values.items()}
        found = [json.loads(t) for t in Agreement(communicator).texts(json.dumps(own))]
        for rank, other in enumerate(found):
            names = [
                n for n in {**found[0], **other} if found[0].get(n) != other.get(n)
            ]
            if names:
                raise ReplicaError(
                    f"Rank {rank} differs from rank 0 in {', '.join(names[:5])}"
                    f"{' and more' if len(names) > 5 else ''}. All ranks need the same "
                    "code, options and parameters, and must call the same methods."
                )


def _placement(network: Network, options: Distributed) -> Placement:
    size = options.communicator.size
    loads = block_loads(network)
    pairs = network.shared_factors.pairs
    together = [(taker[0], giver[0]) for taker, giver in pairs.items()]

    def with_holders(g: int) -> Placement:
        return place(loads, size, holders=g, together=together, memory=options.memory)

    if options.holders == "all":
        return with_holders(size)
    if options.holders != "auto":
        return with_holders(int(options.holders))

    def numbers(placement: Placement) -> float:
        sent = placement.numbers_sent()
        return sent["operators"] + options.interval * sent["directions"]

    return min(map(with_holders, divisors(size)), key=numbers)


def _require_reducible(network: Network) -> None:
    for name, block in network.blocks.items():
        approximation = block.approximation
        if approximation.reduction == "none":
            raise UnsupportedError(
                f"Block {name!r} ({approximation.name}) cannot be divided among processes: "
                f"{approximation.reduction_problem}."
            )


def _weights_of(
    statistics: Statistics, moments: Statistics | None
) -> np.ndarray[Any, Any]:
    """Return whether there are rows, whether they are invalid, and their weights."""
    made = np.zeros(2 + len(statistics.averages))
    if moments is None:
        return made
    xp = moments.namespace
    numbers = [average.weight for average in moments.averages.values()]
    flag = xp.astype(moments.status != 0, moments.dtype)
    made[0] = 1
    found = backend_of(xp).to_numpy(xp.stack([flag, *numbers]))
    # Weights of rows that are not finite are finite: they are counts.
    made[1:] = found
    return made


def _form_of(statistics: Statistics) -> list[Any]:
    """Return the shapes and dtypes of averages, which all ranks must have."""
    return [
        (path, tuple(x.shape), str(x.dtype).rpartition(".")[2])
        for path, x in leaves(statistics.averages)
    ]


def _counts_of(block: Any, batch: Any) -> tuple[float, float, float]:
    """Return the numbers of examples, of rows that count, and of sources (or 0)."""
    if isinstance(batch, GradientBatch):
        return (
            float(batch.batch_size),
            float(batch.batch_size),
            float(batch.sources or 0),
        )
    rows = block.rows(batch)
    rows = rows.layers[0] if hasattr(rows, "layers") else rows
    xp = own_namespace(rows.like)
    return float(rows.examples), float(rows.kept(rows.like.dtype, xp=xp)), 0.0


def _arrays_of(batch: Any) -> list[Array]:
    """Return an array of a batch, or of each of several, also where it is empty."""
    if batch is None:
        return []
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return [x for use in batch for x in _arrays_of(use)]
    return [batch.like]


def _scaled(batch: Any, factor: float) -> Any:
    """Return a batch, or several, with output gradients times a number."""
    if isinstance(batch, list | tuple):
        return tuple([_scaled(use, factor) for use in batch])
    if isinstance(batch, dict):
        return {name: _scaled(own, factor) for name, own in batch.items()}
    return replaced(batch, output_grads=batch.output_grads * factor)


def _flat_with_flag(
    entries: Sequence[tuple[str, str, Array]], like: Array, failed: bool
) -> Array:
    xp = own_namespace(like)
    flag = xp.full((1,), float(failed), dtype=like.dtype, device=device_of(like))
    return xp.concat([flag, *(xp.reshape(x, (-1,)) for *_, x in entries)])


def _shaped(flat: Array, like: Array, vector: Any) -> Any:
    x = own_namespace(flat).reshape(flat, tuple(like.shape))
    return SparseRows(vector.indices, x) if isinstance(vector, SparseRows) else x


def _parts(flat: Array, counts: Sequence[int]) -> list[Array]:
    starts = [sum(counts[:k]) for k in range(len(counts))]
    return [flat[a : a + n] for a, n in zip(starts, counts, strict=True)]


def _size(x: Array) -> int:
    size = 1
    for n in x.shape:
        size *= int(n)
    return size


def _int32(value: int, like: Array) -> Array:
    xp = own_namespace(like)
    return xp.full((), int(value), dtype=xp.int32, device=device_of(like))


def _number(value: Any) -> float | None:
    if value is None:
        return None
    return float(value) if is_finite_number(value) else float(np.asarray(value))


def _digest(value: Any) -> str:
    """Return a text that is equal for equal values."""
    made = hashlib.sha256()
    if isinstance(value, str):
        made.update(value.encode())
        return made.hexdigest()
    for path, x in leaves(value):
        host = backend_of(own_namespace(x)).to_numpy(x)
        made.update(f"{path} {host.dtype} {host.shape}".encode())
        made.update(np.ascontiguousarray(host).tobytes())
    return made.hexdigest()


def _changed(options: Distributed, **changes: Any) -> Any:
    """Return options with others in their place, unchecked."""
    made = object.__new__(Distributed)
    for name in Distributed.__dataclass_fields__:
        object.__setattr__(made, name, changes.get(name, getattr(options, name)))
    return made


def _no_arrays(rank: int) -> NotReadyError:
    return NotReadyError(
        f"Rank {rank} has neither rows nor statistics, so that it is unknown of which "
        "library its arrays are. Give `like`, an array such as the batches', to "
        "`Distributed`, or a batch of zero examples."
    )
