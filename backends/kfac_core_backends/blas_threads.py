"""How many threads NumPy's and SciPy's BLAS computes on, by threadpoolctl.

Without threadpoolctl nothing is known, and nothing is changed.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kfac_core.array.optional import optional_module

threadpoolctl: Any = optional_module("threadpoolctl")


def pools() -> Sequence[Any] | None:
    """Return the pools of threads of every BLAS in the process; None where unknown."""
    if threadpoolctl is None:
        return None
    controllers: Sequence[Any] = _controller(len(sys.modules)).lib_controllers
    return controllers


@functools.lru_cache(maxsize=1)
def _controller(modules: int) -> Any:
    """Return what holds the pools, looked for again where modules were imported since.

    Looking through all libraries of the process takes a millisecond.
    """
    return threadpoolctl.ThreadpoolController().select(user_api="blas")


def threads() -> int:
    """Return how many threads a call of BLAS computes on."""
    return max((int(pool.num_threads) for pool in pools() or ()), default=1)


def hold_threads(number: int, /) -> Callable[[], None]:
    """Let BLAS compute on so many threads; return what undoes it, from any thread."""
    if threadpoolctl is None:
        return lambda: None
    with _in_control():
        limits = _controller(len(sys.modules)).limit(limits=number)

    def release() -> None:
        with _in_control():
            limits.restore_original_limits()

    return release


_lock = threading.Lock()


@contextmanager
def _in_control() -> Iterator[None]:
    """Let this thread set the numbers of threads, and any other one afterwards.

    OpenBLAS has one number for the whole process.  From 3.8 on threadpoolctl lets only
    the thread that set it first set it again, and ignores others without a word: what
    a background refresh held would never be given back.
    """
    openblas = getattr(threadpoolctl, "OpenBLASController", None)
    clear = getattr(openblas, "clear_controlling_thread", lambda **_: None)
    with _lock:
        clear(force=True)
        yield
        clear(force=True)
