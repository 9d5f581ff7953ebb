"""Which process factorizes which block, and which processes hold the result.

Conventions.  p ranks; each block has one *owner*, which factorizes it, and g *holders*,
which get its operator.  With g = 1 the owner sends directions at every step; with g = p
every rank holds every operator and sends nothing between refreshes; other g are between.
Ranks ``k g, ..., k g + g - 1`` are the k-th *group*: a block is held by all of its owner's
group.  Ranks with equal places in their groups are a *row*, within which directions are
exchanged: each row has one holder of every block.

Owners are assigned by the longest processing time first: blocks in the order of falling
costs, each to the rank with the least work so far.  Blocks that share a factor have one
owner.

With g = 1 and more ranks than blocks, directions of a large block are divided: its owner
sends each of some ranks that own nothing a share of the rows of the larger factor's
inverse, and these ranks compute those rows of ``A^-1 V G^-1``, or of its transpose.
Statistics and factorizations of a block are not divided: for refreshes every ten steps the
largest factorization of ResNet-50 is predicted to be 0.5 of 39 ms of a step on 1,024 ranks
(`benchmarks.plan`), which bounds what a division could gain.

References
----------
Pauloski et al. (2021), "KAISA: An Adaptive Second-Order Optimizer Framework for Deep
Neural Networks", arXiv:2107.01739, for holders between one and all.  Graham (1969), "Bounds
on Multiprocessing Timing Anomalies".
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import array_api_compat
import numpy as np

from kfac_core import errors
from kfac_core.approximations.kronecker import Kronecker
from kfac_core.array import Place
from kfac_core.array.structure import leaves
from kfac_core.block import Block
from kfac_core.distributed.transport import buckets
from kfac_core.execution.costs import block_costs
from kfac_core.factors.statistics import Statistics
from kfac_core.linalg.symmetric import SymmetricMatrix
from kfac_core.network import Network

FLOPS_PER_BYTE = 200.0
"""Flops in the time of sending one byte: 6 for MPI and 36 for gloo within a machine, 90 for
H100 GPUs within a node and 700 between nodes."""

LEAST_DIVIDED = 1e7
"""Flops of a direction that may be divided: fewer take less time than a message."""

LARGEST_SHARE = 0.1
"""Bytes that `choose_placement` allows, relative to averaging whole factors every step."""


@dataclass(frozen=True)
class BlockLoad:
    """What a block costs wherever it is placed.

    Attributes
    ----------
    flops : float
        Flops of a refresh.
    statistics, operator, direction : int
        Numbers in the statistics that are reduced, in the operator, and in a direction; one
        triangle of each symmetric matrix, as they are sent.
    kept : int
        Numbers of the statistics and the operator on the owner, which has the symmetric
        matrices of the operator in full.
    product : float
        Flops of a direction.
    rows : int
        Rows of the larger of two full factors; 0 if directions cannot be divided.
    bases : int
        Numbers of the bases that second moments are kept in.
    """

    flops: float
    statistics: int
    operator: int
    direction: int
    kept: int
    product: float = 0.0
    rows: int = 0
    bases: int = 0


@dataclass(frozen=True)
class RowRange:
    """The rows of a block's directions that one rank computes.

    Attributes
    ----------
    block : str
        Name of the block.
    rank : int
        Rank that computes them.
    start, stop : int
        Range of the rows of the larger factor.
    numbers : int
        Numbers of this part of a direction.
    received : int
        Numbers that the rank gets at a refresh: rows of one inverse, the other inverse and
        the scale.
    """

    block: str
    rank: int
    start: int
    stop: int
    numbers: int
    received: int


@dataclass(frozen=True)
class Placement:
    """Owners and holders of all blocks; ``print`` shows them.

    Attributes
    ----------
    size : int
        Number of ranks p.
    holders : int
        Number of ranks g that hold each operator.
    owners : dict of str to int
        Rank that factorizes each block.
    loads : dict of str to BlockLoad
        Costs of each block.
    workers : dict of str to tuple of int
        Ranks among which a block's directions are divided; blocks left out are not divided.
    """

    size: int
    holders: int
    owners: Mapping[str, int]
    loads: Mapping[str, BlockLoad]
    workers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def row_ranges(self) -> dict[str, dict[str, RowRange]]:
        """Parts of divided directions by block, and by what messages call them."""
        ranges: dict[str, dict[str, RowRange]] = {}
        for name, ranks in self.workers.items():
            n, k = self.loads[name].rows, len(ranks)
            m = self.loads[name].direction // n
            ranges[name] = {}
            for i, rank in enumerate(ranks):
                start, stop = n * i // k, n * (i + 1) // k
                numbers = (stop - start) * n + m * m + 1
                rows = RowRange(name, rank, start, stop, (stop - start) * m, numbers)
                ranges[name][f"{name}, rows {start} to {stop}"] = rows
        return ranges

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each group of holders."""
        g = self.holders
        return tuple(tuple(range(k, k + g)) for k in range(0, self.size, g))

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that exchange directions: one of each group."""
        g = self.holders
        return tuple(tuple(range(j, self.size, g)) for j in range(g))

    def group_of(self, name: str, /) -> int:
        """Return the number of the group that holds a block."""
        return self.owners[name] // self.holders

    def owned_by(self, rank: int, /) -> list[str]:
        """Return the blocks that a rank factorizes."""
        return [name for name, owner in self.owners.items() if owner == rank]

    def messages(
        self, names: Iterable[str], bucket_bytes: int, /, divided: Collection[str] = ()
    ) -> list[list[list[str]]]:
        """Return whose directions each message has, by the rank of a row that sends them.

        Parameters
        ----------
        names : iterable of str
            Blocks.
        bucket_bytes : int
            Size from which a message is sent, with 8 bytes a number.
        divided : collection of str
            Blocks whose directions are sent in parts, by the names of `row_ranges`.

        Returns
        -------
        list of list of list of str
            Messages in their order.
        """
        messages: list[list[list[str]]] = []
        for bucket in buckets(
            names, lambda name: 8 * self.loads[name].direction, bucket_bytes
        ):
            messages.append([[] for _ in range(self.size // self.holders)])
            for name in bucket:
                if name in divided:
                    for key, rows in self.row_ranges[name].items():
                        messages[-1][rows.rank].append(key)
                else:
                    messages[-1][self.group_of(name)].append(name)
        return messages

    def products(self) -> list[float]:
        """Return the flops of a step's directions on each rank."""
        flops = [0.0] * self.size
        for name, load in self.loads.items():
            ranks = self.workers.get(name, self.groups[self.group_of(name)])
            parts = len(ranks) if name in self.workers else 1
            for rank in ranks:
                flops[rank] += load.product / parts
        return flops

    def flops(self) -> list[float]:
        """Return the flops of a refresh on each rank."""
        flops = [0.0] * self.size
        for name, owner in self.owners.items():
            flops[owner] += self.loads[name].flops
        return flops

    def imbalance(self) -> float:
        """Return the flops of the busiest rank over their mean; 1 is balanced."""
        flops = self.flops()
        mean = sum(flops) / self.size
        return max(flops) / mean if mean > 0 else 1.0

    def numbers_sent(self) -> dict[str, float]:
        """Return how many numbers a rank sends on average, by exchange.

        Returns
        -------
        dict of str to float
            ``statistics`` and ``operators`` at a refresh, ``directions`` at a step.
        """
        p, g = self.size, self.holders
        sums = {
            field: sum(getattr(load, field) for load in self.loads.values())
            for field in ("statistics", "operator", "direction")
        }
        rows = p // g
        ranges = [rows for of in self.row_ranges.values() for rows in of.values()]
        to_workers = sum(rows.received for rows in ranges) / p
        return {
            "statistics": sums["statistics"] * (p - 1) / p,
            # Each group gathers its own blocks, a (p / g)-th of all on average.
            "operators": sums["operator"] * (g - 1) / g / rows + to_workers,
            "directions": sums["direction"] * (rows - 1) / rows,
        }

    def digest(self) -> str:
        """Return a text that is equal for equal placements."""
        owners, workers = sorted(self.owners.items()), sorted(self.workers.items())
        text = json.dumps([self.size, self.holders, owners, workers])
        return hashlib.sha256(text.encode()).hexdigest()

    def __str__(self) -> str:
        lines = [f"{self.size} ranks, {self.holders} hold each operator"]
        for rank, flops in enumerate(self.flops()):
            names = self.owned_by(rank)
            sizes = sum(
                self.loads[n].statistics + self.loads[n].operator for n in names
            )
            costs = f"{flops:.1e} flops, {sizes:,} numbers stored"
            lines.append(f"  rank {rank}: {costs}, {', '.join(names) or '-'}")
        for name, ranks in self.workers.items():
            lines.append(f"  {name}: directions by ranks {ranks[0]} to {ranks[-1]}")
        lines.append(f"  imbalance {self.imbalance():.2f}")
        for exchange, numbers in self.numbers_sent().items():
            each = "step" if exchange == "directions" else "refresh"
            lines.append(f"  {exchange}: {numbers:,.0f} numbers a rank and {each}")
        return "\n".join(lines)


def divisors(size: int, /) -> list[int]:
    """Return the divisors of a number of ranks: the possible numbers of holders."""
    return [g for g in range(1, size + 1) if size % g == 0]


def block_loads(network: Network, /) -> dict[str, BlockLoad]:
    """Return what each block of a network costs.

    Parameters
    ----------
    network : Network
        Description of the blocks.

    Returns
    -------
    dict of str to BlockLoad
        Costs by block.  Blocks without full factors count as ``n m`` flops and numbers.
    """
    loads: dict[str, BlockLoad] = {}
    for name, block in network.blocks.items():
        n, m = block.layer.matrix_shape
        # NumPy's zeros take no memory until they are read.
        xp = array_api_compat.array_namespace(np.zeros(1))
        empty = block.approximation.initial(block.layer, Place(xp, np.float32, "cpu"))
        statistics = _numbers(empty, network.shared_factors.taken_by(name))
        costs = block_costs(block)
        if costs is None:
            flops, basis = float(n * m), sum(x.size for _, x in leaves(empty.bases))
            operator = n * m + basis
            resident = statistics + operator
            loads[name] = BlockLoad(
                *(flops, statistics, operator, n * m, resident, flops), bases=basis
            )
            continue
        triangles = costs.groups * sum(k * (k + 1) // 2 for k in costs.sizes)
        way = "eigenbasis" if network.damping_rule == "exact" else "inverse"
        # A factor, where it is kept, and its inverse or its eigenvectors.
        operator = triangles * (1 + network.refreshing.keep_matrices)
        resident = statistics + 2 * operator
        if way == "eigenbasis":
            vectors = costs.groups * sum(k * k for k in costs.sizes)
            operator = triangles + vectors
            resident = statistics + 2 * triangles + vectors
        loads[name] = BlockLoad(
            *(costs.refresh[way], statistics, operator, n * m, resident),
            costs.precondition["inverse"],
            max(n, m) if _is_divisible(block) else 0,
        )
    return loads


def _is_divisible(block: Block) -> bool:
    """Return whether a direction can be ``A^-1 V G^-1`` with two inverses."""
    return isinstance(block.approximation, Kronecker) and block.layer.groups == 1


def _numbers(empty: Statistics, taken: frozenset[str]) -> int:
    """Return how many numbers a block's own averages have, packed."""
    total = 0
    for side, average in empty.averages.items():
        if side in taken:
            continue
        packed = isinstance(getattr(average, "sum", None), SymmetricMatrix)
        for path, x in leaves(average):
            shape = tuple(x.shape)
            if packed and path == "sum.array":
                shape = (*shape[:-2], shape[-1] * (shape[-1] + 1) // 2)
            total += math.prod(shape)
    return total


def place(
    loads: Mapping[str, BlockLoad],
    size: int,
    /,
    *,
    holders: int = 1,
    together: Sequence[tuple[str, str]] = (),
    memory: int | None = None,
    interval: int | None = None,
) -> Placement:
    """Assign blocks to ranks.

    Parameters
    ----------
    loads : mapping of str to BlockLoad
        Costs of each block.
    size : int
        Number of ranks p.
    holders : int
        Number of ranks g that hold each operator, a divisor of p.
    together : sequence of tuple of str
        Pairs of blocks that have one owner.
    memory : int, optional
        How many numbers of statistics and operators an owner has room for.
    interval : int, optional
        Steps between refreshes.  With one holder, ranks that own nothing then take shares
        of large directions, where this saves more than sending rows of an inverse at each
        refresh costs.

    Returns
    -------
    Placement
        The same for the same arguments, on every process.

    Raises
    ------
    ConventionError
        If `holders` does not divide `size`.
    UnsupportedError
        If a block, or what is left for a rank, has more numbers than `memory`.
    """
    if holders not in divisors(size):
        raise errors.ConventionError(
            f"Expected the number of holders to be one of {divisors(size)}, the divisors "
            f"of {size} ranks, got {holders}."
        )
    bundles = _bundles(loads, together)
    order = sorted(
        range(len(bundles)),
        key=lambda i: (-sum(loads[name].flops for name in bundles[i]), i),
    )
    work, used = [0.0] * size, [0] * size
    owners: dict[str, int] = {}
    for i in order:
        numbers = sum(loads[name].kept for name in bundles[i])
        free = [r for r in range(size) if memory is None or used[r] + numbers <= memory]
        if not free:
            raise errors.UnsupportedError(
                f"Block {bundles[i][0]!r} needs room for {numbers:,} numbers on its owner, "
                f"and no rank has that left of {memory:,}. Use more ranks, or an "
                "approximation with smaller factors."
            )
        rank = min(free, key=lambda r: (work[r], r))
        work[rank] += sum(loads[name].flops for name in bundles[i])
        used[rank] += numbers
        owners |= dict.fromkeys(bundles[i], rank)
    owners = {name: owners[name] for name in loads}
    workers: dict[str, tuple[int, ...]] = {}
    if holders == 1 and interval is not None:
        idle = [rank for rank in range(size) if not work[rank]]
        workers = _workers(loads, idle, size, interval)
    return Placement(size, holders, owners, dict(loads), workers)


def _workers(
    loads: Mapping[str, BlockLoad], idle: Sequence[int], size: int, interval: int
) -> dict[str, tuple[int, ...]]:
    """Return ranks among which directions are divided, by block.

    None works more in a step than the busiest owner at a refresh, or than all on average.
    """
    busiest = max(load.flops for load in loads.values()) / interval
    limit = max(busiest, sum(load.product for load in loads.values()) / size)
    workers: dict[str, tuple[int, ...]] = {}
    for name in sorted(loads, key=lambda name: -loads[name].product):
        load = loads[name]
        if not (idle and load.rows and load.product + load.flops / interval > limit):
            continue
        m = load.direction // load.rows
        # So many that the smaller inverse, which all get, is about as much as the larger.
        count = min(math.ceil(load.product / limit), math.ceil((load.rows / m) ** 2))
        sent = load.rows**2 + count * m**2
        cost = 4 * sent / interval * FLOPS_PER_BYTE
        if load.product > max(cost, LEAST_DIVIDED):
            workers[name], idle = tuple(idle[:count]), idle[count:]
    return workers


def choose_placement(
    network: Network,
    size: int,
    /,
    *,
    interval: int,
    memory: int | None = None,
    direction_bytes: int = 4,
) -> Placement:
    """Return the placement with the number of holders that costs least.

    The cost of a step is the bytes that a rank sends, plus the flops of its directions over
    `FLOPS_PER_BYTE`.  Only placements are considered that send at most a tenth of what
    averaging all factors at each step and sending their inverses at each refresh would; if
    there are none, all are.

    Parameters
    ----------
    network : Network
        Description of the blocks.
    size : int
        Number of ranks p.
    interval : int
        Steps between refreshes.
    memory : int, optional
        Numbers of statistics and operators that an owner has room for.
    direction_bytes : int
        Bytes of a number of a direction that is sent.

    Returns
    -------
    Placement
        With the fewest holders, of those that cost as much.
    """
    loads = block_loads(network)
    together = shared_owners(network)
    # A factor has about twice as many numbers as its triangle.
    factors = 2 * sum(load.statistics for load in loads.values()) * (size - 1) / size
    limit = LARGEST_SHARE * 4 * factors * (2 + 1 / interval)
    ranked = []
    for holders in divisors(size):
        placement = place(
            *(loads, size),
            holders=holders,
            together=together,
            memory=memory,
            interval=interval,
        )
        numbers = placement.numbers_sent()
        sent = 4 * (numbers["statistics"] + numbers["operators"]) / interval
        sent += direction_bytes * numbers["directions"]
        cost = sent + max(placement.products()) / FLOPS_PER_BYTE
        ranked.append((sent > limit, cost, holders, placement))
    return min(ranked, key=lambda candidate: candidate[:3])[-1]


def shared_owners(network: Network, /) -> list[tuple[str, str]]:
    """Return the pairs of blocks that share a factor, and so an owner."""
    pairs = network.shared_factors.pairs
    return [(taker[0], giver[0]) for taker, giver in pairs.items()]


def _bundles(
    names: Mapping[str, BlockLoad], together: Sequence[tuple[str, str]]
) -> list[list[str]]:
    """Return the blocks in lists of those that have one owner."""
    bundle_of = {name: [name] for name in names}
    for one, other in together:
        first, second = bundle_of[one], bundle_of[other]
        if first is not second:
            first.extend(second)
            for name in second:
                bundle_of[name] = first
    unique = {id(bundle): bundle for bundle in bundle_of.values()}
    return list(unique.values())
