"""Virtual ranks: several ranks in the threads of one process, for tests and planning.

Conventions.  Sums are formed in the order of the ranks, so that results do not depend on
the threads' timing.  Where real engines mix up data or end the process, because ranks call
different functions or give arrays of different lengths, virtual ranks raise an error that
names both.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kfac_core import constraints
from kfac_core.array import Array
from kfac_core.array import namespaces as ns
from kfac_core.distributed.communicator import Communicator, Operation
from kfac_core.errors import CommunicationError, CommunicationTimeoutError

T = TypeVar("T")


def run_ranks(
    size: int, function: Callable[[Communicator], T], /, *, timeout: float = 60.0
) -> list[T]:
    """Run a function once for each of several ranks, in threads.

    Parameters
    ----------
    size : int
        Number of ranks, at least 1.
    function : callable
        Takes the communicator of one rank.
    timeout : float
        Seconds that a rank waits for others.

    Returns
    -------
    list
        Results in the order of the ranks.

    Raises
    ------
    Exception
        What the lowest rank raised that failed of its own accord: an error that only
        says that another rank failed is raised where there is no other.
    """
    constraints.require_range("size", size, constraints.COUNT)
    constraints.require_range("timeout", timeout, constraints.POSITIVE)
    hub = _Hub(size)
    results: list[Any] = [None] * size
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = function(
                VirtualRank(hub, tuple(range(size)), rank, timeout)
            )
        except BaseException as error:
            errors[rank] = error
        finally:
            hub.leave(rank)

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(run, range(size)))
    # Others fail because the first one is gone: the cause is raised, not its echo.
    followers = CommunicationError, CommunicationTimeoutError
    first = [e for _, e in sorted(errors.items()) if not isinstance(e, followers)]
    for error in (*first, *errors.values()):
        raise error
    return results


class _Hub:
    """What the ranks of one run have in common."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        # The calls of each group of ranks by number, and what each rank brought to one.
        self.calls: dict[tuple[Any, int], dict[int, tuple[Any, ...]]] = {}
        self.taken: dict[tuple[Any, int], int] = {}
        self.gone: set[int] = set()

    def leave(self, rank: int) -> None:
        """Note that a rank's function has ended."""
        with self.changed:
            self.gone.add(rank)
            self.changed.notify_all()


class VirtualRank(Communicator):
    """The communicator of one thread; made by `run_ranks`."""

    name = "virtual"

    def __init__(
        self,
        hub: _Hub,
        members: tuple[int, ...],
        rank: int,
        timeout: float,
        key: Hashable = (),
    ) -> None:
        super().__init__(members.index(rank), len(members), timeout=timeout)
        self._hub, self._members, self._key = hub, members, key
        self._global = rank
        self._number, self._splits = 0, 0

    def _split(self, groups: Sequence[Sequence[int]], /) -> VirtualRank:
        group = next(group for group in groups if self.rank in group)
        members = tuple(self._members[rank] for rank in group)
        self._splits += 1
        key = (self._key, self._splits, members)
        return VirtualRank(self._hub, members, self._global, self.timeout, key)

    def _start(
        self, operation: Operation, values: Array, arguments: Mapping[str, Any], /
    ) -> Callable[[], Any]:
        call = (self._key, self._number)
        self._number += 1
        hub = self._hub
        with hub.changed:
            # A call has its number within its group, so that ranks may run ahead of
            # each other.
            brought = hub.calls.setdefault(call, {})
            brought[self.rank] = (operation, values, arguments)
            hub.changed.notify_all()
        return lambda: self._finish(call, operation)

    def _entering(self, flat: Array) -> Array:
        # Threads share memory, and the sender may overwrite its array after `wait`.
        return ns.own_namespace(flat).asarray(flat, copy=True)

    def _leaving(self, values: Array, like: Array) -> Array:
        return values

    def _finish(self, call: tuple[Any, int], operation: Operation) -> Array:
        hub, deadline = self._hub, time.monotonic() + self.timeout
        with hub.changed:
            brought = hub.calls[call]
            while len(brought) < self.size:
                missing = [m for r, m in enumerate(self._members) if r not in brought]
                gone = [rank for rank in missing if rank in hub.gone]
                if gone:
                    raise CommunicationError(
                        f"Rank {gone[0]} ended before {operation}, for which rank "
                        f"{self._global} waits."
                    )
                left = deadline - time.monotonic()
                if left <= 0:
                    raise CommunicationTimeoutError(
                        f"Rank {self._global} waited {self.timeout} s in {operation} "
                        f"for rank {', '.join(map(str, missing))}."
                    )
                hub.changed.wait(left)
            parts = [brought[rank] for rank in range(self.size)]
            hub.taken[call] = hub.taken.get(call, 0) + 1
            # Drop what every rank has read.
            if hub.taken[call] == self.size:
                del hub.calls[call], hub.taken[call]
        self._require_agreement(parts)
        return self._result(operation, parts)

    def _require_agreement(self, parts: list[tuple[Any, ...]]) -> None:
        """Raise where ranks call different functions, or with different arrays."""
        forms = [_form(*part) for part in parts]
        for rank, form in enumerate(forms):
            if form != forms[0]:
                raise CommunicationError(
                    f"Rank 0 calls {forms[0]} and rank {rank} calls {form}: all ranks "
                    "must make the same calls in the same order."
                )

    def _result(self, operation: Operation, parts: list[tuple[Any, ...]]) -> Array:
        arrays = [values for _, values, _ in parts]
        xp = ns.own_namespace(arrays[0])
        arguments = parts[self.rank][2]
        if operation == "all_gather":
            return xp.concat(arrays)
        if operation == "all_to_all":
            pieces = []
            for values, arguments in ((v, a) for _, v, a in parts):
                start = sum(arguments["send"][: self.rank])
                pieces.append(values[start : start + arguments["send"][self.rank]])
            return xp.concat(pieces)
        if operation == "reduce_scatter":
            start = sum(arguments["counts"][: self.rank])
            stop = start + arguments["counts"][self.rank]
            arrays = [values[start:stop] for values in arrays]
        total = arrays[0]
        for values in arrays[1:]:
            total = total + values
        return xp.asarray(total, copy=True)


def _form(operation: Operation, values: Array, arguments: Mapping[str, Any]) -> str:
    """Return what all ranks must have in common in one call."""
    dtype = str(values.dtype)
    if operation == "all_to_all":
        return f"all_to_all of {dtype}"
    if operation == "all_gather":
        return f"all_gather of {list(arguments['counts'])} {dtype}"
    more = "".join(f", {name}={value}" for name, value in arguments.items())
    return f"{operation} of {values.shape[0]} {dtype}{more}"
