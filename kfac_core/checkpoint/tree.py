"""The state of an estimator as a JSON tree and named tensors.

Conventions.  The tree is that of `kfac_core.Estimator.state_dict`.  In the place of an
array stands ``{"tensor": name}``; in that of a symmetric matrix ``{"packed": name, "n":
rows}``, a triangle as `kfac_core.linalg.packing` packs it; in that of a mapping that
could be taken for one of these, since a block may have any name, ``{"mapping": it}``.  A
name is the path of the array, its parts joined by slashes.  A tuple of numbers is a list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import array_api_compat
import numpy as np

from kfac_core.array.selection import to_numpy
from kfac_core.errors import StateError
from kfac_core.linalg.packing import pack_triangle, packed_shape, unpack_triangle

__all__ = ["HostArray", "folded", "unfolded"]

HostArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_SYMMETRIC = "SymmetricMatrix"
_SIGNS = ({"tensor"}, {"packed", "n"}, {"mapping"})
"""The keys of the mappings that stand for something else."""
_DEPTH = 32
"""How deep a tree may be: three times what any state needs."""


def folded(state: Any, path: str, tensors: dict[str, HostArray], /) -> Any:
    """Return the JSON tree of a state, its arrays put among the tensors.

    Parameters
    ----------
    state : dict, array, str, number or None
        A part of a state.
    path : str
        Where it stands.
    tensors : dict of str to numpy.ndarray
        Filled.

    Returns
    -------
    object
        Of dicts, lists, strings, numbers, booleans and None.
    """
    if isinstance(state, Mapping):
        if state.get("structure") == _SYMMETRIC:
            return _packed(state, path, tensors)
        tree = {
            str(name): folded(part, f"{path}/{name}", tensors)
            for name, part in state.items()
        }
        return {"mapping": tree} if set(tree) in _SIGNS else tree
    if isinstance(state, tuple | list):
        return list(state)
    if array_api_compat.is_array_api_obj(state):
        tensors[path] = _plain(to_numpy(state))
        return {"tensor": path}
    return state


def unfolded(
    tree: Any, load: Callable[[str], HostArray], /, *, where: str, depth: int = _DEPTH
) -> Any:
    """Return the state of a JSON tree, with arrays on the host.

    Parameters
    ----------
    tree : object
        As `folded` made it.
    load : callable
        Returns the tensor of a name, or raises `StateError`.
    where : str
        What a message should call the place.
    depth : int
        How much deeper the tree may go.

    Returns
    -------
    object
        A part of a state.

    Raises
    ------
    StateError
        For a tensor that is missing or of another form, and for a tree that is too
        deep.
    """
    if isinstance(tree, Mapping):
        if depth == 0:
            raise StateError("the document is nested too deeply.")
        if set(tree) == {"tensor"}:
            return load(_name(tree["tensor"], where))
        if set(tree) == {"packed", "n"}:
            return _symmetric(tree, load, where)
        if set(tree) == {"mapping"}:
            tree = _mapping(tree["mapping"], where)
        return {
            name: unfolded(part, load, where=f"{where}/{name}", depth=depth - 1)
            for name, part in tree.items()
        }
    if isinstance(tree, list):
        return tuple(tree)
    return tree


def _packed(state: Mapping[str, Any], path: str, tensors: dict[str, HostArray]) -> Any:
    """Return a symmetric matrix as one triangle, where that is all there is to it."""
    array = to_numpy(state["array"])
    same = np.array_equal(array, np.swapaxes(array, -1, -2), equal_nan=True)
    if state["full_storage"] and not same:
        # Equal up to rounding only, as a product may leave it: both triangles count.
        tensors[path] = _plain(array)
        return {
            "structure": _SYMMETRIC,
            "array": {"tensor": path},
            "full_storage": True,
        }
    xp = array_api_compat.array_namespace(array)
    tensors[path] = _plain(pack_triangle(array, xp=xp))
    return {"packed": path, "n": int(array.shape[-1])}


def _plain(array: HostArray) -> HostArray:
    """Return an array whose memory is in the order of its axes.

    The library of the files writes memory as it lies, in whatever order.
    """
    return np.asarray(array, order="C")


def _symmetric(
    tree: Mapping[str, Any], load: Callable[[str], HostArray], where: str
) -> dict[str, Any]:
    n = tree["n"]
    if not isinstance(n, int) or isinstance(n, bool) or n < 0:
        raise StateError(f"{where}: expected a number of rows, got {n!r}.")
    packed = load(_name(tree["packed"], where))
    if packed.shape[-2:] != packed_shape(n) or packed.size == 0 < n:
        raise StateError(
            f"{where}: expected {n * (n + 1) // 2} numbers of a triangle of {n} rows, got "
            f"shape {packed.shape}."
        )
    xp = array_api_compat.array_namespace(packed)
    whole = unpack_triangle(packed, n, xp=xp)
    return {"structure": _SYMMETRIC, "array": whole, "full_storage": True}


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        found = type(value).__name__
        raise StateError(f"{where}: expected a mapping, got {found}.")
    return value


def _name(value: Any, where: str) -> str:
    if not isinstance(value, str):
        found = type(value).__name__
        raise StateError(f"{where}: expected the name of a tensor, got {found}.")
    return value
