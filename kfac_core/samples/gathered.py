"""The Jacobian of several processes' examples, on each of them.

Conventions.  Every process has the rows of its own examples, and gets those of all, one
process after the other.  K and the directions are then those of one process that has all
examples.
"""

from __future__ import annotations

from kfac_core.array import Array, replaced
from kfac_core.array import namespaces as ns
from kfac_core.distributed.communicator import Communicator
from kfac_core.layers.example_gradients import ExampleGradients
from kfac_core.layers.id_rows import IdRows
from kfac_core.layers.layer import AnyRows
from kfac_core.samples.gram import widest_dtype
from kfac_core.samples.jacobian import Jacobian, LayerJacobian


def gathered(x: Array, communicator: Communicator, /, *, axis: int = 0) -> Array:
    """Return the arrays of all processes, one after the other along an axis.

    Parameters
    ----------
    x : array
        This process's part; other axes have the same lengths on all processes.
    communicator : Communicator
        The processes; all of them call this.
    axis : int
        Axis of the examples.

    Returns
    -------
    array
        The same on every process.
    """
    xp = ns.own_namespace(x)
    moved = xp.moveaxis(x, axis, 0)
    device = ns.device_of(x)
    # Processes may have unequal numbers of examples.  Engines exchange floats, which
    # count exactly up to 2^24 in float32.
    length = xp.full((1,), float(moved.shape[0]), dtype=xp.float32, device=device)
    lengths = communicator.all_gather(length, [1] * communicator.size).wait()
    each = 1
    for size in moved.shape[1:]:
        each *= int(size)
    counts = [int(lengths[rank]) * each for rank in range(communicator.size)]
    flat = communicator.all_gather(xp.reshape(moved, (-1,)), counts).wait()
    return xp.moveaxis(xp.reshape(flat, (-1, *moved.shape[1:])), 0, axis)


def gathered_jacobian(J: Jacobian, communicator: Communicator, /) -> Jacobian:
    """Return the Jacobian of the examples of all processes.

    Parameters
    ----------
    J : Jacobian
        Of this process's examples; the layers and their order are the same on all.
    communicator : Communicator
        The processes; all of them call this.

    Returns
    -------
    Jacobian
        The same on every process.

    Notes
    -----
    Memory: the rows of all processes.
    """
    layers: dict[str, LayerJacobian] = {}
    for name, jacobian in J.layers.items():
        rows = _gathered_rows(jacobian.rows, communicator)
        layers[name] = LayerJacobian(rows, jacobian.layer)
    rows = next(iter(layers.values())).rows
    others = J.sample_shape[1:]
    examples = rows.examples * rows.sources
    for length in others:
        examples //= length
    return replaced(J, layers=layers, sample_shape=(examples, *others))


def _gathered_rows(rows: AnyRows, communicator: Communicator) -> AnyRows:
    if isinstance(rows, ExampleGradients):
        xp = ns.own_namespace(rows.gradients)
        # Examples are joined source by source: flat rows would mix processes and sources.
        by_source = (rows.sources, rows.examples, rows.gradients.shape[-1])
        D = gathered(xp.reshape(rows.gradients, by_source), communicator, axis=1)
        examples = int(D.shape[1])
        return ExampleGradients(
            xp.reshape(D, (rows.sources * examples, D.shape[-1])),
            examples,
            rows.sources,
        )
    gathered_grads = gathered(rows.output_grads, communicator, axis=-3)
    changes = {"output_grads": gathered_grads}
    if isinstance(rows, IdRows):
        changes["ids"] = _in_floats(rows.ids, gathered_grads.dtype, communicator)
    else:
        changes["inputs"] = gathered(rows.inputs, communicator, axis=-3)
    if rows.mask is not None:
        changes["mask"] = _in_floats(rows.mask, gathered_grads.dtype, communicator)
    return replaced(rows, **changes)


def _in_floats(x: Array, dtype: object, communicator: Communicator) -> Array:
    """Return gathered integers or booleans, which engines exchange as floats."""
    xp = ns.own_namespace(x)
    wide = widest_dtype(xp.zeros((), dtype=dtype, device=ns.device_of(x)), xp=xp)
    return xp.astype(gathered(xp.astype(x, wide), communicator), x.dtype)
