"""Ranks of a real engine, as a program: exchanges, training, and ways to fail.

``rank.py programs FOLDER COMMANDS`` runs programs of PyTorch, one after the other, and
``rank.py kills FOLDER NUMBER`` kills ranks of the elastic program so many times.
``rank.py torch FOLDER SCENARIO:SIZE ...`` starts so many processes for each scenario, one
scenario after the other; ``mpirun -n P rank.py mpi FOLDER SCENARIO ...`` is one process.
Each rank writes what it has to say into ``FOLDER/SCENARIO_SIZE_RANK``.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import importlib
import itertools
import json
import os
import pickle
import random
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path

import numpy as np

import kfac_core as kc
from conformance_tests.builders.eigenspaces import BOUNDS, Singular
from conformance_tests.builders.tolerances import relative_error
from kfac_core.distributed import (
    Distributed,
    connect,
    execution_for,
    running_processes,
)
from kfac_core.errors import CommunicationError, FactorizationError, ReplicaError

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples" / "distributed"
LOSING = "late", "killed", "raises", "lost"
LIBRARIES = {"by_accelerate": "accelerate", "by_lightning": "lightning"}
TIMEOUT = 2.0
FAILING = 1
# Nothing waits as long, unless the machine has much else to do.
PATIENCE = 240.0


def run(engine, scenario, folder):
    """Write what a scenario says here; return the number of ranks if it failed."""
    communicator = connect(engine, timeout=PATIENCE)
    communicator.folder = folder
    said, failed = "fine", None
    try:
        SCENARIOS[scenario](communicator)
    except Exception as error:
        said = f"{type(error).__name__}: {error}".replace("\n", " ")
        failed = error
    if isinstance(failed, KeyError):
        # As a program's own error would.
        raise failed
    place = folder / f"{scenario}_{communicator.size}_{communicator.rank}"
    # Whole at once: a rank that sees the file may end this one.
    part = place.with_suffix(".part")
    part.write_text(said)
    part.replace(place)
    return 0 if failed is None else communicator.size


def one_of_mpi(folder, scenarios):
    for scenario in scenarios:
        size = run("mpi", scenario, folder)
        if size and scenario in LOSING:
            from mpi4py import MPI

            # A program that lost a rank ends all others: first they have all written.
            deadline = time.monotonic() + 10.0
            names = [f"{scenario}_{size}_{k}" for k in range(size) if k != FAILING]
            while time.monotonic() < deadline and not all(
                (folder / n).exists() for n in names
            ):
                time.sleep(0.02)
            MPI.COMM_WORLD.Abort(1)


def import_torch():
    """Import here what copies of this process then need not import."""
    import torch
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel

    import kfac_core_shims.torch.sharded  # noqa: F401

    torch.set_num_threads(1)


def all_of_torch(folder, scenarios):
    """Start the ranks of each scenario as copies of this process.

    Those whose ranks wait, one after the other, for one that does not come are first, and
    run at the same time.
    """
    import_torch()
    waiting = [wanted for wanted in scenarios if wanted.partition(":")[0] in LOSING]
    others = [[wanted] for wanted in scenarios if wanted not in waiting]
    for together in (waiting, *others):
        ranks = set()
        for wanted in together:
            scenario, _, size = wanted.partition(":")
            if scenario in LIBRARIES:
                importlib.import_module(LIBRARIES[scenario])
            for rank in range(int(size)):
                child = os.fork()
                if not child:
                    one_of_torch(folder, scenario, rank, int(size))
                ranks.add(child)
        deadline = time.monotonic() + PATIENCE
        while ranks:
            for child in list(ranks):
                if os.waitpid(child, os.WNOHANG)[0]:
                    ranks.remove(child)
                elif time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.01)


def programs(folder, commands):
    """Run programs as copies of this process; write what each says, and how it ends."""
    import_torch()
    import sklearn.datasets  # noqa: F401

    codes = []
    for number, command in enumerate(commands):
        child = os.fork()
        if not child:
            with (folder / f"{number}.txt").open("w") as said:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
            one_program(command)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    (folder / "codes.json").write_text(json.dumps(codes))


def kills(folder, number):
    """Kill one of three ranks of the elastic program, and go on with two; repeatedly.

    Write for each time what the survivors said, how long after, and the losses.
    """
    import_torch()
    sys.path.insert(0, str(EXAMPLES))
    import torch_elastic

    expected = torch_elastic.train(folder / "alone", "alone")
    rng, results = random.Random(number), []
    for k in range(number):
        place = folder / f"run_{k}"
        place.mkdir()
        ranks = start_elastic(place, 3)
        while len([*place.glob("started_*")]) < 3:
            time.sleep(0.01)
        # A few runs are hit before their first checkpoint, and a few after the last.
        time.sleep(rng.uniform(0.0, 2.0))
        victim = rng.randrange(3)
        os.kill(ranks[victim], signal.SIGKILL)
        killed = time.time()
        for child in ranks:
            os.waitpid(child, 0)
        said = {}
        for rank in {0, 1, 2} - {victim}:
            file = place / f"said_{rank}"
            text = file.read_text() if file.exists() else "nothing"
            said[rank] = text, file.stat().st_mtime - killed if file.exists() else 0.0
        for child in start_elastic(place, 2):
            os.waitpid(child, 0)
        file = place / "said_0"
        results.append([victim, said, file.read_text(), repr(expected)])
    (folder / "results.json").write_text(json.dumps(results))


def start_elastic(place, size):
    """Start ranks of the elastic program as copies of this process."""
    import torch.distributed as dist
    import torch_elastic

    ranks = []
    for rank in range(size):
        child = os.fork()
        if child:
            ranks.append(child)
            continue
        file = place / f"said_{rank}"
        file.unlink(missing_ok=True)
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{place}/store_{size}",
                rank=rank,
                world_size=size,
                timeout=datetime.timedelta(seconds=PATIENCE),
            )
            communicator = connect("torch", timeout=PATIENCE)
            # PyTorch makes groups until the first step has ended, and waits for as long as
            # it may for a rank that is killed meanwhile.
            torch_elastic.batch = functools.partial(
                noted, torch_elastic.batch, place / f"started_{rank}", itertools.count()
            )
            file.write_text(repr(torch_elastic.train(place, communicator)))
        except Exception as error:
            text = f"{type(error).__name__}: {error}".replace("\n", " ")
            file.write_text(text)
        finally:
            os._exit(0)
    return ranks


def noted(batch, file, calls, step):
    """Return the batch of a step, and note by a file that it is not the first one."""
    if next(calls):
        file.touch()
    return batch(step)


def one_program(command):
    code = 1
    try:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def one_of_torch(folder, scenario, rank, size):
    import torch.distributed as dist

    code = 1
    try:
        with contextlib.suppress(KeyError):
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/store_{scenario}_{size}",
                rank=rank,
                world_size=size,
                timeout=datetime.timedelta(seconds=PATIENCE),
            )
            run("torch", scenario, folder)
            code = 0
    finally:
        # A group whose exchange failed cannot be destroyed in order.
        os._exit(code)


# Exchanges, and what is refused before any.


def exchanges(communicator):
    """Compare every exchange with NumPy, for parts of unequal lengths."""
    p = communicator.size
    for counts in ([3, 0, 5, 2], [9000, 0, 20, 300], [5000, 4900, 5000, 4800]):
        for dtype in ("float64", "float32", "int64"):
            compare_exchanges(communicator, counts[:p], dtype)
        if communicator.name == "torch":
            # As with NCCL, of which no hardware is here.
            communicator.by_shares = True
            compare_exchanges(communicator, counts[:p], "float64")
            communicator.by_shares = False
    half = [[k for k in range(p) if k % 2 == parity] for parity in (0, 1)]
    group = communicator.split(half)
    assert group.rank == communicator.rank // 2
    total = group.all_reduce(np.asarray([float(communicator.rank)])).wait()
    assert total[0] == sum(half[communicator.rank % 2])
    # A group that does not begin at the first rank, of which the second has all.
    lengths = [0] * (group.size - 1) + [6000]
    mine = np.full(lengths[group.rank], communicator.rank, float)
    gathered = group.all_gather(mine, lengths).wait()
    assert (gathered == half[communicator.rank % 2][-1]).all()
    part = group.reduce_scatter(np.ones(6000), lengths).wait()
    assert part.shape == (lengths[group.rank],)
    assert (part == group.size).all()


def compare_exchanges(communicator, counts, dtype):
    p, own = communicator.size, communicator.rank
    rng = np.random.default_rng(0)
    everything = rng.integers(-50, 50, size=(p, sum(counts))).astype(dtype)
    ends = np.cumsum(counts)
    part = slice(int(ends[own]) - counts[own], int(ends[own]))
    handles = {
        "sum": communicator.all_reduce(everything[own]),
        "sum in place": communicator.all_reduce(everything[own].copy(), overwrite=True),
        "part": communicator.reduce_scatter(everything[own], counts),
        "all": communicator.all_gather(everything[0, part], counts),
    }
    # What rank r has for rank k is r k long; it begins at the r-th number.
    send, receive = [own * k for k in range(p)], [own * k for k in range(p)]
    flat = np.concatenate([everything[own, :1].repeat(n) for n in send])
    handles["each"] = communicator.all_to_all(flat, send, receive)
    expected = {
        "sum": everything.sum(axis=0),
        "sum in place": everything.sum(axis=0),
        "part": everything.sum(axis=0)[part],
        "all": everything[0],
        "each": np.concatenate(
            [everything[k, :1].repeat(n) for k, n in enumerate(receive)]
        ),
    }
    # In another order than they were started in.
    for name in reversed(handles):
        found = handles[name].wait()
        assert found.dtype == dtype, name
        np.testing.assert_array_equal(found, expected[name], err_msg=name)


def owned(communicator):
    """Memory beyond 16 MB that one rank owns, while all get them or they are added up."""
    import torch

    block, owner = torch.randn(1 << 22), communicator.size - 1
    counts = [block.numel() if k == owner else 0 for k in range(communicator.size)]
    part = block if communicator.rank == owner else block[:0]
    # What the first exchanges load is no message.
    compare_exchanges(communicator, [9000, *[0] * (communicator.size - 1)], "float32")
    for exchange in (
        lambda: communicator.all_gather(part, counts),
        lambda: communicator.reduce_scatter(block, counts),
    ):
        Path("/proc/self/clear_refs").write_text("5")
        before = peak_memory()
        exchange().wait()
        grown = peak_memory() - before
        assert grown <= 20.0, f"{grown} MB"


def peak_memory():
    """Return the most memory that this process had, in MB."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def noticed(communicator):
    """An estimator of its own is refused, unless it is asked for."""
    assert running_processes()[communicator.name] == communicator.size
    assert execution_for("alone") is None
    named = execution_for(communicator.name, holders="all")
    assert named.communicator.size == communicator.size
    # No rank ends before all have the group that was made here.
    named.communicator.all_reduce(np.zeros(1)).wait()
    execution_for(None)


# Failures.


LAYER = kc.Dense(in_features=3, out_features=2, bias=True, weight_layout="io")
BLOCKS = {"fc": kc.Block(LAYER, kc.Kronecker())}


def estimator_of(communicator, *, rows=True):
    execution = Distributed(communicator=communicator, like=np.zeros(1))
    made = kc.Estimator(BLOCKS, reduction="sum", execution=execution)
    if rows:
        made.update(fed(communicator.rank))
        made.refresh()
    return made


def fed(rank):
    rng = np.random.default_rng(rank)
    return {"fc": kc.Batch(rng.normal(size=(4, 3)), rng.normal(size=(4, 2)))}


def late(communicator):
    """One rank comes long after the timeout of the others."""
    estimator = estimator_of(communicator)
    communicator.timeout = TIMEOUT
    if communicator.rank == FAILING:
        time.sleep(TIMEOUT + 3.0)
        return
    estimator.update(fed(communicator.rank))


def killed(communicator):
    """One rank is ended by the system while the others wait."""
    estimator = estimator_of(communicator)
    communicator.timeout = TIMEOUT
    if communicator.rank == FAILING:
        os.kill(os.getpid(), signal.SIGKILL)
    estimator.update(fed(communicator.rank))


def raises(communicator):
    """One rank raises in its own code."""
    estimator = estimator_of(communicator)
    communicator.timeout = TIMEOUT
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


def code(communicator):
    """One rank runs other code of the library."""
    from kfac_core.distributed import partition

    own = partition.code_digests
    if communicator.rank == FAILING:
        partition.code_digests = lambda: {**own(), "kfac_core_shims": "other"}
    try:
        estimator_of(communicator)
    finally:
        partition.code_digests = own


def unlike(communicator):
    """One rank makes KFAC with another option, or comes to another stage of a step."""
    import torch

    other = communicator.rank == FAILING
    for name, value in (
        ("reduction", "sum" if other else "mean"),
        ("likelihood", "gaussian" if other else "categorical"),
        ("overlap", other),
        ("update_every", 3 if other else 2),
        ("refresh_every", 3 if other else 2),
    ):
        with soon_raises(ReplicaError, f"Rank 1 differs from rank 0 in `{name}`"):
            kfac_of(network(), **{name: value})
    # Functions of the step are compared at each step, before anything is sent.
    for name, what in (
        ("update_every", "with statistics"),
        ("refresh_every", "a refresh"),
        ("bases_every", "bases"),
    ):
        execution = Distributed(
            communicator=communicator,
            holders=1,
            like=torch.zeros(1, dtype=torch.float64),
        )
        every = {name: lambda step: 3 if other else 2}
        kfac = kfac_of(network(), execution=execution, **every)
        with soon_raises(ReplicaError, f"Rank 0 is at '{what}: True"):
            trained(kfac, kfac.model)
        assert kfac.steps == 2
    with soon_raises(CommunicationError, "Rank 1 divides the ranks into other groups"):
        communicator.split([[0], [1]] if other else [[0, 1]])


@contextlib.contextmanager
def soon_raises(error, text):
    start, said = time.monotonic(), "nothing was raised"
    try:
        yield
    except error as raised:
        said = str(raised)
    assert text in said, f"{text}: {said}"
    assert time.monotonic() - start < 10.0


# A run that loses a rank, with NumPy, and the one that goes on.


def stepped(estimator, own_rows, steps, weight):
    """Return the weights after some steps; the gradient is that of all rows."""
    rng = np.random.default_rng(7)
    x, g = rng.normal(size=(STEPS, ROWS, 3)), rng.normal(size=(STEPS, ROWS, 2))
    for step in steps:
        rows = own_rows(step)
        estimator.update({"fc": kc.Batch(x[step, rows], g[step, rows])})
        if step % 2 == 0:
            estimator.refresh()
        gradient = {"weight": x[step].T @ g[step] + weight, "bias": g[step].sum(axis=0)}
        weight = weight - 0.1 * estimator.precondition({"fc": gradient})["fc"]["weight"]
    return weight


def shares(communicator):
    """Each rank keeps its part, as no program should."""
    estimator = estimator_of(communicator)
    name = f"part_{communicator.rank}.pickle"
    (communicator.folder / name).write_bytes(pickle.dumps(estimator.state))


def foreign(communicator):
    """Fewer ranks go on with the parts of three."""
    estimator = estimator_of(communicator)
    name = f"part_{communicator.rank}.pickle"
    estimator.state = pickle.loads((communicator.folder / name).read_bytes())
    estimator.update(fed(communicator.rank))


def lost(communicator):
    """Write a checkpoint after the third step, and lose a rank in the fourth."""
    estimator = estimator_of(communicator, rows=False)
    weight = stepped(
        estimator, lambda k: rows_of(communicator, k), range(3), np.zeros((3, 2))
    )
    # All ranks save, since the state is of all; one file is enough.
    place = communicator.folder / f"lost_{communicator.rank}"
    kc.save_checkpoint(place.with_suffix(".npz"), estimator)
    np.save(place.with_suffix(".npy"), weight)
    communicator.all_reduce(np.zeros(1)).wait()
    communicator.timeout = TIMEOUT
    if communicator.rank == FAILING:
        os.kill(os.getpid(), signal.SIGKILL)
    stepped(estimator, lambda k: rows_of(communicator, k), range(3, STEPS), weight)


def regained(communicator):
    """Go on from that checkpoint, on any number of ranks: the run that would have been."""
    alone = kc.Estimator(BLOCKS, reduction="sum")
    expected = stepped(alone, all_rows, range(STEPS), np.zeros((3, 2)))
    estimator = estimator_of(communicator, rows=False)
    kc.load_checkpoint(communicator.folder / "lost_0.npz", estimator)
    saved = np.load(communicator.folder / "lost_0.npy")
    found = stepped(
        estimator, lambda k: rows_of(communicator, k), range(3, STEPS), saved
    )
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < 1e-13, f"relative difference {error}"
    # The row that must differ: without the checkpoint it is another run.
    fresh = kc.Estimator(BLOCKS, reduction="sum")
    fresh.update({"fc": kc.Batch(np.ones((1, 3)), np.ones((1, 2)))})
    fresh.refresh()
    other = stepped(fresh, all_rows, range(3, STEPS), saved)
    assert np.linalg.norm(other - expected) > 1e-3 * np.linalg.norm(expected)


# Training with PyTorch.

ROWS, STEPS = 12, 5
FIRST_ROWS = [2, 5, 0, 3, 9]
"""The rows of rank 0 at each step; the next rank has those after it."""


def network():
    import torch

    torch.manual_seed(0)
    layers = torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4)
    return torch.nn.Sequential(*layers).double()


def data():
    import torch

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, ROWS, 5, dtype=torch.float64, generator=generator)
    return x, torch.randint(4, (STEPS, ROWS), generator=generator)


def rows_of(communicator, step):
    ends = [0, FIRST_ROWS[step], *[ROWS] * (communicator.size - 1)]
    return slice(ends[communicator.rank], ends[communicator.rank + 1])


def all_rows(step):
    return slice(None)


def kfac_of(model, **options):
    from kfac_core_shims.torch import KFAC

    settings = {"likelihood": "categorical", "fisher": "exact"}
    settings |= {"update_every": 1, "refresh_every": 2, "kl_clip": 1e-5, "lr": 0.1}
    return KFAC(model, **settings | options)


def trained(
    kfac,
    called,
    own_rows=all_rows,
    scale=1,
    steps=range(STEPS),
    examples=None,
    *,
    count_votes=False,
):
    """Return the parameters after some steps of K-FAC."""
    import torch

    x, y = examples or data()
    for step in steps:
        rows = own_rows(step)
        kfac.model.zero_grad()
        z = called(x[step, rows])
        labels = y[step, rows].reshape(-1)
        loss = torch.nn.functional.cross_entropy(
            z.flatten(0, -2), labels, reduction="sum"
        )
        (loss * scale / y[step].numel()).backward()
        before = votes_of(kfac)
        kfac.step()
        if count_votes:
            assert votes_of(kfac) == before + 1, f"votes of step {step}"
        assert kfac.metrics()["clip"] < 1
        descend(kfac.model)
    return parameters_of(kfac.model)


def votes_of(kfac):
    """Return how many sums over all processes K-FAC has waited for."""
    if kfac.communicator is None:
        return 0
    return kfac.communicator.traffic.calls["all_reduce"]


def descend(model):
    import torch

    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad


def parameters_of(model):
    return [whole(p.detach()).clone() for p in model.parameters()]


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def require_close(found, expected):
    import torch

    for one, other in zip(found, expected, strict=True):
        error = torch.linalg.norm(one - other) / torch.linalg.norm(other)
        assert error < 1e-13, f"relative difference {error}"


def ddp(communicator):
    """`KFAC` beside DistributedDataParallel is `KFAC` on one process with all rows."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = network()
    expected = trained(kfac_of(model, communicator="alone"), model)
    runs = []
    for overlap in (False, True):
        model = network()
        called = DistributedDataParallel(model)
        # The wrapper need not be given.
        kfac = kfac_of(model if overlap else called, overlap=overlap)
        runs.append(trained(kfac, called, *of_ranks(communicator)))
        require_close(runs[-1], expected)
        kfac.estimator.check_replicas(parameters=dict(model.named_parameters()))
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)
    # Owners factorize during the next step, and all replace operators together.
    model = network()
    called = DistributedDataParallel(model)
    kfac = kfac_of(called, refresh_lag=1)
    trained(kfac, called, *of_ranks(communicator))
    assert kfac.metrics()["operator_age"] == STEPS - 2
    kfac.estimator.check_replicas(parameters=dict(model.named_parameters()))


def soap(communicator):
    """`SOAP` beside DistributedDataParallel is `SOAP` on one process with all rows."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from kfac_core_shims.torch import SOAP

    # A step in a direction without variance is roundoff, divided by eps.
    new_soap = functools.partial(SOAP, eps=1e-8)
    x, y = data()

    def run(optimizer, model, called, mine, scale):
        for step in range(STEPS):
            optimizer.zero_grad()
            z = called(x[step, mine])
            loss = torch.nn.functional.cross_entropy(z, y[step, mine], reduction="sum")
            (loss * scale).backward()
            optimizer.step()
        return parameters_of(model)

    model = network()
    # A group of this process alone: all others take part in making each.
    groups = [torch.distributed.new_group([i]) for i in range(communicator.size)]
    alone = new_soap(model, process_group=groups[communicator.rank])
    expected = run(alone, model, model, slice(None), 1)
    for is_given in (False, True):
        model = network()
        called = DistributedDataParallel(model)
        optimizer = new_soap(called if is_given else model)
        mine = rows_of(communicator, 0)
        got = run(optimizer, model, called, mine, communicator.size)
        # Bases of close eigenvalues amplify the order of additions.
        for one, other in zip(got, expected, strict=True):
            assert torch.linalg.norm(one - other) < 1e-7 * torch.linalg.norm(other)

    class Choosing(torch.nn.Module):
        """Two layers of one input, of which each process uses one or both."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = (torch.nn.Linear(6, 4).double() for _ in range(2))

        def forward(self, x, *, both):
            return self.a(x).tanh() + self.b(x) if both else self.a(x).tanh()

    def loss_on(rank, called):
        x = torch.linspace(-1.0, 1.0, 60, dtype=torch.float64).reshape(10, 6) ** (
            1 + rank
        )
        return (called(x.sin(), both=rank > 0) - 1).square().mean()

    ranks, size = range(communicator.size), communicator.size
    alone, shared = Choosing(), Choosing()
    called = DistributedDataParallel(shared, find_unused_parameters=True)
    steppers = (
        new_soap(alone, process_group=groups[communicator.rank]),
        new_soap(called),
    )
    for _ in range(STEPS):
        for optimizer in steppers:
            optimizer.zero_grad()
        (sum(loss_on(rank, alone) for rank in ranks) / size).backward()
        loss_on(communicator.rank, called).backward()
        for optimizer in steppers:
            optimizer.step()
    pairs = zip(parameters_of(shared), parameters_of(alone), strict=True)
    for one, other in pairs:
        assert torch.linalg.norm(one - other) < 1e-7 * torch.linalg.norm(other)


def singular(communicator):
    """EKFAC of fewer rows than columns, with sums in either dtype, is the dense one."""
    problem = Singular.drawn(np.random.default_rng(7))
    for storage, reduce in itertools.product(BOUNDS, ("refresh", "owner")):
        execution = Distributed(communicator=communicator, reduce=reduce, holders=1)
        found = problem.direction(communicator, storage, execution)
        error = relative_error(found, problem.expected())
        assert error < BOUNDS[storage], f"{storage}, {reduce}: {error}"


def gauss_newton(communicator):
    """`GaussNewton` takes the steps of one process with all points."""
    import torch

    from kfac_core_shims.torch import GaussNewton

    x, y = data()

    def run(share, *, minibatch, **options):
        model = network()
        optimizer = GaussNewton(
            model, likelihood="categorical", minibatch=minibatch, **options
        )
        losses = []
        for step in range(STEPS):
            batch = step if minibatch else 0, share(step)
            losses.append(optimizer.step(lambda at=batch: (model(x[at]), y[at])))
        return [*parameters_of(model), torch.stack(losses)]

    # Shares change from step to step, and a third process has no points.
    def share(step):
        return rows_of(communicator, step)

    for minibatch in (False, True):
        expected = run(all_rows, minibatch=minibatch, communicator="alone")
        got = run(share, minibatch=minibatch)
        for one, other in zip(got, expected, strict=True):
            assert torch.linalg.norm(one - other) < 1e-10 * torch.linalg.norm(other)
    # An error of one process alone, where a step begins and at a trial.
    model, last = network(), communicator.size - 1
    optimizer = GaussNewton(model)
    for failing in (1, 2):
        before, calls = parameters_of(model), itertools.count(1)

        def residuals(failing=failing, calls=calls):
            if next(calls) == failing and communicator.rank == last:
                raise ValueError("alone")
            return model(x[0, share(0)])

        kind = ValueError if communicator.rank == last else CommunicationError
        with soon_raises(kind, "alone"):
            optimizer.step(residuals)
        require_close(parameters_of(model), before)


def stepped_by_kfac(communicator):
    """KFACOptimizer on two processes with unequal shards takes the steps of one."""
    model = network()
    expected = optimized(model, optimizer_of(model), all_rows, 1)
    called, optimizer = optimizer_on(communicator)
    with soon_raises(ValueError if communicator.rank else CommunicationError, "alone"):
        optimizer.step(failing_at(2, called, communicator))
    found = optimized(called, optimizer, *of_ranks(communicator))
    require_close(found, expected)


def failing_at(number, called, communicator):
    """Return a closure whose call of some number raises on the last rank."""
    import torch

    x, y = data()
    rows, calls = rows_of(communicator, 0), itertools.count(1)

    def closure():
        z = called(x[0, rows])
        if next(calls) == number and communicator.rank == communicator.size - 1:
            raise ValueError("alone")
        return torch.nn.functional.cross_entropy(z, y[0, rows])

    return closure


def of_ranks(communicator):
    return lambda k: rows_of(communicator, k), communicator.size


def optimizer_of(called, **options):
    from kfac_core_shims.torch import KFACOptimizer

    settings = {"likelihood": "categorical", "fisher": "exact"}
    return KFACOptimizer(called, **settings | options)


def optimizer_on(communicator):
    """Return a wrapped model, and an optimizer whose states have owned blocks alone."""
    from torch.nn.parallel import DistributedDataParallel

    called = DistributedDataParallel(network())
    like = next(called.parameters()).detach()
    execution = Distributed(communicator=communicator, like=like)
    return called, optimizer_of(called, execution=execution, owned_state=True)


def optimized(called, optimizer, own_rows, scale, steps=range(STEPS)):
    """Return the parameters after some steps of KFACOptimizer."""
    import torch

    x, y = data()
    for step in steps:
        rows = own_rows(step)

        def closure(rows=rows, step=step):
            z = called(x[step, rows])
            loss = torch.nn.functional.cross_entropy(z, y[step, rows], reduction="sum")
            return loss * scale / ROWS

        optimizer.step(closure)
    return parameters_of(called)


def apart(communicator):
    """What a program exchanges meanwhile is not taken for what `connect` made exchanges."""
    import torch
    import torch.distributed as dist

    own, others = torch.ones(3, dtype=torch.float64), torch.ones(5)
    # In another order on each rank, as after a step that one of them left out.
    if communicator.rank:
        waiting = dist.all_reduce(others, async_op=True)
        found = communicator.all_reduce(own)
    else:
        found = communicator.all_reduce(own)
        waiting = dist.all_reduce(others, async_op=True)
    waiting.wait()
    assert float(found.wait().sum()) == 3 * communicator.size
    assert float(others.sum()) == 5 * communicator.size


def halves(communicator):
    """Two models, each on some of the processes, train at the same time."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    groups = [[0], [1, 2]]
    made = [dist.new_group(ranks) for ranks in groups]
    place = int(communicator.rank > 0)
    model = network()
    expected = trained(kfac_of(model, communicator="alone"), model)
    own = communicator.split(groups)
    model = network()
    called = DistributedDataParallel(model, process_group=made[place])
    kfac = kfac_of(called, communicator=own)

    def rows(step):
        return rows_of(own, step) if place else all_rows(step)

    require_close(trained(kfac, called, rows, own.size), expected)
    require_close(trained(*of_mesh(own, made[place]), rows, own.size), expected)
    try:
        if not place:
            # Without a word K-FAC takes all processes, and their average is another.
            kfac_of(called)
    finally:
        # The first process has the store that the others still need.
        dist.barrier()


def of_mesh(communicator, group):
    """A model that `fully_shard` divides among the processes of a group."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model = network()
    # Meshes of other ranks on each process would make groups of one name, which hang.
    mesh = DeviceMesh.from_group(group, "cpu")
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    return kfac_of(model, communicator=communicator), model


def joined(communicator):
    """Processes without batches answer to nothing but DistributedDataParallel."""
    from torch.nn.parallel import DistributedDataParallel

    model = network()
    called = DistributedDataParallel(model)
    kfac = kfac_of(called)
    with called.join():
        trained(kfac, called, *of_ranks(communicator))


def alone_beside_others(communicator):
    """Averages over all processes, and the statistics of one."""
    from torch.nn.parallel import DistributedDataParallel

    kfac_of(DistributedDataParallel(network()), communicator="alone")


def in_part(communicator):
    """Gradients of layers outside of `fully_shard` are those of each process's rows."""
    from torch.distributed.fsdp import fully_shard

    model = network()
    fully_shard(model[0])
    kfac = kfac_of(model)
    trained(kfac, model, *of_ranks(communicator))


def passes(communicator):
    """Passes that are differentiated, and not cleared, count; so do those observed.

    Parameters are divided by `fully_shard`, and a rank has no rows in a step.
    """
    import torch
    from torch.distributed.fsdp import fully_shard

    x, y = data()

    def run(model, p, own_rows, loop, **options):
        # Steps that are long enough for what is counted to show.
        kfac = kfac_of(model, kl_clip=0.05, **options)

        def differentiate(rows, by_hand=False):
            labels = y[step, rows]
            z = model(x[step, rows])
            if by_hand:
                kfac.observe(z)
            loss = torch.nn.functional.cross_entropy(z, labels, reduction="sum")
            (loss * p / ROWS).backward()

        for step in range(STEPS):
            loop(model, kfac, own_rows(step), differentiate)
            kfac.step()
            descend(model)
        return parameters_of(model)

    def cleared(model, kfac, rows, differentiate):
        with torch.no_grad():
            for p in model.parameters():
                p += 0.1
        differentiate(rows)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1
        model.zero_grad()
        differentiate(rows)

    def once(model, kfac, rows, differentiate):
        model.zero_grad()
        differentiate(rows)

    def in_two(model, kfac, rows, differentiate):
        model.zero_grad()
        for last, part in enumerate(halved(rows)):
            # Gradients are exchanged after the second alone.
            model.set_requires_gradient_sync(bool(last))
            differentiate(part)

    def put_back(model, kfac, rows, differentiate):
        total = [torch.zeros_like(p) for p in model.parameters()]
        for part in halved(rows):
            model.zero_grad()
            differentiate(part, by_hand=True)
            total = [t + p.grad for t, p in zip(total, model.parameters(), strict=True)]
        for p, t in zip(model.parameters(), total, strict=True):
            p.grad = t

    def halved(rows):
        middle = (rows.start + rows.stop) // 2
        return slice(rows.start, middle), slice(middle, rows.stop)

    size = communicator.size
    for fisher, of_one, of_several in (
        *(("exact", cleared, cleared), ("exact", once, in_two)),
        *(("exact", once, put_back), ("empirical", once, once)),
    ):
        alone = {"fisher": fisher, "communicator": "alone"}
        expected = run(network(), 1, all_rows, of_one, **alone)
        model = network()
        for module in (model[0], model[2], model):
            fully_shard(module)
        found = run(
            *(model, size, lambda k: rows_of(communicator, k), of_several),
            fisher=fisher,
        )
        require_close(found, expected)


def of_tokens():
    """A model of tokens with several kinds of layers, and its examples."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(9, 5),
        nn.LayerNorm(5),
        nn.Linear(5, 7),
        nn.Tanh(),
        nn.Linear(7, 6),
        nn.Tanh(),
        nn.Linear(6, 4),
    ).double()
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(9, (STEPS, ROWS, 3), generator=generator)
    return model, (x, torch.randint(4, (STEPS, ROWS, 3), generator=generator))


def sharded(model, **options):
    """Return a model whose parameters `fully_shard` divides."""
    from torch.distributed.fsdp import fully_shard

    for module in model:
        if [*module.parameters()]:
            fully_shard(module, **options)
    return fully_shard(model, **options)


def meshes(communicator):
    """Meshes of two dimensions: replicas of shards, and shards of tensor parallelism."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    first, examples = of_tokens()
    shape = (2, communicator.size // 2)
    runs = {}
    for fisher in ("exact", "empirical"):
        model = copy.deepcopy(first)
        alone = kfac_of(model, communicator="alone", fisher=fisher)
        runs[fisher] = trained(alone, model, examples=examples)

    def parts_of(place, number):
        """Return the rows of one of several processes, some of which may have none."""
        ends = [0, 2, 2, *range(4, ROWS, 2)][:number]

        def rows(step):
            return slice(ends[place], [*ends[1:], ROWS][place])

        return rows

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = sharded(copy.deepcopy(first), mesh=mesh)
    rows = parts_of(communicator.rank, communicator.size)
    found = trained(
        *(kfac_of(model), model, rows, communicator.size), examples=examples
    )
    require_close(found, runs["exact"])

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    columns = ColwiseParallel(use_local_output=False)
    kinds = [("exact", 2), ("empirical", 2)]
    # PyTorch's loss_parallel needs a class on each process.
    if communicator.size <= 4:
        kinds += [("exact", 1), ("empirical", 1)]
    for fisher, dp in kinds:
        model = copy.deepcopy(first)
        tp = mesh["tp"] if dp == 2 else init_device_mesh("cpu", (communicator.size,))
        parallelize_module(model, tp, {"2": columns, "4": RowwiseParallel()})
        context = contextlib.nullcontext()
        if dp == 2:
            sharded(model, mesh=mesh["dp"])
        else:
            # The loss reads logits that lie on all processes.
            parallelize_module(model, tp, {"6": columns})
            context = loss_parallel()
        rows = parts_of(mesh.get_local_rank("dp"), 2) if dp == 2 else all_rows
        kfac = kfac_of(model, fisher=fisher)
        assert len(kfac.estimator.blocks) == 5
        with context:
            found = trained(kfac, model, rows, dp, examples=examples)
        require_close(found, runs[fisher])


def divided(communicator):
    """Parameters that `fully_shard` or tensor parallelism divides among processes."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    first, examples = of_tokens()
    model = copy.deepcopy(first)
    alone = kfac_of(model, communicator="alone")
    expected = trained(alone, model, examples=examples)

    model = sharded(copy.deepcopy(first))
    refreshing = kc.Refreshing(keep_matrices=False, failure_budget=1)
    kfac = kfac_of(model, refreshing=refreshing)
    assert len(kfac.estimator.blocks) == 5
    found = trained(
        kfac, model, *of_ranks(communicator), examples=examples, count_votes=True
    )
    require_close(found, expected)
    # An owner holds the operators of its blocks alone.
    held = [
        name
        for name, own in kfac.estimator.state.blocks.items()
        if type(own.operator).__name__ != "RemoteOperator"
    ]
    assert held == kfac.estimator.placement.owned_by(communicator.rank)

    # Factorizations that fail on their owners keep the operators, on all.
    partition = kfac.estimator._executor.partition
    inner = partition.inner

    def failing(stage, tasks):
        if stage.name != "refresh":
            return inner(stage, tasks)
        return dict.fromkeys(tasks, FactorizationError("not positive"))

    partition.inner = failing
    alone.refresh_every, kfac.refresh_every = 100, 1
    expected_later = trained(alone, alone.model, steps=[0], examples=examples)
    found = trained(kfac, model, *of_ranks(communicator), [0], examples)
    require_close(found, expected_later)
    assert all(block.failures == 1 for block in kfac.estimator.state.blocks.values())

    # Bases of EKFAC are on the owners of their blocks alone.
    options = {
        "approximations": {torch.nn.Linear: kc.EKFAC()},
        "bases_every": 2,
        "positions": "separate",
    }
    model = copy.deepcopy(first)
    alone = kfac_of(model, communicator="alone", **options)
    expected_of_ekfac = trained(alone, model, examples=examples)
    model = sharded(copy.deepcopy(first))
    kfac = kfac_of(model, **options)
    found = trained(
        kfac, model, *of_ranks(communicator), examples=examples, count_votes=True
    )
    require_close(found, expected_of_ekfac)
    for name, own in kfac.estimator.state.blocks.items():
        owned = kfac.estimator.placement.owners[name] == communicator.rank
        assert own.statistics.lacks_bases != (owned or not own.statistics.bases)

    model = copy.deepcopy(first)
    columns = ColwiseParallel(use_local_output=False)
    plan = {"2": columns, "4": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (communicator.size,)), plan)
    found = trained(kfac_of(model), model, examples=examples, count_votes=True)
    require_close(found, expected)


# Checkpoints.


def interrupted(communicator):
    """Write a checkpoint at the third step, and lose a rank at the fourth."""
    from torch.distributed import checkpoint

    model = network()
    kfac, called = wrapped(communicator, model)
    trained(kfac, called, *of_ranks(communicator), steps=range(3))
    state = saved(model, kfac)
    called, optimizer = optimizer_on(communicator)
    optimized(called, optimizer, *of_ranks(communicator), steps=range(3))
    state |= saved_optimizer(called, optimizer)
    checkpoint.save(state, checkpoint_id=communicator.folder / "saved")
    # The owner of each layer has written it.
    reader = checkpoint.FileSystemReader(communicator.folder / "saved")
    files = {
        index.fqn: stored.relative_path
        for index, stored in reader.read_metadata().storage_data.items()
    }
    owners = kfac.estimator.placement.owners
    for name, owner in owners.items():
        for entry in (
            f"kfac.blocks.{name}",
            f"optimizer.state.{name}.weight.curvature.{name}",
        ):
            assert files[entry].startswith(f"__{owner}_"), files
    communicator.timeout = TIMEOUT
    if communicator.rank == FAILING:
        os.kill(os.getpid(), signal.SIGKILL)
    # Without gradients, so that it is K-FAC that waits and not PyTorch.
    kfac.estimator.refresh()


def resumed(communicator):
    """Go on from that checkpoint, on any number of ranks."""
    from torch.distributed import checkpoint

    model = network()
    alone = kfac_of(model, communicator="alone")
    expected = trained(alone, model)
    model = network()
    kfac, called = wrapped(communicator, model)
    of_optimizer, optimizer = optimizer_on(communicator)
    state = saved(model, kfac) | saved_optimizer(of_optimizer, optimizer)
    checkpoint.load(state, checkpoint_id=communicator.folder / "saved")
    model.load_state_dict(state["model"])
    found = trained(kfac, called, *of_ranks(communicator), steps=range(3, STEPS))
    require_close(found, expected)
    model = network()
    expected = optimized(model, optimizer_of(model, communicator="alone"), all_rows, 1)
    of_optimizer.module.load_state_dict(state["trained"])
    set_state = checkpoint.state_dict.set_optimizer_state_dict
    set_state(of_optimizer, optimizer, state["optimizer"])
    own_rows = of_ranks(communicator)
    found = optimized(of_optimizer, optimizer, *own_rows, steps=range(3, STEPS))
    require_close(found, expected)


def saved_optimizer(called, optimizer):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    return {
        "trained": called.module.state_dict(),
        "optimizer": get_optimizer_state_dict(called, optimizer),
    }


def wrapped(communicator, model):
    from torch.nn.parallel import DistributedDataParallel

    like = next(model.parameters()).detach()
    execution = Distributed(communicator=communicator, like=like)
    return kfac_of(model, execution=execution), DistributedDataParallel(model)


def saved(model, kfac):
    from kfac_core_shims.torch import DistributedState

    return {"model": model.state_dict(), "kfac": DistributedState(kfac)}


def emptied(communicator):
    """A reader that reads only what a new object has is refused."""
    from torch.distributed import checkpoint

    model = network()
    kfac, called = wrapped(communicator, model)
    trained(kfac, called, *of_ranks(communicator), steps=range(1))
    folder = communicator.folder / "plain"
    checkpoint.save({"kfac": kfac}, checkpoint_id=folder)
    checkpoint.load({"kfac": wrapped(communicator, network())[0]}, checkpoint_id=folder)


# Trainers of others.


def environment_of(communicator):
    """Set the variables that torchrun sets."""
    os.environ |= {
        "RANK": str(communicator.rank),
        "LOCAL_RANK": str(communicator.rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(communicator.size),
        "LOCAL_WORLD_SIZE": str(communicator.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "test",
    }


def collected(communicator):
    """Factors and moments of a data set, each process with a share of its own length."""
    import torch

    from kfac_core.posterior import spectral_blocks
    from kfac_core_shims.torch import collect

    x, model = data()[0], network()
    path = communicator.folder / f"collected_{communicator.size}.npz"
    alone = collect(model, x, fisher="exact", communicator="alone")
    share = x[communicator.rank :: communicator.size]
    shared = collect(model, share, fisher="exact", path=path, save_every=1)
    assert shared.examples == alone.examples == STEPS * ROWS
    spectra = spectral_blocks(shared.blocks, shared.statistics)
    for name, operator in spectral_blocks(alone.blocks, alone.statistics).items():
        torch.testing.assert_close(
            spectra[name].spectrum, operator.spectrum, rtol=1e-9, atol=1e-13
        )


class Failing(list):
    """Batches of which one cannot be read on a rank, in some of the readings."""

    def __init__(self, batches, rank, reading):
        super().__init__(batches)
        self.readings, self.failing = 0, reading if rank else None

    def __iter__(self):
        self.readings += 1
        yield self[0]
        if self.readings == self.failing:
            raise ValueError("no such batch")
        yield from self[1:]


def not_collected(communicator):
    """What one process cannot read or write is raised on both; then all go on."""
    from kfac_core_shims.torch import collect

    model, rank = network(), communicator.rank
    share = [*data()[0]][rank :: communicator.size]
    folder = communicator.folder / "not_collected"
    for reading in (1, 2):
        with soon_raises(ValueError if rank else CommunicationError, "no such batch"):
            collect(model, Failing(share, rank, reading))
    options = {"fisher": "exact", "path": folder / "factors"}
    with soon_raises(ValueError if rank else CommunicationError, "no such batch"):
        collect(model, Failing(share, rank, 2), **options)
    part = f"factors.part0.{rank}of{communicator.size}"
    saved = folder / f"{part}.1"
    content = saved.read_bytes()
    if rank:
        saved.write_bytes(content[:100])
    with soon_raises(kc.StateError, part.replace(f".{rank}of", ".1of")):
        collect(model, share, **options)
    saved.write_bytes(content)
    (folder / f"factors.part0.1of{communicator.size}.2").mkdir(exist_ok=True)
    with soon_raises(kc.StateError, "not a regular file"):
        collect(model, share, **options)


def by_accelerate(communicator):
    """A loop of accelerate's, with its loader, model and backward pass."""
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    x, y = data()
    model = network()
    expected = trained(kfac_of(model, communicator="alone"), model)
    environment_of(communicator)
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == communicator.size
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = TensorDataset(x.flatten(0, 1), y.flatten())
    loader = DataLoader(rows, batch_size=ROWS // communicator.size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    kfac = kfac_of(model)
    for inputs, labels in loader:
        optimizer.zero_grad()
        z = model(inputs)
        accelerator.backward(torch.nn.functional.cross_entropy(z, labels))
        kfac.step()
        optimizer.step()
    assert kfac.steps == STEPS
    require_close(parameters_of(kfac.model), expected)


def by_lightning(communicator):
    """A module of Lightning's, whose trainer runs the loop."""
    import lightning
    import torch
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network()

        def configure_optimizers(self):
            self.kfac = kfac_of(self.network)
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def training_step(self, batch):
            inputs, labels = batch
            return torch.nn.functional.cross_entropy(self.network(inputs), labels)

        def on_before_optimizer_step(self, optimizer):
            self.kfac.step()

    x, y = data()
    model = network()
    expected = trained(kfac_of(model, communicator="alone"), model)
    environment_of(communicator)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=communicator.size,
        strategy=DDPStrategy(process_group_backend="gloo"),
        plugins=[TorchElasticEnvironment()],
        max_epochs=1,
        logger=False,
        use_distributed_sampler=False,  # It shuffles.
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=communicator.folder,
    )
    rows = TensorDataset(x.flatten(0, 1), y.flatten())
    loader = DataLoader(
        rows,
        batch_size=ROWS // communicator.size,
        sampler=DistributedSampler(rows, shuffle=False),
    )
    module = Classifier()
    trainer.fit(module, loader)
    assert module.kfac.steps == STEPS
    require_close(parameters_of(module.network), expected)


SCENARIOS = {
    f.__name__: f
    for f in (
        *(exchanges, owned, noticed, late, killed, raises, nan, options, code, unlike),
        *(shares, foreign, lost, regained, singular),
        *(
            apart,
            stepped_by_kfac,
            halves,
            joined,
            alone_beside_others,
            in_part,
            passes,
        ),
        *(
            ddp,
            divided,
            meshes,
            soap,
            gauss_newton,
            interrupted,
            resumed,
            emptied,
            collected,
            not_collected,
            by_accelerate,
            by_lightning,
        ),
    )
}

if __name__ == "__main__":
    engine, folder, *scenarios = sys.argv[1:]
    if engine == "mpi":
        one_of_mpi(Path(folder), scenarios)
    elif engine == "kills":
        kills(Path(folder), int(scenarios[0]))
    elif engine == "programs":
        programs(Path(folder), json.loads(scenarios[0]))
    else:
        all_of_torch(Path(folder), scenarios)
