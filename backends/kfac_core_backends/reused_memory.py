"""Memory of arrays that are gone, for new ones of the same size.

Conventions.  Fresh memory costs as much as the numbers that are put there: the system
maps and clears it page by page, a quarter of a microsecond for each kilobyte.  Running
sums and inverses are replaced by others of the same size again and again.  So when the
last view of an array of `empty` is gone, its memory is kept for the next one.  No more
is kept than half of what is in use: of running sums, inverses and the sums that these
were made of one is replaced at a time.  Nothing is held when nothing is in use.
"""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np

_SMALLEST = 1 << 20
"""Bytes below which what the system's own allocator keeps for the next array is enough."""


class _Store:
    """What is in use, in bytes, and what is kept for use, by size.

    Memory comes back from wherever garbage is collected, which may be in here: so
    `give` never blocks: memory that arrives while another thread holds the lock is sorted
    in by the next call.
    """

    def __init__(self) -> None:
        self.used = self.idle = 0
        self.spare: dict[int, list[Any]] = {}
        self._back: deque[Any] = deque()
        self._lock = threading.Lock()

    def take(self, size: int, /) -> Any:
        """Return memory of a size, kept or new."""
        with self._lock:
            self._order()
            self.used += size
            same = self.spare.get(size)
            if not same:
                return np.empty(size, np.uint8)
            self.idle -= size
            return same.pop()

    def give(self, memory: Any, /) -> None:
        """Keep what is no longer in use, and let go of what is too much."""
        self._back.append(memory)
        while self._back and self._lock.acquire(blocking=False):
            try:
                self._order()
            finally:
                self._lock.release()

    def _order(self) -> None:
        while self._back:
            memory = self._back.popleft()
            self.used -= memory.nbytes
            self.idle += memory.nbytes
            self.spare.setdefault(memory.nbytes, []).append(memory)
        while 2 * self.idle > self.used:
            # Any would do; the size that came back first goes first.
            oldest = next(iter(self.spare))
            if self.spare[oldest]:
                self.idle -= oldest
                self.spare[oldest].pop()
            else:
                del self.spare[oldest]


_store = _Store()


def empty(shape: tuple[int, ...], dtype: np.dtype[Any], /) -> np.ndarray[Any, Any]:
    """Return an array in Fortran order that holds whatever the memory held.

    Parameters
    ----------
    shape : tuple of int
        Shape of the array.
    dtype : numpy.dtype
        Dtype of the array.

    Returns
    -------
    numpy.ndarray
        Contiguous and writeable.  Its memory goes to another array only after the last
        reference to it or to a view of it is gone.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _SMALLEST:
        return np.empty(shape, dtype, order="F")
    memory = _store.take(size)
    # Views refer to their array, and it to this.  (NumPy refers to the owner of the
    # memory itself where it is given another array or a memoryview.)
    lease: Any = (ctypes.c_char * size).from_buffer(memory)
    weakref.finalize(lease, _store.give, memory).atexit = False
    return np.ndarray(shape, dtype, buffer=lease, order="F")
