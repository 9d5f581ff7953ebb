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

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NoReturn

import numpy as np

from kfac_core.array.backend import Array, backend_of
from kfac_core.array.namespaces import device_of, is_finite_number, own_namespace
from kfac_core.array.structure import leaves, map_structure, replaced
from kfac_core.block import UpdateBlock, emptied
from kfac_core.distributed.agreement import (
    Agreement,
    error_as_data,
    error_from_data,
)
from kfac_core.distributed.exchange import Exchange, SentDirections
from kfac_core.distributed.options import Distributed
from kfac_core.distributed.placement import (
    Placement,
    block_loads,
    choose_placement,
    place,
    shared_owners,
)
from kfac_core.distributed.reduction import (
    Item,
    absorbed_share,
    summed,
    summed_at_owners,
)
from kfac_core.distributed.remote import RemoteOperator
from kfac_core.distributed.replicas import code_digests, require_same
from kfac_core.distributed.transport import BYTES, dtype_name, narrower
from kfac_core.distributed.whole_batch import counts_first, in_whole_batch, no_arrays
from kfac_core.errors import KFACError, UnsupportedError
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.feeding import is_empty, raise_for_flags
from kfac_core.network import (
    BlockState,
    Executor,
    Network,
    NetworkState,
    Tasks,
    plain,
)

__all__ = ["DistributedExecutor", "vote_length"]


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
    share : tuple of int or None
        Rank and number of processes, that of the states that it takes and makes; None for
        one process.

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
        p = self._communicator.size
        self.share = (self._communicator.rank, p) if p > 1 else None
        self._agreement = Agreement(self._communicator)
        _require_reducible(network)
        self.placement = _placement(network, options)
        self._require_same_plan()
        groups, rows = self.placement.groups, self.placement.rows
        self._group = self._communicator.split(groups)
        self._row = self._communicator.split(rows)
        self._group_number = self._communicator.rank // self.placement.holders
        self._background: DistributedExecutor | None = None
        self._to_all = Exchange(self._communicator)
        self._to_group = Exchange(self._group)
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

    def tell(
        self, stage: str, held: Mapping[str, Statistics | None], error: Exception, /
    ) -> NoReturn:
        """Raise an error on all ranks, which this one cannot begin a stage for.

        Parameters
        ----------
        stage : {"update", "absorb"}
            Stage that the other ranks are at, or come to.
        held : mapping of str to Statistics or None
            Not read.
        error : Exception
            What was raised on this rank.
        """
        self._agreement.vote(stage, error=error)
        raise error  # as the vote did

    def in_background(self, inner: Executor) -> DistributedExecutor:
        """Return an executor whose exchanges do not mix with those of this one.

        Collective.  Only one thread at a time may use it.
        """
        if self._background is None:
            everyone = [range(self._communicator.size)]
            own = replace(self.options, communicator=self._communicator.split(everyone))
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
        state = state.as_part(self.share)
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
        like = next((s.like for s in statistics.values()), None)
        found = own if like is None else self._to_all(own, like)
        blocks = {
            name: replaced(held, statistics=found[name][0], operator=found[name][1])
            for name, held in state.blocks.items()
            if name in found
        }
        return NetworkState({**state.blocks, **blocks})

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
        return NetworkState(blocks, self.share)

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
        require_same(self._communicator, common)
        require_same(self._group, held_here)

    def _update(self, function: UpdateBlock, tasks: Tasks) -> dict[str, Any]:
        tasks = self._with_statistics("update", tasks)
        batches = {n: task[2] for n, task in tasks.items() if not is_empty(task[2])}
        if counts_first(self.network, self.options.loss):
            batches = in_whole_batch(
                self._agreement,
                self.network,
                batches,
                loss=self.options.loss,
                like=next(task[1].like for task in tasks.values()),
            )
        own = {}
        for name, batch in batches.items():
            block, statistics, _, _, _, skip = tasks[name]
            own[name] = (block, emptied(statistics), batch, 0.0, None, skip)
        moments, error = self._attempt(function, own)
        coefficients = {name: (task[3], task[4]) for name, task in tasks.items()}
        return self._absorbed(function, tasks, moments, coefficients, error)

    def _absorb(self, function: Any, tasks: Tasks) -> dict[str, Any]:
        tasks = self._with_statistics("absorb", tasks)
        moments = {n: task[2] for n, task in tasks.items() if task[2] is not None}
        coefficients = {name: (task[3], task[4]) for name, task in tasks.items()}
        return self._absorbed(function, tasks, moments, coefficients, None)

    def _absorbed(
        self,
        function: Any,
        tasks: Tasks,
        moments: Mapping[str, Statistics],
        coefficients: Mapping[str, tuple[Any, Any]],
        error: Exception | None,
    ) -> dict[str, Statistics]:
        """Return statistics after an update with this rank's part of the batch."""
        weights = {
            name: _weights_of(task[1], moments.get(name))
            for name, task in tasks.items()
        }
        # Traced coefficients cannot be compared.
        numbers = [
            c for pair in coefficients.values() for c in pair if type(c) is float
        ]
        dtypes = sorted({dtype_name(task[1].like) for task in tasks.values()})
        step = f"update with {sorted({*numbers})}; {', '.join(dtypes)}"
        ballot = np.concatenate(list(weights.values()))
        total = self._agreement.vote(step, ballot, error=error)
        stops = np.cumsum([len(part) for part in weights.values()])[:-1]
        found = dict(zip(weights, np.split(total, stops), strict=True))
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
            made[name] = replaced(old, status=_int32(flag, old.like))
        return made

    def _rebase(self, function: Any, tasks: Tasks) -> dict[str, Any]:
        names = list(tasks)
        given = {name: task[1] for name, task in tasks.items()}
        whole = self._whole(f"rebase {names} {function.moments}", given)
        own = {name: (tasks[name][0], whole[name]) for name in whole}
        made, error = self._attempt(function, own)
        self._agreement.vote("rebased", error=error)
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
        like = next((s.like for s in given.values()), None)
        if like is None:
            return {}
        sums_here = self._communicator.rank == 0 or self.options.reduce == "update"
        found: dict[str, Statistics] = {}
        sent = self._to_all(news, like, dtype=self.options.operators_dtype)
        for name, (bases, status, changed) in sent.items():
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
        own = {name: (tasks[name][0], whole[name], *tasks[name][2:]) for name in whole}
        made, error = self._attempt(function, own)
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
            like = next(iter(given.values())).like
            held = self._to_group(held, like, dtype=self.options.operators_dtype)
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
                like = given[name].like
                results[name] = self._remote(name, like, int(status)), float(damping)
        return results

    def _product(self, function: Any, tasks: Tasks) -> dict[str, Any]:
        if self.placement.holders == self._communicator.size:
            return self._inner(function, tasks)
        given = {name: task[2] for name, task in tasks.items()}
        self._agreement.meet(f"{function.product} of {sorted(given)}")
        made: dict[str, Any] = {}
        error: Exception | None = None
        started = []
        for names in self.placement.messages(given, self.options.bucket_bytes):
            own = {n: tasks[n] for of_rank in names for n in of_rank if self._holds(n)}
            if error is None:
                found, error = self._attempt(function, own)
                made |= found
            started.append(
                SentDirections(
                    *(self._row, names, given, made),
                    failed=error is not None,
                    dtype=self.options.directions_dtype,
                )
            )
        results: dict[str, Any] = {}
        anything_failed = False
        for sent in started:
            found, failed = sent.wait()
            results |= found
            anything_failed = anything_failed or failed
        if anything_failed:
            Agreement(self._row).vote("product", error=error)
        if self.options.directions_dtype is not None:
            # What this rank sent, rounded as the others have it.
            return {name: results[name] for name in tasks}
        return {name: made.get(name) or results[name] for name in tasks}

    def _attempt(
        self, function: Any, tasks: Tasks
    ) -> tuple[dict[str, Any], Exception | None]:
        """Return the results of this rank's tasks, or what they raised."""
        try:
            return (self._inner(function, tasks) if tasks else {}), None
        except Exception as error:
            return {}, error

    def _prepare(self, function: Any, tasks: Tasks) -> dict[str, Any]:
        own = {name: task for name, task in tasks.items() if self._holds(name)}
        made, error = self._attempt(function, own)
        step = f"prepare {list(tasks)} {function.factorization}"
        self._agreement.vote(step, error=error)
        return {name: made.get(name, task[1]) for name, task in tasks.items()}

    def _whole(
        self, step: str, given: Mapping[str, Statistics]
    ) -> dict[str, Statistics]:
        """Return the statistics of all rows, of the blocks that this rank owns."""
        own = self.placement.owned_by(self._communicator.rank)
        own = [name for name in own if name in given]
        forms = [f"{name}: {_form_of(given[name])}" for name in given]
        self._agreement.meet("; ".join([step, *forms]))
        if self.options.reduce == "update":
            return {name: given[name] for name in own}
        sums = summed_at_owners(self._communicator, self._items(given), **self._wire)
        return {name: self._joined(name, given[name], sums) for name in own}

    def _summed_everywhere(
        self, given: Mapping[str, Statistics]
    ) -> dict[str, Statistics]:
        """Return the statistics of all ranks' rows on every rank."""
        # What one block takes from another is empty here.
        parts = {name: self._untaken(name, part) for name, part in given.items()}
        sums = summed(self._communicator, self._items(parts), **self._wire)
        joined = {name: self._joined(name, part, sums) for name, part in parts.items()}
        return {
            name: replaced(part, averages={**part.averages, **joined[name].averages})
            for name, part in given.items()
        }

    def _untaken(self, name: str, given: Statistics) -> Statistics:
        taken = self.network.shared_factors.taken_by(name)
        own = {side: a for side, a in given.averages.items() if side not in taken}
        return replaced(given, averages=own)

    @property
    def _wire(self) -> dict[str, Any]:
        return {
            "dtype": self.options.statistics_dtype,
            "bucket_bytes": self.options.bucket_bytes,
        }

    def _items(self, given: Mapping[str, Statistics]) -> list[Item]:
        """Return the averages of blocks, with a shared factor once: that of its giver."""
        items: dict[str, Item] = {}
        for name, statistics in given.items():
            for side, average in statistics.averages.items():
                key = self._key(name, side)
                items.setdefault(key, Item(key, self.placement.owners[name], average))
        return [*items.values()]

    def _joined(
        self, name: str, given: Statistics, found: Mapping[str, Any]
    ) -> Statistics:
        averages = {side: found[self._key(name, side)] for side in given.averages}
        return replaced(given, averages=averages)

    def _with_statistics(self, stage: str, tasks: Tasks) -> dict[str, tuple[Any, ...]]:
        """Return tasks with zero statistics where there are none yet."""
        if all(task[1] is not None for task in tasks.values()):
            return dict(tasks)
        likes = [task[1].like for task in tasks.values() if task[1] is not None]
        likes += [like for task in tasks.values() for like in _arrays_of(task[2])]
        like = likes[0] if likes else self.options.like
        if like is None:
            held = {name: task[1] for name, task in tasks.items()}
            self.tell(stage, held, no_arrays(self._communicator.rank))
        made: dict[str, tuple[Any, ...]] = {}
        for name, (block, statistics, *rest) in tasks.items():
            own = statistics
            if own is None:
                own = block.initial(like, precision=self.network.precision)
            made[name] = (block, own, *rest)
        return made

    def _errors(self, failed: Mapping[str, KFACError]) -> dict[str, KFACError]:
        """Return the errors of all ranks' blocks, on every rank."""
        own = json.dumps({name: error_as_data(error) for name, error in failed.items()})
        found: dict[str, KFACError] = {}
        for rank, text in enumerate(self._agreement.texts(own)):
            for name, data in json.loads(text).items():
                found[name] = (
                    failed[name] if name in failed else error_from_data(data, rank)
                )
        return found

    def _holds(self, name: str) -> bool:
        return self.placement.group_of(name) == self._group_number

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
        # What an interval decides is in the placement.
        local = "communicator", "like", "interval"
        options = {
            f"`{f.name}`": repr(getattr(self.options, f.name))
            for f in fields(self.options)
            if f.name not in local
        }
        compared = {
            "the network": repr(self.network._parts),
            **options,
            "the placement": self.placement.digest(),
            **{
                f"the code of {package}": text
                for package, text in code_digests().items()
            },
        }
        require_same(self._communicator, compared)
        self._agreement.reserve(vote_length(self.network))


def vote_length(network: Network, /) -> int:
    """Return the length of the votes between processes that divide a network.

    That of an update has the weights of all averages, and may take along the examples of
    each block that `kfac_core.integration.NaturalGradient` adds up.
    """
    averages = sum(
        len(block.initial(np.zeros(())).averages) for block in network.blocks.values()
    )
    uses = len(network.chains.of) + len(network.tied_weights.uses)
    return averages + 3 * len(network.blocks) + uses + 32


def _placement(network: Network, options: Distributed) -> Placement:
    size = options.communicator.size
    if options.holders == "auto":
        sent = narrower("float32", options.directions_dtype)
        return choose_placement(
            network,
            size,
            interval=options.interval,
            memory=options.memory,
            direction_bytes=BYTES[sent],
        )
    return place(
        block_loads(network),
        size,
        holders=size if options.holders == "all" else options.holders,
        together=shared_owners(network),
        memory=options.memory,
    )


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


def _arrays_of(batch: Any) -> list[Array]:
    """Return an array of a batch, or of each of several, also where it is empty."""
    if batch is None:
        return []
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return [x for use in batch for x in _arrays_of(use)]
    return [batch.like]


def _int32(value: int, like: Array) -> Array:
    xp = own_namespace(like)
    return xp.full((), int(value), dtype=xp.int32, device=device_of(like))


def _number(value: Any) -> float | None:
    if value is None:
        return None
    return float(value) if is_finite_number(value) else float(np.asarray(value))
