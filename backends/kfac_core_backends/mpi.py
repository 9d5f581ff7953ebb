"""Exchanges by MPI, with mpi4py.

Conventions.  Arrays go through the host's memory as NumPy arrays.  Waiting tests the
request until the timeout.  MPI cannot cancel a collective, so that a program has to end
after a timeout.  Run it with ``mpirun -n P python -m mpi4py program.py``, where an
uncaught error on one rank ends all.

After a timeout the ranks that wait tell each other so; those that do not answer are named.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kfac_core.distributed.communicator import (
    Communicator,
    Operation,
    require_groups,
)
from kfac_core.errors import CommunicationTimeoutError

__all__ = ["MPICommunicator", "connect", "problem", "running", "versions"]

_TAG = 4711


class MPICommunicator(Communicator):
    """The ranks of a communicator of mpi4py.

    Parameters
    ----------
    communicator : mpi4py.MPI.Comm, optional
        Communicator of this process; by default a duplicate of ``MPI.COMM_WORLD``.
    timeout : float
        Seconds to wait for other ranks.
    """

    name = "mpi"

    def __init__(self, communicator: Any = None, *, timeout: float = 60.0) -> None:
        from mpi4py import MPI

        own = MPI.COMM_WORLD.Dup() if communicator is None else communicator
        super().__init__(own.Get_rank(), own.Get_size(), timeout=timeout)
        self._own = own

    def split(self, groups: Sequence[Sequence[int]], /) -> MPICommunicator:
        """Return the communicator of this rank's group; see `Communicator.split`."""
        require_groups(groups, self.size)
        color = next(k for k, group in enumerate(groups) if self.rank in group)
        place = list(groups[color]).index(self.rank)
        made = MPICommunicator(self._own.Split(color, place), timeout=self.timeout)
        made.traffic = self.traffic
        return made

    def _start(
        self, operation: Operation, values: Any, arguments: Mapping[str, Any], /
    ) -> Callable[[], Any]:
        begin: Any = getattr(self, f"_{operation}")
        # The request does not keep the arrays that it reads and writes.
        values = np.ascontiguousarray(values)
        request, result = begin(values, **arguments)

        def wait() -> Any:
            deadline = time.monotonic() + self.timeout
            while not request.Test():
                if time.monotonic() > deadline:
                    raise self._late(operation)
            del values_kept[:]
            return result

        values_kept = [values]
        return wait

    def _all_reduce(self, values: Any) -> Any:
        total = np.empty_like(values)
        return self._own.Iallreduce(values, total), total

    def _reduce_scatter(self, values: Any, counts: Sequence[int]) -> Any:
        total = np.empty(counts[self.rank], values.dtype)
        return self._own.Ireduce_scatter(values, total, list(counts)), total

    def _all_gather(self, values: Any, counts: Sequence[int]) -> Any:
        arrived = np.empty(sum(counts), values.dtype)
        return self._own.Iallgatherv(values, [arrived, list(counts)]), arrived

    def _broadcast(self, values: Any, source: int) -> Any:
        sent = np.array(values)
        return self._own.Ibcast(sent, root=source), sent

    def _all_to_all(
        self, values: Any, send: Sequence[int], receive: Sequence[int]
    ) -> Any:
        arrived = np.empty(sum(receive), values.dtype)
        request = self._own.Ialltoallv([values, list(send)], [arrived, list(receive)])
        return request, arrived

    def _late(self, operation: str) -> CommunicationTimeoutError:
        """Return an error that names the ranks that are not waiting, too."""
        from mpi4py import MPI

        word = np.ones(1, np.int8)
        others = [rank for rank in range(self.size) if rank != self.rank]
        sends = [self._own.Isend(word, dest=rank, tag=_TAG) for rank in others]
        deadline = time.monotonic() + min(2.0, self.timeout)
        while others and time.monotonic() < deadline:
            if self._own.Iprobe(source=MPI.ANY_SOURCE, tag=_TAG):
                status = MPI.Status()
                self._own.Recv(np.empty(1, np.int8), tag=_TAG, status=status)
                if status.Get_source() in others:
                    others.remove(status.Get_source())
            time.sleep(0.001)
        del sends
        named = ", ".join(map(str, others)) or "unknown"
        return CommunicationTimeoutError(
            f"Rank {self.rank} waited {self.timeout} s in {operation} for rank {named}. "
            "MPI cannot cancel the exchange: end the program, and start again from the "
            "last checkpoint."
        )


def problem() -> str | None:
    """Return why the engine cannot be used here, or None."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed; pip install mpi4py mpich"
    try:
        from mpi4py import MPI  # noqa: F401
    except (ImportError, RuntimeError) as error:
        return f"mpi4py finds no MPI ({error}); pip install mpich"
    return None


def versions() -> dict[str, str]:
    """Return the versions of the libraries behind the engine."""
    if importlib.util.find_spec("mpi4py") is None:
        return {}
    import mpi4py

    return {"mpi4py": str(mpi4py.__version__)}


def running() -> int:
    """Return the number of processes, or 0 where MPI was not initialized."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return 0
    return int(mpi.COMM_WORLD.Get_size())


def connect(*, timeout: float) -> MPICommunicator:
    """Return the communicator of all processes.

    Parameters
    ----------
    timeout : float
        Seconds to wait for other ranks.

    Returns
    -------
    MPICommunicator
        Over all processes.
    """
    return MPICommunicator(timeout=timeout)
