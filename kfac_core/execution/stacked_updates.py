"""Updates of many small blocks, as one stack.

For layers of few features nearly all of an update goes into calls, not into numbers.
What several equal layers saw is copied into one array, and their statistics are fed in
as many calls as those of one layer.  What comes out for a block is what it would have
been alone, up to rounding.

Conventions.  As in `kfac_core.execution.stacking`.  Stacked are dense layers with
`Kronecker` and
full factors, fed unmasked batches of one shape, library, device and dtype, with one
decay and one weight that are Python numbers; whatever else there is, is done one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kfac_core.approximations.finite_sums import finite_arguments
from kfac_core.approximations.kronecker import Kronecker
from kfac_core.approximations.options import UpdateOptions
from kfac_core.array.backend import Array, Namespace
from kfac_core.array.namespaces import Scalar, device_of, own_namespace, status_unless
from kfac_core.array.status import Check, Status
from kfac_core.array.structure import map_structure
from kfac_core.block import Block, Fed
from kfac_core.conventions import Conventions
from kfac_core.execution.stacking import stacked_statistics
from kfac_core.factors.average import Average, require_decay, require_weight
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.dense import Dense
from kfac_core.layers.rows import Batch, Rows
from kfac_core.linalg.symmetric import SymmetricMatrix

__all__ = ["update_stacks", "updated_stack"]

STACKED_UP_TO = 128
"""The width up to which updates are stacked: from there on, copying costs what is saved."""


def update_stacks(
    blocks: Mapping[str, Block],
    statistics: Mapping[str, Statistics],
    batches: Mapping[str, Fed],
    decays: Mapping[str, Scalar],
    weights: Mapping[str, Scalar],
    /,
) -> list[list[str]]:
    """Return the names of blocks whose updates are those of one stack.

    Parameters
    ----------
    blocks, statistics, batches, decays, weights : mapping
        As for `kfac_core.execution.updating.updated_blocks`.

    Returns
    -------
    list of list of str
        Each of two names or more, in the order of `batches`.
    """
    if len(batches) < 2:
        return []
    groups: dict[Any, list[str]] = {}
    for name, batch in batches.items():
        block = blocks[name]
        if _is_small(block) and type(batch) is Batch:
            key = _alike(block, statistics[name], batch, decays[name], weights[name])
            if key is not None:
                groups.setdefault(key, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def updated_stack(
    block: Block,
    statistics: Mapping[str, Statistics],
    batches: Mapping[str, Any],
    /,
    *,
    conventions: Conventions,
    decay: float,
    weight: float,
    check: Check,
) -> dict[str, Statistics]:
    """Return the statistics of blocks that `update_stacks` put together.

    Parameters
    ----------
    block : Block
        What all of them are equal to.
    statistics, batches : mapping of str to Statistics, and to Batch
        Of the same names; never modified.
    conventions : Conventions
        How the output gradients are scaled.
    decay, weight : float
        Of the update.
    check : {"raise", "status"}
        Whether statistics whose status is not zero are of no use, or what they were.

    Returns
    -------
    dict of str to Statistics
        With ``"raise"`` what `Block.unchecked_update` gives for each, with ``"status"``
        what `Block.update` gives, up to rounding.

    Raises
    ------
    KFACError
        As `Block.unchecked_update`, for arrays that do not fit.

    Notes
    -----
    ``R (n^2 + M m^2)`` flops a block for R rows, and a copy of rows and sums.
    """
    require_decay(decay)
    require_weight(weight)
    names = list(batches)
    # The others have its shapes, library and dtypes: what holds for one holds for all.
    one = block.rows(batches[names[0]])
    xp, Q = own_namespace(one.inputs), len(names)
    x = xp.stack([batches[name].inputs for name in names])
    g = xp.stack([batches[name].output_grads for name in names])
    rows = Rows(
        xp.reshape(x, (Q, *one.inputs.shape)),
        xp.reshape(g, (Q, *one.output_grads.shape)),
        None,
        one.homogeneous,
    )
    old = stacked_statistics([statistics[name] for name in names], xp, mirrored=False)
    options = UpdateOptions(conventions=conventions, decay=decay, weight=weight, xp=xp)
    stack = block.approximation.updated(old, rows, block.layer, options)
    shown = finite_arguments(block.approximation, stack, skip=frozenset(), xp=xp)
    flags = xp.zeros(Q, dtype=xp.int32, device=device_of(x))
    if "inputs" not in shown:
        flags = flags | _not_finite(x, Status.INPUTS_NOT_FINITE, xp)
    if "output_grads" not in shown:
        flags = flags | _not_finite(g, Status.OUTPUT_GRADS_NOT_FINITE, xp)
    if check == "status":
        stack = _accepted(stack, old, flags == 0, xp)
    return dict(zip(names, _each(stack, flags, xp), strict=True))


def _is_small(block: Block) -> bool:
    """Whether a block is of a kind that is stacked."""
    layer, approximation = block.layer, block.approximation
    return (
        type(layer) is Dense
        and type(approximation) is Kronecker
        and (approximation.input, approximation.output) == ("full", "full")
        and max(layer.matrix_shape) <= STACKED_UP_TO
    )


def _alike(
    block: Block, statistics: Statistics, batch: Batch, decay: Scalar, weight: Scalar
) -> Any:
    """Return what blocks of one stack have in common; None for a block by itself."""
    x, g, held = batch.inputs, batch.output_grads, statistics.any_weight
    if (
        batch.mask is not None
        or batch.chosen is not None
        or not type(x) is type(g) is type(held)
        or type(decay) is not float
        or type(weight) is not float
    ):
        return None
    place = device_of(held)
    if device_of(x) != place or device_of(g) != place:
        return None
    arrays = type(x), str(place), x.dtype, g.dtype, held.dtype
    whole = tuple(
        statistics.averages[side].sum.full_storage for side in ("input", "output")
    )
    shapes = tuple(x.shape), tuple(g.shape), batch.sources, whole
    return block, arrays, shapes, decay, weight


def _not_finite(x: Array, flag: Status, xp: Namespace) -> Array:
    """Return the flag for each of a stack that holds NaN or infinity, shape (Q,)."""
    good = xp.all(xp.isfinite(xp.reshape(x, (x.shape[0], -1))), axis=-1)
    return status_unless(xp, good, flag)


def _accepted(
    new: Statistics, old: Statistics, good: Array, xp: Namespace
) -> Statistics:
    """Return the new averages of the blocks that are good, else the old ones."""

    def chosen(a: Array, b: Array) -> Array:
        return xp.where(xp.reshape(good, (-1,) + (1,) * (a.ndim - 1)), a, b)

    averages = {
        name: map_structure(chosen, average, old.averages[name])
        for name, average in new.averages.items()
    }
    return Statistics(averages, new.status)


def _each(stack: Statistics, flags: Array, xp: Namespace) -> list[Statistics]:
    """Return the statistics of each block of a stack."""
    by_name = [
        [(name, average) for average in _averages(stacked, xp)]
        for name, stacked in stack.averages.items()
    ]
    statuses = _scalars(flags, xp)
    return [
        Statistics(dict(averages), status)
        for averages, status in zip(zip(*by_name, strict=True), statuses, strict=True)
    ]


def _averages(stacked: Average, xp: Namespace) -> list[Average]:
    weights = _scalars(xp.reshape(stacked.weight, (-1,)), xp)
    if not isinstance(stacked.sum, SymmetricMatrix):
        sums: list[Any] = _scalars(stacked.sum, xp)
    else:
        whole = stacked.sum.full_storage
        sums = [SymmetricMatrix(x, whole) for x in xp.unstack(stacked.sum.array)]
    return [Average(*parts) for parts in zip(sums, weights, strict=True)]


def _scalars(x: Array, xp: Namespace) -> list[Array]:
    """Return the numbers of a 1-d array, each as a 0-d array."""
    # By rows of one number: NumPy's unstack of a 1-d array gives scalars, no arrays.
    return [xp.reshape(row, ()) for row in xp.unstack(x[:, None])]
