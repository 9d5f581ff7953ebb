"""How many threads NumPy's and SciPy's BLAS computes on, by threadpoolctl.

Without threadpoolctl nothing is known, and nothing is changed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

threadpoolctl: Any
try:
    threadpoolctl = importlib.import_module("threadpoolctl")
except ImportError:
    threadpoolctl = None

__all__ = ["hold_threads", "threads"]


def threads() -> int:
    """Return how many threads a call of BLAS computes on."""
    if threadpoolctl is None:
        return 1
    pools = threadpoolctl.ThreadpoolController().select(user_api="blas")
    return max((int(pool.num_threads) for pool in pools.lib_controllers), default=1)


def hold_threads(number: int, /) -> Callable[[], None]:
    """Let BLAS compute on so many threads; return what undoes it."""
    if threadpoolctl is None:
        return lambda: None
    limits = threadpoolctl.threadpool_limits(number, user_api="blas")
    return lambda: limits.restore_original_limits()
