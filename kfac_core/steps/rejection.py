"""Rejecting a step: select the state after it, or before.

Conventions.  A state is a tree of arrays: nested dicts, tuples (named or not) and lists,
and the library's structures, with None where there is nothing.  Parameters, velocity and
counts go together in one, so that a rejected step leaves all of them as they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import array_api_compat

from kfac_core import constraints, errors
from kfac_core.array import Array, Namespace, Scalar, map_structure
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import combinable, is_structure
from kfac_core.array.types import Tree
from kfac_core.layers.feeding import detached_array

T = TypeVar("T")


def is_accepted(loss_before: Scalar, loss_after: Scalar, /) -> bool | Array:
    """Whether a step did not increase the objective.

    Parameters
    ----------
    loss_before, loss_after : float or 0-d array
        The objective on one batch, before the step and after it.

    Returns
    -------
    bool or 0-d array of bool
        False where the loss after the step is not finite; true where it is, and the
        one before is not.  A bool where both are numbers.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError
        For anything else.

    Notes
    -----
    Stricter rules are comparisons too: ``rho > 0.25`` for a `reduction_ratio` rho.
    """
    before, after = detached_array(loss_before), detached_array(loss_after)
    for name, x in (("loss_before", before), ("loss_after", after)):
        if not isinstance(x, ns.NUMBER):
            ns.as_scalar(ns.namespace_of(**{name: x}), x, x.dtype, name)
    if not (hasattr(before, "dtype") or hasattr(after, "dtype")):
        return ns.is_finite_number(after) and not after > before
    xp = array_api_compat.array_namespace(before, after)
    # Not `after <= before`: a loss before that is NaN must not hold every step back.
    return xp.isfinite(after) & ~(after > before)


def select(accepted: bool | Array, proposed: T, current: T, /) -> T:
    """Return the proposed state, or the current one if it is not accepted.

    Parameters
    ----------
    accepted : bool or 0-d array of bool
        Whether the step is taken.  The value of an array is not read, and may be traced.
    proposed, current : tree of array
        States of one form, of equal shapes and dtypes.

    Returns
    -------
    tree of array
        One of the two objects for a bool; else new arrays.

    Raises
    ------
    ShapeError
        For states of different forms, shapes or dtypes, naming the place, or `accepted` of
        more than one value.
    DtypeError
        For an `accepted` that is not boolean, or numbers that are not arrays.
    """
    if isinstance(accepted, bool):
        return proposed if accepted else current
    condition = detached_array(accepted)
    xp = ns.namespace_of(accepted=condition)
    constraints.require_shape("accepted", condition, ())
    if condition.dtype != xp.bool:
        raise errors.DtypeError(
            f"Expected `accepted` to be a bool, got {condition.dtype}. Write a comparison, "
            "such as `rho > 0.25`."
        )
    chosen: T = _selected(condition, proposed, current, "state", xp)
    return chosen


def _selected(
    condition: Array, proposed: Tree, current: Tree, path: str, xp: Namespace
) -> Tree:
    forms = _form(proposed), _form(current)
    structures = is_structure(proposed) and is_structure(current)
    if forms[0] != forms[1] or (structures and not combinable(proposed, current)):
        raise errors.ShapeError(
            f"The states differ at `{path}`: {forms[0]} is proposed, and {forms[1]} is "
            "current. Give numbers as 0-d arrays."
        )
    if current is None:
        return None
    if isinstance(current, Mapping):
        return {
            name: _selected(condition, proposed[name], x, f"{path}[{name!r}]", xp)
            for name, x in current.items()
        }
    if isinstance(current, tuple | list):
        parts = [
            _selected(condition, new, old, f"{path}[{i}]", xp)
            for i, (new, old) in enumerate(zip(proposed, current, strict=True))
        ]
        kind = type(current)
        # A named tuple takes its fields as arguments.
        return kind(*parts) if hasattr(current, "_fields") else kind(parts)
    if structures:
        return map_structure(
            lambda new, old: _selected(condition, new, old, path, xp), proposed, current
        )
    if not hasattr(current, "dtype"):
        raise errors.DtypeError(
            f"`{path}` is a {forms[1]}. Give numbers as 0-d arrays."
        )
    return xp.where(condition, detached_array(proposed), detached_array(current))


def _form(value: Tree) -> str:
    """Return the description of one place of a state, equal for states of one form."""
    name = type(value).__name__
    if isinstance(value, Mapping):
        return f"{name} of {sorted(value)}"
    if isinstance(value, tuple | list):
        return f"{name} of {len(value)}"
    if hasattr(value, "dtype"):
        return f"an array of shape {tuple(value.shape)} and dtype {value.dtype}"
    return name
