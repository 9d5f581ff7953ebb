"""Optional packages and entry points, which may be missing or broken.

A package may raise anything when it is imported: an ``OSError`` for a library that cannot
be loaded, a ``SystemExit``, a ``RuntimeError``.  Whatever it raises, the library works
without it, and `kfac-core doctor` prints what was raised.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_broken: dict[str, str] = {}
broken_packages: Mapping[str, str] = MappingProxyType(_broken)
"""The exceptions of packages that are installed and cannot be used, by name."""


def optional_module(name: str, /) -> ModuleType | None:
    """Import a module of an optional package; None if it is missing or broken.

    Parameters
    ----------
    name : str
        Full name of the module.

    Returns
    -------
    module or None
        What a broken one raised is kept in `broken_packages`.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        root = name.partition(".")[0]
        if (error.name or "").partition(".")[0] != root:
            # The package is installed, but one that it needs is not.
            _broken[name] = f"{type(error).__name__}: {error}"
    except (Exception, SystemExit) as error:
        _broken[name] = f"{type(error).__name__}: {error}"
    return None


@functools.cache
def _entry_points() -> Any:
    """Return the entry points of all groups, which reads every installed package."""
    # Imported here, since it takes a fifth of the time of `import kfac_core`.
    from importlib.metadata import entry_points

    return entry_points()


@functools.cache
def entry_points_of(group: str, /) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group by name, without those that are malformed.

    Parameters
    ----------
    group : str
        Name of the group.

    Returns
    -------
    mapping of str to EntryPoint
        A package whose entry points cannot be read is left out, and is kept in
        `broken_packages`.
    """
    from importlib.metadata import distributions

    try:
        return {entry.name: entry for entry in _entry_points().select(group=group)}
    except Exception:
        pass  # One cannot be read, so read them one by one.
    by_name: dict[str, EntryPoint] = {}
    for distribution in distributions():
        try:
            for entry in distribution.entry_points.select(group=group):
                by_name.setdefault(entry.name, entry)
        except Exception as error:
            try:
                name = str(distribution.metadata["Name"])
            except Exception:
                name = "an unknown package"
            _broken[name] = f"its entry points: {type(error).__name__}: {error}"
    return by_name
