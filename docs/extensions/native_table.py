"""The table of operations and backends of the page on backends, read from their files.

The libraries need not be installed where the pages are built.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from kfac_core.array.backend import OPERATIONS

NAMES = ("numpy", "torch", "jax", "cupy")


def table() -> str:
    """Return the table in Markdown."""
    package = importlib.util.find_spec("kfac_core_backends")
    assert package is not None
    assert package.origin is not None
    folder = Path(package.origin).parent
    native = {name: native_in(folder / f"{name}.py") for name in NAMES}
    lines = [f"| operation | {' | '.join(NAMES)} |", "| --- |" + " --- |" * len(NAMES)]
    for operation in OPERATIONS:
        cells = ["native" if operation in native[n] else "generic" for n in NAMES]
        lines.append(f"| `{operation}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def native_in(path: Path) -> set[str]:
    """Return the functions that a file defines or imports, where SciPy is there."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    branches = [part for part in body if isinstance(part, ast.If | ast.Try)]
    defined = [*body, *(part for branch in branches for part in ast.walk(branch))]
    found = {part.name for part in defined if isinstance(part, ast.FunctionDef)}
    for part in defined:
        if isinstance(part, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in part.names}
    return found
