"""One rank of a real engine, as a program: exchanges, and ways to fail.

``rank.py ENGINE SCENARIO [RANK SIZE STORE]``; prints what the rank raised as its last line.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time

import numpy as np

import kfac_core as kc
from kfac_core.distributed import (
    Distributed,
    connect,
    execution_for,
    running_processes,
)

TIMEOUT = 2.0
FAILING = 1


def main(engine, scenario, *place):
    if engine == "torch":
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        rank, size, store = place
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=int(rank),
            world_size=int(size),
            timeout=datetime.timedelta(seconds=60),
        )
    communicator = connect(engine, timeout=60.0)
    try:
        SCENARIOS[scenario](communicator)
        said = "fine"
    except Exception as error:
        said = f"{type(error).__name__}: {error}".replace("\n", " ")
        if isinstance(error, KeyError):
            # As a program's own error would.
            raise
    # In one piece, on lines of its own: launchers join what several ranks write.
    sys.stdout.write(f"\nrank {communicator.rank} says {said}\n")
    sys.stdout.flush()
    # A group whose exchange failed cannot be destroyed in order.
    os._exit(0)


def exchanges(communicator):
    """Compare every exchange with NumPy, for parts of unequal lengths."""
    p, own = communicator.size, communicator.rank
    rng = np.random.default_rng(0)
    counts = [3, 0, 5, 2][:p]
    for dtype in ("float64", "float32", "int64"):
        everything = rng.integers(-50, 50, size=(p, sum(counts))).astype(dtype)
        ends = np.cumsum(counts)
        part = slice(int(ends[own]) - counts[own], int(ends[own]))
        handles = {
            "sum": communicator.all_reduce(everything[own]),
            "part": communicator.reduce_scatter(everything[own], counts),
            "all": communicator.all_gather(everything[0, part], counts),
            "one": communicator.broadcast(everything[own], source=p - 1),
        }
        # What rank r has for rank k is r k long; it begins at the r-th number.
        send, receive = [own * k for k in range(p)], [own * k for k in range(p)]
        flat = np.concatenate([everything[own, :1].repeat(n) for n in send])
        handles["each"] = communicator.all_to_all(flat, send, receive)
        expected = {
            "sum": everything.sum(axis=0),
            "part": everything.sum(axis=0)[part],
            "all": everything[0],
            "one": everything[p - 1],
            "each": np.concatenate(
                [everything[k, :1].repeat(n) for k, n in enumerate(receive)]
            ),
        }
        # In another order than they were started in.
        for name in reversed(handles):
            found = handles[name].wait()
            assert found.dtype == dtype, name
            np.testing.assert_array_equal(found, expected[name], err_msg=name)
    groups = [[k for k in range(p) if k % 2 == parity] for parity in (0, 1)]
    half = communicator.split(groups)
    assert half.rank == own // 2
    total = half.all_reduce(np.asarray([float(own)])).wait()
    assert total[0] == sum(groups[own % 2])


def estimator_of(communicator):
    communicator.timeout = TIMEOUT
    layer = kc.Dense(in_features=3, out_features=2, bias=True, weight_layout="io")
    made = kc.Estimator(
        {"fc": kc.Block(layer, kc.Kronecker())},
        reduction="sum",
        execution=Distributed(communicator=communicator),
    )
    made.update(fed(communicator.rank))
    made.refresh()
    return made


def fed(rank):
    rng = np.random.default_rng(rank)
    return {"fc": kc.Batch(rng.normal(size=(4, 3)), rng.normal(size=(4, 2)))}


def noticed(communicator):
    """An estimator of its own is refused, unless it is asked for."""
    assert running_processes()[communicator.name] == communicator.size
    assert execution_for("alone") is None
    named = execution_for(communicator.name, holders="all")
    assert named.communicator.size == communicator.size
    execution_for(None)


def late(communicator):
    """One rank comes long after the timeout of the others."""
    estimator = estimator_of(communicator)
    if communicator.rank == FAILING:
        time.sleep(TIMEOUT + 3.0)
        return
    estimator.update(fed(communicator.rank))


def killed(communicator):
    """One rank is ended by the system."""
    estimator = estimator_of(communicator)
    if communicator.rank == FAILING:
        os.kill(os.getpid(), signal.SIGKILL)
    estimator.update(fed(communicator.rank))


def raises(communicator):
    """One rank raises in its own code."""
    estimator = estimator_of(communicator)
    if communicator.rank == FAILING:
        raise KeyError("in the data")
    estimator.update(fed(communicator.rank))


def nan(communicator):
    """One rank has a row that is not finite; all go on afterwards."""
    estimator = estimator_of(communicator)
    batches = fed(communicator.rank)
    if communicator.rank == FAILING:
        batches["fc"].inputs[0, 0] = np.nan
    try:
        estimator.update(batches)
    finally:
        estimator.update(fed(communicator.rank))
        estimator.check_replicas()


def options(communicator):
    """One rank has another decay."""
    estimator = estimator_of(communicator)
    estimator.decay = 0.5 if communicator.rank == FAILING else 0.95
    estimator.update(fed(communicator.rank))


def ddp(communicator):
    """`KFAC` beside DistributedDataParallel is `KFAC` on one process with all rows."""
    import copy

    import torch
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    from kfac_core_shims.torch import KFAC

    N, size, rank = 12, communicator.size, communicator.rank
    torch.manual_seed(0)
    first = torch.nn.Sequential(
        torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4)
    ).double()
    x = torch.randn(5, N, 5, dtype=torch.float64)
    y = torch.randint(4, (5, N))
    # The rows of rank 0, and of all others together those after it.
    first_rows = [2, 5, 0, 3, 9]

    def own_rows(step):
        ends = [0, first_rows[step], *[N] * (size - 1)]
        return slice(ends[rank], ends[rank + 1])

    def all_rows(step):
        return slice(None)

    def trained(model, called, scale, rows_of, **options):
        kfac = KFAC(
            model,
            likelihood="categorical",
            fisher="exact",
            refresh_every=2,
            **options,
        )
        for step in range(5):
            rows = rows_of(step)
            model.zero_grad()
            z = called(x[step, rows])
            (cross_entropy(z, y[step, rows], reduction="sum") * scale / N).backward()
            kfac.step()
            assert kfac.metrics()["clip"] < 1
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
        return kfac, [p.detach() for p in model.parameters()]

    model = copy.deepcopy(first)
    _, expected = trained(model, model, 1, all_rows, communicator="alone")
    for wrapper_is_given in (True, False):
        model = copy.deepcopy(first)
        called = DistributedDataParallel(model)
        given = called if wrapper_is_given else model
        kfac, found = trained(given, called, size, own_rows)
        for one, other in zip(found, expected, strict=True):
            error = torch.linalg.norm(one - other) / torch.linalg.norm(other)
            assert error < 1e-10, f"relative difference {error}"
        kfac.estimator.check_replicas(parameters=dict(model.named_parameters()))


SCENARIOS = {
    f.__name__: f for f in (exchanges, noticed, late, killed, raises, nan, options, ddp)
}

if __name__ == "__main__":
    main(*sys.argv[1:])
