"""Executors: stages as programs of their own, and equal blocks as parts of one."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

import kfac_core as kc

__all__ = ["compiled", "compiler_options", "traced_once"]


def compiled(function: Any, tasks: Any, /) -> dict[str, Any]:
    """Run a function of several blocks as one compiled program: an executor.

    Pass it as ``kfac_core.Estimator(..., execution=compiled)``.  If a result is flagged,
    the blocks are run one by one without the compiler, so that factorizations use the
    fallback chain, and errors name the block.

    Parameters
    ----------
    function : callable
        Takes a name, a block and arguments.
    tasks : mapping of str to tuple
        For each name, the block and its arguments.

    Returns
    -------
    dict of str to object
        Results of the function, by name.
    """
    raises = getattr(function, "check", "status") == "raise"
    traced = dataclasses.replace(function, check="status") if raises else function
    fixed = tuple(
        (name, tuple(part if isinstance(part, _FIXED) else None for part in task))
        for name, task in tasks.items()
    )
    arrays = {
        name: [None if isinstance(part, _FIXED) else part for part in task]
        for name, task in tasks.items()
    }
    # A part of another program is compiled as that is; JAX refuses options for it.
    inside = isinstance(jnp.zeros(()), jax.core.Tracer)
    options = None if inside else compiler_options(jax.default_backend())
    try:
        hash(traced)
    except TypeError:  # a product with arguments that no program can be known by
        return _one_by_one(function, tasks)
    try:
        results = _program(options)(traced, fixed, arrays)
    except kc.NotReadyError:  # a product prepares what it needs, and may raise
        return _one_by_one(function, tasks)
    if raises and not all(map(function.accepts, results.values())):
        return _one_by_one(function, tasks)
    return {name: results[name] for name in tasks}


def traced_once(function: Any, tasks: Any, /) -> dict[str, Any]:
    """Run a function of several blocks inside a program, traced once for equal blocks.

    Also for the same function of the same shapes later, such as in another program.

    Parameters
    ----------
    function : callable
        Takes a name, a block and arguments, and reads no values.
    tasks : mapping of str to tuple
        For each name, the block and its arguments.

    Returns
    -------
    dict of str to object
        Results of the function, by name.
    """
    arrays = [id(x) for task in tasks.values() for x in jax.tree.leaves(task[1])]
    if len(set(arrays)) < len(arrays):
        # Blocks that share a factor share what is made of it.
        return kc.execution.plain(function, tasks)
    results: dict[str, Any] = {}
    for name, task in tasks.items():
        fixed = tuple(part if isinstance(part, _GIVEN) else ... for part in task)
        traced = [None if isinstance(part, _GIVEN) else part for part in task]
        try:
            results[name] = _part(function, fixed, traced)
        except kc.KFACError:
            # Again, for the error with the block's name.
            results |= kc.execution.plain(function, {name: task})
    return results


@functools.partial(jax.jit, static_argnums=(0, 1))
def _part(function: Any, fixed: Any, arrays: Any) -> Any:
    if hasattr(function, "memo"):
        function = dataclasses.replace(function, memo={})
    task = (
        traced if part is ... else part
        for part, traced in zip(fixed, arrays, strict=True)
    )
    return function("a block", *task)


def _one_by_one(function: Any, tasks: Any) -> dict[str, Any]:
    return {name: function(name, *task) for name, task in tasks.items()}


_FIXED = (kc.Block, str, frozenset)
"""What is a part of a program among a block's arguments."""


_GIVEN = (*_FIXED, int, float, type(None))
"""What is a part of a program beside those: numbers that are checked where they are."""


@functools.cache
def _program(options: tuple[tuple[str, str], ...] | None) -> Any:
    """Return the loop over blocks as a program for each form of its arguments."""

    def run(function: Any, fixed: Any, arrays: Any) -> dict[str, Any]:
        if hasattr(function, "memo"):
            # What is remembered belongs to one trace.
            function = dataclasses.replace(function, memo={})
        tasks = {
            name: tuple(
                traced if part is None else part
                for part, traced in zip(parts, arrays[name], strict=True)
            )
            for name, parts in fixed
        }
        return _one_by_one(function, tasks)

    known = None if options is None else dict(options)
    return jax.jit(run, static_argnums=(0, 1), compiler_options=known)


@functools.cache
def compiler_options(platform: str) -> tuple[tuple[str, str], ...] | None:
    """Return what the compiler is told, None where it does not know it.

    On the CPU to order operations so that little memory is in use at a time.  By default
    all blocks are begun at once, in fresh memory of a few times the factors' size, and
    the system's clearing of that takes a third of an update.

    Parameters
    ----------
    platform : str
        Name of JAX's backend: ``"cpu"``, ``"gpu"``, ``"tpu"``.

    Returns
    -------
    tuple of pairs of str, or None
        Names and values of the compiler's options.
    """
    if platform != "cpu":
        return None
    options = (("xla_cpu_scheduler_type", "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"),)
    try:
        jax.jit(jnp.negative, compiler_options=dict(options))(1.0)
    except jax.errors.JaxRuntimeError:
        return None
    return options
