"""``kfac-core doctor``: what was found, what is chosen and why, what is native."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, metadata, version
from typing import Any

import kfac_core
from kfac_core.array.backend import adapter_problem, backend_names, get_backend
from kfac_core.array.capabilities import capability_table
from kfac_core.array.optional import broken_packages
from kfac_core.array.selection import selected_backend
from kfac_core.cli.options import add_json
from kfac_core.cli.screen import Progress, print_json, print_table, printable
from kfac_core.distributed.communicator import (
    ENVIRONMENT_VARIABLE,
    communicator_names,
    engine,
)
from kfac_core.errors import KFACError

__all__ = ["EXAMPLES", "EXIT_CODES", "SUMMARY", "add_arguments", "diagnosis", "run"]

SUMMARY = "say what was found, what is chosen and why"
EXAMPLES = (
    "kfac-core doctor",
    "kfac-core doctor --all",
    "KFAC_CORE_BACKEND=torch:cuda:0 kfac-core doctor",
)
EXIT_CODES = {
    0: "the chosen backend can be used",
    2: "it cannot, and the text says why",
}


def add_arguments(parser: argparse.ArgumentParser, /) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument(
        "--all",
        action="store_true",
        help="import every library, and show its devices and native operations",
    )
    add_json(parser)


def run(arguments: argparse.Namespace, /) -> int:
    """Print the diagnosis.

    Parameters
    ----------
    arguments : argparse.Namespace
        Parsed arguments of `add_arguments`.

    Returns
    -------
    int
        0 where the chosen backend can be used, else 2.
    """
    with Progress() as progress:
        found = diagnosis(progress, every=arguments.all)
    if arguments.json:
        print_json(found)
    else:
        _print(found)
    return 0 if found["selected"]["problem"] is None else 2


def diagnosis(
    progress: Progress | None = None, /, *, every: bool = True
) -> dict[str, Any]:
    """Return what there is to say, as plain data.

    Parameters
    ----------
    progress : Progress, optional
        Is told which backend is looked at: some take seconds to import.
    every : bool
        Whether every library is imported, or the chosen one only.

    Returns
    -------
    dict
        Report of ``kfac_core``, ``python``, ``selected``, ``backends``, ``broken`` (the
        packages that raise when they are used) and, with `every`, ``operations`` and
        ``communicators``; ``communicator`` is the name that the environment chooses.
    """
    selected = _selected()
    chosen = (selected["spec"] or "").partition(":")[0]
    backends = {}
    for name in backend_names():
        if progress is not None:
            progress.begin(f"looking at {name}")
        backends[name] = _backend(name) if every or name == chosen else _seen(name)
    found = {
        "kfac_core": kfac_core.__version__,
        "python": platform.python_version(),
        "selected": selected,
        "backends": backends,
        "communicator": os.environ.get(ENVIRONMENT_VARIABLE),
        "broken": dict(broken_packages),
    }
    if every:
        found["operations"] = capability_table()
        found["communicators"] = {name: _engine(name) for name in communicator_names()}
    return found


def _selected() -> dict[str, str | None]:
    try:
        selection = selected_backend()
    except KFACError as error:
        return {"spec": None, "reason": None, "problem": str(error)}
    except (Exception, SystemExit) as error:
        problem = f"its adapter raised {type(error).__name__}: {error}"
        return {"spec": None, "reason": None, "problem": problem}
    return {"spec": selection.spec, "reason": selection.reason, "problem": None}


def _seen(name: str) -> dict[str, Any]:
    """Return what can be said of a backend without importing its library."""
    try:
        installed = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        installed = False
    versions = {}
    # The distribution may have another name, as CuPy's builds have.
    with contextlib.suppress(PackageNotFoundError):
        versions = {name: version(name)} if installed else {}
    return {
        "usable": None if installed else False,
        "problem": None if installed else f"not installed; {_how_to_install(name)}",
        "adapter": "not loaded",
        "versions": versions,
        "devices": [],
        "trouble": [],
    }


def _how_to_install(name: str) -> str:
    """Return a hint that names the extras for a library, of which there may be several."""
    extras: list[str] = []
    with contextlib.suppress(PackageNotFoundError):
        extras = metadata("kfac-core").get_all("Provides-Extra") or []
    fitting = [e for e in extras if e == name or e.startswith(f"{name}-")] or [name]
    lines = " or ".join(f"`pip install 'kfac-core[{extra}]'`" for extra in fitting)
    return f"install it by {lines}"


def _backend(name: str) -> dict[str, Any]:
    backend = get_backend(name)
    problem = backend.problem()
    usable = problem is None
    trouble: list[str] = []
    versions = _asked(
        lambda: {str(k): str(v) for k, v in backend.versions().items()},
        "versions",
        trouble,
    )
    devices = (
        _asked(lambda: list(map(str, backend.devices())), "devices", trouble)
        if usable
        else None
    )
    return {
        "usable": usable,
        "problem": problem,
        "adapter": adapter_problem(name) or "loaded",
        "versions": versions or {},
        "devices": devices or [],
        "trouble": trouble,
    }


def _engine(name: str) -> dict[str, Any]:
    """Return what there is to say of an engine that moves arrays between processes."""
    try:
        adapter = engine(name)
        problem, versions = adapter.problem(), adapter.versions()
    except KFACError as error:
        problem, versions = str(error), {}
    except Exception as error:
        # An adapter may be third-party.
        problem, versions = f"its adapter raised {type(error).__name__}: {error}", {}
    return {"usable": problem is None, "problem": problem, "versions": versions}


def _asked(question: Callable[[], Any], member: str, trouble: list[str]) -> Any:
    """Call a member of an adapter, which may be third-party; record what it raises."""
    try:
        return question()
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        trouble.append(f"its adapter's `{member}` raised {reason}")
    return None


def _print(found: dict[str, Any]) -> None:
    selected = found["selected"]
    print(f"kfac_core {found['kfac_core']}, Python {found['python']}")
    if selected["problem"] is None:
        chosen = f"{selected['spec']} ({selected['reason']})"
    else:
        chosen = f"nothing usable. {selected['problem']}"
    print(printable(f"chosen: {chosen}"))
    if selected["problem"] is None:
        print("  for arrays that the library makes; yours decide by themselves")
    for name, reason in found["broken"].items():
        print(printable(f"broken: {name} ({reason})"))
    print()
    names = list(found["backends"])
    there = sum(
        backend["usable"] is not False for backend in found["backends"].values()
    )
    print_table(
        f"{there} of {len(names)} array libraries are installed",
        ("backend", "versions", "devices", "state"),
        [_cells(name, backend) for name, backend in found["backends"].items()],
    )
    if there < len(names):
        print(
            "In a checkout write `pip install '.[jax]'`, and so for the other extras."
        )
    if "operations" not in found:
        return
    print()
    print_table(
        f"{len(found['operations'])} operations",
        ("operation", *names),
        [
            (operation, *(row[name] for name in names))
            for operation, row in found["operations"].items()
        ],
    )
    print()
    chosen = found["communicator"] or f"none by {ENVIRONMENT_VARIABLE}"
    print_table(
        printable(f"communicators of processes; chosen: {chosen}"),
        ("communicator", "versions", "state"),
        [_engine_cells(name, row) for name, row in found["communicators"].items()],
    )


def _engine_cells(name: str, found: dict[str, Any]) -> tuple[str, str, str]:
    versions = ", ".join(f"{k} {v}" for k, v in found["versions"].items())
    return name, versions, found["problem"] or "usable"


def _cells(name: str, backend: dict[str, Any]) -> tuple[str, ...]:
    if backend["usable"] is False:
        word = "" if backend["problem"].startswith("not installed") else "not usable: "
        return (name, "", "", word + backend["problem"])
    state = "usable"
    if backend["usable"] is None:
        state = "installed, not imported"
    elif backend["adapter"] != "loaded":
        state += f", more slowly: {backend['adapter']}"
    if backend["trouble"]:
        state += f", but {'; '.join(backend['trouble'])}"
    return (
        name,
        ", ".join(f"{k} {v}" for k, v in backend["versions"].items()),
        ", ".join(backend["devices"]),
        state,
    )
