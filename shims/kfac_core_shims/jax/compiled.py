"""Executors: stages as programs of their own, and equal blocks as parts of one."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

import kfac_core as kc


class _Compiled(kc.execution.Executor):
    """Runs a stage of several blocks as one compiled program.

    Pass `compiled` as ``kfac_core.Estimator(..., execution=compiled)``.  If a result is
    flagged, the blocks are run one by one without the compiler, so that factorizations use
    the fallback chain, and errors name the block.
    """

    def __call__(self, stage: Any, tasks: Any, /) -> dict[str, Any]:
        """Return the result of a stage for each task, by name."""
        # A traced program cannot raise: it sets flags, which are read below.
        quiet = {name: tuple(map(_in_status, task)) for name, task in tasks.items()}
        raises = any(
            one is not other
            for name, task in tasks.items()
            for one, other in zip(task, quiet[name], strict=True)
        )
        # A flag chooses between programs, which no traced value can.
        fixed, traced = _divided(quiet, (kc.Block, str, bool))
        # A part of another program is compiled as that is; JAX refuses options for it.
        inside = isinstance(jnp.zeros(()), jax.core.Tracer)
        options = None if inside else compiler_options(jax.default_backend())
        try:
            hash(fixed)
        except TypeError:  # a product with arguments that no program can be known by
            return kc.execution.plain(stage, tasks)
        try:
            results = _program(options)(stage, fixed, traced)
        except kc.NotReadyError:  # a product prepares what it needs, and may raise
            return kc.execution.plain(stage, tasks)
        if raises and not all(map(stage.accepts, results.values())):
            return kc.execution.plain(stage, tasks)
        return {name: results[name] for name in tasks}


class _TracedOnce(kc.execution.Executor):
    """Runs a stage inside a program, traced once for equal blocks.

    Also for the same stage of the same shapes later, such as in another program.
    """

    def __call__(self, stage: Any, tasks: Any, /) -> dict[str, Any]:
        """Return the result of a stage for each task, by name."""
        results: dict[str, Any] = {}
        for name, task in tasks.items():
            # Numbers are checked where they are: they are a part of the program.
            fixed, traced = _divided(task, (kc.Block, str, int, float))
            try:
                results[name] = _part(stage, fixed, traced)
            except kc.KFACError:
                # Again, for the error with the block's name.
                results |= kc.execution.plain(stage, {name: task})
        return results


compiled = _Compiled()
traced_once = _TracedOnce()


def _in_status(part: Any) -> Any:
    """Return options with ``check="status"`` instead of ``"raise"``."""
    if part == "raise":
        return "status"
    if getattr(part, "check", None) == "raise":
        return kc.array.replaced(part, check="status")
    return part


def _divided(value: Any, kinds: tuple[type, ...]) -> tuple[Any, list[Any]]:
    """Return the static part of arguments, and the leaves that are traced."""
    leaves, form = jax.tree.flatten(value)
    static = (*kinds, kc.execution.ProductCall)
    fixed = tuple(leaf if isinstance(leaf, static) else ... for leaf in leaves)
    return (form, fixed), [leaf for leaf in leaves if not isinstance(leaf, static)]


def _joined(parts: Any, traced: list[Any]) -> Any:
    """Return the value that was divided, with traced leaves in their places."""
    form, fixed = parts
    leaves = iter(traced)
    return jax.tree.unflatten(form, [next(leaves) if x is ... else x for x in fixed])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _part(stage: Any, fixed: Any, traced: list[Any]) -> Any:
    return stage.run(*_joined(fixed, traced), name="a block")


@functools.cache
def _program(options: tuple[tuple[str, str], ...] | None) -> Any:
    """Return the loop over blocks as a program for each form of its arguments."""

    def run(stage: Any, fixed: Any, traced: list[Any]) -> dict[str, Any]:
        tasks = _joined(fixed, traced)
        return {name: stage.run(*task, name=name) for name, task in tasks.items()}

    known = None if options is None else dict(options)
    return jax.jit(run, static_argnums=(0, 1), compiler_options=known)


@functools.cache
def compiler_options(platform: str) -> tuple[tuple[str, str], ...] | None:
    """Return the compiler's options; None if it does not know them.

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
