"""What an integration does about several processes, in one call.

A training loop that runs on several processes, and an estimator that is not told of them,
keep statistics of each process's own rows, and no error says so.  An integration calls
`execution_for` with what its user gave: it returns the execution for the estimator, or
refuses where processes run that nobody mentioned.
"""

from __future__ import annotations

from typing import Any

from kfac_core import constraints, errors
from kfac_core.distributed.communicator import (
    Communicator,
    communicator_names,
    connect,
    engine,
)
from kfac_core.distributed.options import Distributed


def execution_for(
    communicator: Communicator | str | None, /, *, timeout: float = 60.0, **options: Any
) -> Distributed | None:
    """Return the execution of an estimator for the processes that run.

    Parameters
    ----------
    communicator : Communicator, str or None
        Communicator, or the name of an engine such as ``"torch"``.  ``"alone"`` says that
        each process has an estimator of its own.  None is for programs of one process.
    timeout : float
        Seconds to wait for other ranks, for an engine that is named.
    **options
        Options of `Distributed`, such as ``loss="ddp"``.

    Returns
    -------
    Distributed or None
        For ``Estimator(..., execution=...)``; None for one process.

    Raises
    ------
    UnsupportedError
        If nothing was given and an engine runs several processes.
    UnknownBackendError, BackendUnavailableError
        For an engine that is unknown, or not usable here.
    """
    constraints.require_range("timeout", timeout, constraints.POSITIVE)
    if communicator is None:
        for name, size in running_processes().items():
            if size > 1:
                raise errors.UnsupportedError(
                    f"{size} processes of {name!r} are running, and each would keep "
                    f"statistics of its own rows only. Pass communicator={name!r} to "
                    "combine them, or communicator='alone' to keep them apart."
                )
        return None
    if communicator == "alone":
        return None
    if isinstance(communicator, str):
        communicator = connect(communicator, timeout=timeout)
    return Distributed(communicator=communicator, **options)


def running_processes() -> dict[str, int]:
    """Return how many processes each engine runs, of those that are initialized.

    Nothing is initialized, and no library is imported, by asking.

    Returns
    -------
    dict of str to int
        Sizes by the name of the engine.
    """
    sizes: dict[str, int] = {}
    for name in communicator_names():
        try:
            running = getattr(engine(name), "running", None)
        except errors.KFACError:
            continue
        size = running() if running is not None else 0
        if size:
            sizes[name] = int(size)
    return sizes
