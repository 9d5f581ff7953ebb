"""One of two structures, by a condition whose value may not be known."""

from __future__ import annotations

from typing import TypeVar

from kfac_core.array.dispatch import dispatched
from kfac_core.array.structure import map_structure
from kfac_core.array.types import Array, Namespace

T = TypeVar("T")


@dispatched
def choose(condition: Array, new: T, old: T, /, *, xp: Namespace) -> T:
    """Return a structure if a condition holds, else another of the same form.

    Parameters
    ----------
    condition : array of bool, 0-d
        The condition.
    new, old : structure
        Structures of equal form, whose arrays have equal shapes and dtypes.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    structure
        Arrays of `new` where the condition holds, else of `old`.  Arrays of the other
        structure may hold NaN.
    """
    return map_structure(lambda a, b: xp.where(condition, a, b), new, old)
