"""Table of operations and backends: native or generic.

The command ``kfac-core doctor --all`` prints it.
"""

from __future__ import annotations

from typing import Literal

from kfac_core.array import backend

Capability = Literal["native", "generic", "unavailable"]


def capability_table() -> dict[str, dict[str, Capability]]:
    """Return whether each operation is native or generic, by operation and backend.

    Returns
    -------
    dict of str to dict of str to str
        ``"native"`` where the adapter brings the operation, ``"generic"`` where the
        definition serves, ``"unavailable"`` where the backend cannot be used here.
    """
    names = backend.backend_names()
    return {
        op: {name: _capability(op, name) for name in names} for op in backend.OPERATIONS
    }


def _capability(operation: str, name: str) -> Capability:
    if backend.get_backend(name).problem() is not None:
        return "unavailable"
    return "native" if operation in backend.native_operations(name) else "generic"
