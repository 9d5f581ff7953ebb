"""A GPU's own clock, and what it was asked to do.

Conventions.  PyTorch and CuPy mark the device's stream with events.  JAX has no events
for its users: there the wall clock runs until the result is there.  Launches and
synchronizations are counted by PyTorch's profiler, which sees the CUDA calls of the
whole process.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

from benchmarks.libraries.library import Call, Events

LAUNCHES = (
    *("cudaLaunchKernel", "cudaLaunchKernelExC", "cudaLaunchCooperativeKernel"),
    *("cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchCooperativeKernel"),
    *("cudaGraphLaunch", "cuGraphLaunch"),
)
WAITS = (
    *("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
    *("cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize"),
    *("cudaMemcpy", "cuMemcpyDtoH", "cuMemcpyHtoD"),
)
VERSION = re.compile(r"(_v\d+)?(_ptsz)?$")
"""What CUDA's tracing appends to a function's name."""


def device_events(library: str, device: str, /) -> Events | None:
    """Return how a library marks its device's stream; None where it cannot.

    Parameters
    ----------
    library : str
        ``"torch"``, ``"cupy"`` or another.
    device : str
        ``"cpu"`` or ``"cuda"``.

    Returns
    -------
    callable or None
        See `benchmarks.libraries.library.Events`.
    """
    if device != "cuda" or library not in ("torch", "cupy"):
        return None
    cuda: Any = importlib.import_module(f"{library}.cuda")

    def torch_events() -> tuple[Callable[[], None], Callable[[], float]]:
        start, stop = (cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        return stop.record, lambda: float(start.elapsed_time(stop)) / 1e3

    def cupy_events() -> tuple[Callable[[], None], Callable[[], float]]:
        start, stop = cuda.Event(), cuda.Event()
        start.record()
        return stop.record, lambda: float(cuda.get_elapsed_time(start, stop)) / 1e3

    return torch_events if library == "torch" else cupy_events


def device_counts(
    call: Call, finish: Callable[[Any], None], /
) -> dict[str, int] | None:
    """Return how many kernels a call launched, and how often the host waited.

    Parameters
    ----------
    call, finish : callable
        As for `benchmarks.timing.Clock.sample`.

    Returns
    -------
    dict of str to int, or None
        ``"launches"`` and ``"synchronizations"``, without that for the result itself;
        None where PyTorch is not there to count, or not built for CUDA.
    """
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    finish(call())
    # The profiler synchronizes with the device when it ends.
    nothing, own = counted(torch, lambda: None, finish), counted(torch, call, finish)
    return {name: own[name] - nothing[name] for name in own}


def counted(torch: Any, call: Call, finish: Callable[[Any], None]) -> dict[str, int]:
    """Return what a call asks of the device, and what counting does."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
        result = call()
    finish(result)
    counts = {"launches": 0, "synchronizations": 0}
    for event in profile.key_averages():
        name = VERSION.sub("", event.key)
        counts["launches"] += event.count if name in LAUNCHES else 0
        counts["synchronizations"] += event.count if name in WAITS else 0
    return counts
