"""The blocks of a network divided among ranks, as one of the ranks sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import numpy as np

from kfac_core.array import Array, map_structure, replaced
from kfac_core.array import namespaces as ns
from kfac_core.distributed import placement, remote, transport
from kfac_core.distributed.agreement import Agreement
from kfac_core.distributed.exchange import Exchange
from kfac_core.distributed.options import Distributed
from kfac_core.distributed.replicas import code_digests, require_same
from kfac_core.errors import UnsupportedError
from kfac_core.factors.statistics import Statistics
from kfac_core.network import Network
from kfac_core.operators.operator import CurvatureOperator
from kfac_core.stages import Executor, Result, Stage, Tasks


class Partition:
    """Owners and holders of blocks, and the communicators and exchanges between them.

    Collective: all ranks make one, and compare the network, the options and the placement.

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
    communicator : Communicator
        Communicator of all ranks.
    agreement : Agreement
        Between all ranks.
    placement : Placement
        Owners and holders.
    owners_only : bool
        Whether owners alone keep statistics.
    rows_here : RowRange or None
        Rows of a block's directions that this rank computes, though it owns no block.
    group, row : Communicator
        A group has the holders of one operator; a row has one rank of each group, to which
        the others send the directions of their blocks.
    group_number : int
        Number of this rank's group.
    message_bytes : int
        Size from which a message is sent.
    to_all, to_group : Exchange
        Send structures to all ranks and to this rank's group.
    """

    def __init__(self, network: Network, options: Distributed, inner: Executor) -> None:
        self.network, self.options, self.inner = network, options, inner
        self.communicator = options.communicator
        self.agreement = Agreement(self.communicator)
        self.owners_only = options.reduce == "owner"
        _require_reducible(network)
        self.placement = _placement(network, options)
        self._require_same_plan()
        rank = self.communicator.rank
        self.rows_here: placement.RowRange | None = None
        for ranges in self.placement.row_ranges.values():
            here = [rows for rows in ranges.values() if rows.rank == rank]
            self.rows_here = here[0] if here else self.rows_here
        groups, rows = self.placement.groups, self.placement.rows
        self.group = self.communicator.split(groups)
        self.row = self.communicator.split(rows)
        self.group_number = rank // self.placement.holders
        self.message_bytes = transport.message_bytes(
            options.bucket_bytes, self.communicator.size
        )
        self.to_all = Exchange(self.communicator)
        self.to_group = Exchange(self.group)

    def owned(self) -> list[str]:
        """Return the blocks that this rank factorizes."""
        return self.placement.owned_by(self.communicator.rank)

    def owns(self, name: str, /) -> bool:
        """Return whether this rank factorizes a block."""
        return self.placement.owners[name] == self.communicator.rank

    def holds(self, name: str) -> bool:
        """Return whether this rank has the operator of a block."""
        return self.placement.group_of(name) == self.group_number

    def key(self, name: str, side: str) -> str:
        """Return the name of an average; a shared factor has that of its giver."""
        giver = self.network.shared_factors.pairs.get((name, side))
        return f"{name}/{side}" if giver is None else "/".join(giver)

    def divides(self, name: str, operator: CurvatureOperator) -> bool:
        """Return whether several ranks compute the directions of an operator."""
        if name not in self.placement.workers:
            return False
        if isinstance(operator, remote.RemoteOperator):
            return operator.is_divided
        return remote.has_inverses(operator)

    def part_of(self, name: str, statistics: Statistics) -> Statistics:
        """Return what this rank keeps of statistics that all ranks know."""
        if self.owners_only:
            return self.owned_part(name, statistics)
        if self.owns(name):
            return statistics
        return statistics.emptied()

    def owned_part(self, name: str, statistics: Statistics) -> Statistics:
        """Return statistics with packed sums on their owner, and empty arrays elsewhere."""
        if self.owns(name):
            averages = transport.packed_matrices(statistics.averages)
            return replaced(statistics, averages=averages)
        averages = map_structure(_without_numbers, statistics.averages)
        bases = map_structure(_without_numbers, statistics.bases)
        return Statistics(averages, statistics.status, bases)

    def remote(
        self,
        name: str,
        like: Array,
        status: int,
        is_divided: bool,
        rows: Mapping[str, remote.InverseRows],
    ) -> remote.RemoteOperator:
        """Return what stands for an operator that this rank does not hold."""
        xp = ns.own_namespace(like)
        zero = xp.zeros((), dtype=like.dtype, device=ns.device_of(like))
        shape = self.network.blocks[name].layer.matrix_shape
        return remote.RemoteOperator(
            *(self.placement.owners[name], shape, zero, int32(status, like)),
            *(is_divided, rows.get(name)),
        )

    def attempt(
        self, stage: Stage[Result], tasks: Tasks
    ) -> tuple[dict[str, Result], Exception | None]:
        """Return the results of this rank's tasks, or what they raised."""
        try:
            return (self.inner(stage, tasks) if tasks else {}), None
        except Exception as error:
            return {}, error

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
        require_same(self.communicator, plan)
        self.agreement.reserve(vote_length(self.network))


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


def _without_numbers(x: Array) -> Array:
    """Return an array of the same library without numbers; one number is a zero."""
    xp = ns.own_namespace(x)
    return xp.zeros((0,) * x.ndim, dtype=x.dtype, device=ns.device_of(x))


def int32(value: int, like: Array, /) -> Array:
    """Return a number as an int32 array, 0-d, beside an array."""
    xp = ns.own_namespace(like)
    return xp.full((), int(value), dtype=xp.int32, device=ns.device_of(like))
