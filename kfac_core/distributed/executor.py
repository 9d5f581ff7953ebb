"""An executor whose blocks are divided among processes.

Conventions.  Every rank has its own part of each batch, possibly none, and calls the same
methods in the same order.  The result is that of one process with all rows, up to rounding:

* `update`: each rank keeps running sums of its own rows.  The ranks exchange one small
  vector with the weights of their rows and whether all are finite.  With
  ``reduce="owner"`` the sums of a batch go to the blocks' owners, which alone keep them,
  and which lend the bases of EKFAC while the others square the gradients of their rows.
* `refresh`: sums are added up at the blocks' owners, each of which factorizes its blocks.
  Operators go to the other holders; see `kfac_core.distributed.placement`.
* products: every rank gives the same vectors.  Holders compute, and the results of each
  block go to the ranks that do not hold it.

Whatever fails on one rank is agreed on first, and then raised on all; no state changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NoReturn, TypeAlias

import numpy as np

from kfac_core.approximations.options import RefreshOptions, UpdateOptions
from kfac_core.array import Array, Scalar, map_structure, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.backend import backend_of
from kfac_core.array.structure import leaves
from kfac_core.block import Block
from kfac_core.distributed import agreement, placement, reduction, remote, transport
from kfac_core.distributed.exchange import Exchange, SentDirections
from kfac_core.distributed.options import Distributed
from kfac_core.distributed.replicas import code_digests, require_same
from kfac_core.distributed.whole_batch import counts_first, in_whole_batch, no_arrays
from kfac_core.errors import KFACError, UnsupportedError
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.feeding import detached_array, is_empty, raise_for_flags
from kfac_core.network import Network
from kfac_core.operators.operator import CurvatureOperator
from kfac_core.stages import APPLY, Executor, Stage, Tasks, plain
from kfac_core.state import BlockState, NetworkState, require_same_form

Moments: TypeAlias = tuple[dict[str, Any], Exception | None]
"""Statistics of this rank's rows by block, or what was raised instead."""


class DistributedExecutor(Executor):
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
        self._owners_only = options.reduce == "owner"
        p = self._communicator.size
        self.share = (self._communicator.rank, p) if p > 1 else None
        self._agreement = agreement.Agreement(self._communicator)
        _require_reducible(network)
        self.placement = _placement(network, options)
        self._require_same_plan()
        rank = self._communicator.rank
        self._rows_here: placement.RowRange | None = None
        for ranges in self.placement.row_ranges.values():
            here = [rows for rows in ranges.values() if rows.rank == rank]
            self._rows_here = here[0] if here else self._rows_here
        groups, rows = self.placement.groups, self.placement.rows
        # A group has the holders of one operator; a row has one rank of each group, to
        # which the others send the directions of their blocks.
        self._group = self._communicator.split(groups)
        self._row = self._communicator.split(rows)
        self._group_number = self._communicator.rank // self.placement.holders
        self._message_bytes = transport.message_bytes(options.bucket_bytes, p)
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

    def __call__(self, stage: Stage, tasks: Tasks, /) -> dict[str, Any]:
        """Return the result of a stage for each task, as one process would have it."""
        return self._stages[stage.name](stage, tasks)

    def tell(self, error: Exception, /, *, product: bool = False) -> NoReturn:
        """Raise an error that this rank cannot begin a stage for, on all ranks.

        Parameters
        ----------
        error : Exception
            Exception that was raised on this rank.
        product : bool
            Whether the stage is a product, which ranks that hold all blocks begin alone.
        """
        if not product:
            self._agreement.vote("update", error=error)
        elif self.placement.holders < self._communicator.size:
            self._agreement.meet("product", error=error)
        raise error  # as the vote did

    def in_background(self, inner: Executor) -> DistributedExecutor:
        """Return an executor whose exchanges do not mix with those of this one.

        Collective.  Only one thread at a time may use it.
        """
        if self._background is None:
            # A refresh in the background and a step run at once: in one communicator
            # the order of their exchanges would differ between ranks.
            everyone = [range(self._communicator.size)]
            options = replace(
                self.options, communicator=self._communicator.split(everyone)
            )
            self._background = DistributedExecutor(self.network, options, inner)
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
        owned = {
            name: (block.statistics, block.operator)
            for name, block in self.owned(state).blocks.items()
        }
        statistics = [block.statistics for block in state.blocks.values()]
        like = next((s.like for s in statistics if s is not None), None)
        everything = owned if like is None else self._to_all(owned, like)
        blocks = {
            name: replaced(
                state.blocks[name], statistics=whole_statistics, operator=operator
            )
            for name, (whole_statistics, operator) in everything.items()
        }
        return NetworkState({**state.blocks, **blocks})

    def owned(self, state: NetworkState, /) -> NetworkState:
        """Return the blocks that this rank owns, as one process with all rows has them.

        Collective.  Together the ranks have what `gathered` returns.
        """
        state = state.as_part(self.share)
        statistics = {
            name: block.statistics
            for name, block in state.blocks.items()
            if block.statistics is not None
        }
        sums = self._sums_of_owned(f"gather {list(statistics)}", statistics)
        names = self.placement.owned_by(self._communicator.rank)
        return NetworkState(
            {n: replaced(state.blocks[n], statistics=sums.get(n)) for n in names}
        )

    def shared(
        self, owned: NetworkState, /, *, error: Exception | None = None
    ) -> NetworkState:
        """Return this rank's part of a state of which each rank has what it owns.

        Parameters
        ----------
        owned : NetworkState
            Blocks from `owned`, on any number of ranks.
        error : Exception, optional
            What failed on this rank, to be raised on all.

        Returns
        -------
        NetworkState
            State of this rank.
        """
        blocks = owned.blocks
        present = [b.statistics for b in blocks.values() if b.statistics is not None]
        like = present[0].like if present else self.options.like
        if like is None and error is None:
            error = no_arrays(self._communicator.rank)
        # Vote before the first exchange: a rank whose file was bad would leave others
        # waiting.
        self._agreement.vote("load", error=error)
        heads, operators = {}, {}
        for name, block in blocks.items():
            statistics, operator, status = block.statistics, block.operator, None
            is_divided = operator is not None and self._divides(name, operator)
            if statistics is not None:
                # Only owners need the sums; others learn that there are some.
                bases = {} if self._owners_only else statistics.bases
                statistics = replaced(statistics, averages={}, bases=bases)
            if operator is not None:
                operators[name] = operator
                status = int(operator.status())
            head = replaced(block, statistics=statistics, operator=None)
            heads[name] = head, status, is_divided
        if self.placement.holders > 1:
            operators = self._to_group(operators, like)
        parts: dict[str, BlockState] = {}
        heads = self._to_all(heads, like)
        divided = [name for name in self.placement.workers if heads[name][2]]
        rows = self._sent_rows(divided, operators, like)
        for name, (head, status, is_divided) in heads.items():
            statistics, operator = head.statistics, operators.get(name)
            if name in blocks:
                statistics = blocks[name].statistics
            elif statistics is not None:
                empty = self.network.blocks[name].initial(
                    like, precision=self.network.precision
                )
                bases = statistics.bases or empty.bases
                statistics = Statistics(empty.averages, statistics.status, bases)
            if statistics is not None:
                statistics = self._part_of(name, statistics)
            if operator is None and status is not None:
                operator = self._remote(name, like, status, is_divided, rows)
            parts[name] = replaced(head, statistics=statistics, operator=operator)
        return NetworkState({n: parts[n] for n in self.network.blocks}, self.share)

    def scattered(self, state: NetworkState, /) -> NetworkState:
        """Return this rank's part of a state of one process.

        Owners take the sums and the others start at zero, which adds up to the same.

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
        for name, block in state.blocks.items():
            statistics, operator = block.statistics, block.operator
            if statistics is not None:
                statistics = self._part_of(name, statistics)
            if operator is not None and not self._holds(name):
                is_divided, here = self._divides(name, operator), self._rows_here
                rows: dict[str, remote.InverseRows] = {}
                if is_divided and here is not None and here.block == name:
                    (rows[name],) = remote.rows_of_inverses(operator, [here])
                status = int(operator.status())
                operator = self._remote(name, operator.like, status, is_divided, rows)
            blocks[name] = replaced(block, statistics=statistics, operator=operator)
        return NetworkState(blocks, self.share)

    def _part_of(self, name: str, statistics: Statistics) -> Statistics:
        """Return what this rank keeps of statistics that all ranks know."""
        if self._owners_only:
            return self._owned_part(name, statistics)
        if self.placement.owners[name] == self._communicator.rank:
            return statistics
        return statistics.emptied()

    def _owned_part(self, name: str, statistics: Statistics) -> Statistics:
        """Return statistics with packed sums on their owner, and empty arrays elsewhere."""
        if self.placement.owners[name] == self._communicator.rank:
            averages = transport.packed_matrices(statistics.averages)
            return replaced(statistics, averages=averages)
        averages = map_structure(_without_numbers, statistics.averages)
        bases = map_structure(_without_numbers, statistics.bases)
        return Statistics(averages, statistics.status, bases)

    def check_replicas(
        self, state: NetworkState, /, **arrays: Mapping[str, Any] | Array
    ) -> None:
        """Raise unless all ranks hold the same of what must be the same.

        These are counts, dampings, bases and operators that several ranks hold, and further
        arrays, such as parameters.

        Parameters
        ----------
        state : NetworkState
            State of this rank.
        **arrays : array or mapping of str to array
            Arrays that must also be equal to the bit.

        Raises
        ------
        ReplicaError
            Names what differs, and the ranks.
        """
        of_all = dict(arrays)
        of_holders: dict[str, Any] = {}
        for name, block in state.blocks.items():
            # Compared as text: a repr of floats is exact, and names what differs in the
            # error.
            counts = {
                f: _number(getattr(block, f))
                for f in ("updates", "age", "refreshes", "failures", "damping")
            }
            of_all[f"{name}: counts and damping"] = repr(counts)
            if block.statistics is not None and not self._owners_only:
                of_all[f"{name}: bases"] = block.statistics.bases
            if self._holds(name):
                of_holders[f"{name}: operator"] = block.operator
        require_same(self._communicator, of_all)
        require_same(self._group, of_holders)

    def _update(self, stage: Stage, tasks: Tasks) -> dict[str, Any]:
        tasks = self._with_statistics(tasks)
        batches = {n: task[2] for n, task in tasks.items() if not is_empty(task[2])}
        if counts_first(self.network, self.options.loss):
            batches = in_whole_batch(
                self._agreement,
                self.network,
                batches,
                loss=self.options.loss,
                like=next(task[1].like for task in tasks.values()),
            )

        def moments_of(empties: Mapping[str, Statistics]) -> Moments:
            local = {}
            for name, empty in empties.items():
                if name not in batches:
                    continue
                block, _, _, options = tasks[name]
                # Bare sums over rows: decay and weight apply once, to the sums of all
                # ranks.
                alone = replaced(options, decay=0.0, weight=None)
                local[name] = (block, empty, batches[name], alone)
            return self._attempt(stage, local)

        if self._owners_only:
            return self._absorbed_by_owners(tasks, set(batches), moments_of)
        empties = {name: tasks[name][1].emptied() for name in batches}
        return self._absorbed(tasks, *moments_of(empties))

    def _absorb(self, stage: Stage, tasks: Tasks) -> dict[str, Any]:
        tasks = self._with_statistics(tasks)
        moments = {n: task[2] for n, task in tasks.items() if task[2] is not None}
        if not self._owners_only:
            return self._absorbed(tasks, moments, None)

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

        return self._absorbed_by_owners(tasks, set(moments), moments_of)

    def _absorbed_by_owners(
        self,
        tasks: Mapping[str, tuple[Any, ...]],
        here: set[str],
        moments_of: Callable[[Mapping[str, Statistics]], Moments],
    ) -> dict[str, Statistics]:
        """Return statistics after an update whose sums go to the owners of the blocks.

        So many blocks at a time that their sums fill a message.  The last message says
        whether all rows were finite; if not, a second vote raises.
        """
        # A block without rows on any rank is left out, as one process leaves it out.
        any_rows = [float(name in here) for name in tasks]
        total = self._agreement.vote(self._update_step(tasks), any_rows)
        with_rows = [name for name, ranks in zip(tasks, total, strict=True) if ranks]
        updated: dict[str, Statistics] = {}
        flags = dict.fromkeys(with_rows, 0)
        error: Exception | None = None
        failed = 0.0
        filled = transport.buckets(
            with_rows,
            lambda name: 8 * self.placement.loads[name].statistics,
            self._message_bytes,
        )
        for names in filled:
            empties = self._empties({name: tasks[name][:2] for name in names})
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
            own_sides = self._without_taken(parts)
            # The mark rides with the last message, so that a good update costs no
            # second vote.
            mark = float(error is not None or any(flags.values()))
            sums, failed = self._summed(
                own_sides, mark=mark if names is filled[-1] else None
            )
            for name in names:
                statistics = self._owned_part(name, tasks[name][1])
                if self.placement.owners[name] == self._communicator.rank:
                    added = self._with_averages(name, own_sides[name], sums)
                    averages = {**parts[name].averages, **added.averages}
                    moments_of_all = replaced(parts[name], averages=averages)
                    block, _, *others = tasks[name]
                    task = block, statistics, *others
                    statistics = self._share(task, moments_of_all, None)
                updated[name] = statistics
        # Nothing has been assigned yet: after a failure all ranks keep their
        # statistics.
        if failed:
            self._agreement.vote("added up", error=error)
            return self._flagged(tasks, flags)
        return updated

    def _update_step(self, tasks: Tasks) -> str:
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

    def _absorbed(
        self,
        tasks: Tasks,
        moments: Mapping[str, Statistics],
        error: Exception | None,
    ) -> dict[str, Statistics]:
        """Return statistics after an update with this rank's part of the batch."""
        local = [_weights_of(task[1], moments.get(n)) for n, task in tasks.items()]
        step = self._update_step(tasks)
        total = self._agreement.vote(step, np.concatenate(local), error=error)
        # The vote itself carries the weights: one message says what all ranks have and
        # agree.
        stops = np.cumsum([len(part) for part in local])[:-1]
        weights = dict(zip(tasks, np.split(total, stops), strict=True))
        with_rows = [name for name, numbers in weights.items() if numbers[0] > 0]
        if any(numbers[1] > 0 for numbers in weights.values()):
            flags = {
                n: int(moments[n].status) if n in moments else 0 for n in with_rows
            }
            return self._flagged(tasks, flags)
        parts = {n: moments.get(n) or tasks[n][1].emptied() for n in with_rows}
        totals = {
            name: dict(
                zip(tasks[name][1].averages, weights[name][2:].tolist(), strict=True)
            )
            for name in with_rows
        }
        return {
            name: self._share(tasks[name], parts[name], totals[name])
            for name in with_rows
        }

    def _share(
        self,
        task: tuple[Any, ...],
        moments: Statistics,
        totals: Mapping[str, float] | None,
    ) -> Statistics:
        """Return the statistics of a task after an update; see `absorbed_share`."""
        decay, weight = _coefficients(task)
        decays = task[0].approximation.decays
        return reduction.absorbed_share(
            *(task[1], moments),
            decay=decay,
            weight=weight,
            decays=decays,
            totals=totals,
        )

    def _flagged(
        self, tasks: Tasks, flags_here: Mapping[str, int]
    ) -> dict[str, Statistics]:
        """Raise for rows that are not finite on some rank, or return their flags."""
        names = [*flags_here]
        local = np.asarray([*flags_here.values()], np.int64)
        of_ranks = self._agreement.gathered(local, length=len(names))
        # Merged moments were read before; an update says whether its flags are.
        options = tasks[names[0]][3]
        if not isinstance(options, UpdateOptions) or options.check == "raise":
            for rank, flags in zip(self._communicator.ranks, of_ranks, strict=True):
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
            flagged[name] = replaced(statistics, status=_int32(flag, statistics.like))
        return flagged

    def _rebase(self, stage: Stage, tasks: Tasks) -> dict[str, Any]:
        names = list(tasks)
        local = {name: task[1] for name, task in tasks.items()}
        sums = self._sums_of_owned(
            f"rebase {names} {sorted({task[2] for task in tasks.values()})}", local
        )
        owned = {name: (tasks[name][0], sums[name], *tasks[name][2:]) for name in sums}
        rebased, error = self._attempt(stage, owned)
        if not local:
            return {}
        dtype = self.options.operators_dtype
        news: dict[str, tuple[Any, ...]] = {}
        for name, new in rebased.items():
            if self._owners_only:
                # Bases are sent while an update needs them.
                news[name] = {}, new.status, {}
                continue
            # Second moments have new bases; other averages are those that ranks have.
            changed = _changed(new.averages, sums[name].averages)
            news[name] = new.bases, new.status, changed
        received = self._to_all(news, local[names[0]].like, dtype=dtype)
        if len(received) < len(names):
            # All ranks see that the bases of an owner are missing, and learn why.
            self._agreement.vote("rebased", error=error)
        statistics: dict[str, Statistics] = {}
        for name in names:
            bases, status, changed = received[name]
            if self._owners_only:
                new = rebased.get(name, local[name])
                if dtype is not None:
                    new = replaced(new, bases=transport.rounded(new.bases, dtype))
                statistics[name] = self._owned_part(name, replaced(new, status=status))
                continue
            changed = self._part_of(name, Statistics(changed, status)).averages
            averages = {**local[name].averages, **changed}
            statistics[name] = Statistics(averages, status, bases)
        return statistics

    def _refresh(self, stage: Stage, tasks: Tasks) -> dict[str, Any]:
        names = list(tasks)
        local = {name: task[1] for name, task in tasks.items()}
        dampings = {task[2].damping for task in tasks.values()}
        # Traced dampings cannot be compared.
        dampings = {damping for damping in dampings if type(damping) is float}
        step = f"refresh {names} with {sorted(dampings)}"
        sums = self._sums_of_owned(step, local)
        owned = {name: (tasks[name][0], sums[name], *tasks[name][2:]) for name in sums}
        refreshed, error = self._attempt(stage, owned)
        like = local[names[0]].like
        operators = {
            n: r[0] for n, r in refreshed.items() if not isinstance(r, KFACError)
        }
        requested = [task[2] for task in tasks.values()]
        among_all = self.placement.holders == self._communicator.size
        follow = self._communicator.votes.directions_follow
        # No vote where the next message tells of failures: without an operator in it all
        # ranks know, and a holder without one refuses the directions that follow.
        votes_first = not (among_all or follow) or any(
            type(options.damping) is not float or options.damping_scaling != "none"
            for options in requested
        )
        outcomes: dict[str, Any] = {}
        if votes_first:
            outcomes = self._outcomes(names, refreshed, error)
        elif not among_all:
            # Flags have to be known everywhere, as failures have.
            operators = {n: x for n, x in operators.items() if not int(x.status())}
        divided = [
            name
            for name in self.placement.workers
            if name in tasks
            and not isinstance(outcomes.get(name), KFACError)
            and _inverts(tasks[name][2])
        ]
        rows = self._sent_rows(divided, operators, like)
        if self.placement.holders > 1:
            operators = self._to_group(
                operators, like, dtype=self.options.operators_dtype
            )
        if among_all and not votes_first and len(operators) < len(names):
            outcomes = self._outcomes(names, refreshed, error)
        results: dict[str, Any] = {}
        for name, options in zip(names, requested, strict=True):
            outcome = outcomes.get(name, (0, options.damping))
            if isinstance(outcome, KFACError):
                results[name] = outcome
                continue
            status, damping = outcome
            operator = operators.get(name)
            if operator is None:
                operator = self._remote(name, like, status, name in divided, rows)
                operator = replaced(operator, has_failed=self._holds(name))
            results[name] = operator, damping
        return results

    def _outcomes(
        self, names: Sequence[str], refreshed: Mapping[str, Any], error: Any
    ) -> dict[str, Any]:
        """Return each block's status and damping, or its error, on every rank."""
        failed = {n: r for n, r in refreshed.items() if isinstance(r, KFACError)}
        # Whether it failed, its status and its damping, of each block by its owner.
        ballot = np.zeros((len(names), 3))
        for i, name in enumerate(names):
            if name in failed:
                ballot[i, 0] = 1
            elif name in refreshed:
                operator, damping = refreshed[name]
                ballot[i, 1:] = int(operator.status()), float(damping)
        total = self._agreement.vote("refreshed", ballot.reshape(-1), error=error)
        errors = self._errors(failed) if total[::3].any() else {}
        return {
            name: errors.get(name, (int(status), damping))
            for name, (_, status, damping) in zip(
                names, total.reshape(-1, 3).tolist(), strict=True
            )
        }

    def _sent_rows(
        self, names: Sequence[str], operators: Mapping[str, Any], like: Array
    ) -> dict[str, remote.InverseRows]:
        """Send rows of inverses to the ranks that multiply with them; collective.

        Parameters
        ----------
        names : sequence of str
            Blocks with divided directions, in the order of their workers.
        operators : mapping of str to FactoredKronecker
            Operators of this rank's blocks.
        like : array
            Array in the dtype of the statistics.

        Returns
        -------
        dict of str to InverseRows
            This rank's share, of one block at most.
        """
        if not names:
            return {}
        rank, owners = self._communicator.rank, self.placement.owners
        xp = ns.own_namespace(like)
        dtype = self.network.precision.dtypes(like.dtype, xp=xp)[1]
        # Only workers receive rows, each of one block: lengths are zero for most pairs.
        send, receive = [0] * self._communicator.size, [0] * self._communicator.size
        arrays: list[Array] = [xp.zeros((0,), dtype=dtype, device=ns.device_of(like))]
        for name in names:
            ranges = [*self.placement.row_ranges[name].values()]
            if owners[name] == rank:
                for rows in ranges:
                    send[rows.rank] = rows.received
                if name not in operators:
                    # A failure that the directions will tell of, which these are not for.
                    total = sum(rows.received for rows in ranges)
                    device = ns.device_of(like)
                    arrays.append(xp.zeros((total,), dtype=dtype, device=device))
                    continue
                for sent in remote.rows_of_inverses(operators[name], ranges):
                    for x in (sent.rows, sent.other, sent.scale):
                        arrays.append(ns.cast(xp, xp.reshape(x, (-1,)), dtype))
            for rows in ranges:
                if rows.rank == rank:
                    receive[owners[name]] = rows.received
        exchange = self._communicator.all_to_all(xp.concat(arrays), send, receive)
        arrived, here = exchange.wait(), self._rows_here
        if here is None or here.block not in names:
            return {}
        count = here.stop - here.start
        m = here.numbers // count
        # In the order in which the owner has sent them: rows, the other inverse, the
        # scale.
        rows, other = arrived[: -m * m - 1], arrived[-m * m - 1 : -1]
        return {
            here.block: remote.InverseRows(
                xp.reshape(rows, (count, -1)), xp.reshape(other, (m, m)), arrived[-1]
            )
        }

    def _divides(self, name: str, operator: CurvatureOperator) -> bool:
        """Return whether several ranks compute the directions of an operator."""
        if name not in self.placement.workers:
            return False
        if isinstance(operator, remote.RemoteOperator):
            return operator.is_divided
        return remote.has_inverses(operator)

    def _product(self, stage: Stage, tasks: Tasks) -> dict[str, Any]:
        # Every rank holds every operator: no message, and no vote, in a step.
        if self.placement.holders == self._communicator.size:
            return self._inner(stage, tasks)
        vectors = {name: task[2] for name, task in tasks.items()}
        calls = sorted({task[3].product for task in tasks.values()})
        self._agreement.meet(f"{calls} of {sorted(vectors)}")
        matrices: dict[str, Array] = {}
        ranges: dict[str, placement.RowRange] = {}
        if calls == ["multiply_inverse"]:
            for name, (block, operator, vector, _) in tasks.items():
                if self._divides(name, operator):
                    matrices[name] = _as_matrix(block, vector)
                    # Rows of a direction are one task a rank, which messages treat like
                    # a block.
                    ranges |= self.placement.row_ranges[name]
        for key, rows in ranges.items():
            of_rank = matrices[rows.block][..., rows.start : rows.stop, :]
            vectors[key] = {"rows": of_rank}
        computed: dict[str, Any] = {}
        error: Exception | None = None
        started = []
        for names in self.placement.messages(tasks, self._message_bytes, matrices):
            sent_here = names[self._group_number]
            local = {n: tasks[n] for n in sent_here if n not in ranges}
            local_rows = {}
            for key in set(sent_here) & ranges.keys():
                name = ranges[key].block
                local_rows[key] = *tasks[name][:2], matrices[name], ranges[key]
            for run, run_tasks in ((stage, local), (_ROWS, local_rows)):
                if error is None:
                    directions, error = self._attempt(run, run_tasks)
                    computed |= directions
            # Start each message before the next blocks are computed, so that both
            # overlap.
            started.append(
                SentDirections(
                    *(self._row, names, vectors, computed),
                    failed=error is not None,
                    dtype=self.options.directions_dtype,
                )
            )
        received: dict[str, Any] = {}
        anything_failed = False
        for sent in started:
            directions, failed = sent.wait()
            received |= directions
            anything_failed = anything_failed or failed
        # Only the ranks of this row know of the failure; each row votes alike.
        if anything_failed:
            agreement.Agreement(self._row).vote("product", error=error)
        for name in matrices:
            parts = [received[key]["rows"] for key in self.placement.row_ranges[name]]
            received[name] = _as_parameters(tasks[name][0], parts)
        if self.options.directions_dtype is not None:
            # What this rank sent, rounded as the others have it.
            return {name: received[name] for name in tasks}
        return {name: computed.get(name) or received[name] for name in tasks}

    def _attempt(
        self, stage: Stage, tasks: Tasks
    ) -> tuple[dict[str, Any], Exception | None]:
        """Return the results of this rank's tasks, or what they raised."""
        try:
            return (self._inner(stage, tasks) if tasks else {}), None
        except Exception as error:
            return {}, error

    def _prepare(self, stage: Stage, tasks: Tasks) -> dict[str, Any]:
        local = {name: task for name, task in tasks.items() if self._holds(name)}
        prepared, error = self._attempt(stage, local)
        step = f"prepare {list(tasks)} {sorted({task[2] for task in tasks.values()})}"
        self._agreement.vote(step, error=error)
        return {name: prepared.get(name, task[1]) for name, task in tasks.items()}

    def _sums_of_owned(
        self, step: str, local: Mapping[str, Statistics]
    ) -> dict[str, Statistics]:
        """Return the statistics of all rows, of the blocks that this rank owns."""
        owned = self.placement.owned_by(self._communicator.rank)
        owned = [name for name in owned if name in local]
        if self._owners_only:
            self._agreement.meet(step)
            return {name: transport.unpacked_matrices(local[name]) for name in owned}
        forms = [f"{name}: {_form_of(local[name])}" for name in local]
        self._agreement.meet("; ".join([step, *forms]))
        # A reduce-scatter: no rank holds the sums of blocks that others own.
        sums, _ = self._summed(local)
        return {name: self._with_averages(name, local[name], sums) for name in owned}

    def _without_taken(self, local: Mapping[str, Statistics]) -> dict[str, Statistics]:
        """Return statistics without what one block takes from another, which is empty."""
        return {
            name: replaced(
                statistics,
                averages={
                    side: average
                    for side, average in statistics.averages.items()
                    if side not in self.network.shared_factors.taken_by(name)
                },
            )
            for name, statistics in local.items()
        }

    def _summed(
        self,
        local: Mapping[str, Statistics],
        *,
        mark: float | None = None,
    ) -> tuple[dict[str, Any], float]:
        """Return the sums of averages by key, and of marks; see `summed`.

        A shared factor is summed once.
        """
        items: dict[str, reduction.Item] = {}
        for name, statistics in local.items():
            for side, average in statistics.averages.items():
                key = self._key(name, side)
                # Blocks that share a factor have the same key.
                items.setdefault(
                    key, reduction.Item(key, self.placement.owners[name], average)
                )
        return reduction.summed(
            self._communicator,
            items.values(),
            bucket_bytes=self._message_bytes,
            mark=mark,
        )

    def _with_averages(
        self, name: str, statistics: Statistics, averages: Mapping[str, Any]
    ) -> Statistics:
        sides = {side: averages[self._key(name, side)] for side in statistics.averages}
        return replaced(statistics, averages=sides)

    def _with_statistics(self, tasks: Tasks) -> dict[str, tuple[Any, ...]]:
        """Return tasks with zero statistics where there are none yet."""
        if all(task[1] is not None for task in tasks.values()):
            return dict(tasks)
        likes = [task[1].like for task in tasks.values() if task[1] is not None]
        likes += [like for task in tasks.values() for like in _arrays_of(task[2])]
        like = likes[0] if likes else self.options.like
        if like is None:
            self.tell(no_arrays(self._communicator.rank))
        filled: dict[str, tuple[Any, ...]] = {}
        for name, (block, statistics, *others) in tasks.items():
            if statistics is None:
                statistics = block.initial(like, precision=self.network.precision)
                if self._owners_only:
                    statistics = self._owned_part(name, statistics)
            filled[name] = (block, statistics, *others)
        return filled

    def _empties(
        self, blocks: Mapping[str, tuple[Block, Statistics]]
    ) -> dict[str, Statistics]:
        """Return zero statistics of blocks, in the bases of their owners; collective.

        Of bases every rank gets the eigenvectors, which is all that moments need.
        """
        owners = self.placement.owners
        of_ranks: list[list[str]] = [[] for _ in self._communicator.ranks]
        empties, vectors, local = {}, {}, {}
        for name, (block, statistics) in blocks.items():
            precision = self.network.precision
            empties[name] = block.initial(statistics.like, precision=precision)
            if not empties[name].bases:
                continue
            of_ranks[owners[name]].append(name)
            vectors[name] = _eigenvectors(empties[name])
            if owners[name] == self._communicator.rank:
                local[name] = _eigenvectors(statistics)
        if not vectors:
            return empties
        sent = SentDirections(
            *(self._communicator, of_ranks, vectors, local),
            failed=False,
            dtype=self.options.operators_dtype,
        )
        for name, received in sent.wait()[0].items():
            bases = {
                side: replaced(basis, eigenvectors=received[side])
                for side, basis in empties[name].bases.items()
            }
            empties[name] = replaced(empties[name], bases=bases)
        return empties

    def _errors(self, failed: Mapping[str, KFACError]) -> dict[str, KFACError]:
        """Return the errors of all ranks' blocks, on every rank."""
        data = {name: agreement.error_as_data(error) for name, error in failed.items()}
        # An exception may not be picklable; its class, factor and message are enough.
        texts = self._agreement.texts(json.dumps(data))
        errors: dict[str, KFACError] = {}
        for rank, text in zip(self._communicator.ranks, texts, strict=True):
            for name, error in json.loads(text).items():
                errors[name] = failed.get(name) or agreement.error_from_data(
                    error, rank
                )
        return errors

    def _holds(self, name: str) -> bool:
        return self.placement.group_of(name) == self._group_number

    def _key(self, name: str, side: str) -> str:
        """Return the name of an average; a shared factor has that of its giver."""
        giver = self.network.shared_factors.pairs.get((name, side))
        return f"{name}/{side}" if giver is None else "/".join(giver)

    def _remote(
        self,
        name: str,
        like: Array,
        status: int,
        is_divided: bool,
        rows: Mapping[str, remote.InverseRows],
    ) -> remote.RemoteOperator:
        xp = ns.own_namespace(like)
        zero = xp.zeros((), dtype=like.dtype, device=ns.device_of(like))
        shape = self.network.blocks[name].layer.matrix_shape
        return remote.RemoteOperator(
            *(self.placement.owners[name], shape, zero, _int32(status, like)),
            *(is_divided, rows.get(name)),
        )

    def _require_same_plan(self) -> None:
        # What an interval decides is in the placement.
        local = "communicator", "like", "interval"
        options = {
            f"`{f.name}`": repr(getattr(self.options, f.name))
            for f in fields(self.options)
            if f.name not in local
        }
        code = {f"the code of {p}": text for p, text in code_digests().items()}
        plan = {"the network": repr(self.network._parts), **options, **code}
        plan["the placement"] = self.placement.digest()
        require_same(self._communicator, plan)
        self._agreement.reserve(vote_length(self.network))


def vote_length(network: Network, /) -> int:
    """Return the length of the votes between processes that divide a network.

    An update's vote has the weights of all averages, and room for the examples of each
    block, which `kfac_core.integration.NaturalGradient` adds up.
    """
    averages = sum(
        len(block.initial(np.zeros(())).averages) for block in network.blocks.values()
    )
    # Longer values go in a second message, so this length is a matter of speed only.
    return averages + 2 * len(network.blocks) + len(network.layers.names) + 32


def _placement(network: Network, options: Distributed) -> placement.Placement:
    size = options.communicator.size
    if options.holders == "auto":
        sent = transport.narrower("float32", options.directions_dtype)
        return placement.choose_placement(
            network,
            size,
            interval=options.interval,
            memory=options.memory,
            direction_bytes=transport.BYTES[sent],
        )
    return placement.place(
        placement.block_loads(network),
        size,
        holders=size if options.holders == "all" else options.holders,
        together=placement.shared_owners(network),
        memory=options.memory,
        interval=options.interval,
    )


def _require_reducible(network: Network) -> None:
    for name, block in network.blocks.items():
        approximation = block.approximation
        if approximation.reduction == "none":
            raise UnsupportedError(
                f"Block {name!r} ({approximation.name}) cannot be divided among processes: "
                f"{approximation.reduction_problem}."
            )


def _rows_of_direction(
    block: Block,
    operator: remote.RemoteOperator,
    matrix: Array,
    rows: placement.RowRange,
    /,
    *,
    name: str,
) -> dict[str, Array]:
    """Return the rows of a direction that this rank computes."""
    return {"rows": operator.direction_rows(matrix, rows.start, rows.stop)}


_ROWS = Stage("rows", _rows_of_direction, 2, APPLY.work)


def _inverts(options: RefreshOptions) -> bool:
    """Return whether a refresh gives `FactoredKronecker` operators with inverses."""
    return (
        options.rule != "exact"
        and options.solving == "inverse"
        and "inverse" in options.factorizations
    )


def _as_matrix(block: Block, vector: Mapping[str, Array]) -> Array:
    arrays = {key: detached_array(x) for key, x in vector.items()}
    return remote.larger_first(block.layer.parameters_to_matrix(arrays))


def _as_parameters(block: Block, parts: Sequence[Array]) -> dict[str, Array]:
    """Return a direction of the rows of its matrix, or of the transpose."""
    xp = ns.own_namespace(parts[0])
    matrix = xp.concat(parts, axis=-2)
    n, m = block.layer.matrix_shape
    if n < m:
        matrix = xp.matrix_transpose(matrix)
    return block.layer.matrix_to_parameters(matrix)


def _coefficients(task: tuple[Any, ...]) -> tuple[Any, Any]:
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


def _without_numbers(x: Array) -> Array:
    """Return an array of the same library without numbers; one number is a zero."""
    xp = ns.own_namespace(x)
    return xp.zeros((0,) * x.ndim, dtype=x.dtype, device=ns.device_of(x))


def _changed(averages: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    return {side: x for side, x in averages.items() if x is not before[side]}


def _form_of(statistics: Statistics) -> list[Any]:
    """Return the shapes and dtypes of averages, which all ranks must have."""
    return [
        (path, tuple(x.shape), str(x.dtype).rpartition(".")[2])
        for path, x in leaves(statistics.averages)
    ]


def _arrays_of(batch: Any) -> list[Array]:
    """Return an array of a batch, or of each of several, also where it is empty."""
    if batch is None or callable(batch):
        return []
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        return [x for use in batch for x in _arrays_of(use)]
    return [batch.like]


def _int32(value: int, like: Array) -> Array:
    xp = ns.own_namespace(like)
    return xp.full((), int(value), dtype=xp.int32, device=ns.device_of(like))


def _number(value: Scalar | None) -> float | None:
    if value is None:
        return None
    return float(value) if ns.is_finite_number(value) else float(np.asarray(value))
