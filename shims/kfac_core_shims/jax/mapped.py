"""Statistics and gradients of all devices of a mapped axis.

Conventions.  In a function mapped over devices (``pmap``, ``shard_map``) each device sees a
part of the batch.  `kfac_core.distributed.SummedOver` adds up the sums and weights of the
parts, which is what one device would have had, whatever the masks.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.custom_batching

import kfac_core as kc


def mapped_axes() -> tuple[set[Any], set[Any]]:
    """Return the names of the axes that the caller is mapped over.

    Returns
    -------
    all, devices : set of hashable
        All of them, and those of ``shard_map`` and ``pmap``: each index is a device, with a
        part of the data.
    """
    names = set(kc.distributed.engine("jax").mapped_axes())
    merged = "jax_pmap_shmap_merge"
    if not jax.config.values.get(merged, jax.__version_info__ >= (0, 8)):
        return names, names  # These versions do not distinguish `pmap` from `vmap`.
    return names, names & set(jax.sharding.get_abstract_mesh().manual_axes)


def names_of(axis_name: Any, /) -> tuple[Any, ...]:
    """Return the names of mapped axes of an option `axis_name`: one, a tuple, or None.

    In their order, which is in the compiled program and has to be the same on all hosts.
    """
    if isinstance(axis_name, tuple):
        return axis_name
    return () if axis_name is None else (axis_name,)


def require_named(axis_name: Any, owner: str, /, *, unless: str = "") -> None:
    """Raise where devices of a mapped axis would keep statistics of their own.

    Parameters
    ----------
    axis_name : hashable
        The option of that name.
    owner : str
        What has the option.
    unless : str
        Further advice.
    """
    axes, devices = mapped_axes()
    if devices - {*names_of(axis_name)}:
        raise kc.ConventionError(
            f"This step is mapped over the axes {sorted(map(str, axes))}, and `axis_name` "
            f"is {axis_name!r}: each device would keep statistics of its own examples, and "
            f"go its own way. Say {owner}(..., axis_name=...){unless}."
        )


def watched(count: Any, gradients: Any, batches: Any, axes: tuple[Any, ...], /) -> Any:
    """Return a count of a state, and raise where a ``vmap`` averages gradients alone.

    Each index then has a state and inputs of its own, and all have the same gradients, as
    of `jax.lax.pmean`.  What a ``vmap`` around a ``jit`` or a ``scan`` maps is known only
    when that is mapped, in the rule of `_watched`.

    Parameters
    ----------
    count : array, 0-d
        Part of the state.
    gradients, batches : pytree
        What an update is called with.
    axes : tuple of hashable
        Axes over which the rows will be added up.

    Returns
    -------
    array, 0-d
        `count`.
    """

    def mark(tree: Any) -> Any:
        # Integers, which no derivative is taken of.
        return sum((x.size and x.ravel()[0] != 0) + 0 for x in jax.tree.leaves(tree))

    # Runs with one batch may differ by their random vectors alone, and share gradients.
    uses = [use for b in batches.values() for use in (b if type(b) is tuple else [b])]
    rows = mark([getattr(use, "inputs", use) for use in uses])
    return _watched(count, mark(gradients), jax.lax.psum(rows, axes) if axes else rows)


def _mapped(
    axis_size: int, is_mapped: Any, count: Any, gradients: Any, batches: Any
) -> tuple[Any, bool]:
    own_state, own_gradients, own_rows = is_mapped
    if own_state and own_rows and not own_gradients:
        raise kc.ConventionError(
            f"The {axis_size} runs of this `vmap` have the same gradients, and each has a "
            "state and rows of its own: gradients are averaged over the axis, and "
            "statistics are not. Say KFAC(..., axis_name=...) for an average over both, or "
            "axis_name=() for independent runs."
        )
    return _watched(count, gradients, batches), own_state


_watched: Any = jax.custom_batching.custom_vmap(lambda count, gradients, batches: count)
_watched.def_vmap(_mapped)


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
    """Return the mean over a mapped axis."""
    return jax.tree.map(lambda x: jax.lax.pmean(x, axis_name), tree)


def summed_over(
    axis_name: Any, inner: kc.execution.Executor, /
) -> kc.distributed.SummedOver:
    """Return the executor of an update with the rows of all devices of an axis."""
    communicator = kc.distributed.engine("jax").AxisCommunicator(axis_name)
    return kc.distributed.SummedOver(communicator, inner)
