"""K-FAC with DistributedDataParallel on several processes, beside one with all rows.

Needs `pip install scikit-learn torch`.  Starts its processes itself, with gloo; with
torchrun only `main` would differ.  What K-FAC adds to the training loop is numbered in
`train`.

DistributedDataParallel averages gradients over processes, not over rows.  With shards of
unequal sizes the loss of a process is therefore its sum, times the number of processes
over that of all rows, and K-FAC is told so by ``loss="ddp"``.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from compared import STEPS, batch, compared, digits, holders_of, options, shard
from torch.nn.parallel import DistributedDataParallel

import kfac_core as kc
from kfac_core.distributed import Distributed, connect

RATE, DAMPING, TIMEOUT = 0.3, 0.1, 30.0


class Recorded:
    """The inputs and output gradients of a model's linear layers, by hooks."""

    def __init__(self, model):
        self.layers = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear)
        }
        self.batches = {}
        for name, module in self.layers.items():
            module.register_forward_hook(functools.partial(self.forward, name))

    def forward(self, name, module, inputs, output):
        x = inputs[0].detach()
        output.register_hook(
            lambda g: self.batches.__setitem__(name, kc.Batch(x, g.detach()))
        )

    def taken(self):
        """Return the batches of the last backward pass, and forget them."""
        batches, self.batches = self.batches, {}
        return batches


def network(dtype):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 32),
        torch.nn.Tanh(),
        torch.nn.Linear(32, 32),
        torch.nn.Tanh(),
        torch.nn.Linear(32, 10),
    ).to(dtype)


def blocks_of(recorded):
    """Return a block of K-FAC for each linear layer."""
    return {
        name: kc.Block(
            kc.Dense(
                in_features=layer.in_features,
                out_features=layer.out_features,
                bias=True,
                weight_layout="oi",
            ),
            kc.Kronecker(),
        )
        for name, layer in recorded.layers.items()
    }


def train(communicator, holders, dtype):
    """Return the parameters after 20 steps, and the last directions."""
    images, labels = (torch.as_tensor(x) for x in digits(dtype))
    model = network(images.dtype)
    recorded = Recorded(model)
    parallel = model if communicator is None else DistributedDataParallel(model)
    blocks = blocks_of(recorded)
    # 1. The estimator is told of the other processes, and how the loss is scaled.
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
        logits = parallel(images[rows])
        loss = torch.nn.functional.cross_entropy(logits, labels[rows], reduction="sum")
        (loss * (scale / N)).backward()
        # 2. This process's own rows; a shard may be empty.
        estimator.update(recorded.taken())
        if step % 5 == 0:
            estimator.refresh()
        # 3. The gradients, which DistributedDataParallel has averaged, become directions.
        gradients = {
            name: {"weight": layer.weight.grad, "bias": layer.bias.grad}
            for name, layer in recorded.layers.items()
        }
        found = estimator.precondition(gradients)
        with torch.no_grad():
            for name, layer in recorded.layers.items():
                for key, direction in found[name].items():
                    layer.get_parameter(key).sub_(RATE * direction)
                    directions[f"{name}.{key}"] = direction.numpy()
    if communicator is not None:
        estimator.check_replicas(parameters=dict(model.named_parameters()))
    parameters = {name: p.detach().numpy() for name, p in model.named_parameters()}
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


def joined(chosen):
    """Join the other processes, and return the communicator."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{chosen.store}",
        rank=chosen.rank,
        world_size=chosen.processes,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )
    return connect("torch", timeout=TIMEOUT)


@contextlib.contextmanager
def ended():
    """Leave the process group at the end."""
    try:
        yield
    finally:
        dist.destroy_process_group()


def start(processes):
    """Start this program once for each rank, and exit with the first failure."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *sys.argv, "--store", f"{folder}/store"]
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank)])
            for rank in range(processes)
        ]
        codes = [rank.wait() for rank in ranks]
    sys.exit(next((1 for code in codes if code), 0))


if __name__ == "__main__":
    main()
