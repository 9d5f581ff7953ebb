"""K-FAC in NumPy on several processes of MPI, beside one process with all rows.

Needs `pip install scikit-learn mpi4py mpich`.  Starts its processes itself; under your own
launcher it is

    mpirun -n 2 python -m mpi4py docs/examples/distributed/mpi_numpy.py

Every process computes the gradients of its own part of each batch, and adds them up; what
K-FAC does beside that is in `train`, marked by the number of the step.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys

import numpy as np
from compared import STEPS, batch, compared, digits, holders_of, options, shard

import kfac_core as kc
from kfac_core.distributed import Distributed, connect

WIDTHS = (64, 32, 32, 10)
RATE, DAMPING = 0.3, 0.1


def initial(dtype):
    """Return the weights of a network of three layers."""
    rng = np.random.default_rng(1)
    return {
        f"fc{i}": (rng.normal(size=(n + 1, m)) / np.sqrt(n)).astype(dtype)
        for i, (n, m) in enumerate(itertools.pairwise(WIDTHS))
    }


def backpropagated(weights, x, labels):
    """Return each layer's batch and the gradients, of the loss summed over examples."""
    inputs = {}
    for name, W in weights.items():
        inputs[name] = x
        x = x @ W[:-1] + W[-1]
        if name != "fc2":
            x = np.tanh(x)
    p = np.exp(x - x.max(axis=1, keepdims=True, initial=-np.inf))
    g = p / p.sum(axis=1, keepdims=True) - np.eye(10, dtype=x.dtype)[labels]
    batches, gradients = {}, {}
    for name, W in reversed(weights.items()):
        x = inputs[name]
        batches[name] = kc.Batch(x, g)
        gradients[name] = np.concatenate([x.T @ g, g.sum(axis=0)[None]])
        g = (g @ W[:-1].T) * (1.0 - x**2)
    return batches, gradients


def train(communicator, holders, dtype):
    """Return the weights after 20 steps, and the last directions."""
    images, labels = digits(dtype)
    weights = initial(dtype)
    blocks = {
        name: kc.Block(
            kc.Dense(
                in_features=len(W) - 1,
                out_features=W.shape[1],
                bias=True,
                weight_layout="io",
            ),
            kc.Kronecker(),
        )
        for name, W in weights.items()
    }
    # 1. The estimator is told of the other processes.
    execution = None
    if communicator is not None:
        execution = Distributed(communicator=communicator, holders=holders)
    estimator = kc.Estimator(
        blocks, reduction="sum", damping=DAMPING, execution=execution
    )
    directions = {}
    for step in range(STEPS):
        rows = batch(step)
        if communicator is not None:
            rows = shard(step, communicator.rank, communicator.size)
        batches, gradients = backpropagated(weights, images[rows], labels[rows])
        # 2. The gradient of the whole batch, as without K-FAC.
        if communicator is not None:
            flat = np.concatenate([g.reshape(-1) for g in gradients.values()])
            flat = communicator.all_reduce(flat).wait()
            ends = np.cumsum([g.size for g in gradients.values()])[:-1]
            for (name, g), part in zip(
                gradients.items(), np.split(flat, ends), strict=True
            ):
                gradients[name] = part.reshape(g.shape)
        # 3. This process's own rows; a batch may be empty.
        estimator.update(batches)
        if step % 5 == 0:
            estimator.refresh()
        N = len(labels[batch(step)])
        preconditioned = estimator.precondition(
            {
                name: {"weight": g[:-1] / N, "bias": g[-1] / N}
                for name, g in gradients.items()
            }
        )
        for name, parts in preconditioned.items():
            directions[name] = np.concatenate([parts["weight"], parts["bias"][None]])
            weights[name] = weights[name] - RATE * directions[name]
    if communicator is not None:
        estimator.check_replicas(weights=weights)
    return weights, directions


def main():
    chosen = options(__doc__)
    if "PMI_RANK" not in os.environ and "OMPI_COMM_WORLD_RANK" not in os.environ:
        launcher = shutil.which("mpirun")
        here = os.path.join(os.path.dirname(sys.executable), "mpirun")
        launcher = here if os.path.exists(here) else launcher
        if launcher is None:
            sys.exit("no mpirun was found; pip install mpich")
        # With `-m mpi4py` an error on one rank ends all.
        program = [sys.executable, "-m", "mpi4py", *sys.argv]
        command = [launcher, "-n", str(chosen.processes), *program]
        sys.exit(subprocess.run(command, check=False).returncode)
    communicator = connect("mpi", timeout=120.0)
    holders = holders_of(chosen.holders)
    compared(
        lambda: train(communicator, holders, chosen.dtype),
        lambda: train(None, None, chosen.dtype),
        rank=communicator.rank,
        size=communicator.size,
        dtype=chosen.dtype,
    )


if __name__ == "__main__":
    main()
