"""How many threads a process has, and on which processors.

Every BLAS reads its own environment variable when it is loaded, XLA another, and PyTorch
is told by a function; the system is told as well, so that nothing can have more.
"""

from __future__ import annotations

import os
from typing import Any

VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def environment(threads: int, /, *, device: str) -> dict[str, str]:
    """Return the variables of a process that may use so many threads.

    Parameters
    ----------
    threads : int
        At least 1.
    device : {"cpu", "cuda"}
        Where it is to compute; JAX takes a GPU where there is one, unless told.

    Returns
    -------
    dict of str to str
        To be added to the environment before the process starts.
    """
    found = dict.fromkeys(VARIABLES, str(threads))
    flags = os.environ.get("XLA_FLAGS", "")
    if threads == 1:
        flags += " --xla_cpu_multi_thread_eigen=false"
    if flags:
        found["XLA_FLAGS"] = flags.strip()
    if device == "cpu":
        found["JAX_PLATFORMS"] = "cpu"
    return found


def processors() -> int:
    """Return on how many processors this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def pin(threads: int, /) -> None:
    """Keep this process to so many processors, the last ones that it may use."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-threads:])


def describe() -> dict[str, Any]:
    """Return on which processors this process runs, and its variables."""
    found: dict[str, Any] = {}
    if hasattr(os, "sched_getaffinity"):
        found["processors"] = sorted(os.sched_getaffinity(0))
    names = (*VARIABLES, "XLA_FLAGS")
    return found | {name: os.environ[name] for name in names if name in os.environ}
