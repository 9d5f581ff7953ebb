"""Statistics and gradients of all devices of a mapped axis.

Conventions.  In a function mapped over devices (``pmap``, ``shard_map``) each device sees a
part of the batch.  `kfac_core.distributed.SummedOver` adds up the sums and weights of the
parts, which is what one device would have had, whatever the masks.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.extend.core as jex

import kfac_core as kc

__all__ = [
    "averaged",
    "explicit_axes",
    "gathered",
    "mapped_axes",
    "summed_over",
    "vmapped_axes",
]


def mapped_axes() -> tuple[Any, ...]:
    """Return the names of the mapped axes that the caller is inside of."""
    name = "unsafe_get_axis_names_DO_NOT_USE"
    # Before JAX 0.10 it was in `jax.core`.
    names: Any = getattr(jex, name, None) or getattr(jax.core, name)
    return tuple(names())


def vmapped_axes(value: Any, /) -> set[Any]:
    """Return the names of the axes that ``vmap`` maps a value over.

    Inside of a ``jit`` or a ``scan`` that is itself mapped nothing is known of them.
    """
    names = set()
    while hasattr(value, "batch_dim"):
        names.add(value._trace.axis_data.name)
        value = value.val
    return names


def gathered(tree: Any, /) -> Any:
    """Return arrays without the explicit axes of a mesh that they are sharded over."""

    def whole(x: Any) -> Any:
        return (
            jax.sharding.reshard(x, jax.sharding.PartitionSpec())
            if explicit_axes(x)
            else x
        )

    return jax.tree.map(whole, tree)


def explicit_axes(x: Any, /) -> set[Any]:
    """Return the explicit axes of a mesh that an array is sharded over."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    named: set[Any] = set()
    for axes in getattr(sharding, "spec", ()):
        named |= set(axes) if isinstance(axes, tuple) else {axes}
    return named & set(getattr(getattr(sharding, "mesh", None), "explicit_axes", ()))


def averaged(tree: Any, axis_name: Any, /) -> Any:
    """Return the mean over a mapped axis; of what is equal on it, that itself."""
    return jax.tree.map(lambda x: jax.lax.pmean(x, axis_name), tree)


def summed_over(
    axis_name: Any, inner: kc.execution.Executor, /
) -> kc.distributed.SummedOver:
    """Return the executor of an update with the rows of all devices of an axis."""
    communicator = kc.distributed.engine("jax").AxisCommunicator(axis_name)
    return kc.distributed.SummedOver(communicator, inner)
