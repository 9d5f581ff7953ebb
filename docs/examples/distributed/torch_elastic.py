"""A run that loses a process goes on with fewer, from its last checkpoint.

Needs `pip install scikit-learn torch`.  Started by itself, the program starts three
processes by torchrun, kills one of them at a random moment, and starts torchrun again on
two; it compares the loss at the end with that of a run that nothing interrupted.  Started
by torchrun it trains, from the last complete checkpoint in the folder if there is one:

    torchrun --nproc-per-node 3 torch_elastic.py --folder run

All processes together take the same batches, whatever their number.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from compared import batch, digits
from torch.distributed import checkpoint
from torch.nn.parallel import DistributedDataParallel

from kfac_core.distributed import connect
from kfac_core_shims.torch import KFAC, DistributedState

STEPS, SAVE_EVERY, RATE, LIMIT = 30, 5, 0.3, 1e-8


def train(folder, communicator):
    """Train from the last checkpoint on, and return the loss of the last batch."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)
    model = torch.nn.Sequential(*layers).double()
    parallel = model if communicator == "alone" else DistributedDataParallel(model)
    rank, size = 0, 1
    if communicator != "alone":
        rank, size = communicator.rank, communicator.size
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    kfac = KFAC(
        parallel,
        likelihood="categorical",
        fisher="exact",
        lr=optimizer,
        update_every=2,
        refresh_every=5,
        communicator=communicator,
    )
    state = {"model": model.state_dict(), "kfac": DistributedState(kfac)}
    # The name of a checkpoint that all processes have written.
    last = Path(folder, "last")
    first = 0
    if last.exists():
        first = int(last.read_text())
        checkpoint.load(state, checkpoint_id=Path(folder, f"step_{first}"))
        model.load_state_dict(state["model"])
    images, labels = (torch.as_tensor(x) for x in digits("float64"))
    for step in range(first, STEPS):
        rows = batch(step)
        # Every `size`-th example, from this process's first on.
        local_rows = slice(rows.start + rank, rows.stop, size)
        optimizer.zero_grad()
        logits = parallel(images[local_rows])
        loss = torch.nn.functional.cross_entropy(
            logits, labels[local_rows], reduction="sum"
        )
        # DistributedDataParallel averages over processes.
        (loss * size / (rows.stop - rows.start)).backward()
        kfac.step()
        optimizer.step()
        if (step + 1) % SAVE_EVERY == 0:
            name = Path(folder, f"step_{step + 1}")
            checkpoint.save(state, checkpoint_id=name)
            if rank == 0:
                written = Path(folder, "writing")
                written.write_text(str(step + 1))
                written.replace(last)
    rows = batch(STEPS - 1)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(images[rows]), labels[rows])
    return float(loss)


def on_a_rank(folder):
    """Train as one of the processes of torchrun."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    communicator = connect("torch", timeout=30.0)
    Path(folder, f"process_{communicator.rank}").write_text(str(os.getpid()))
    loss = train(folder, communicator)
    if communicator.rank == 0:
        Path(folder, "loss").write_text(repr(loss))
    dist.destroy_process_group()


def torchrun(folder, size):
    """Start processes that train."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(size), __file__, "--folder", folder]
    return subprocess.Popen(command)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="where checkpoints are, in a run by torchrun")
    parser.add_argument("--seed", type=int, default=0, help="of the moment")
    arguments = parser.parse_args()
    if arguments.folder is not None:
        on_a_rank(arguments.folder)
        return 0
    rng = random.Random(arguments.seed)
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory() as other,
    ):
        started = torchrun(folder, 3)
        lost = Path(folder, f"process_{rng.randrange(3)}")
        while not lost.exists() and started.poll() is None:
            time.sleep(0.05)
        time.sleep(rng.uniform(0.0, 3.0))
        if started.poll() is None:
            os.kill(int(lost.read_text()), signal.SIGKILL)
        print(f"3 processes ended with {started.wait()}; starting 2", flush=True)
        if torchrun(folder, 2).wait():
            return 1
        reached, expected = (
            float(Path(folder, "loss").read_text()),
            train(other, "alone"),
        )
    error = abs(reached - expected) / expected
    print(f"loss {reached:.6f}, relative difference {error:.1e} (limit {LIMIT:.0e})")
    return int(not error <= LIMIT)


if __name__ == "__main__":
    sys.exit(main())
