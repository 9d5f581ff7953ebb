"""K-FAC with DistributedDataParallel on several processes, beside one with all rows.

Needs `pip install scikit-learn torch`.  Starts its processes itself, with gloo; with
torchrun only `main` would differ.  What K-FAC adds to the training loop is two lines,
which are numbered in `train`.

DistributedDataParallel averages gradients over processes, not over rows.  With shards of
unequal sizes the loss of a process is therefore its sum, times the number of processes
over that of all rows.
"""

from __future__ import annotations

import datetime
import multiprocessing
import sys
import tempfile

import torch
import torch.distributed as dist
from compared import STEPS, batch, compared, digits, holders_of, options, shard
from torch.nn.parallel import DistributedDataParallel

from kfac_core.distributed import Distributed, connect
from kfac_core_shims.torch import KFAC

RATE, DAMPING, TIMEOUT = 0.3, 0.1, 120.0


def network(dtype):
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 32),
        torch.nn.Tanh(),
        torch.nn.Linear(32, 32),
        torch.nn.Tanh(),
        torch.nn.Linear(32, 10),
    ).to(dtype)


def train(communicator, holders, dtype, wrap=DistributedDataParallel, divided=True):
    """Return the parameters after 20 steps, and the last directions.

    ``wrap`` divides a model among processes; with ``divided`` also the rows are.
    """
    images, labels = (torch.as_tensor(x) for x in digits(dtype))
    model = network(images.dtype)
    options = {"likelihood": "categorical", "fisher": "exact", "lr": RATE}
    options |= {"damping": DAMPING, "update_every": 1, "refresh_every": 5}
    if communicator is None:
        parallel = model
        # Other processes run, which this one does without.
        kfac = KFAC(model, communicator="alone", **options)
    else:
        parallel = wrap(model)
        if holders != "auto":
            options["execution"] = Distributed(
                communicator=communicator, holders=holders, like=images
            )
        # 1. All processes, since `communicator` is left out.
        kfac = KFAC(parallel, **options)
    for step in range(STEPS):
        rows, N, scale = batch(step), len(labels[batch(step)]), 1.0
        if communicator is not None and divided:
            rows = shard(step, communicator.rank, communicator.size)
            scale = communicator.size
        model.zero_grad()
        # A shard may be empty.
        logits = parallel(images[rows])
        loss = torch.nn.functional.cross_entropy(logits, labels[rows], reduction="sum")
        (loss * (scale / N)).backward()
        # 2. The gradients, averaged over the parts of the data, become directions.
        kfac.step()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(RATE * p.grad)
    named = dict(model.named_parameters())
    directions = {name: whole(p.grad).numpy() for name, p in named.items()}
    parameters = {name: whole(p.detach()) for name, p in named.items()}
    if communicator is not None:
        kfac.estimator.check_replicas(parameters=parameters)
    return {name: p.numpy() for name, p in parameters.items()}, directions


def whole(x):
    """Return a tensor with the parts of all processes."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def main(**how):
    """Start the ranks, and exit with 1 if one of them fails."""
    chosen = options(__doc__, holders="auto")
    # What was imported need not be imported by each rank.
    method = "fork" if sys.platform == "linux" else "spawn"
    context = multiprocessing.get_context(method)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=on_a_rank, args=(chosen, rank, folder, how))
            for rank in range(chosen.processes)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    sys.exit(int(any(rank.exitcode for rank in ranks)))


def on_a_rank(chosen, rank, folder, how):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=chosen.processes,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )
    communicator = connect("torch", timeout=TIMEOUT)
    holders = holders_of(chosen.holders)
    try:
        compared(
            lambda: train(communicator, holders, chosen.dtype, **how),
            lambda: train(None, None, chosen.dtype),
            rank=rank,
            size=chosen.processes,
            dtype=chosen.dtype,
        )
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
