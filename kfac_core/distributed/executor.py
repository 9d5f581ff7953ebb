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

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from kfac_core.array import Array, replaced
from kfac_core.distributed import products, reduction, refreshes, remote, updates
from kfac_core.distributed.options import Distributed
from kfac_core.distributed.partition import Partition
from kfac_core.distributed.replicas import require_same
from kfac_core.distributed.whole_batch import no_arrays
from kfac_core.factors.statistics import Statistics
from kfac_core.network import Network
from kfac_core.stages import Executor, Result, Stage, Tasks, plain
from kfac_core.state import BlockState, NetworkState

_STAGES: dict[str, Callable[..., dict[str, Any]]] = {
    "update": updates.update,
    "absorb": updates.absorb,
    "rebase": refreshes.rebase,
    "refresh": refreshes.refresh,
    "product": products.product,
    "prepare": refreshes.prepare,
}


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
        self.partition = Partition(network, options, inner)
        self.placement = self.partition.placement
        rank, p = options.communicator.rank, options.communicator.size
        self.share = (rank, p) if p > 1 else None
        self._background: DistributedExecutor | None = None

    def __call__(self, stage: Stage[Result], tasks: Tasks, /) -> dict[str, Result]:
        """Return the result of a stage for each task, as one process would have it."""
        results: dict[str, Result] = _STAGES[stage.name](self.partition, stage, tasks)
        return results

    def tell(self, error: Exception, /, *, product: bool = False) -> NoReturn:
        """Raise an error that this rank cannot begin a stage for, on all ranks.

        Parameters
        ----------
        error : Exception
            Exception that was raised on this rank.
        product : bool
            Whether the stage is a product, which ranks that hold all blocks begin alone.
        """
        partition = self.partition
        if not product:
            partition.agreement.vote("update", error=error)
        elif partition.placement.holders < partition.communicator.size:
            partition.agreement.meet("product", error=error)
        raise error  # as the vote did

    def in_background(self, inner: Executor) -> DistributedExecutor:
        """Return an executor whose exchanges do not mix with those of this one.

        Collective.  Only one thread at a time may use it.
        """
        if self._background is None:
            # A refresh in the background and a step run at once: in one communicator
            # the order of their exchanges would differ between ranks.
            options = self.partition.options
            everyone = [range(options.communicator.size)]
            options = replace(
                options, communicator=options.communicator.split(everyone)
            )
            network = self.partition.network
            self._background = DistributedExecutor(network, options, inner)
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
        partition = self.partition
        owned = {
            name: (block.statistics, block.operator)
            for name, block in self.owned(state).blocks.items()
        }
        statistics = [block.statistics for block in state.blocks.values()]
        like = next((s.like for s in statistics if s is not None), None)
        everything = owned if like is None else partition.to_all(owned, like)
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
        partition = self.partition
        state = state.as_part(self.share)
        statistics = {
            name: block.statistics
            for name, block in state.blocks.items()
            if block.statistics is not None
        }
        sums = reduction.sums_of_owned(
            partition, f"gather {list(statistics)}", statistics
        )
        return NetworkState(
            {
                name: replaced(state.blocks[name], statistics=sums.get(name))
                for name in partition.owned()
            }
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
        partition = self.partition
        blocks = owned.blocks
        present = [b.statistics for b in blocks.values() if b.statistics is not None]
        like = present[0].like if present else partition.options.like
        if like is None and error is None:
            error = no_arrays(partition.communicator.rank)
        # Vote before the first exchange: a rank whose file was bad would leave others
        # waiting.
        partition.agreement.vote("load", error=error)
        heads, operators = {}, {}
        for name, block in blocks.items():
            statistics, operator, status = block.statistics, block.operator, None
            is_divided = operator is not None and partition.divides(name, operator)
            if statistics is not None:
                # Only owners need the sums; others learn that there are some.
                bases = {} if partition.owners_only else statistics.bases
                statistics = replaced(statistics, averages={}, bases=bases)
            if operator is not None:
                operators[name] = operator
                status = int(operator.status())
            head = replaced(block, statistics=statistics, operator=None)
            heads[name] = head, status, is_divided
        if partition.placement.holders > 1:
            operators = partition.to_group(operators, like)
        parts: dict[str, BlockState] = {}
        heads = partition.to_all(heads, like)
        divided = [name for name in partition.placement.workers if heads[name][2]]
        rows = refreshes.sent_rows(partition, divided, operators, like)
        for name, (head, status, is_divided) in heads.items():
            statistics, operator = head.statistics, operators.get(name)
            if name in blocks:
                statistics = blocks[name].statistics
            elif statistics is not None:
                empty = partition.network.blocks[name].initial(
                    like, precision=partition.network.precision
                )
                bases = statistics.bases or empty.bases
                statistics = Statistics(empty.averages, statistics.status, bases)
            if statistics is not None:
                statistics = partition.part_of(name, statistics)
            if operator is None and status is not None:
                operator = partition.remote(name, like, status, is_divided, rows)
            parts[name] = replaced(head, statistics=statistics, operator=operator)
        return NetworkState({n: parts[n] for n in partition.network.blocks}, self.share)

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
        partition = self.partition
        blocks: dict[str, BlockState] = {}
        for name, block in state.blocks.items():
            statistics, operator = block.statistics, block.operator
            if statistics is not None:
                statistics = partition.part_of(name, statistics)
            if operator is not None and not partition.holds(name):
                is_divided = partition.divides(name, operator)
                here = partition.rows_here
                rows: dict[str, remote.InverseRows] = {}
                if is_divided and here is not None and here.block == name:
                    (rows[name],) = remote.rows_of_inverses(operator, [here])
                status = int(operator.status())
                operator = partition.remote(
                    name, operator.like, status, is_divided, rows
                )
            blocks[name] = replaced(block, statistics=statistics, operator=operator)
        return NetworkState(blocks, self.share)

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
        partition = self.partition
        of_all = dict(arrays)
        of_holders: dict[str, Any] = {}
        for name, block in state.blocks.items():
            # Compared as text: a repr of floats is exact, and names what differs in the
            # error.
            counts = block.updates, block.age, block.refreshes, block.failures
            damping = None if block.damping is None else float(block.damping)
            of_all[f"{name}: counts and damping"] = f"{[*map(int, counts)]} {damping}"
            if block.statistics is not None and not partition.owners_only:
                of_all[f"{name}: bases"] = block.statistics.bases
            if partition.holds(name):
                of_holders[f"{name}: operator"] = block.operator
        require_same(partition.communicator, of_all)
        require_same(partition.group, of_holders)
