"""The engine of a single process: every exchange returns what it was given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kfac_core.array import Array
from kfac_core.distributed.communicator import Communicator, Operation


class Alone(Communicator):
    """The communicator of one process, for programs that also run without others."""

    name = "alone"

    def __init__(self) -> None:
        super().__init__(0, 1, timeout=1.0)

    def _split(self, groups: Sequence[Sequence[int]], /) -> Communicator:
        return Alone()

    def _start(
        self, operation: Operation, values: Array, arguments: Mapping[str, Any], /
    ) -> Callable[[], Any]:
        raise NotImplementedError  # `Communicator` answers for one rank.


def problem() -> str | None:
    """Return None: the engine needs nothing."""
    return None


def versions() -> dict[str, str]:
    """Return the versions of the libraries behind the engine: none."""
    return {}


def connect(*, timeout: float) -> Alone:
    """Return the communicator of one process.

    Parameters
    ----------
    timeout : float
        Ignored: there is nobody to wait for.

    Returns
    -------
    Alone
        Communicator.
    """
    return Alone()
