"""
Two processes
=============

With ``DistributedDataParallel`` nothing changes: ``KFAC`` takes the rows of all
processes. The result is that of one process with all examples.
"""

import multiprocessing
import socket

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kfac_core_shims.torch import KFAC

STEPS = 20


def train(model, rows_of_step, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    kfac = KFAC(model, lr=optimizer, fisher="exact", **options)
    for step in range(STEPS):
        x = rows_of_step(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
        kfac.step()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    return model.double()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(64, 16, generator=generator, dtype=torch.float64)


# %%
# Each process has half of every batch. ``torchrun`` would start them as well.


def main(rank, port, results):
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    model = DistributedDataParallel(network())
    weights = train(model, lambda step: batch(step)[32 * rank : 32 * rank + 32])
    results.put(weights.tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=main, args=(k, port, results)) for k in (0, 1)]
    for process in processes:
        process.start()
    together = torch.tensor(results.get(), dtype=torch.float64)
    results.get()
    for process in processes:
        process.join()
    alone = train(network(), batch)
    difference = ((together - alone).norm() / alone.norm()).item()
    print(f"relative difference to one process: {difference:.0e}")
    assert difference < 1e-10
