"""An executor that runs independent blocks on several threads.

Conventions.  Many factorizations of a few hundred rows are faster in parallel than one
after another on all cores.  The array library's own threads are divided among them: on
PyTorch always, on NumPy if threadpoolctl is installed; otherwise set
``OPENBLAS_NUM_THREADS=1`` before the start.  Only code that releases the GIL runs in
parallel.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kfac_core import constraints
from kfac_core.array import namespaces as ns
from kfac_core.array.backend import Backend, backend_of
from kfac_core.array.structure import is_plain, leaves
from kfac_core.stages import EXECUTOR, Executor, Result, Stage, Tasks, plain

T = TypeVar("T")
R = TypeVar("R")

_lock = threading.Lock()
_holders: dict[str, int] = {}
_undo: dict[str, Callable[[], None]] = {}


class Threaded(Executor):
    """An executor that divides blocks among threads.

    Each thread gets its share of the array library's own threads.  Only code that releases
    the GIL runs in parallel.

    Parameters
    ----------
    workers : int
        The number of threads, at least 1.
    inner : Executor
        Executor that runs each thread's share.
    """

    def __init__(self, workers: int, inner: Executor = plain) -> None:
        constraints.require_range("workers", workers, constraints.COUNT)
        constraints.require_range("inner", inner, EXECUTOR)
        self.workers, self._inner = workers, inner

    def __call__(self, stage: Stage[Result], tasks: Tasks, /) -> dict[str, Result]:
        """Return the result of a stage for each task, by name."""
        work = {name: stage.work(task[0]) for name, task in tasks.items()}
        if self.workers == 1 or sum(work.values()) < stage.worth_threads:
            return self._inner(stage, tasks)

        def share(names: list[str]) -> dict[str, Any]:
            return self._inner(stage, {name: tasks[name] for name in names})

        firsts = [task[1] for task in tasks.values()]
        results = in_bundles(
            share,
            list(tasks),
            work=work.__getitem__,
            workers=self.workers,
            library=library_of(firsts),
        )
        return {name: results[name] for name in tasks}


def library_of(structures: Iterable[Any], /) -> Backend | None:
    """Return the backend of the first array in structures; None without an array."""
    for structure in structures:
        for _, x in leaves(structure):
            if not is_plain(x):
                return backend_of(ns.own_namespace(x))
    return None


def in_threads(
    function: Callable[[T], R],
    problems: Sequence[T],
    /,
    *,
    workers: int,
    library: Backend | None = None,
) -> list[R]:
    """Return the function of each problem, in the problems' order.

    Parameters
    ----------
    function : callable
        Changes nothing that another call reads.
    problems : sequence
        Arguments of the function, started in this order.
    workers : int
        The number of threads, at least 1, which is the calling thread alone.
    library : Backend, optional
        What computes, whose own threads are shared out among the workers meanwhile.

    Returns
    -------
    list
        The results.  Where calls raise, the first error in the problems' order is
        raised after all have ended.
    """
    if workers == 1 or len(problems) < 2:
        return [function(problem) for problem in problems]
    workers = min(workers, len(problems))
    if library is None:
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(function, problems))
    with _with_share_of_threads(library, workers) as share:
        hold = library.hold_threads
        # Some libraries set threads for the calling thread only, so each worker sets them.
        with ThreadPoolExecutor(workers, initializer=hold, initargs=(share,)) as pool:
            return list(pool.map(function, problems))


def in_bundles(
    function: Callable[[list[T]], dict[str, R]],
    problems: Sequence[T],
    /,
    *,
    work: Callable[[T], int],
    workers: int,
    library: Backend | None,
) -> dict[str, R]:
    """Return the results of a function of several problems, computed on threads.

    The most work is begun first, so that no thread is left with it at the end.  But
    small problems are mostly Python, where threads would only contend for the GIL: the
    smallest, up to half of one worker's share, are solved by one thread while others
    have large ones, half of them at the start and half at the end.

    Parameters
    ----------
    function : callable
        Function of a list of problems; changes nothing that another call reads.
    problems : sequence
        Problems of any kind.
    work : callable
        How much a problem takes, in any unit.
    workers, library : int, Backend
        As for `in_threads`; with one worker the calling thread has all problems.

    Returns
    -------
    dict
        Results by name, in no particular order.
    """
    if workers == 1 or len(problems) < 2:
        return function(list(problems))
    results: dict[str, R] = {}
    tasks = _bundles(problems, work, workers)
    for part in in_threads(function, tasks, workers=workers, library=library):
        results |= part
    return results


def _bundles(
    problems: Sequence[T], work: Callable[[T], int], workers: int
) -> list[list[T]]:
    """Return each problem once, in lists and in the order to start."""
    # Longest processing time first, within 4/3 of the best schedule (Graham).
    ordered = sorted(problems, key=work, reverse=True)
    room = sum(map(work, ordered)) // (2 * workers)
    small: list[T] = []
    while len(ordered) > workers and work(ordered[-1]) <= room:
        room -= work(ordered[-1])
        small.append(ordered.pop())
    # One bundle of small tasks starts at once, the other fills the end.
    tasks = [small[::2], *([problem] for problem in ordered), small[1::2]]
    return [task for task in tasks if task]


@contextlib.contextmanager
def _with_share_of_threads(library: Backend, workers: int) -> Iterator[int]:
    """Limit a library to a share of its threads, and yield their number.

    Of several calls at a time the first decides the share, and the last to leave restores
    all threads.
    """
    name = library.name
    with _lock:
        share = library.threads()
        if _holders.get(name, 0) == 0:
            share = max(1, share // workers)
            _undo[name] = library.hold_threads(share)
        _holders[name] = _holders.get(name, 0) + 1
    try:
        yield share
    finally:
        with _lock:
            _holders[name] -= 1
            if _holders[name] == 0:
                _undo.pop(name)()
