"""K-FAC with tensor-parallel linear layers on several processes, beside one.

Needs `pip install scikit-learn torch`.  Starts its processes itself, with gloo.  What K-FAC
adds to the training loop is numbered in `train`.

All processes have the same examples, and a part of each layer's columns or rows.  Hooks
that are registered before `parallelize_module` see `DTensor`s.  The inputs and output
gradients of a layer are gathered, and each process takes its share of the examples, of
which the shares may be unequal: so the statistics are divided as they are between shards of
data.
"""

from __future__ import annotations

import torch
from compared import STEPS, batch, compared, digits, holders_of, options, shard
from recorded import Recorded, blocks_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch_ddp import DAMPING, RATE, ended, joined, network, start
from torch_fsdp import like, whole

import kfac_core as kc
from kfac_core.distributed import Distributed


def train(communicator, holders, dtype):
    """Return the parameters after 20 steps, and the last directions."""
    images, labels = (torch.as_tensor(x) for x in digits(dtype))
    model = network(images.dtype)
    recorded = Recorded(model)
    blocks = blocks_of(recorded)
    execution = None
    if communicator is not None:
        mesh = init_device_mesh("cpu", (communicator.size,))
        # The columns of the first layer, the rows of the second; the third is whole.
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh, plan)
        # 1. The estimator is told of the other processes.
        execution = Distributed(communicator=communicator, holders=holders)
    estimator = kc.Estimator(
        blocks, reduction="sum", damping=DAMPING, execution=execution
    )
    directions = {}
    for step in range(STEPS):
        rows = batch(step)
        model.zero_grad()
        logits = model(images[rows])
        loss = torch.nn.functional.cross_entropy(logits, labels[rows], reduction="sum")
        loss.backward()
        # 2. All rows of each layer, of which this process takes its share.
        own = slice(None)
        if communicator is not None:
            share = shard(step, communicator.rank, communicator.size)
            own = slice(share.start - rows.start, share.stop - rows.start)
        batches = {}
        for name, seen in recorded.taken().items():
            x, g = whole(seen.inputs), whole(seen.output_grads)
            batches[name] = kc.Batch(x[own], g[own])
        estimator.update(batches)
        if step % 5 == 0:
            estimator.refresh()
        for name, layer in recorded.layers.items():
            # 3. The whole gradient of one layer at a time.
            parameters = {"weight": layer.weight, "bias": layer.bias}
            N = len(labels[rows])
            gradient = {key: whole(p.grad) / N for key, p in parameters.items()}
            found = estimator.precondition({name: gradient})[name]
            for key, direction in found.items():
                directions[f"{name}.{key}"] = direction.numpy()
                with torch.no_grad():
                    parameters[key].sub_(RATE * like(parameters[key], direction))
    parameters = {
        name: whole(p.detach()).numpy() for name, p in model.named_parameters()
    }
    return parameters, directions


def main():
    chosen = options(__doc__)
    if chosen.rank is None:
        start(chosen.processes)
    communicator = joined(chosen)
    with ended():
        compared(
            lambda: train(communicator, holders_of(chosen.holders), chosen.dtype),
            lambda: train(None, None, chosen.dtype),
            rank=chosen.rank,
            size=chosen.processes,
            dtype=chosen.dtype,
        )


if __name__ == "__main__":
    main()
