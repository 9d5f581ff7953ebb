"""Resident memory of a process, and its peak.

LAPACK's work space and what a compiled function allocates are seen by the system alone.
Linux forgets a process's peak when told to, so that one stage's peak can be had without
that of what came before; elsewhere the peak is the process's own, since its start.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

# Arrays are given back to the system when they are freed, and are not kept for the next.
MEMORY_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}

_STATUS = Path("/proc/self/status")
_FORGET = Path("/proc/self/clear_refs")


class Resident:
    """The memory of this process, in bytes."""

    def settled(self) -> int:
        """Return what is resident, after everything that can be freed was."""
        gc.collect()
        if sys.platform == "linux":
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                trim(0)
        found = _status("VmRSS")
        return self.peak() if found is None else found

    def reset_peak(self) -> None:
        """Forget the peak so far, where the system can."""
        try:
            _FORGET.write_text("5")
        except OSError:
            return

    def peak(self) -> int:
        """Return the peak since it was last forgotten."""
        found = _status("VmHWM")
        if found is not None:
            return found
        import resource  # which Windows lacks

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(name: str) -> int | None:
    if not _STATUS.exists():
        return None
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None
