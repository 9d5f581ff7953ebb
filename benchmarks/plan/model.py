r"""Predicted times of a step on many processes.

Conventions.  Times are of one step in seconds, on average over the steps between refreshes.
A message of S bytes among p ranks takes, with the latency :math:`\alpha` of one hop and the
bandwidth B of one rank (the smaller where nodes are crossed),

=======================  ====================================================
all-reduce               ``base + 2 (p - 1) alpha + 2 (p - 1) / p S / B``
reduce-scatter, gather   ``base + (p - 1) alpha + (p - 1) / p S / B``
=======================  ====================================================

or the time of a tree, ``base + 2 log2(p) alpha + 2 S / B``, where an all-reduce is
faster by one.  Computing takes the flops of `kfac_core.execution` over the rate of a rank.
Nothing overlaps.  Beyond a few processes this is a prediction and no measurement.

References
----------
Bandwidth terms: ``doc/PERFORMANCE.md`` of nccl-tests.  Latencies: ``src/graph/tuning.cc``
of NCCL.
"""

from __future__ import annotations

import json
import math
import runpy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.plan.exchanges import Message, rows_sent
from kfac_core.approximations.kronecker import Kronecker
from kfac_core.block import Block
from kfac_core.constraints import shown
from kfac_core.conventions import Conventions
from kfac_core.distributed.communicator import Communicator, Traffic
from kfac_core.distributed.options import Distributed
from kfac_core.distributed.partition import vote_length
from kfac_core.distributed.placement import (
    BlockLoad,
    Placement,
    block_loads,
    choose_placement,
    divisors,
    place,
    shared_owners,
)
from kfac_core.distributed.transport import BYTES, buckets, message_bytes
from kfac_core.errors import RecordError
from kfac_core.execution.costs import block_costs
from kfac_core.layers.dense import Dense
from kfac_core.network import Network
from kfac_core_backends.torch_distributed import are_similar


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Constants of a machine.

    Attributes
    ----------
    flops : float
        Flops of a matrix product a second, of one rank.
    node : int
        Ranks of a node.
    near, far : tuple of float
        Latency of a hop in seconds, and bytes a second of a rank: within a node, and
        between nodes.
    base : float
        Seconds of a message of no bytes.
    bytes : int
        Bytes of a number.
    """

    flops: float
    node: int
    near: tuple[float, float]
    far: tuple[float, float]
    base: float
    bytes: int = 4

    def time(self, traffic: Traffic, p: int) -> float:
        """Return the seconds of exchanges among p ranks of one node.

        Parameters
        ----------
        traffic : Traffic
            Calls and bytes; those of one operation count as equally long.
        p : int
            Number of ranks.

        Returns
        -------
        float
            Seconds.
        """
        found = 0.0
        for operation, calls in traffic.calls.items():
            if calls:
                numbers = traffic.payload[operation] / calls / self.bytes
                once = self.all_reduce if operation == "all_reduce" else self.gather
                found += calls * once(numbers, p)
        return found

    def all_reduce(self, numbers: float, p: int) -> float:
        """Return the seconds of a sum of arrays over p ranks, on all of them."""
        if p == 1:
            return 0.0
        size, (hop, rate) = numbers * self.bytes, self._link(p)
        hops = self._hops(p)
        ring = 2 * hops + 2 * (p - 1) / p * size / rate
        tree = 2 * math.log2(p) * hop + 2 * size / rate
        return self.base + min(ring, tree)

    def gather(self, numbers: float, p: int, stride: int = 1) -> float:
        """Return the seconds of an all-gather or a reduce-scatter.

        Parameters
        ----------
        numbers : float
            Length of the whole array.
        p : int
            Number of ranks.
        stride : int
            Difference of the numbers of neighboring ranks.

        Returns
        -------
        float
            Seconds.
        """
        if p == 1:
            return 0.0
        _, rate = self._link(p * stride)
        size = numbers * self.bytes
        return self.base + self._hops(p, stride) + (p - 1) / p * size / rate

    def uneven(self, parts: Sequence[int], width: int, stride: int = 1) -> float:
        """Return the seconds of a gather or a reduce-scatter of parts of any lengths.

        Similar ones are padded; others are divided into even shares, which takes one more
        message from, or to, the ranks that have them.

        Parameters
        ----------
        parts : sequence of int
            Length of each rank's part.
        width : int
            Bytes of a number.
        stride : int
            As of `gather`.

        Returns
        -------
        float
            Seconds.
        """
        p = len(parts)
        if p == 1:
            return 0.0
        scale = width / self.bytes
        if are_similar(parts):
            return self.gather(p * max(parts) * scale, p, stride)
        divided = self.send(width * max(parts), p * stride)
        return divided + self.gather(sum(parts) * scale, p, stride)

    def send(self, size: float, span: int) -> float:
        """Return the seconds of bytes from one rank to others, among so many ranks."""
        hop, rate = self._link(span)
        return self.base + hop + size / rate

    def _link(self, span: int) -> tuple[float, float]:
        return self.near if span <= self.node else self.far

    def _hops(self, p: int, stride: int = 1) -> float:
        """Return the latency of the p - 1 hops along a ring."""
        if p * stride <= self.node:
            return (p - 1) * self.near[0]
        # Hops from one node to the next: all of them where strides are as large.
        far = min(p - 1, math.ceil(p * stride / self.node) - 1)
        return (p - 1 - far) * self.near[0] + far * self.far[0]


MACHINES: Mapping[str, Machine] = {
    # 18 NVLinks of 20.6 GB/s, one 400 Gb/s network card a GPU; latencies of NCCL's protocol
    # Simple.  Flops: half of the 67 TFLOP/s of float32 without TF32.
    "h100": Machine(
        flops=3.3e13,
        node=8,
        near=(3.4e-6, 3.7e11),
        far=(1.4e-5, 4.8e10),
        base=8.4e-6,
    ),
    # Two processes of gloo on one machine, as measured on two cores.
    "gloo": Machine(
        flops=5e10, node=1 << 30, near=(2e-4, 1.4e9), far=(2e-4, 1.4e9), base=2e-4
    ),
    # MPICH on one machine, likewise.
    "mpi": Machine(
        flops=5e10, node=1 << 30, near=(4e-6, 8e9), far=(4e-6, 8e9), base=4e-6
    ),
}
"""Machines by name."""


@dataclass(frozen=True)
class Shapes:
    """Layers of a network, by their sizes.

    Attributes
    ----------
    name : str
        Name of the network.
    layers : tuple of (str, int, int, int)
        Name, inputs (patches for a convolution, with a bias), outputs and rows an example.
    """

    name: str
    layers: tuple[tuple[str, int, int, int], ...]

    @property
    def rows(self) -> dict[str, int]:
        """Rows of an example, by layer."""
        return {name: rows for name, _, _, rows in self.layers}

    def network(self) -> Network:
        """Return K-FAC blocks of these layers."""
        blocks = {
            name: Block(
                Dense(in_features=n, out_features=m, bias=False, weight_layout="oi"),
                Kronecker(),
            )
            for name, n, m, _ in self.layers
        }
        summed = Conventions(reduction="sum", sources="sum")
        return Network(blocks, conventions=summed)


@dataclass(frozen=True)
class PredictedStep:
    """The predicted time of one step, by what it is spent on.

    Attributes
    ----------
    ranks, holders : int
        Number of ranks, and of those that hold each operator.
    seconds : dict of str to float
        ``statistics``, ``votes`` (one a step), ``reduce``, ``refresh``, ``operators``,
        ``apply`` and ``directions``, each averaged over the steps.
    sent, busiest : float
        Bytes that a rank sends a step, on average and at most.
    averaged : float
        Bytes that it would send if all factors were averaged at each update and their
        inverses sent to all at each refresh, as whole matrices.
    memory, peak : float
        Bytes of statistics and operators that the fullest rank keeps; and with the largest
        message and the statistics of a batch, both twice.
    placement : Placement
        Owners and holders.
    chosen : bool
        Whether ``holders="auto"`` takes this placement.
    """

    ranks: int
    holders: int
    seconds: Mapping[str, float]
    sent: float
    busiest: float
    averaged: float
    memory: float
    peak: float
    placement: Placement
    chosen: bool

    @property
    def total(self) -> float:
        """Seconds of a step that K-FAC adds."""
        return sum(self.seconds.values())


NETWORKS = Path(__file__).with_name("networks")
"""Folder of the layer shapes of known networks."""


def chosen_step(steps: Sequence[PredictedStep], /) -> PredictedStep:
    """Return the step of the placement that ``holders="auto"`` takes."""
    return next(step for step in steps if step.chosen)


def measured_machine(communicator: Communicator, /, *, repeats: int = 9) -> Machine:
    """Return the constants of the machine that this program runs on.

    Collective.  Medians of short and long messages, and of a matrix product, on the slowest
    rank; a fraction of a second where nothing else runs.

    Parameters
    ----------
    communicator : Communicator
        Of the processes, all on one node.
    repeats : int
        How often each is timed.

    Returns
    -------
    Machine
        The same on all ranks.  With one process the messages are those of ``"mpi"``.
    """
    p = communicator.size
    xs = np.ones((_SIDE, _SIDE), np.float32)
    product = _median(lambda: xs @ xs, repeats)

    def gathered(numbers: int) -> Callable[[], Any]:
        flat = np.zeros(numbers, np.float32)
        return lambda: communicator.all_gather(flat, [numbers] * p).wait()

    one = np.zeros(1, np.float32)
    times = np.asarray(
        [
            product,
            _median(lambda: communicator.all_reduce(one).wait(), repeats),
            _median(gathered(1), repeats),
            _median(gathered(_LONG), repeats),
        ]
    )
    counts = [len(times)] * p
    of_ranks = communicator.all_gather(times, counts).wait().reshape(p, -1)
    product, summed, short, long = of_ranks.max(axis=0).tolist()
    flops = 2.0 * _SIDE**3 / product
    if p == 1:
        return replace(MACHINES["mpi"], flops=flops)
    # A sum passes 2 (p - 1) hops, a gather half of these.
    hop = min(max(summed - short, 0.0), short) / (p - 1)
    rate = 4.0 * (p - 1) * _LONG / max(long - short, 1e-9)
    link = hop, rate
    base = short - (p - 1) * hop
    return Machine(flops=flops, node=1 << 30, near=link, far=link, base=base)


_SIDE, _LONG = 512, 1 << 20


def _median(function: Callable[[], Any], repeats: int) -> float:
    function()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[repeats // 2]


def read_machine(name: str, /) -> Machine:
    """Return a machine by its name, or from a file that ``--measure`` wrote.

    Parameters
    ----------
    name : str
        One of `MACHINES`, or the path of a JSON file with the attributes of `Machine`.

    Returns
    -------
    Machine
        Constants.

    Raises
    ------
    RecordError
        For a file that is missing or of another form.
    """
    if name in MACHINES:
        return MACHINES[name]
    try:
        data = json.loads(Path(name).read_text(encoding="utf-8"))
        data |= {link: tuple(map(float, data[link])) for link in ("near", "far")}
        made = Machine(**data)
        numbers = made.flops, made.node, *made.near, *made.far, made.base, made.bytes
        if min(numbers) < 0 or min(made.flops, made.near[1], made.far[1]) <= 0:
            raise ValueError("expected positive numbers")
        return made
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(
            f"{name!r} is no file of a machine's constants ({type(error).__name__}: "
            f"{error}). Give one that `--measure` wrote, or one of "
            f"{', '.join(MACHINES)}."
        ) from error


def known_networks() -> tuple[str, ...]:
    """Return the names of the networks that come with the library."""
    return tuple(sorted(path.stem for path in NETWORKS.glob("*.json")))


def read_shapes(name: str, /) -> Shapes:
    """Return the layers of a known network, or of a file.

    Parameters
    ----------
    name : str
        One of `known_networks`, or the path of a JSON file: ``{"name": ..., "layers":
        [{"name": ..., "inputs": 64, "outputs": 128, "rows": 1, "repeat": 1}, ...]}`` with
        the bias counted among the inputs, the rows of one example (tokens, pixels), and how
        often such a layer stands there.

    Returns
    -------
    Shapes
        Layers; repeated ones are numbered.

    Raises
    ------
    RecordError
        For a file that is missing or of another form.
    """
    try:
        path = NETWORKS / f"{name}.json" if name in known_networks() else Path(name)
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        layers: list[tuple[str, int, int, int]] = [
            (
                f"{layer['name']}.{k}" if repeat > 1 else str(layer["name"]),
                _size(layer, "inputs"),
                _size(layer, "outputs"),
                _size({"rows": 1, **layer}, "rows"),
            )
            for layer in data["layers"]
            for repeat in [_size({"repeat": 1, **layer}, "repeat")]
            for k in range(repeat)
        ]
        if not layers:
            raise ValueError("expected at least one layer")
        if len({layer[0] for layer in layers}) < len(layers):
            raise ValueError("expected layers of different names")
        return Shapes(str(data["name"]), tuple(layers))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(
            f"{name!r} is no file of layer shapes ({type(error).__name__}: {error}). Give "
            'a JSON file {"name": ..., "layers": [{"name": ..., "inputs": ..., "outputs": '
            f"...}}]}}, or one of {', '.join(known_networks())}."
        ) from error


def _size(layer: Mapping[str, Any], name: str) -> int:
    """Return a size of a layer in a file; other numbers are not rounded to one."""
    size = layer[name]
    if type(size) is not int or not 1 <= size < 2**31:
        raise ValueError(f"expected {name!r} to be an integer >= 1, got {shown(size)}")
    return size


def network_of(name: str, /) -> tuple[str, Network, dict[str, int]]:
    """Return a network by its name, from a file of shapes, or from a program.

    Parameters
    ----------
    name : str
        As of `read_shapes`; or ``"program.py:name"``, where the name is a function without
        arguments or an object: a PyTorch module, a `KFAC` of any integration, an
        `Estimator`, or whatever else has ``blocks``.

    Returns
    -------
    label : str
        What to call it.
    network : Network
        Its blocks.
    rows : dict of str to int
        Rows of an example by block, as far as they are known.

    Raises
    ------
    RecordError
        For a file that is missing or of another form, and a program that raises.
    """
    path, colon, attribute = name.rpartition(":")
    if not (colon and path.endswith(".py")):
        shapes = read_shapes(name)
        return shapes.name, shapes.network(), shapes.rows
    try:
        found = runpy.run_path(path)
        made: Any = found.get(attribute)
        if callable(made) and not hasattr(made, "named_modules"):
            made = made()
    except (Exception, SystemExit) as error:
        raise RecordError(
            f"{name!r} cannot be made: {type(error).__name__}: {error}"
        ) from error
    if attribute not in found:
        raise RecordError(f"{path!r} is no program that has a {attribute!r}.")
    if hasattr(made, "named_modules"):
        from kfac_core_shims.torch import KFAC

        made = KFAC(made, communicator="alone")
    for below in ("estimator", "curvature", "network"):
        inner = getattr(made, below, None)
        # A KFAC of JAX has an estimator only for a state.
        if not hasattr(made, "blocks") and not (inner is None or callable(inner)):
            made = inner
    if not hasattr(made, "blocks"):
        raise RecordError(
            f"{name!r} is of type {type(made).__name__}: expected a PyTorch module, a KFAC "
            "or an Estimator, or a function that returns one."
        )
    summed = Conventions(reduction="sum", sources="sum")
    return attribute, Network(made.blocks, conventions=summed), {}


def predicted_steps(
    network: Network,
    ranks: int,
    /,
    *,
    machine: Machine,
    examples: int = 1,
    rows: Mapping[str, int] | None = None,
    update_every: int = 1,
    interval: int = 10,
    memory: int | None = None,
    dtypes: Mapping[str, str | None] | None = None,
    reduce: Literal["refresh", "owner"] = "refresh",
) -> list[PredictedStep]:
    """Return the predicted step for each possible number of holders.

    Parameters
    ----------
    network : Network
        The blocks.
    ranks : int
        Number of ranks p.
    machine : Machine
        Constants.
    examples : int
        Examples of a step on each rank.
    rows : mapping of str to int, optional
        Rows of an example by block; 1 where left out.
    update_every, interval : int
        Steps between updates, and between refreshes.
    memory : int, optional
        As of `place`.
    dtypes : mapping of str to str or None, optional
        Dtypes of messages with ``statistics``, ``operators`` and ``directions``; by
        default numbers of ``machine.bytes``.
    reduce : {"refresh", "owner"}
        As of `Distributed`.

    Returns
    -------
    list of PredictedStep
        In the order of the holders; one of them is `chosen`.
    """
    loads = block_loads(network)
    together = shared_owners(network)
    costs = {name: block_costs(b) for name, b in network.blocks.items()}
    rows = rows or {}
    gathered = sum(
        examples * rows.get(name, 1) * cost.statistics_per_row
        for name, cost in costs.items()
        if cost is not None
    )
    squares = sum(
        loads[name].statistics
        if cost is None
        else cost.groups * sum(k * k for k in cost.sizes)
        for name, cost in costs.items()
    )
    averaged = (ranks - 1) / ranks * squares * (2 / update_every + 1 / interval)
    lengths = _lengths(dtypes or {}, machine)
    chosen = choose_placement(
        network,
        ranks,
        interval=interval,
        memory=memory,
        direction_bytes=round(machine.bytes * lengths["directions"]),
    )
    found = []
    for holders in divisors(ranks):
        placement = place(
            *(loads, ranks),
            holders=holders,
            together=together,
            memory=memory,
            interval=interval,
        )
        found.append(
            _predicted(
                placement,
                loads,
                machine,
                gathered=gathered / update_every,
                averaged=averaged,
                lengths=lengths,
                vote=vote_length(network),
                reduce=reduce,
                update_every=update_every,
                interval=interval,
                chosen=holders == chosen.holders,
            )
        )
    return found


def _lengths(dtypes: Mapping[str, str | None], machine: Machine) -> dict[str, float]:
    """Return the bytes of a number that is sent over those of one that is kept."""
    found = {}
    for exchange in ("statistics", "operators", "directions"):
        asked = dtypes.get(exchange)
        size = machine.bytes if asked is None else BYTES[asked]
        if exchange != "statistics":
            # Only what is narrower changes anything.
            size = min(size, machine.bytes)
        found[exchange] = size / machine.bytes
    return found


def _predicted(
    placement: Placement,
    loads: Mapping[str, BlockLoad],
    machine: Machine,
    *,
    gathered: float,
    averaged: float,
    lengths: Mapping[str, float],
    vote: int,
    reduce: str,
    update_every: int,
    interval: int,
    chosen: bool,
) -> PredictedStep:
    p, g = placement.size, placement.holders
    row = p // g
    of_groups = [[n for n in loads if placement.group_of(n) == k] for k in range(row)]
    widths = {
        exchange: round(machine.bytes * length) for exchange, length in lengths.items()
    }
    limit = message_bytes(Distributed.bucket_bytes, p)
    sums, bases = [], []
    messages_of = buckets(loads, lambda name: 8 * loads[name].statistics, limit)
    for names in messages_of:
        parts, of_bases = [0] * p, [0] * p
        for name in names:
            parts[placement.owners[name]] += loads[name].statistics
            of_bases[placement.owners[name]] += loads[name].bases
        sums.append(Message("reduce_scatter", tuple(parts), widths["statistics"], p))
        if reduce == "owner" and any(of_bases):
            bases.append(Message("all_gather", tuple(of_bases), widths["operators"], p))
    directions = []
    numbers = {name: load.direction for name, load in loads.items()}
    for ranges in placement.row_ranges.values():
        numbers |= {key: rows.numbers for key, rows in ranges.items()}
    messages = placement.messages(loads, limit, placement.workers)
    for of_members in messages if row > 1 else []:
        parts = [sum(numbers[n] for n in names) for names in of_members]
        directions.append(
            Message("all_gather", tuple(parts), widths["directions"], row)
        )
    operators = []
    for k in range(row if g > 1 else 0):
        parts = [0] * g
        for name in of_groups[k]:
            parts[placement.owners[name] % g] += loads[name].operator
        operators.append(Message("all_gather", tuple(parts), widths["operators"], g))
    to_workers = machine.bytes * max(rows_sent(placement))
    # Sums are sent at each refresh, or at each update.
    every = interval if reduce == "refresh" else update_every
    seconds = {
        "statistics": gathered / machine.flops,
        "votes": machine.all_reduce(vote * 8 / machine.bytes, p),
        "reduce": sum(machine.uneven(m.parts, m.width) for m in sums + bases) / every,
        "refresh": max(placement.flops()) / machine.flops / interval,
        "operators": max(
            (machine.uneven(m.parts, m.width) for m in operators),
            default=machine.send(to_workers, p) if to_workers else 0.0,
        )
        / interval,
        "apply": max(placement.products()) / machine.flops,
        "directions": sum(
            machine.uneven(m.parts, m.width, stride=g) for m in directions
        ),
    }
    sent = np.zeros((row, g))
    for m in sums + bases:
        sent += np.reshape(m.sent(), (row, g)) / every
    for m in directions:
        sent += np.reshape(m.sent(), (row, 1))
    for k, m in enumerate(operators):
        sent[k] += np.asarray(m.sent()) / interval
    sent += np.reshape(rows_sent(placement), (row, g)) * machine.bytes / interval
    of_groups_kept = [
        sum(loads[name].kept - loads[name].statistics for name in names)
        for names in of_groups
    ]
    owned = [sum(loads[n].statistics for n in placement.owned_by(r)) for r in range(p)]
    kept = max(of_groups_kept) + max(owned)
    if reduce == "refresh":
        # Whole squares, about two triangles, of the rows of each rank; and the bases of
        # all blocks, not of those alone that it has an operator of.
        kept += 2 * sum(load.statistics for load in loads.values()) - max(owned)
        kept += sum(load.bases for load in loads.values()) * (row - 1) // row
    largest = max(m.buffer for m in (*sums, *bases, *directions, *operators))
    largest = max(largest, to_workers)
    # Squares of a batch, beside which the new running sums are made; or those of one
    # message, with its bases.
    batch = [2 * sum(loads[name].statistics for name in names) for names in messages_of]
    batch_kept = sum(batch)
    if reduce == "owner":
        lent = [sum(loads[name].bases for name in names) for names in messages_of]
        batch_kept = max(n + m for n, m in zip(batch, lent, strict=True))
    return PredictedStep(
        p,
        g,
        seconds,
        float(sent.mean()),
        float(sent.max()),
        averaged * machine.bytes,
        kept * machine.bytes,
        (kept + 2 * batch_kept) * machine.bytes + 2 * largest,
        placement,
        chosen,
    )
