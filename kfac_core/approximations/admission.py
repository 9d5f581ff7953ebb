"""Checks of an update: place, coefficients, ids, finiteness and overflow.

Conventions.  These functions set flags (`Status`).  They read values only where that is
free, so that they run inside function compilers.  ``status`` has the shape ``()``, or
``(L,)`` for the statistics of a stack of L equal blocks.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from kfac_core import constraints, errors
from kfac_core.approximations.approximation import Approximation
from kfac_core.approximations.options import UpdateOptions
from kfac_core.array import Array, Status, map_structure, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.finite import all_finite, known_finite, known_true
from kfac_core.array.structure import leaves
from kfac_core.conventions import Conventions
from kfac_core.factors.average import (
    Average,
    coefficient_flags,
    require_decay,
    require_weight,
)
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.layer import BlockRows
from kfac_core.linalg.symmetric import SymmetricMatrix, matrix_trace


def require_options(options: UpdateOptions, /) -> None:
    """Raise for options of an update that a caller wrote and no network has checked."""
    constraints.require_kind("options", options, UpdateOptions, "UpdateOptions")
    constraints.require_kind(
        "conventions", options.conventions, Conventions, "Conventions"
    )
    require_decay(options.decay)
    if options.weight is not None:
        require_weight(options.weight)
    constraints.require_check(options.check)
    if options.max_patch_elements is not None:
        constraints.require_range(
            "max_patch_elements", options.max_patch_elements, constraints.COUNT
        )


def entering_options(
    options: UpdateOptions, statistics: Statistics, /
) -> tuple[UpdateOptions, Array | int]:
    """Return options with coefficients in the statistics' dtype, and flags of these.

    Python numbers were checked before; a 0-d array that is traced can only be flagged.
    """
    status = statistics.status
    xp, flags = ns.own_namespace(status), ns.as_number(status) * 0
    decay, weight = options.decay, options.weight
    if type(decay) is float and (weight is None or type(weight) is float):
        return replaced(options, xp=xp), flags
    like = statistics.like
    if type(decay) is not float:
        decay = ns.as_scalar(xp, decay, like.dtype, "decay")
    if weight is not None and type(weight) is not float:
        weight = ns.as_scalar(xp, weight, like.dtype, "weight")
    for name, x in (("decay", decay), ("weight", weight)):
        if not (x is None or isinstance(x, float)):
            ns.same_place(statistics=like, **{name: x})
    flags = flags | coefficient_flags(decay, weight, xp=xp)
    return replaced(options, decay=decay, weight=weight, xp=xp), flags


def require_place(statistics: Statistics, rows: BlockRows, /) -> None:
    """Raise if a batch and the statistics differ in library or device."""
    like, new = statistics.status, rows.like
    if ns.common_namespace(like, new) is not None:
        return
    try:
        ns.namespace_of(statistics=like, batch=new)
    except errors.MixedArraysError as error:
        raise errors.MixedArraysError(
            f"{error} (The statistics stay where their first batch was.)"
        ) from None


def flags_of_update(
    earlier: Array | int,
    approximation: Approximation[Any],
    rows: BlockRows,
    new: Statistics,
    options: UpdateOptions,
    /,
) -> Array | int:
    """Return earlier flags, and those of rows or sums of squares that are not finite.

    The traces of the updated Gram matrices are sums of squares: where they are finite, so
    is the batch.  Arrays are read only without such a sum, or where it is not finite.
    """
    xp, stacked = options.xp, new.status.ndim
    arguments: set[str] = set()
    names: set[str] = set()
    traces = 0.0
    for name, argument in approximation.sums_of_squares:
        if name in options.skip:
            continue
        total = new.averages[name].sum
        if isinstance(total, SymmetricMatrix):
            trace = matrix_trace(total.array, xp=xp)
        elif getattr(total, "ndim", 0) > stacked:
            trace = xp.sum(total, axis=-1)
        else:
            continue
        arguments.add(argument)
        names.add(name)
        traces = traces + trace
    # Inf - inf cannot occur among traces, so that one sum shows all of them.
    if not (arguments and known_finite(traces, xp=xp)):
        arguments, names = set(), set()
    flags = rows.status(xp=xp, known=frozenset(arguments), stacked=stacked)
    return overflow_flags(earlier | flags, approximation, new, options, known=names)


def overflow_flags(
    flags: Array | int,
    approximation: Approximation[Any],
    new: Statistics,
    options: UpdateOptions,
    /,
    *,
    known: Collection[str] = (),
) -> Array | int:
    """Return flags of an update, with one for sums of squares that are not finite.

    Finite rows may have squares that overflow.  Of a Gram matrix only the diagonal is
    read; averages in `known` are finite.
    """
    xp, stacked = options.xp, new.status.ndim
    squares = [*approximation.squares(new, xp=xp)]
    for name, average in new.averages.items():
        if name in options.skip or name in known:
            continue
        total = getattr(average, "sum", average)
        if getattr(total, "ndim", None) == 0:
            continue
        if isinstance(total, SymmetricMatrix):
            total = total.diagonal()
        for _, leaf in leaves(total):
            if leaf.ndim > stacked and xp.isdtype(leaf.dtype, "real floating"):
                squares.append(leaf)
    good = None
    for square in squares:
        if stacked:
            finite = xp.all(xp.isfinite(square), axis=tuple(range(1, square.ndim)))
        else:
            finite = all_finite(square, xp=xp)
        if not known_true(finite, xp=xp):
            good = finite if good is None else good & finite
    if good is None:
        return flags
    # Rows that are not finite have squares that are not: report the rows alone.
    overflow = ns.status_unless(xp, good, Status.OVERFLOWED)
    return flags | xp.where(
        overflow * 0 + flags == 0, overflow, xp.zeros_like(overflow)
    )


def with_status(statistics: Statistics, status: Array, /) -> Statistics:
    """Return statistics with other flags, and 0-d arrays in place of NumPy scalars."""
    averages = statistics.averages
    if isinstance(status, (np.generic, np.ndarray)):
        # NumPy operations return scalars for 0-d arrays; a state holds arrays only.
        status = np.asarray(status)
        for average in averages.values():
            plain = type(average) is Average and not isinstance(average.sum, np.generic)
            if not plain or isinstance(average.weight, np.generic):
                averages = map_structure(np.asarray, averages)
                break
    return replaced(statistics, averages=averages, status=status)


def accepted(new: Statistics, old: Statistics, /) -> Statistics:
    """Return the new statistics if no flag is set, else the old ones."""
    xp, good = new.namespace, new.status == 0
    chosen: Statistics = map_structure(lambda a, b: xp.where(good, a, b), new, old)
    return replaced(chosen, status=new.status)
