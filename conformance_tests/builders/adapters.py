"""What depends on whether the backends' own files are there."""

from __future__ import annotations

import os
from typing import Any

WITHOUT_ADAPTERS = os.environ.get("KFAC_CORE_TEST_NO_BACKENDS") == "1"
"""Whether every backend's file is hidden, so that the generic path alone is tested."""


def looks_at_values(backend: Any) -> bool:
    """Whether products are looked at: only an adapter knows that it costs nothing."""
    return backend.name in ("numpy", "torch") and not WITHOUT_ADAPTERS
