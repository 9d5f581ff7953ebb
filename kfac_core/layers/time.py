"""Recurrent use of a layer: one weight, T time steps.

Conventions.  Time is a shared axis.  A dense layer takes arrays of shape
``(N, T, features)`` as they are, with a mask of shape ``(N, T)`` for sequences of unequal
lengths.  A convolution takes one `Batch` a step, in a sequence, which `steps_of` makes of
arrays with a time axis.  Where a framework has folded time into the batch, `unfold_time`
brings the axis back: in which order it was folded has to be said.
"""

from __future__ import annotations

from typing import Literal, get_args

from kfac_core import constraints, errors
from kfac_core.array import Array
from kfac_core.array import namespaces as ns
from kfac_core.layers.rows import Batch

__all__ = ["Folding", "steps_of", "unfold_time"]

Folding = Literal["time_major", "batch_major"]
"""Whether row ``t N + n`` or row ``n T + t`` of a folded array is step t of example n."""


def unfold_time(x: Array, /, *, steps: int, folding: Folding) -> Array:
    """Bring back a time axis that was folded into the batch.

    Parameters
    ----------
    x : array, shape (T N, ...)
        The folded array.
    steps : int
        Number of time steps ``T``.
    folding : {"time_major", "batch_major"}
        Order in which the axes were folded.

    Returns
    -------
    array, shape (N, T, ...)
        A view where the library allows it.

    Raises
    ------
    ShapeError
        If T does not divide the first axis.
    ConventionError
        For an unknown order.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> folded = np.arange(6.0)[:, None]  # 3 steps of 2 examples, time first
    >>> kc.layers.unfold_time(folded, steps=3, folding="time_major")[:, :, 0]
    array([[0., 2., 4.],
           [1., 3., 5.]])
    """
    constraints.require_one_of("folding", folding, get_args(Folding))
    xp = ns.namespace_of(x=x)
    if steps < 1 or x.shape[0] % steps:
        raise errors.ShapeError(
            f"Expected `steps` to divide the first axis of `x`, got {steps} steps and "
            f"shape {tuple(x.shape)}."
        )
    event = tuple(x.shape[1:])
    if folding == "batch_major":
        return xp.reshape(x, (x.shape[0] // steps, steps, *event))
    return ns.moved_axis(
        xp.reshape(x, (steps, x.shape[0] // steps, *event)), 0, 1, xp=xp
    )


def steps_of(batch: Batch, /, *, mask_axes: int) -> tuple[Batch, ...]:
    """Split a batch with a time axis into one batch a step.

    Parameters
    ----------
    batch : Batch
        ``inputs`` of shape ``(N, T, ...)``, ``output_grads`` of shape
        ``((M,) N, T, ...)``, and a ``mask`` of shape ``(N, T)``, or with the output
        positions after that, or None.
    mask_axes : int
        The number of shared axes of one step, over which a mask of shape ``(N, T)`` is
        spread: 0 for a dense layer, d for a convolution of d spatial axes whose
        data layout is channels last.

    Returns
    -------
    tuple of Batch
        To be fed to one block as several uses of its layer.

    Raises
    ------
    ShapeError
        If the axes of time differ.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> batch = kc.Batch(np.ones((8, 5, 3)), np.ones((8, 5, 2)))
    >>> steps = kc.layers.steps_of(batch, mask_axes=0)
    >>> len(steps), steps[0].inputs.shape
    (5, (8, 3))
    """
    if batch.bias is not None:
        raise errors.UnsupportedError("Expected no `bias` in a batch that is split.")
    x, g, mask = batch.inputs, batch.output_grads, batch.mask
    xp = ns.namespace_of(inputs=x, output_grads=g, optional={"mask": mask})
    # Sources come first in output gradients, and inputs have no such axis.
    lead = 0 if batch.sources is None else 1
    T = x.shape[1]
    steps_in = {"inputs": T, "output_grads": g.shape[lead + 1]}
    steps_in |= {} if mask is None else {"mask": mask.shape[1]}
    constraints.require_same("number of steps, after the axis of examples", steps_in)
    steps = []
    for t in range(T):
        now = None if mask is None else mask[:, t, ...]
        if now is not None and now.ndim == 1 and mask_axes:
            positions = tuple(g.shape[lead + 2 : lead + 2 + mask_axes])
            shape = (now.shape[0], *(1,) * mask_axes)
            now = xp.broadcast_to(xp.reshape(now, shape), (now.shape[0], *positions))
        part = g[:, :, t, ...] if lead else g[:, t, ...]
        steps.append(Batch(x[:, t, ...], part, now, batch.sources))
    return tuple(steps)
