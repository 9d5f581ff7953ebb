"""The memory that Python and NumPy take meanwhile."""

from __future__ import annotations

import tracemalloc
from typing import Any


class PeakMemory:
    """Measures, as a context, the most bytes that were held at a time since it began.

    Attributes
    ----------
    peak : int
        That number, when the context has ended.
    """

    def __init__(self) -> None:
        self.peak = 0

    def __enter__(self) -> PeakMemory:
        tracemalloc.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
