"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any


def describe_machine() -> dict[str, Any]:
    """Return the processor, its number, the system and how busy it is."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        named = [line for line in lines if line.startswith("model name")]
        model = named[0].partition(":")[2].strip() if named else model
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "processor": model,
        "processors": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load": load,
    }
