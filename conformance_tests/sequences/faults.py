"""Faults at the k-th call of a kind: linear algebra, memory, files, interrupts."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kfac_core.array import backend as backends

KINDS = ("interrupt", "memory", "linear algebra", "files")

_ERRORS: dict[str, Callable[[], BaseException]] = {
    "interrupt": lambda: KeyboardInterrupt("injected"),
    "memory": lambda: MemoryError("injected"),
    "linear algebra": lambda: np.linalg.LinAlgError("injected"),
    "files": lambda: OSError(28, "injected: no space left on device"),
}
_OURS = ("kfac_core/", "kfac_core_backends/")
_ALGEBRA = (
    *("gram_update", "damped_cholesky", "cholesky_inverse", "solve_triangular"),
    *("multiply_triangular", "eigh", "multiply_symmetric", "scale_symmetric"),
)
_FILES = ("posix", "nt", "_io")
_code_is_ours: dict[Any, bool] = {}
# What cleans up after a failure must not fail for the same reason.
_ALLOWED = ("close", "unlink", "remove", "stat", "fstat", "lstat", "fspath")


class Fault:
    """A count of calls, of which one raises.

    Attributes
    ----------
    left : int
        How many calls are left until the one that raises.
    met : bool
        Whether it was met.
    """

    def __init__(self, kind: str, k: int) -> None:
        self.left, self.met, self._kind = k, False, kind

    def count(self) -> None:
        """Count a call, and raise if it is the k-th."""
        self.left -= 1
        if self.left == 0:
            self.met = True
            raise _ERRORS[self._kind]()


@contextlib.contextmanager
def injected(kind: str, k: int) -> Iterator[Fault]:
    """Let the k-th call of a kind raise, of those that are made inside.

    Parameters
    ----------
    kind : {"interrupt", "memory", "linear algebra", "files"}
        The first two count every call of a function of the library and its backends; an
        interrupt may also come when one returns.
    k : int
        At least 1.

    Yields
    ------
    Fault
        Which says afterwards whether there were so many calls.
    """
    fault = Fault(kind, k)
    if kind == "linear algebra":
        with _operations_that_count(fault):
            yield fault
        return
    before, unraisable = (sys.gettrace(), sys.getprofile()), sys.unraisablehook
    # A generator that is closed by the fault cannot raise it again, and prints it.
    sys.unraisablehook = lambda _: None
    if kind == "files":
        sys.setprofile(_profiler(fault))
    else:
        # Tracing is cheaper than profiling, which also stops at each call of C.
        sys.settrace(_tracer(fault, returns=kind == "interrupt"))
    try:
        yield fault
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
        sys.unraisablehook = unraisable


def _profiler(fault: Fault) -> Callable[..., None]:
    def of_files(frame: Any, event: str, argument: Any) -> None:
        if event != "c_call" or fault.met:
            return
        name = getattr(argument, "__name__", "")
        owner = type(getattr(argument, "__self__", None)).__module__
        module = getattr(argument, "__module__", None) or owner
        if module in _FILES and name not in _ALLOWED and not name.startswith("__"):
            fault.count()

    return of_files


def _tracer(fault: Fault, *, returns: bool) -> Callable[..., Any]:
    def of_return(frame: Any, event: str, argument: Any) -> None:
        if event == "return" and not fault.met:
            fault.count()

    def of_call(frame: Any, event: str, argument: Any) -> Any:
        code = frame.f_code
        ours = _code_is_ours.get(code)
        if ours is None:
            path = code.co_filename.replace("\\", "/")
            ours = any(part in path for part in _OURS)
            _code_is_ours[code] = ours
        if not ours or fault.met:
            return None
        fault.count()
        if not returns:
            return None
        frame.f_trace_lines = False
        return of_return

    return of_call


@contextlib.contextmanager
def _operations_that_count(fault: Fault) -> Iterator[None]:
    """Replace the native operations of all backends by ones that count their calls."""
    before = {name: dict(backends.natives[name]) for name in _ALGEBRA}

    def counting(operation: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            if not fault.met:
                fault.count()
            return operation(*arguments, **options)

        return counted

    for name, by_namespace in before.items():
        for namespace, operation in by_namespace.items():
            if operation is not None:
                backends.natives[name][namespace] = counting(operation)
    try:
        yield
    finally:
        for name, by_namespace in before.items():
            backends.natives[name].update(by_namespace)
