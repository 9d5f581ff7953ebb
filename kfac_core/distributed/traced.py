"""Statistics of all devices inside one compiled program.

Conventions.  A function compiler maps a program over devices (JAX's ``shard_map`` or
``pmap``), and a communicator adds an array up over them.  With it each update adds up the
sums of all devices' rows, so that every device has the statistics of all rows, and
everything after the update is the same on all devices.  Shards of unequal sizes are padded
and masked.  An example that is masked as a whole has no rows, but it is an example, as on
one device: averages over examples (``sharing="reduce"``, `Full`) count it.  No value is
read.

Where a compiler divides arrays itself (``jit`` of arrays with shardings) nothing is needed:
the program is that of the whole batch.
"""

from __future__ import annotations

from typing import Any

from kfac_core import errors
from kfac_core.array import Array, Status, map_structure, replaced
from kfac_core.array import namespaces as ns
from kfac_core.distributed.communicator import Communicator
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.example_gradients import GradientBatch
from kfac_core.stages import Executor, Result, Stage, Tasks, plain


class SummedOver(Executor):
    """An executor for a program that runs on several devices, each with its own rows.

    ``network.update(..., check="status", executor=SummedOver(connect("jax")))`` is then,
    on every device, the update with the rows of all devices.

    Parameters
    ----------
    communicator : Communicator
        Communicator of all devices, made inside the mapped function.
    inner : Executor
        Executor that runs the tasks.

    Notes
    -----
    An update adds up the averages of all blocks, unpacked, and divides a mean loss by the
    number of each device's own examples.
    """

    def __init__(self, communicator: Communicator, inner: Executor = plain) -> None:
        self._communicator, self._inner = communicator, inner

    def __call__(self, stage: Stage[Result], tasks: Tasks, /) -> dict[str, Result]:
        """Return the result of a stage for each task, for the rows of all devices."""
        if stage.name != "update":
            # Everything else is of what all devices have.
            return self._inner(stage, tasks)
        for name, (block, _, batch, *_) in tasks.items():
            reduction = block.approximation.reduction
            if reduction != "sum" or isinstance(batch, GradientBatch):
                reason = block.approximation.reduction_problem
                if reduction == "sum":
                    reason = "only sums over rows are added up inside a program"
                raise errors.UnsupportedError(
                    f"Block {name!r} ({block.approximation.name}) cannot be divided among "
                    f"devices: {reason}."
                )
        parts = {
            name: (
                block,
                statistics.emptied(),
                batch,
                replaced(options, decay=0.0, weight=None),
            )
            for name, (block, statistics, batch, options) in tasks.items()
        }
        results: dict[str, Any] = {}
        of_device: dict[str, Any] = self._inner(stage, parts)
        for name, moments in of_device.items():
            block, statistics, _, options = tasks[name]
            results[name] = statistics.absorbed(
                self._summed(moments),
                decay=options.decay,
                weight=options.weight,
                decays=block.approximation.decays,
            )
        return results

    def _psum(self, x: Array) -> Array:
        """Return the sum of an array over all devices."""
        xp = ns.own_namespace(x)
        total = self._communicator.all_reduce(xp.reshape(x, (-1,))).wait()
        return xp.reshape(total, x.shape)

    def _summed(self, moments: Statistics) -> Statistics:
        averages = map_structure(self._psum, moments.averages)
        xp = moments.namespace
        # What is made of a sum over the devices is known to be the same on all.
        status = self._psum(xp.zeros_like(moments.status))
        for flag in Status:
            if flag:
                flagged = xp.astype((moments.status & int(flag)) != 0, xp.int32)
                anywhere = xp.astype(self._psum(flagged) > 0, xp.int32)
                status = status | (anywhere * int(flag))
        return Statistics(averages, status, moments.bases)
