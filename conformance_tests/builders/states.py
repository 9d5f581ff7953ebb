"""The state of an estimator as bytes, to be compared bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import array_api_compat
import numpy as np

import kfac_core as kc
from kfac_core.array.structure import leaves


def frozen(state: Any) -> Any:
    """Return a state with its arrays as (dtype, shape, bytes), to be compared by ``==``."""
    if isinstance(state, Mapping):
        return {name: frozen(part) for name, part in state.items()}
    if isinstance(state, (str, int, float)) and not isinstance(state, np.generic):
        return repr(state)  # asking whether it is an array takes longer
    if array_api_compat.is_array_api_obj(state):
        host = kc.to_numpy(state)
        if host.dtype.kind == "f":
            # Above a triangle stands a zero of either sign, which means nothing.
            host = host + host.dtype.type(0)
        return str(host.dtype), host.shape, host.tobytes()
    return repr(state)


def differences(first: Any, second: Any, path: str = "") -> list[str]:
    """Return the paths at which two frozen states differ."""
    if not isinstance(first, dict) or not isinstance(second, dict):
        return [] if first == second else [path or "."]
    found = [f"{path}.{name}" for name in first.keys() ^ second.keys()]
    for name in first.keys() & second.keys():
        found += differences(first[name], second[name], f"{path}.{name}")
    return sorted(found)


def arrays_of(state: Any) -> list[Any]:
    """Return the arrays of a state."""
    if isinstance(state, Mapping):
        return [x for part in state.values() for x in arrays_of(part)]
    return [state] if array_api_compat.is_array_api_obj(state) else []


def wholes(structure: Any) -> dict[str, Any]:
    """Return the arrays of a structure, symmetric ones with both triangles."""
    found = {}
    for path, x in leaves(structure):
        value = kc.to_numpy(x)
        owner = structure
        for part in path.split(".")[:-1]:
            owner = owner[part] if isinstance(owner, dict) else getattr(owner, part)
        if getattr(owner, "full_storage", True) is False:
            value = np.tril(value) + np.swapaxes(np.tril(value, -1), -1, -2)
        found[path] = value
    return found
