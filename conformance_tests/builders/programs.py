"""Programs that run in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any


def run_python(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run this Python, with options of `subprocess.run`, and return what it says."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        **{"check": False, **options},
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
