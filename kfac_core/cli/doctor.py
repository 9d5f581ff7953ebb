"""``kfac-core doctor``: what was found, what is chosen and why, what is native."""

from __future__ import annotations

import argparse
import json
import platform
from typing import Any

import kfac_core
from kfac_core.backend import adapter_problem, backend_names, get_backend
from kfac_core.capabilities import capability_table
from kfac_core.errors import KFACError
from kfac_core.selection import selected_backend

__all__ = ["add_arguments", "diagnosis", "run"]


def add_arguments(parser: argparse.ArgumentParser, /) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace, /) -> int:
    """Print the diagnosis.

    Parameters
    ----------
    arguments : argparse.Namespace
        As `add_arguments` declared.

    Returns
    -------
    int
        0 where the chosen backend can be used, else 2.
    """
    found = diagnosis()
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(_lines(found)))
    return 0 if found["selected"]["problem"] is None else 2


def diagnosis() -> dict[str, Any]:
    """Return what there is to say, as plain data.

    Returns
    -------
    dict
        Of ``kfac_core``, ``python``, ``selected``, ``backends`` and ``operations``.
    """
    return {
        "kfac_core": kfac_core.__version__,
        "python": platform.python_version(),
        "selected": _selected(),
        "backends": {name: _backend(name) for name in backend_names()},
        "operations": capability_table(),
    }


def _selected() -> dict[str, str | None]:
    try:
        selection = selected_backend()
    except KFACError as error:
        return {"spec": None, "reason": None, "problem": str(error)}
    return {"spec": selection.spec, "reason": selection.reason, "problem": None}


def _backend(name: str) -> dict[str, Any]:
    backend = get_backend(name)
    problem = backend.problem()
    usable = problem is None
    return {
        "usable": usable,
        "problem": problem,
        "adapter": adapter_problem(name) or "loaded",
        "versions": dict(backend.versions()),
        "devices": list(backend.devices()) if usable else [],
    }


def _lines(found: dict[str, Any]) -> list[str]:
    selected = found["selected"]
    lines = [f"kfac_core {found['kfac_core']}, Python {found['python']}", ""]
    if selected["problem"] is None:
        lines.append(f"chosen: {selected['spec']} ({selected['reason']})")
    else:
        lines.append(f"chosen: nothing usable. {selected['problem']}")
    lines.append("")
    for name, backend in found["backends"].items():
        versions = ", ".join(f"{k} {v}" for k, v in backend["versions"].items())
        if backend["usable"]:
            devices = ", ".join(backend["devices"])
            lines.append(f"{name:8} usable: {versions}; devices: {devices}")
            if backend["adapter"] != "loaded":
                lines.append(f"{'':8} adapter not loaded: {backend['adapter']}")
        else:
            lines.append(f"{name:8} not usable: {backend['problem']}")
    names = list(found["backends"])
    lines += ["", f"{'operation':20}" + "".join(f"{name:>13}" for name in names)]
    for operation, row in found["operations"].items():
        lines.append(f"{operation:20}" + "".join(f"{row[name]:>13}" for name in names))
    return lines
