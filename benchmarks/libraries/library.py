"""What a library is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from benchmarks.workloads import Workload

Call = Callable[[], Any]
"""One stage, ready to be timed; what it returns can be waited for."""

Events = Callable[[], tuple[Callable[[], None], Callable[[], float]]]
"""Marks the start on a device; returns what marks the end, and what reads the seconds."""


class AbsentError(Exception):
    """A stage that the library does not have, with the reason."""


class Library(Protocol):
    """One library on one device.

    Attributes
    ----------
    events : callable or None
        How the device's own time is taken.
    """

    events: Events | None

    def versions(self) -> dict[str, str]:
        """Return what is running here."""

    def prepare(self, workload: Workload, /) -> None:
        """Make everything that a stage works on; feed all batches of the workload."""

    def stage(self, name: str, /) -> Call:
        """Return a stage; raise `AbsentError` where there is none.

        What a stage changes, it keeps to itself: statistics are timed on statistics of
        their own.
        """

    def answer(self, stage: str, /) -> list[np.ndarray[Any, Any]]:
        """Return the layers' preconditioned vectors, each of shape ``(in(+1), out)``."""

    def finish(self, result: Any, /) -> None:
        """Wait until a result has been computed."""

    def gemm(self, size: int, /) -> Call:
        """Return the product of two square float32 matrices, ready to be timed."""
