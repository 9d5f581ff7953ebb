"""What processes send and how long it takes, beside what the cost model predicts.

Run ``python -m benchmarks.predicted``.  For 2 to 8 processes of gloo, 2 and 4 of MPI, and 2
to 16 virtual ranks, the machine's constants are measured first; then the calls and bytes of
an update, a refresh and a step are compared with the prediction exactly.  Medians of times
are printed beside the prediction: of the whole stage, and of its messages alone, which is
what is predicted.  Exits with 1 if a call or a byte differs.  On two shared cores measured
times vary fourfold.

With ``--memory``, 2 to 8 processes of gloo run four layers of 1,024 neurons.  What the
fullest rank keeps, and the most memory that a rank has during an update, a refresh and a
step beyond what it had before, stand beside the prediction.
"""

from __future__ import annotations

import argparse
import ctypes
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
from benchmarks.plan.exchanges import predicted_traffic
from benchmarks.plan.model import MACHINES, measured_machine, predicted_steps
from benchmarks.traffic import NETWORKS, blocks_of
from kfac_core.array.structure import leaves
from kfac_core.cli.screen import print_table
from kfac_core.distributed import (
    Communicator,
    Distributed,
    Traffic,
    connect,
    run_ranks,
)

SHAPES = NETWORKS["a transformer block of width 128"]
ROWS, ROUNDS = 8, 5
MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of glibc's malloc.h."""


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
            expected = predicted[name]
            alone = functools.partial(exchanged, communicator, expected)
            messages = median(communicator, alone)
            seconds = median(communicator, stage)
            traffic = communicator.traffic
            found.append(
                {
                    "holders": holders,
                    "stage": name,
                    "calls": sum(traffic.calls.values()),
                    "bytes": sum(traffic.payload.values()),
                    "as_predicted": traffic.calls == expected.calls
                    and traffic.payload == expected.payload,
                    "seconds": seconds,
                    "messages": messages,
                    "predicted_seconds": machine.time(expected, communicator.size),
                }
            )
    return found


def remembered(
    communicator: Communicator, *, reduce: Any, holders: int
) -> dict[str, float]:
    """Return measured and predicted megabytes of this rank."""
    # The C library keeps freed arrays below a size that it adapts: fix that size, so that
    # what is measured is what is used.
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 16)
    options = Distributed(communicator=communicator, holders=holders, reduce=reduce)
    # What libraries load at their first call is not the layers'.
    run_blocks(options, 32)
    before = megabytes("VmRSS")
    estimator = run_blocks(options, 1024)
    kept = sum(
        x.nbytes
        for block in estimator.state.blocks.values()
        for part in (block.statistics, block.operator)
        for _, x in leaves(part)
    )
    steps = predicted_steps(
        *(estimator.network, communicator.size),
        machine=MACHINES["gloo"],
        reduce=reduce,
    )
    predicted = next(step for step in steps if step.holders == holders)
    return {
        "kept": kept / 1e6,
        "predicted_kept": predicted.memory / 1e6,
        "peak": megabytes("VmHWM") - before,
        "predicted_peak": predicted.peak / 1e6,
    }


def run_blocks(options: Distributed, width: int) -> kc.Estimator:
    """Return an estimator of four layers after two updates, refreshes and steps."""
    blocks = blocks_of([(width, width)] * 4)
    rng = np.random.default_rng(options.communicator.rank)
    batch = kc.Batch(*rng.normal(size=(2, ROWS, width)).astype(np.float32))
    ones = {
        "weight": np.ones((width, width), np.float32),
        "bias": np.ones(width, np.float32),
    }
    estimator = kc.Estimator(
        blocks,
        reduction="sum",
        damping=1.0,
        execution=options,
        refreshing=kc.Refreshing(keep_matrices=False),
    )
    for _ in range(2):
        estimator.update(dict.fromkeys(blocks, batch))
        estimator.refresh()
        estimator.precondition(dict.fromkeys(blocks, ones))
    return estimator


def megabytes(field: str) -> float:
    """Return a size of this process's memory."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) * 1024 / 1e6


def median(communicator: Communicator, function: Callable[[], Any]) -> float:
    """Return the median of the seconds of calls; the traffic counts the last one."""
    seconds = []
    for _ in range(ROUNDS):
        communicator.all_reduce(np.zeros(1)).wait()
        communicator.traffic.reset()
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[ROUNDS // 2]


def exchanged(communicator: Communicator, traffic: Traffic) -> None:
    """Send messages of as many calls and bytes, with nothing computed."""
    p = communicator.size
    for operation, calls in traffic.calls.items():
        # What one rank sends to each other one is known to that rank alone.
        for _ in range(calls if operation != "all_to_all" else 0):
            part = traffic.payload[operation] // (4 * calls * p)
            counts = [part] * p
            if operation == "all_gather":
                communicator.all_gather(np.zeros(part, np.float32), counts).wait()
            elif operation == "reduce_scatter":
                flat = np.zeros(part * p, np.float32)
                communicator.reduce_scatter(flat, counts).wait()
            else:
                communicator.all_reduce(np.zeros(part * p, np.float32)).wait()


def of_gloo(size: int, folder: str, run: Callable[..., Any] = measured) -> None:
    """Run ranks of gloo, as copies of this process."""
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=one_of_gloo, args=(rank, size, folder, run))
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()


def one_of_gloo(rank: int, size: int, folder: str, run: Callable[..., Any]) -> None:
    """Run one rank of gloo."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    write(connect("torch"), folder, run)
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


def write(
    communicator: Communicator, folder: str, run: Callable[..., Any] = measured
) -> None:
    """Write what a rank measured."""
    text = json.dumps(run(communicator))
    Path(folder, f"{communicator.rank}.json").write_text(text)


ENGINES = {"gloo": of_gloo, "mpi": of_mpi, "virtual": of_virtual}
SIZES = {"gloo": (2, 4, 8), "mpi": (2, 4), "virtual": (2, 4, 8, 16)}


def rows_of(engine: str, size: int) -> list[dict[str, Any]]:
    """Return what the slowest rank measured, by strategy and stage."""
    with tempfile.TemporaryDirectory() as folder:
        ENGINES[engine](size, folder)
        files = [Path(folder, f"{rank}.json") for rank in range(size)]
        of_ranks = [json.loads(file.read_text()) for file in files]
    found = []
    for rows in zip(*of_ranks, strict=True):
        slowest = dict(max(rows, key=lambda row: row["seconds"]))
        slowest["messages"] = max(row["messages"] for row in rows)
        slowest["as_predicted"] = all(row["as_predicted"] for row in rows)
        found.append({"engine": engine, "ranks": size, **slowest})
    return found


def print_memory() -> None:
    """Print what the fullest of ranks of gloo keeps, and its peak."""
    rows = []
    for size in SIZES["gloo"]:
        for reduce, holders in (("refresh", size), ("refresh", 1), ("owner", 1)):
            with tempfile.TemporaryDirectory() as folder:
                run = functools.partial(remembered, reduce=reduce, holders=holders)
                of_gloo(size, folder, run)
                files = [Path(folder, f"{rank}.json") for rank in range(size)]
                of_ranks = [json.loads(file.read_text()) for file in files]
            most = [f"{max(own[key] for own in of_ranks):.1f}" for key in of_ranks[0]]
            rows.append((str(size), reduce, str(holders), *most))
    columns = ("ranks", "reduce", "holders", "MB kept", "predicted", "MB at most")
    print_table("memory of the fullest rank", (*columns, "predicted"), rows)


def table() -> str:
    """Return bytes and times as a table of a page; raise where a byte differs."""
    heads = ["engine", "processes", "holders", "bytes of an update", "of a refresh"]
    heads += [
        "of a step",
        "milliseconds of a refresh's messages",
        "milliseconds predicted",
    ]
    heads += ["milliseconds of a step's messages", "milliseconds predicted"]
    lines = [heads, ["---"] * len(heads)]
    for engine, sizes in SIZES.items():
        for size in sizes:
            rows = rows_of(engine, size)
            for update, refresh, step in zip(*[iter(rows)] * 3, strict=True):
                if not all(r["as_predicted"] for r in (update, refresh, step)):
                    raise RuntimeError(f"{size} of {engine} sent other bytes: {rows}")
                sent = [f"{r['bytes']:,}" for r in (update, refresh, step)]
                times = [
                    f"{1e3 * r[key]:.2f}" if r["calls"] else "-"
                    for r in (refresh, step)
                    for key in ("messages", "predicted_seconds")
                ]
                lines.append([engine, str(size), str(update["holders"]), *sent, *times])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> int:
    """Print the table; return 1 where a call or a byte differs from the prediction."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="+", choices=[*ENGINES], default=[*ENGINES])
    parser.add_argument("--memory", action="store_true", help="compare memory only")
    parser.add_argument("--plot", help="a file to draw the times in")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if chosen.folder:
        write(connect("mpi"), chosen.folder)
        return 0
    if chosen.memory:
        print_memory()
        return 0
    good = True
    points: dict[str, list[tuple[float, float]]] = {}
    print(
        "engine   ranks holders stage         calls      bytes  as predicted"
        "   ms in all   messages  predicted"
    )
    for engine in chosen.engines:
        for size in SIZES[engine]:
            for row in rows_of(engine, size):
                times = row["messages"], row["predicted_seconds"]
                points.setdefault(engine, []).append(times)
                good = good and row["as_predicted"]
                print(
                    f"{engine:8s} {size:5d} {row['holders']:7d} "
                    f"{row['stage']:12s} {row['calls']:6d} {row['bytes']:10d}  "
                    f"{'yes' if row['as_predicted'] else 'NO':12s} "
                    f"{1e3 * row['seconds']:11.2f} {1e3 * times[0]:10.2f} "
                    f"{1e3 * times[1]:10.2f}"
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
    axes.set(xlabel="ms predicted", ylabel="ms measured, of the messages of a stage")
    axes.axline((1, 1), (10, 10), color="gray", linewidth=0.8)
    axes.legend()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
