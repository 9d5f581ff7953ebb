"""What exchanging while computing gains, and that it changes no bit.

Run ``python -m benchmarks.overlap``.  Two processes of gloo (``--processes``) take the same
steps with each of three options and without it; medians of a step's time on the slowest
process are printed side by side, in turns.  Exits with 1 if a bit of the results differs.

* ``overlap=True`` of `KFAC`: statistics are taken, exchanged and factorized in a thread
  while the backward pass of the loss runs.
* `Estimator.start_refresh`: a refresh in a thread, while the next batches are absorbed.
* ``bucket_bytes``: directions are sent as soon as so many bytes are computed.

Where processes share their cores, a thread that computes takes time from the rest, and only
waiting can be hidden.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kfac_core as kc
from kfac_core.distributed import Communicator, Distributed, connect

WIDTH, ROWS, ROUNDS, UPDATES = 256, 64, 9, 3

Results = list[Any]
Step = Callable[[], Results]


def backward(communicator: Communicator, with_it: bool) -> Step:
    """Return a step of `KFAC` beside DistributedDataParallel."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from kfac_core_shims.torch import KFAC

    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(4):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 10))
    called = DistributedDataParallel(model)
    kfac = KFAC(
        *(called,),
        overlap=with_it,
        lr=0.1,
        likelihood="categorical",
        fisher="exact",
        update_every=1,
        refresh_every=1,
    )
    generator = torch.Generator().manual_seed(communicator.rank)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    y = torch.randint(10, (ROWS,), generator=generator)

    def step() -> Results:
        model.zero_grad()
        torch.nn.functional.cross_entropy(called(x), y).backward()
        kfac.step()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad  # type: ignore[operator]
        return [p.detach().numpy() for p in model.parameters()]

    return step


def refresh(communicator: Communicator, with_it: bool) -> Step:
    """Return a refresh and some updates."""
    estimator, batches, gradients = arrays(communicator, bucket_bytes=1 << 25)

    def step() -> Results:
        pending = estimator.start_refresh() if with_it else estimator.refresh()
        for _ in range(UPDATES):
            estimator.update(batches)
        if with_it:
            pending.install()
        return flat(estimator.precondition(gradients))

    return step


def directions(communicator: Communicator, with_it: bool) -> Step:
    """Return the products of a step, in one message or in several."""
    size = WIDTH * WIDTH * 4 if with_it else 1 << 40
    estimator, _, gradients = arrays(communicator, bucket_bytes=size)
    estimator.refresh()
    return lambda: flat(estimator.precondition(gradients))


def arrays(communicator: Communicator, bucket_bytes: int) -> Any:
    """Return an estimator whose owners send directions, its batches and gradients."""
    rng = np.random.default_rng(communicator.rank)
    layer = kc.Dense(
        in_features=WIDTH, out_features=WIDTH, bias=False, weight_layout="io"
    )
    blocks = {f"fc{i}": kc.Block(layer, kc.Kronecker()) for i in range(6)}
    execution = Distributed(
        communicator=communicator, holders=1, bucket_bytes=bucket_bytes
    )
    estimator = kc.Estimator(blocks, reduction="sum", execution=execution)
    batches = {
        name: kc.Batch(
            rng.normal(size=(ROWS, WIDTH)).astype(np.float32),
            rng.normal(size=(ROWS, WIDTH)).astype(np.float32),
        )
        for name in blocks
    }
    common = np.random.default_rng(0)
    gradients = {
        name: {"weight": common.normal(size=(WIDTH, WIDTH)).astype(np.float32)}
        for name in blocks
    }
    estimator.update(batches)
    return estimator, batches, gradients


def flat(directions: Any) -> Results:
    """Return the arrays of directions."""
    return [x for own in directions.values() for x in own.values()]


OPTIONS = {
    "statistics during the backward pass": backward,
    "a refresh during updates": refresh,
    "directions as they are ready": directions,
}


def measured(communicator: Communicator) -> dict[str, Any]:
    """Return the times of this rank by option, and whether results are the same."""
    found = {}
    for name, made in OPTIONS.items():
        steps = [made(communicator, with_it) for with_it in (False, True)]
        for step in steps:
            step()
        seconds: list[list[float]] = [[], []]
        same = True
        for _ in range(ROUNDS):
            results = []
            for step, own in zip(steps, seconds, strict=True):
                communicator.all_reduce(np.zeros(1)).wait()
                start = time.perf_counter()
                results.append(step())
                own.append(time.perf_counter() - start)
            same = same and all(
                np.array_equal(a, b) for a, b in zip(*results, strict=True)
            )
        found[name] = {
            "seconds": [sorted(s)[ROUNDS // 2] for s in seconds],
            "same": same,
        }
    return found


def on_a_rank(rank: int, size: int, folder: str) -> None:
    """Measure on one rank of gloo."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    text = json.dumps(measured(connect("torch")))
    Path(folder, f"{rank}.json").write_text(text)
    dist.destroy_process_group()


def compared(size: int) -> dict[str, tuple[float, float, bool]]:
    """Return the seconds without and with each option, and whether results are the same."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=on_a_rank, args=(rank, size, folder))
            for rank in range(size)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        files = [Path(folder, f"{rank}.json") for rank in range(size)]
        of_ranks = [json.loads(file.read_text()) for file in files]
    found = {}
    for name in OPTIONS:
        without, with_it = (
            max(own[name]["seconds"][k] for own in of_ranks) for k in (0, 1)
        )
        found[name] = without, with_it, all(own[name]["same"] for own in of_ranks)
    return found


def table() -> str:
    """Return the comparison as a table of a page."""
    lines = ["| | milliseconds without | milliseconds with | same bits |"]
    lines.append("| --- | --- | --- | --- |")
    for name, (without, with_it, same) in compared(2).items():
        cells = f"{1e3 * without:.0f} | {1e3 * with_it:.0f} | {'yes' if same else 'no'}"
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def main() -> int:
    """Print the times; return 1 where a result differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    size = parser.parse_args().processes
    found = compared(size)
    print(f"{size} processes of gloo, {os.cpu_count()} cores; milliseconds, medians")
    print(f"{'':38s}without   with  of it  same bits")
    for name, (without, with_it, same) in found.items():
        print(
            f"{name:38s}{1e3 * without:7.1f}{1e3 * with_it:7.1f}{with_it / without:7.2f}"
            f"  {'yes' if same else 'NO'}"
        )
    return 0 if all(same for *_, same in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
