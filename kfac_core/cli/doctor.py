"""``kfac-core doctor``: installed array libraries, the one in use, native operations."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import platform
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, metadata, version
from typing import Any

import kfac_core
from kfac_core import errors
from kfac_core.array.backend import adapter_problem, backend_names, get_backend
from kfac_core.array.capabilities import capability_table
from kfac_core.array.optional import broken_packages, optional_module
from kfac_core.array.selection import selected_backend
from kfac_core.cli.options import add_json
from kfac_core.cli.screen import print_json, print_table, printable, wrapped
from kfac_core.distributed import communicator

SUMMARY = "show installed array libraries and the one in use"
EXAMPLES = (
    "kfac-core doctor",
    "kfac-core doctor --all",
    "KFAC_CORE_BACKEND=torch:cuda:0 kfac-core doctor",
)
EXIT_CODES = {
    0: "the chosen backend can be used",
    2: "it cannot, and the text says why",
}

# Measured on one core: 512 rows, six dense layers of 128 to 784 units, float32.
FAST_PATHS = {
    "scipy.linalg": "without SciPy statistics take up to 2 and refreshes 2 to 4 times as "
    "long, on NumPy and on PyTorch with one thread: pip install scipy",
    "threadpoolctl": "without threadpoolctl refreshes on PyTorch with one thread take "
    "twice as long, and workers compete for cores: pip install threadpoolctl",
}
"""Packages that speed up NumPy and PyTorch, and the cost without them."""


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
    report = diagnosis(every=arguments.all)
    if arguments.json:
        print_json(report)
    else:
        _print(report)
    return 0 if report["selected"]["problem"] is None else 2


def diagnosis(*, every: bool = True) -> dict[str, Any]:
    """Return the diagnosis as plain data.

    Parameters
    ----------
    every : bool
        Whether every library is imported, or the chosen one only: some take seconds.

    Returns
    -------
    dict
        Report of ``kfac_core``, ``python``, ``selected``, ``backends``, ``broken`` (the
        packages that raise when they are used), ``slower`` (what is missing and makes the
        library slower) and, with `every`, ``operations`` and ``communicators``;
        ``communicator`` is the name that the environment chooses.
    """
    selected = _selected()
    chosen = (selected["spec"] or "").partition(":")[0]
    backends = {
        # Importing a framework takes seconds, so only the chosen one is imported.
        name: _backend(name) if every or name == chosen else _not_imported(name)
        for name in backend_names()
    }
    missing = [name for name in FAST_PATHS if optional_module(name) is None]
    report = {
        "kfac_core": kfac_core.__version__,
        "python": platform.python_version(),
        "selected": selected,
        "backends": backends,
        "communicator": os.environ.get(communicator.ENVIRONMENT_VARIABLE),
        "broken": dict(broken_packages),
        "slower": {name: FAST_PATHS[name] for name in missing},
    }
    if every:
        report["operations"] = capability_table()
        report["communicators"] = {
            name: _checked(partial(communicator.engine, name))
            for name in communicator.communicator_names()
        }
    return report


def _selected() -> dict[str, str | None]:
    try:
        selection = selected_backend()
    except (Exception, SystemExit) as error:
        return {"spec": None, "reason": None, "problem": _reason(error)}
    return {"spec": selection.spec, "reason": selection.reason, "problem": None}


def _reason(error: BaseException) -> str:
    """Return an error's text; errors that are not ours come from third-party adapters."""
    if isinstance(error, errors.KFACError):
        return str(error)
    return f"its adapter raised {type(error).__name__}: {error}"


def _checked(get_adapter: Callable[[], Any]) -> dict[str, Any]:
    """Return whether an adapter can be used, and its versions."""
    try:
        adapter = get_adapter()
        problem = adapter.problem()
        versions = {str(k): str(v) for k, v in adapter.versions().items()}
    except (Exception, SystemExit) as error:
        problem, versions = _reason(error), {}
    return {"usable": problem is None, "problem": problem, "versions": versions}


def _backend(name: str) -> dict[str, Any]:
    if not _is_installed(name):
        return _not_imported(name)
    report = _checked(lambda: get_backend(name))
    report |= {"adapter": adapter_problem(name) or "loaded", "devices": []}
    if report["usable"]:
        try:
            report["devices"] = list(map(str, get_backend(name).devices()))
        except (Exception, SystemExit) as error:
            report |= {"usable": False, "problem": _reason(error)}
    return report


def _not_imported(name: str) -> dict[str, Any]:
    """Return the diagnosis of a backend without importing its library."""
    installed = _is_installed(name)
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
    }


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _how_to_install(name: str) -> str:
    """Return a hint that names the extras for a library, of which there may be several."""
    extras: list[str] = []
    with contextlib.suppress(PackageNotFoundError):
        extras = metadata("kfac-core").get_all("Provides-Extra") or []
    fitting = [e for e in extras if e == name or e.startswith(f"{name}-")] or [name]
    lines = " or ".join(f"`pip install 'kfac-core[{extra}]'`" for extra in fitting)
    return f"install it by {lines}"


def _print(report: dict[str, Any]) -> None:
    selected, backends = report["selected"], report["backends"]
    print(f"kfac_core {report['kfac_core']}, Python {report['python']}")
    chosen = f"nothing usable. {selected['problem']}"
    if selected["problem"] is None:
        chosen = f"{selected['spec']} ({selected['reason']})"
    print(printable(f"chosen: {chosen}"))
    if selected["problem"] is None:
        print("  used only when no array is passed; otherwise your array's library is")
    for name, reason in report["broken"].items():
        print(printable(f"broken: {name} ({reason})"))
    for cost in report["slower"].values():
        print(wrapped(f"slower: {cost}"))
    print()
    installed = sum(backend["usable"] is not False for backend in backends.values())
    print_table(
        f"{installed} of {len(backends)} array libraries are installed",
        ("backend", "versions", "devices", "state"),
        [_cells(name, backend) for name, backend in backends.items()],
    )
    if installed < len(backends):
        print("In a checkout write `pip install '.[jax]'`; likewise for other extras.")
    if "operations" not in report:
        return
    print()
    print_table(
        f"{len(report['operations'])} operations",
        ("operation", *backends),
        [
            (operation, *(row[name] for name in backends))
            for operation, row in report["operations"].items()
        ],
    )
    print()
    chosen = report["communicator"] or f"none by {communicator.ENVIRONMENT_VARIABLE}"
    print_table(
        f"communicators of processes; chosen: {chosen}",
        ("communicator", "versions", "state"),
        [
            (name, _versions(engine), engine["problem"] or "usable")
            for name, engine in report["communicators"].items()
        ],
    )


def _versions(report: dict[str, Any]) -> str:
    return ", ".join(f"{name} {text}" for name, text in report["versions"].items())


def _cells(name: str, backend: dict[str, Any]) -> tuple[str, ...]:
    if backend["usable"] is False:
        return name, "", "", backend["problem"]
    state = "usable"
    if backend["usable"] is None:
        state = "installed, not imported"
    elif backend["adapter"] != "loaded":
        state += f", more slowly: {backend['adapter']}"
    return name, _versions(backend), ", ".join(backend["devices"]), state
