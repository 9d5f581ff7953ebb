"""Independent problems on several threads.

Conventions.  Many factorizations of a few hundred rows go faster side by side than one
after the other on all processors.  Each should then have its library's threads held to
one: ``OPENBLAS_NUM_THREADS=1`` (and ``MKL_NUM_THREADS=1``) before the start, or
``torch.set_num_threads(1)``.  Only what a library does without the interpreter's lock
runs at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["in_threads"]

T = TypeVar("T")
R = TypeVar("R")


def in_threads(
    function: Callable[[T], R], problems: Sequence[T], /, *, workers: int
) -> list[R]:
    """Return the function of each problem, in the problems' order.

    Parameters
    ----------
    function : callable
        Changes nothing that another call reads.
    problems : sequence
        Its arguments; started in this order.
    workers : int
        The number of threads, at least 1, which is the calling thread alone.

    Returns
    -------
    list
        The results.  Where calls raise, the first error in the problems' order is
        raised after all have ended.

    Raises
    ------
    ValueError
        For fewer workers than one.
    """
    if workers < 1:
        raise ValueError(f"Expected `workers` >= 1, got {workers}.")
    if workers == 1 or len(problems) < 2:
        return [function(problem) for problem in problems]
    with ThreadPoolExecutor(min(workers, len(problems))) as pool:
        return list(pool.map(function, problems))
