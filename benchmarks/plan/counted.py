"""A rank whose exchanges are counted, and of whose partners there are none.

It runs the program of one rank of any number, as in `benchmarks.simulated`.  What others
would send is zero, or what this rank sends where all ranks must send the same: votes and
comparisons pass, and numbers mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.plan.exchanges import Message
from kfac_core.distributed.communicator import Communicator, Operation


class CountedRank(Communicator):
    """One rank of p.

    Parameters
    ----------
    rank, size : int
        Number of this rank, and of all.

    Attributes
    ----------
    messages : list of Message
        Exchanges in their order; those of communicators made by `split` come here too.
    """

    name = "counted"

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size, timeout=1.0)
        self.messages: list[Message] = []

    def _split(self, groups: Sequence[Sequence[int]], /) -> CountedRank:
        members = next([*group] for group in groups if self.rank in group)
        part = CountedRank(members.index(self.rank), len(members))
        part.messages = self.messages
        return part

    def _start(
        self, operation: Operation, values: Any, arguments: Mapping[str, Any], /
    ) -> Callable[[], Any]:
        counts = "send" if operation == "all_to_all" else "counts"
        parts = arguments.get(counts, (values.size,))
        width = values.dtype.itemsize
        self.messages.append(Message(operation, tuple(parts), width, self.size))
        if operation == "all_to_all":
            return lambda: np.ones(sum(arguments["receive"]), values.dtype)
        return lambda: self._result(operation, values, parts)

    def _result(self, operation: Operation, values: Any, parts: Sequence[int]) -> Any:
        start = sum(parts[: self.rank])
        if operation == "all_reduce":
            return values * self.size
        if operation == "reduce_scatter":
            return values[start : start + parts[self.rank]]
        if len(set(parts)) == 1:
            return np.tile(values, self.size)
        total = np.zeros(sum(parts), values.dtype)
        total[start : start + len(values)] = values
        return total
