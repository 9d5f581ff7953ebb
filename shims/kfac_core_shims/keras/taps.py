"""A run of a model that tells what its layers see, and pulls gradients back to them.

Conventions.  Zeros are added to what a layer's weights compute; the derivative with respect
to these zeros is the output gradient g.  A layer may be used any number of times.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras

import kfac_core as kc
from kfac_core_shims.keras import private


@dataclass
class Use:
    """One use of a weight: its block, its inputs, and which rows are padding (or None)."""

    block: str
    inputs: Any = None
    mask: Any = None


class Tape:
    """The uses of weights in one run of a model.

    Parameters
    ----------
    zeros : callable
        Takes the number of a use and an array of its outputs' shape; returns zeros.

    Notes
    -----
    Uses within another trace than that in which the tape was made are refused.
    """

    def __init__(self, zeros: Callable[[int, Any], Any]) -> None:
        self._zeros = zeros
        self._trace = private.trace_state()
        self._begun = self._trace()
        self.uses: list[Use] = []

    def tap(self, block: str, inputs: Any, outputs: Any, mask: Any = None) -> Any:
        """Record a use, and return its outputs, to which zeros are added."""
        added = self.begin(block, outputs)
        self.uses[-1].inputs, self.uses[-1].mask = inputs, mask
        return outputs + added

    def begin(self, block: str, outputs: Any) -> Any:
        """Record a use whose inputs are to come; return the zeros to be added."""
        if self._trace() != self._begun:
            raise _within_a_trace(block)
        self.uses.append(Use(block))
        return self._zeros(len(self.uses) - 1, outputs)


def run_taped(
    run: Callable[[Tape], Any],
) -> Any:
    """Run a function of a tape.

    Parameters
    ----------
    run : callable
        ``tape -> outputs``, a list of arrays, which depend on no other parameters.

    Returns
    -------
    uses : list of Use
        What was tapped.
    outputs : list of array
        What `run` returned.
    pull : callable
        Takes a vector for each output, and returns the output gradient of each use.

    Raises
    ------
    UnsupportedError
        For a use within a function that is traced or mapped by itself.
    """
    if keras.backend.backend() != "jax":
        return _run_torch(run)
    return _run_jax(run)


def _within_a_trace(block: str) -> kc.UnsupportedError:
    """Return the error for a layer whose inputs are known within a function alone."""
    return kc.UnsupportedError(
        f"The layer of {block!r} is called within a function that is traced or mapped by "
        "itself (keras.ops.vectorized_map; on JAX also an RNN's cell, keras.ops.scan, map "
        "or cond, keras.remat), where its inputs cannot be recorded. Write a loop in "
        "Python and rematerialization as keras.RematScope, or use a subclass of the "
        "layer, whose gradients K-FAC leaves as they are."
    )


def _run_torch(run: Callable[[Tape], Any]) -> Any:
    import torch

    zeros: list[Any] = []

    def fresh(_: int, like: Any) -> Any:
        zeros.append(torch.zeros_like(like, requires_grad=True))
        return zeros[-1]

    tape = Tape(fresh)
    with torch.enable_grad():
        outputs = run(tape)

    def pull(vectors: Any) -> Any:
        cotangents = [v.to(z.dtype) for v, z in zip(vectors, outputs, strict=True)]
        # What a layer computes for nothing has the gradient zero, as on JAX.
        options: Any = {"retain_graph": True, "materialize_grads": True}
        return torch.autograd.grad(outputs, zeros, cotangents, **options)

    return tape.uses, [z.detach() for z in outputs], pull


def _run_jax(run: Callable[[Tape], Any]) -> Any:
    import jax
    import jax.numpy as jnp

    shapes: list[Any] = []

    def first(_: int, like: Any) -> Any:
        shapes.append(jax.ShapeDtypeStruct(like.shape, like.dtype))
        return jnp.zeros_like(like)

    # The zeros must be there before `vjp`: a first trace learns their shapes.
    jax.eval_shape(lambda: run(Tape(first)))
    zeros = [jnp.zeros(like.shape, like.dtype) for like in shapes]
    blocks: list[str] = []

    def taped(zeros: Any) -> Any:
        tape = Tape(lambda number, _: zeros[number])
        outputs = run(tape)
        blocks.extend(use.block for use in tape.uses)
        return outputs, [(use.inputs, use.mask) for use in tape.uses]

    outputs, pulled, seen = jax.vjp(taped, zeros, has_aux=True)
    uses = [
        Use(block, *cotangents) for block, cotangents in zip(blocks, seen, strict=True)
    ]

    def pull(vectors: Any) -> Any:
        cotangents = [v.astype(z.dtype) for v, z in zip(vectors, outputs, strict=True)]
        return pulled(cotangents)[0]

    return uses, outputs, pull


@contextlib.contextmanager
def shadowed(changes: list[tuple[Any, dict[str, Any]]]) -> Iterator[None]:
    """Replace attributes of objects, past Keras's tracking of what is set."""
    before = [{k: vars(o)[k] for k in new if k in vars(o)} for o, new in changes]
    for thing, new in changes:
        vars(thing).update(new)
    try:
        yield
    finally:
        for (thing, new), old in zip(changes, before, strict=True):
            for name in new:
                del vars(thing)[name]
            vars(thing).update(old)
