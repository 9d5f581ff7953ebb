"""Statistics and gradients of all devices of a mapped axis.

Conventions.  In a function mapped over devices (``pmap``, ``shard_map``) each device sees a
part of the batch.  Running sums are linear in the rows: sums and weights of the parts are
added up, which is what one device would have had, whatever the masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

import kfac_core as kc

__all__ = ["Summed", "averaged", "mapped_axes"]


def mapped_axes() -> tuple[Any, ...]:
    """Return the names of the mapped axes that the caller is inside of."""
    name = "unsafe_get_axis_names_DO_NOT_USE"
    # Before JAX 0.10 it was in `jax.core`.
    names: Any = getattr(jex, name, None) or getattr(jax.core, name)
    return tuple(names())


def averaged(tree: Any, axis_name: Any, /) -> Any:
    """Return the mean over a mapped axis; of what is equal on it, that itself."""
    return jax.tree.map(lambda x: jax.lax.pmean(x, axis_name), tree)


@dataclass(frozen=True)
class Summed:
    """Executor of `kfac_core.Network.update` that adds up what the devices saw.

    Attributes
    ----------
    axis_name : hashable
        Name of a mapped axis, or a tuple of names.
    """

    axis_name: Any

    def __call__(
        self, function: Any, tasks: Mapping[str, tuple[Any, ...]], /
    ) -> dict[str, Any]:
        """Return the statistics of each block after an update with all rows."""
        return {name: self._one(function, name, *task) for name, task in tasks.items()}

    def _one(
        self,
        function: Any,
        name: str,
        block: kc.Block,
        statistics: Any,
        batch: Any,
        decay: Any,
        weight: Any,
        skip: Any,
    ) -> Any:
        nothing = replace(
            statistics, averages=jax.tree.map(jnp.zeros_like, statistics.averages)
        )
        # Weighted by its rows; devices have as many, unless some are masked.
        rows = _kept(batch, statistics.dtype)
        own = function(name, block, nothing, batch, 0.0, rows, skip)
        whole = replace(
            own,
            averages=jax.lax.psum(own.averages, self.axis_name),
            status=_any_flags(own.status, self.axis_name),
        )
        return block.absorb(statistics, whole, decay=decay, weight=weight)


def _kept(batch: Any, dtype: Any) -> Any:
    """Return the number of rows that count, or 1 where all do."""
    uses = batch if isinstance(batch, list | tuple) else (batch,)
    masks = [getattr(use, "mask", None) for use in uses]
    if all(mask is None for mask in masks):
        return jnp.ones((), dtype)
    total = jnp.zeros((), dtype)
    for use, mask in zip(uses, masks, strict=True):
        if mask is None:
            rows = use.output_grads.size // use.output_grads.shape[-1]
            total = total + rows // (use.sources or 1)
        else:
            total = total + mask.sum().astype(dtype)
    return total


def _any_flags(status: Any, axis_name: Any) -> Any:
    """Return the flags that are set on any device."""
    bits = jnp.arange(16, dtype=status.dtype)
    flags = jax.lax.pmax((status >> bits) & 1, axis_name)
    return (flags << bits).sum(dtype=status.dtype)
