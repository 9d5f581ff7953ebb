"""Feeding the statistics of some blocks: one pure function of their arrays.

Conventions.  What comes of it is installed by the estimator, so that an update that raises
has changed nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kfac_core.array.backend import Array, backend_of
from kfac_core.array.namespaces import Scalar
from kfac_core.array.status import Check
from kfac_core.block import Block, Fed
from kfac_core.conventions import Conventions
from kfac_core.errors import KFACError
from kfac_core.execution.stacked_updates import update_stacks, updated_stack
from kfac_core.execution.threads import in_bundles
from kfac_core.factors.statistics import Statistics

__all__ = ["UpdateSettings", "updated_blocks"]


@dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """How statistics are fed.

    Attributes
    ----------
    conventions : Conventions
        How the output gradients are scaled.
    skip : mapping of str to frozenset of str
        The factors of each block that another block computes.
    max_patch_elements : int or None
        As for `kfac_core.Block.update`.
    mean_gradients : bool
        Whether the mean gradient of the batch is returned too.
    workers : int
        The number of threads, with ``check="raise"``; else nothing may be started.
    check : {"raise", "status"}
        With ``"status"`` a block whose batch is not finite keeps its statistics; with
        ``"raise"`` the caller looks at the statuses, and installs nothing if one is set.
    """

    conventions: Conventions
    skip: Mapping[str, frozenset[str]]
    max_patch_elements: int | None
    mean_gradients: bool
    workers: int
    check: Check


def updated_blocks(
    blocks: Mapping[str, Block],
    statistics: Mapping[str, Statistics],
    batches: Mapping[str, Fed],
    decays: Mapping[str, Scalar],
    weights: Mapping[str, Scalar],
    /,
    *,
    settings: UpdateSettings,
) -> tuple[dict[str, Statistics], dict[str, Array]]:
    """Return the statistics of some blocks after an update, and mean gradients.

    Parameters
    ----------
    blocks : mapping of str to Block
        Descriptions.
    statistics : mapping of str to Statistics
        Of the same names; never modified.
    batches : mapping of str to batch
        What each block's layer saw.
    decays, weights : mapping of str to float or 0-d array
        Of each block's update.
    settings : UpdateSettings
        How.

    Returns
    -------
    dict of str to Statistics, dict of str to array
        New; the second is empty unless `settings` asks for it.

    Raises
    ------
    KFACError
        For arrays that do not fit, with the name of the block.
    """
    arguments = blocks, statistics, batches, decays, weights
    whole = {name: batches[name] for name in batches if not settings.skip[name]}
    new: dict[str, Statistics] = {}
    for names in update_stacks(blocks, statistics, whole, decays, weights):
        new |= _of_stack(names, *arguments, settings)
    rest = [name for name in batches if name not in new]

    def some(names: list[str]) -> dict[str, Statistics]:
        return {name: _alone(name, *arguments, settings) for name in names}

    workers = settings.workers if settings.check == "raise" and rest else 1
    new |= in_bundles(
        some,
        rest,
        work=lambda name: _numbers(blocks[name]),
        workers=workers,
        library=backend_of(statistics[rest[0]].namespace) if workers > 1 else None,
    )
    gradients: dict[str, Array] = {}
    if settings.mean_gradients:
        for name, batch in batches.items():
            with _quietly(name):
                gradients[name] = blocks[name].mean_gradient(
                    batch, conventions=settings.conventions
                )
    return {name: new[name] for name in batches}, gradients


@contextlib.contextmanager
def _quietly(name: str) -> Iterator[None]:
    """Let errors name the block; in each thread anew, NumPy does not warn.

    What is infinite is found by its status, and NumPy would also warn of inf - inf.
    """
    try:
        with np.errstate(invalid="ignore"):
            yield
    except KFACError as error:
        raise type(error)(f"Block {name!r}: {error}") from None


def _numbers(block: Block) -> int:
    """Return how many numbers a block's factors hold."""
    n, m = block.layer.matrix_shape
    return n * n + m * m


def _alone(
    name: str,
    blocks: Mapping[str, Block],
    statistics: Mapping[str, Statistics],
    batches: Mapping[str, Fed],
    decays: Mapping[str, Scalar],
    weights: Mapping[str, Scalar],
    settings: UpdateSettings,
) -> Statistics:
    options: dict[str, Any] = {
        "conventions": settings.conventions,
        "decay": decays[name],
        "weight": weights[name],
        "skip": settings.skip[name],
        "max_patch_elements": settings.max_patch_elements,
    }
    block, old, batch = blocks[name], statistics[name], batches[name]
    with _quietly(name):
        if settings.check == "status":
            return block.update(old, batch, check="status", **options)
        return block.unchecked_update(old, batch, **options)


def _of_stack(
    names: list[str],
    blocks: Mapping[str, Block],
    statistics: Mapping[str, Statistics],
    batches: Mapping[str, Fed],
    decays: Mapping[str, Scalar],
    weights: Mapping[str, Scalar],
    settings: UpdateSettings,
) -> dict[str, Statistics]:
    first = names[0]
    with _quietly(first):
        return updated_stack(
            blocks[first],
            {name: statistics[name] for name in names},
            {name: batches[name] for name in names},
            conventions=settings.conventions,
            decay=decays[first],
            weight=weights[first],
            check=settings.check,
        )
