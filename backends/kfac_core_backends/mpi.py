"""Exchanges by MPI, with mpi4py.

Conventions.  Arrays go through the host's memory as NumPy arrays.  Waiting tests the
request until the timeout.  MPI cannot cancel a collective, so that a program has to end
after a timeout.

A rank that is gone is noticed by the timeout; by Open MPI under ``mpirun --with-ft ulfm``,
or another MPI that reports failed processes, at once.  After a timeout the ranks that wait
tell each other so; those that do not answer are named.

MPI's launchers end all ranks where one is killed, unless they are told not to:
``mpirun --with-ft ulfm`` of Open MPI, and ``mpirun -disable-auto-cleanup`` of MPICH.
``python -m mpi4py program.py`` ends all ranks where an error of one is not caught.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kfac_core.distributed.communicator import Communicator, Operation
from kfac_core.errors import CommunicationError, CommunicationTimeoutError

_TAG, _WORD = 4711, np.ones(1, np.int8)
_PATIENCE = 2.0
"""Seconds in which the ranks that notice a failure find out which do not."""


class MPICommunicator(Communicator):
    """The ranks of a communicator of mpi4py.

    Parameters
    ----------
    communicator : mpi4py.MPI.Comm, optional
        Communicator of this process, which is duplicated; by default ``MPI.COMM_WORLD``.
    timeout : float
        Seconds to wait for other ranks.
    words : mpi4py.MPI.Comm, optional
        Communicator in which a rank that gives up tells all others so, whatever they wait
        in; by default a duplicate.
    """

    name = "mpi"

    def __init__(
        self, communicator: Any = None, *, timeout: float = 60.0, words: Any = None
    ) -> None:
        from mpi4py import MPI

        group = MPI.COMM_WORLD if communicator is None else communicator
        super().__init__(group.Get_rank(), group.Get_size(), timeout=timeout)
        self._group, self._words = group, group if words is None else words
        self._sends: list[Any] = []
        if words is None:
            self._meet("connect")
            with self._naming("connect"):
                self._group, self._words = group.Dup(), group.Dup()

    def _split(self, groups: Sequence[Sequence[int]], /) -> MPICommunicator:
        color = next(k for k, group in enumerate(groups) if self.rank in group)
        place = list(groups[color]).index(self.rank)
        self._meet("split")
        with self._naming("split"):
            part = self._group.Split(color, place)
        return MPICommunicator(part, timeout=self.timeout, words=self._words)

    def _start(
        self, operation: Operation, values: Any, arguments: Mapping[str, Any], /
    ) -> Callable[[], Any]:
        begin: Any = getattr(self, f"_{operation}")
        # The request does not keep the arrays that it reads and writes.
        values = np.ascontiguousarray(values)
        with self._naming(operation):
            request, result = begin(values, **arguments)

        def wait() -> Any:
            self._wait(request, operation)
            del values_kept[:]
            return result

        values_kept = [values]
        return wait

    def _meet(self, step: str) -> None:
        """Wait for all ranks, before a call that MPI has only without a timeout."""
        with self._naming(step):
            request = self._group.Ibarrier()
        self._wait(request, step)

    def _wait(self, request: Any, step: str) -> None:
        """Return when a request is done, or raise an error that names a rank."""
        deadline = time.monotonic() + self.timeout
        with self._naming(step):
            while not request.Test():
                if time.monotonic() > deadline:
                    raise self._late(step)
                # Other ranks may need this core.
                time.sleep(0)

    def _all_reduce(self, values: Any, overwrite: bool) -> Any:
        total = np.empty_like(values)
        return self._group.Iallreduce(values, total), total

    def _reduce_scatter(self, values: Any, counts: Sequence[int]) -> Any:
        total = np.empty(counts[self.rank], values.dtype)
        return self._group.Ireduce_scatter(values, total, list(counts)), total

    def _all_gather(self, values: Any, counts: Sequence[int]) -> Any:
        arrived = np.empty(sum(counts), values.dtype)
        return self._group.Iallgatherv(values, [arrived, list(counts)]), arrived

    def _all_to_all(
        self, values: Any, send: Sequence[int], receive: Sequence[int]
    ) -> Any:
        arrived = np.empty(sum(receive), values.dtype)
        request = self._group.Ialltoallv([values, list(send)], [arrived, list(receive)])
        return request, arrived

    def _late(self, step: str) -> CommunicationTimeoutError:
        return CommunicationTimeoutError(
            f"Rank {self.ranks[self.rank]} waited {self.timeout} s in {step} for rank "
            f"{self._missing()}. MPI cannot cancel the exchange: end the program, and "
            "start again from the last checkpoint."
        )

    @contextlib.contextmanager
    def _naming(self, step: str) -> Iterator[None]:
        """Turn an error of MPI into one that names the ranks that are gone."""
        from mpi4py import MPI

        try:
            yield
        except MPI.Exception as error:
            missing = self._missing()
            if error.Get_error_class() in (MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED):
                # What the others wait in cannot end any more.
                with contextlib.suppress(NotImplementedError):
                    self._group.Revoke()
            raise CommunicationError(
                f"Rank {self.ranks[self.rank]} waited in {step} for rank {missing}, which "
                f"ended or failed ({error}). End the program, and start again from the "
                "last checkpoint."
            ) from error

    def _missing(self) -> str:
        """Tell all ranks that this one gives up; return those that do not say so."""
        from mpi4py import MPI

        here = self.ranks[self.rank]
        for rank in range(self._words.Get_size()):
            # To a process that is known to be gone nothing can be sent.
            with contextlib.suppress(MPI.Exception):
                if rank != here:
                    self._sends.append(self._words.Isend(_WORD, dest=rank, tag=_TAG))
        missing = [rank for rank in self.ranks if rank != here]
        deadline = time.monotonic() + min(_PATIENCE, self.timeout)
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not self._has_word_of(rank)]
            time.sleep(0.001)
        return ", ".join(map(str, missing)) or "unknown"

    def _has_word_of(self, rank: int) -> bool:
        from mpi4py import MPI

        with contextlib.suppress(MPI.Exception):
            return bool(self._words.Iprobe(source=rank, tag=_TAG))
        return False


def problem() -> str | None:
    """Return why the engine cannot be used here, or None."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed; pip install 'kfac-core[mpi]' mpich"
    try:
        from mpi4py import MPI  # noqa: F401
    except (ImportError, RuntimeError) as error:
        # mpi4py lists every library that it looked for, a line each.
        reason = str(error).replace("\\n", "\n").splitlines()[0]
        return f"mpi4py finds no MPI ({reason}); pip install mpich"
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
