"""A state of the same network under other names and layouts.

Conventions.  Frameworks name a layer differently and keep its weight in other orders, and
a state records both.  Statistics and operators do not depend on them: they are
of the block's matrix, ``(in (+1), out)`` with the kernel's positions before its channels,
whatever the layout (`docs/conventions.md`).  So only descriptions change here, and no
number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from kfac_core import errors
from kfac_core.block import Block

Layouts: TypeAlias = Literal["same", "any"]

_LAYOUTS = ("weight_layout", "data_layout")


def renamed(state: dict[str, Any], names: Mapping[str, str], /) -> dict[str, Any]:
    """Return a state with other names of blocks.

    Parameters
    ----------
    state : dict
        State of an estimator, with blocks as `kfac_core.checkpoint.reading` leaves them.
    names : mapping of str to str
        New names by the names in the state; other blocks keep theirs.

    Returns
    -------
    dict
        With the arrays of `state`.

    Raises
    ------
    StateError
        For a name of no block, and where two blocks would have one name.
    """
    blocks = state["blocks"]
    settings: Any = state.get("settings")
    if unknown := sorted(names.keys() - blocks.keys()):
        raise errors.StateError(
            f"There are no blocks {unknown}; it has {sorted(blocks)}."
        )
    new = {name: names.get(name, name) for name in blocks}
    if len({*new.values()}) < len(new):
        raise errors.StateError(
            f"Expected `names` to give each block its own, got {new}."
        )
    damping = settings.get("damping") if isinstance(settings, dict) else None
    if isinstance(damping, dict):
        of_each = {new.get(name, name): value for name, value in damping.items()}
        settings = {**settings, "damping": of_each}
    by_new_name = {new[name]: part for name, part in blocks.items()}
    return {**state, "settings": settings, "blocks": by_new_name}


def with_layouts_of(
    state: dict[str, Any], blocks: Mapping[str, Block], /
) -> dict[str, Any]:
    """Return a state whose layers have the layouts of an estimator's.

    Parameters
    ----------
    state : dict
        State of an estimator, with blocks as `kfac_core.checkpoint.reading` leaves them.
    blocks : mapping of str to Block
        Blocks of the estimator that loads it.

    Returns
    -------
    dict
        With the arrays of `state`; only layouts change.
    """
    translated = dict(state["blocks"])
    for name in translated.keys() & blocks.keys():
        layer = translated[name]["layer"]
        of_estimator = {key: getattr(blocks[name].layer, key, None) for key in _LAYOUTS}
        layouts = {key: value for key, value in of_estimator.items() if key in layer}
        translated[name] = {**translated[name], "layer": {**layer, **layouts}}
    return {**state, "blocks": translated}
