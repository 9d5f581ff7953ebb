"""Exchanges by ``torch.distributed``: gloo between CPUs, NCCL between GPUs.

Conventions.  PyTorch's tensors are exchanged where they are; arrays of other libraries go
through the host's memory (and, with NCCL, to the current GPU).  Parts of similar lengths
are padded to equal ones for ``all_gather_single`` and ``reduce_scatter_single``.  Other
parts are broadcast by, or reduced to, each rank that has one with gloo, which copies what
it gathers.  With NCCL, whose messages each pass all ranks, there are two: parts are divided
into even shares by ``all_to_all_single``, which are gathered; or even shares are added up,
and sent to the ranks whose parts they are.  So no rank holds or sends much more than all
parts together, whoever has most of them.  All ranks wait for exchanges in the same order.

Where an exchange fails or takes too long, the ranks that notice it leave a mark in the
process group's store.  Those without a mark are named in the error.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kfac_core.array.types import Array
from kfac_core.distributed.communicator import Communicator, Operation
from kfac_core.errors import CommunicationError, CommunicationTimeoutError

SLICE_NUMBERS = 1 << 18
"""Length of the slices in which gloo reduces, of which it holds two copies at a time."""

_MARK = "kfac_core/failed"


class TorchCommunicator(Communicator):
    """The ranks of a process group of ``torch.distributed``.

    Parameters
    ----------
    group : ProcessGroup, optional
        Group of this process; by default all processes.
    timeout : float
        Seconds to wait for other ranks.

    Attributes
    ----------
    by_shares : bool
        Whether parts of unlike lengths are divided into even shares, as with NCCL.
    """

    name = "torch"

    def __init__(self, group: Any = None, *, timeout: float = 60.0) -> None:
        import torch.distributed as dist

        super().__init__(
            dist.get_rank(group), dist.get_world_size(group), timeout=timeout
        )
        self._group = dist.group.WORLD if group is None else group
        self._members = dist.get_process_group_ranks(self._group)
        self.ranks = tuple(self._members)
        self._nccl = dist.get_backend(self._group) == "nccl"
        self.by_shares = self._nccl
        self._calls = 0

    def _split(self, groups: Sequence[Sequence[int]], /) -> TorchCommunicator:
        import torch.distributed as dist

        # Of all processes every one takes part in making every group; of some, others do
        # not come, and those of each group make it alone.
        alone = self.size < dist.get_world_size()
        mine: Any = None
        for group in groups:
            if alone and self.rank not in group:
                continue
            with self._naming("split"):
                group_made = dist.new_group(
                    [self._members[rank] for rank in group],
                    timeout=_seconds(self.timeout),
                    use_local_synchronization=alone,
                )
            if self.rank in group:
                mine = group_made
        return TorchCommunicator(mine, timeout=self.timeout)

    def _entering(self, flat: Array) -> Any:
        import torch

        if isinstance(flat, torch.Tensor):
            return flat.detach().contiguous()
        values = torch.from_numpy(np.array(super()._entering(flat)))
        return values.cuda() if self._nccl else values

    def _leaving(self, values: Any, like: Array) -> Array:
        import torch

        if isinstance(like, torch.Tensor):
            return values
        return super()._leaving(values.cpu().numpy(), like)

    def _start(
        self, operation: Operation, values: Any, arguments: Mapping[str, Any], /
    ) -> Callable[[], Any]:
        self._calls += 1
        call = f"{operation} {self._calls}"
        begin: Any = getattr(self, f"_{operation}")
        with self._naming(call):
            works, finish = begin(values, **arguments)

        def wait() -> Any:
            with self._naming(call):
                for work in works:
                    work.wait(_seconds(self.timeout))
                return finish()

        return wait

    def _all_reduce(self, values: Any, overwrite: bool) -> Any:
        import torch.distributed as dist

        total = values if overwrite else values.clone()
        work = dist.all_reduce(total, group=self._group, async_op=True)
        return [work], lambda: total

    def _all_gather(self, values: Any, counts: Sequence[int]) -> Any:
        similar = are_similar(counts)
        if not similar and self.by_shares:
            return self._gather_shares(values, counts)
        total = values.new_empty(sum(counts))
        if not similar:
            works = []
            for source, part in enumerate(total.split(list(counts))):
                if source == self.rank:
                    part.copy_(values)
                if counts[source]:
                    works.append(self._begin_broadcast(part, source))
            return works, lambda: total
        width = max(counts)
        if min(counts) == width:
            return [self._begin_gather(total, values)], lambda: total
        padded = values.new_empty(self.size, width)
        part = values.new_zeros(width)
        part[: counts[self.rank]] = values
        work = self._begin_gather(padded.view(-1), part)

        def joined() -> Any:
            for part, row in zip(total.split(list(counts)), padded, strict=True):
                part.copy_(row[: part.shape[0]])
            return total

        return [work], joined

    def _reduce_scatter(self, values: Any, counts: Sequence[int]) -> Any:
        length = counts[self.rank]
        if not are_similar(counts):
            if self.by_shares:
                return self._reduce_shares(values, counts)
            return self._reduce_to_owners(values, counts)
        width = max(counts)
        if min(counts) < width:
            padded = values.new_zeros(self.size, width)
            for row, part in zip(padded, values.split(list(counts)), strict=True):
                row[: part.shape[0]] = part
            values = padded.view(-1)
        total = values.new_empty(width)
        return [self._begin_scatter(total, values)], lambda: total[:length]

    def _reduce_to_owners(self, values: Any, counts: Sequence[int]) -> Any:
        """Reduce the part of each rank to it, in slices: gloo copies what it reduces."""
        import torch.distributed as dist

        total = values.clone()
        parts = total.split(list(counts))
        works = [
            dist.reduce(
                piece, dst=self._members[owner], group=self._group, async_op=True
            )
            for owner, part in enumerate(parts)
            for piece in part.split(SLICE_NUMBERS)
            if counts[owner]
        ]
        part = parts[self.rank]
        return works, lambda: part.clone() if part.numel() < total.numel() else part

    def _gather_shares(self, values: Any, counts: Sequence[int]) -> Any:
        """Divide all parts into even shares, and gather these."""
        length, parts = sum(counts), _ranges(counts)
        width = -(-length // self.size)
        shares = _ranges([width] * self.size)
        works, share = self._all_to_all(
            *(values, _overlaps(parts[self.rank], shares)),
            _overlaps(shares[self.rank], parts),
        )

        def gathered() -> Any:
            total = values.new_zeros(self.size * width)
            padded = values.new_zeros(width)
            padded[: share().numel()] = share()
            self._begin_gather(total, padded).wait(_seconds(self.timeout))
            return total[:length]

        return works, gathered

    def _reduce_shares(self, values: Any, counts: Sequence[int]) -> Any:
        """Add up even shares, and send these to the ranks whose parts they are."""
        length, parts = values.numel(), _ranges(counts)
        width = -(-length // self.size)
        shares = [
            (min(start, length), min(stop, length))
            for start, stop in _ranges([width] * self.size)
        ]
        padded = values.new_zeros(self.size * width)
        padded[:length] = values
        total = values.new_empty(width)
        start, stop = shares[self.rank]

        def to_owners() -> Any:
            works, part = self._all_to_all(
                *(total[: stop - start], _overlaps(shares[self.rank], parts)),
                _overlaps(parts[self.rank], shares),
            )
            for work in works:
                work.wait(_seconds(self.timeout))
            return part()

        return [self._begin_scatter(total, padded)], to_owners

    def _begin_broadcast(self, sent: Any, source: int) -> Any:
        import torch.distributed as dist

        return dist.broadcast(
            sent, src=self._members[source], group=self._group, async_op=True
        )

    def _begin_gather(self, total: Any, values: Any) -> Any:
        import torch.distributed as dist

        # PyTorch 2.13 has new names for both.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return gather(total, values, group=self._group, async_op=True)

    def _begin_scatter(self, total: Any, values: Any) -> Any:
        import torch.distributed as dist

        scatter = getattr(dist, "reduce_scatter_single", None)
        scatter = scatter or dist.reduce_scatter_tensor
        return scatter(total, values, group=self._group, async_op=True)

    def _all_to_all(
        self, values: Any, send: Sequence[int], receive: Sequence[int]
    ) -> Any:
        import torch.distributed as dist

        arrived = values.new_empty(sum(receive))
        work = dist.all_to_all_single(
            arrived,
            values,
            list(receive),
            list(send),
            group=self._group,
            async_op=True,
        )
        return [work], lambda: arrived

    @contextlib.contextmanager
    def _naming(self, call: str) -> Any:
        """Turn an error of the engine into one that names the ranks that are missing."""
        try:
            yield
        except RuntimeError as error:
            missing = self._missing()
            named = ", ".join(map(str, missing)) or "unknown"
            late = any(word in str(error) for word in ("imed out", "imeout"))
            text = (
                f"Rank {self.ranks[self.rank]} waited in {call} for rank {named}, which "
                f"{'did not come' if late else 'ended or failed'} within {self.timeout} s. "
                f"The process group cannot be used any more. ({_first_line(error)})"
            )
            kind = CommunicationTimeoutError if late else CommunicationError
            raise kind(text) from error

    def _missing(self) -> list[int]:
        """Return the ranks that notice no failure within two seconds.

        By their numbers among all processes: others may wait in another group.
        """
        from torch.distributed import distributed_c10d

        others = {
            member: rank
            for member, rank in zip(self._members, self.ranks, strict=True)
            if rank != self.ranks[self.rank]
        }
        try:
            store = distributed_c10d._get_default_store()
            store.set(f"{_MARK}/{self._members[self.rank]}", "here")
            deadline = time.monotonic() + min(2.0, self.timeout)
            while others and time.monotonic() < deadline:
                for member in [m for m in others if store.check([f"{_MARK}/{m}"])]:
                    del others[member]
                time.sleep(0.01)
        except RuntimeError:
            # Rank 0 holds the store of a TCP rendezvous.
            return [0]
        return [*others.values()]


def problem() -> str | None:
    """Return why the engine cannot be used here, or None."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed; pip install 'kfac-core[torch]'"
    import torch.distributed as dist

    if not dist.is_available():
        return "this build of PyTorch has no torch.distributed"
    if not dist.is_initialized():
        return "call torch.distributed.init_process_group first"
    return None


def versions() -> dict[str, str]:
    """Return the versions of the libraries behind the engine."""
    if importlib.util.find_spec("torch") is None:
        return {}
    import torch

    return {"torch": str(torch.__version__)}


def running() -> int:
    """Return the number of processes, or 0 where PyTorch has no process group."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return 0
    return int(dist.get_world_size())


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Join the processes that ``torchrun`` started, if it did and none was joined.

    At the end they are left: a program that ends without that is aborted now and then.
    """
    import torch.distributed as dist

    if "RANK" not in os.environ or dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def connect(*, timeout: float) -> TorchCommunicator:
    """Return the communicator of all processes.

    Parameters
    ----------
    timeout : float
        Seconds to wait for other ranks.

    Returns
    -------
    TorchCommunicator
        Over all processes, in a group of its own: where a program exchanges something else
        than the library does, as after a step that one process left out, it would take one
        for the other.
    """
    everyone = TorchCommunicator(timeout=timeout)
    return everyone._split([range(everyone.size)])


def are_similar(counts: Sequence[int], /) -> bool:
    """Return whether padding parts to one length costs less than a message for each."""
    padded, total = len(counts) * max(counts), sum(counts)
    return total > 0 and (padded <= 1.25 * total or padded - total <= 1 << 12)


def _ranges(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the start and stop of each part."""
    stops = itertools.accumulate(counts)
    return [(stop - n, stop) for n, stop in zip(counts, stops, strict=True)]


def _overlaps(one: tuple[int, int], others: Sequence[tuple[int, int]]) -> list[int]:
    """Return how many numbers a range has in common with each of others."""
    return [max(0, min(one[1], stop) - max(one[0], start)) for start, stop in others]


def _seconds(timeout: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=timeout)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]
