"""Table of operations and backends: native or generic.

The command ``kfac-core doctor`` prints it, the documentation is made from it, and the
tests take their skip marks from it.
"""

from __future__ import annotations

from typing import Literal

from kfac_core.array.backend import (
    OPERATIONS,
    backend_names,
    get_backend,
    native_operations,
)

__all__ = ["Capability", "capability_table", "markdown_table"]

Capability = Literal["native", "generic", "unavailable"]


def capability_table() -> dict[str, dict[str, Capability]]:
    """Return whether each operation is native or generic, by operation and backend.

    Returns
    -------
    dict of str to dict of str to str
        ``"native"`` where the adapter brings the operation, ``"generic"`` where the
        definition serves, ``"unavailable"`` where the backend cannot be used here.
    """
    names = backend_names()
    return {op: {name: _capability(op, name) for name in names} for op in OPERATIONS}


def markdown_table() -> str:
    """Return the table in Markdown, for the documentation."""
    table = capability_table()
    names = backend_names()
    lines = ["| operation | " + " | ".join(names) + " |"]
    lines.append("| --- |" + " --- |" * len(names))
    for operation, row in table.items():
        cells = " | ".join(row[name] for name in names)
        lines.append(f"| `{operation}` | {cells} |")
    return "\n".join(lines) + "\n"


def _capability(operation: str, name: str) -> Capability:
    if get_backend(name).problem() is not None:
        return "unavailable"
    return "native" if operation in native_operations(name) else "generic"
