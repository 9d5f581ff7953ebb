"""K-FAC with fully_shard (FSDP2) on several processes, beside one with all rows.

Needs `pip install scikit-learn torch`.  Starts its processes itself, with gloo.  What K-FAC
adds to the training loop is numbered in `train`.

Parameters, gradients and the optimizer's state are sharded.  Hooks that are registered
before `fully_shard` see plain tensors of the process's own rows, so that statistics are as
for DistributedDataParallel.  For a direction the gradient of one layer at a time is
gathered, and each process keeps its shard of the result.
"""

from __future__ import annotations

import torch
from compared import STEPS, batch, compared, digits, holders_of, options, shard
from recorded import Recorded, blocks_of
from torch.distributed.fsdp import fully_shard
from torch_ddp import DAMPING, RATE, ended, joined, network, start

import kfac_core as kc
from kfac_core.distributed import Distributed


def train(communicator, holders, dtype):
    """Return the parameters after 20 steps, and the last directions."""
    images, labels = (torch.as_tensor(x) for x in digits(dtype))
    model = network(images.dtype)
    recorded = Recorded(model)
    blocks = blocks_of(recorded)
    if communicator is not None:
        for layer in recorded.layers.values():
            fully_shard(layer)
        fully_shard(model)
    # 1. The estimator is told of the other processes, and how the loss is scaled: as with
    # DistributedDataParallel, gradients are averaged over processes.
    execution = None
    if communicator is not None:
        execution = Distributed(communicator=communicator, holders=holders, loss="ddp")
    estimator = kc.Estimator(
        blocks, reduction="mean", damping=DAMPING, execution=execution
    )
    directions = {}
    for step in range(STEPS):
        rows, N, scale = batch(step), len(labels[batch(step)]), 1.0
        if communicator is not None:
            rows = shard(step, communicator.rank, communicator.size)
            scale = communicator.size
        model.zero_grad()
        logits = model(images[rows])
        loss = torch.nn.functional.cross_entropy(logits, labels[rows], reduction="sum")
        (loss * (scale / N)).backward()
        # 2. This process's own rows; a shard may be empty.
        estimator.update(recorded.taken())
        if step % 5 == 0:
            estimator.refresh()
        for name, layer in recorded.layers.items():
            # 3. The whole gradient of one layer at a time.
            parameters = {"weight": layer.weight, "bias": layer.bias}
            gradient = {key: whole(p.grad) for key, p in parameters.items()}
            found = estimator.precondition({name: gradient})[name]
            for key, direction in found.items():
                directions[f"{name}.{key}"] = direction.numpy()
                with torch.no_grad():
                    parameters[key].sub_(RATE * like(parameters[key], direction))
    parameters = {
        name: whole(p.detach()).numpy() for name, p in model.named_parameters()
    }
    return parameters, directions


def whole(x):
    """Return a sharded tensor with all its parts."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def like(parameter, direction):
    """Return this process's shard of a direction, which all processes have."""
    if not hasattr(parameter, "placements"):
        return direction
    return torch.distributed.tensor.distribute_tensor(
        direction, parameter.device_mesh, parameter.placements, src_data_rank=None
    )


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
