"""What processes send and how long it takes, beside what the cost model predicts.

Run ``python -m benchmarks.predicted``.  For 2 and 4 processes of gloo and of MPI, and for 2
to 16 virtual ranks, the machine's constants are measured first; then the calls and bytes of
an update, a refresh and a step are compared with the prediction exactly, and medians of the
times printed beside it.  Exits with 1 if a call or a byte differs.  Predicted times are of
the messages alone, with nothing else running; on two cores measured ones vary fourfold.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kfac_core as kc
from benchmarks.traffic import NETWORKS, blocks_of
from kfac_core.distributed import (
    Communicator,
    Distributed,
    connect,
    measured_machine,
    predicted_traffic,
    run_ranks,
)

SHAPES = NETWORKS["a transformer block of width 128"]
ROWS, ROUNDS = 8, 5


def measured(communicator: Communicator) -> list[dict[str, Any]]:
    """Return measured and predicted numbers of this rank, by strategy and stage."""
    machine = measured_machine(communicator)
    rng = np.random.default_rng(communicator.rank)
    blocks = blocks_of(SHAPES)
    batches, gradients = {}, {}
    for name, (n, m) in zip(blocks, SHAPES, strict=True):
        x, g = rng.normal(size=(ROWS, n)), rng.normal(size=(ROWS, m))
        batches[name] = kc.Batch(x.astype(np.float32), g.astype(np.float32))
        gradients[name] = {
            "weight": np.ones((n, m), np.float32),
            "bias": np.ones(m, np.float32),
        }
    found = []
    for holders in (1, communicator.size):
        options = Distributed(communicator=communicator, holders=holders)
        estimator = kc.Estimator(
            blocks, reduction="sum", damping=1.0, execution=options
        )
        predicted = predicted_traffic(
            estimator.network,
            options,
            estimator.placement,
            rank=communicator.rank,
            like=np.zeros(1, np.float32),
        )
        stages: dict[str, Callable[[], Any]] = {
            "update": functools.partial(estimator.update, batches),
            "refresh": estimator.refresh,
            "precondition": functools.partial(estimator.precondition, gradients),
        }
        for stage in stages.values():
            stage()
        for name, stage in stages.items():
            seconds = []
            for _ in range(ROUNDS):
                communicator.all_reduce(np.zeros(1)).wait()
                communicator.traffic.reset()
                start = time.perf_counter()
                stage()
                seconds.append(time.perf_counter() - start)
            traffic, expected = communicator.traffic, predicted[name]
            found.append(
                {
                    "holders": holders,
                    "stage": name,
                    "calls": sum(traffic.calls.values()),
                    "bytes": sum(traffic.payload.values()),
                    "as_predicted": traffic.calls == expected.calls
                    and traffic.payload == expected.payload,
                    "seconds": sorted(seconds)[ROUNDS // 2],
                    "predicted_seconds": machine.time(expected, communicator.size),
                }
            )
    return found


def of_gloo(size: int, folder: str) -> None:
    """Run ranks of gloo, as copies of this process."""
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=one_of_gloo, args=(rank, size, folder))
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()


def one_of_gloo(rank: int, size: int, folder: str) -> None:
    """Run one rank of gloo."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    write(connect("torch"), folder)
    dist.destroy_process_group()


def of_mpi(size: int, folder: str) -> None:
    """Run ranks of MPI."""
    beside = Path(sys.executable).with_name("mpirun")
    launcher = str(beside) if beside.exists() else shutil.which("mpirun")
    program = [sys.executable, "-m", "mpi4py", "-m", "benchmarks.predicted"]
    subprocess.run(
        [str(launcher), "-n", str(size), *program, "--folder", folder], check=True
    )


def of_virtual(size: int, folder: str) -> None:
    """Run virtual ranks."""
    run_ranks(size, lambda communicator: write(communicator, folder))


def write(communicator: Communicator, folder: str) -> None:
    """Write what a rank measured."""
    text = json.dumps(measured(communicator))
    Path(folder, f"{communicator.rank}.json").write_text(text)


ENGINES = {"gloo": of_gloo, "mpi": of_mpi, "virtual": of_virtual}


def main() -> int:
    """Print the table; return 1 where a call or a byte differs from the prediction."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="+", choices=[*ENGINES], default=[*ENGINES])
    parser.add_argument("--plot", help="a file to draw the times in")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if chosen.folder:
        write(connect("mpi"), chosen.folder)
        return 0
    good = True
    points: dict[str, list[tuple[float, float]]] = {}
    print(
        "engine   ranks holders stage         calls      bytes  as predicted"
        "   ms measured  predicted"
    )
    for engine in chosen.engines:
        for size in (2, 4, 8, 16) if engine == "virtual" else (2, 4):
            with tempfile.TemporaryDirectory() as folder:
                ENGINES[engine](size, folder)
                files = [Path(folder, f"{rank}.json") for rank in range(size)]
                of_ranks = [json.loads(file.read_text()) for file in files]
            for rows in zip(*of_ranks, strict=True):
                exact = all(row["as_predicted"] for row in rows)
                slowest = max(rows, key=lambda row: row["seconds"])
                times = slowest["seconds"], slowest["predicted_seconds"]
                points.setdefault(engine, []).append(times)
                good = good and exact
                print(
                    f"{engine:8s} {size:5d} {slowest['holders']:7d} "
                    f"{slowest['stage']:12s} {slowest['calls']:6d} "
                    f"{slowest['bytes']:10d}  {'yes' if exact else 'NO':12s} "
                    f"{1e3 * times[0]:12.2f} {1e3 * times[1]:10.2f}"
                )
    if chosen.plot:
        draw(points, chosen.plot)
    return 0 if good else 1


def draw(points: dict[str, list[tuple[float, float]]], file: str) -> None:
    """Draw measured times over predicted ones."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 4), layout="constrained")
    for engine, times in points.items():
        sent = [(1e3 * p, 1e3 * m) for m, p in times if p > 0]
        axes.scatter(*zip(*sent, strict=True), label=engine, s=14)
    axes.set(xscale="log", yscale="log")
    axes.set(
        xlabel="ms predicted, messages alone", ylabel="ms measured, all of a stage"
    )
    axes.axline((1, 1), (10, 10), color="gray", linewidth=0.8)
    axes.legend()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
