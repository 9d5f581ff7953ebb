"""A process that is killed while it saves: the old file or the new one, whole."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import kfac_core as kc

from ..builders.estimators import make_estimator
from .size import FULL, report, sized

pytestmark = pytest.mark.skipif(
    os.name == "nt", reason="there is no SIGKILL on Windows"
)

KILLS = sized(8, 200)

SERVER = """
import os, sys
import kfac_core as kc
from conformance_tests.survival.test_killed_saves import estimator, fed
path = sys.argv[1]
saved = estimator()
saved.update(fed(0))
kc.save_checkpoint(path, saved)
print("ready", flush=True)
for _ in sys.stdin:
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        print("end", flush=True)
        continue
    print(os.getpid(), flush=True)
    saved = estimator()
    for step in range(1, 10**6):
        saved.update(fed(step))
        kc.save_checkpoint(path, saved)
        print(step, flush=True)
"""
"""A warm process that makes one that saves for each line it reads."""


def estimator() -> kc.Estimator:
    """Return one of a size that takes milliseconds to write."""
    layer = kc.Dense(in_features=300, out_features=200, bias=True, weight_layout="io")
    return make_estimator(
        {"a": kc.Block(layer, kc.Kronecker())}, decay=0.0, damping=0.1, reduction="sum"
    )


def fed(step: int) -> dict[str, kc.Batch]:
    """Return a batch that says which step it is of: all its statistics do."""
    return {"a": kc.Batch(np.full((1, 300), 1.0 + step), np.full((1, 200), 2.0 + step))}


def step_of(path: Path) -> int:
    """Return the step whose state a file holds, every number of it checked."""
    loaded = estimator()
    kc.load_checkpoint(path, loaded, backend="numpy")
    state = loaded.state["a"]
    step = state.updates
    inputs = np.append(np.full(300, 1.0 + step), 1.0)
    for name, row in (("input", inputs), ("output", np.full(200, 2.0 + step))):
        A = state.statistics.averages[name].sum.array
        assert np.array_equal(np.tril(A), np.tril(np.outer(row, row)))
    return step


def ended(server: subprocess.Popen[bytes]) -> None:
    """End a process, and close what leads to it: whatever failed, nothing is left."""
    server.kill()
    with server:
        pass


def test_a_kill_leaves_the_old_file_or_the_new_one(tmp_path, request):
    """Killed at a random moment, with a save under way as often as not."""
    rng = random.Random(5)
    path = tmp_path / "state.npz"
    first = estimator()
    kc.save_checkpoint(path, first)
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    interrupted = parts = 0
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    request.addfinalizer(lambda: ended(server))
    assert server.stdin is not None
    assert server.stdout is not None
    # Its first file would else replace that of the first round, on a slow processor.
    assert server.stdout.readline() == b"ready\n"
    for _ in range(KILLS):
        kc.save_checkpoint(path, first)
        server.stdin.write(b"\n")
        server.stdin.flush()
        pid = int(server.stdout.readline())
        time.sleep(rng.uniform(0.0, 0.1))
        os.kill(pid, signal.SIGKILL)
        lines = iter(server.stdout.readline, b"end\n")
        seen = [int(line) for line in lines]
        said = seen[-1] if seen else 0

        # A save may have been complete before its line was.
        assert step_of(path) in (said, said + 1) if said else step_of_first(path)
        left = list(tmp_path.glob(".state.npz.*.part"))
        interrupted += bool(left) or step_of_or_none(path) == said + 1
        parts += len(left)
        for part in left:
            # Nobody takes it for a checkpoint: only its own name is ever read.
            with contextlib.suppress(kc.StateError):
                kc.read_header(part)
            part.unlink()
        assert [p.name for p in tmp_path.iterdir()] == [path.name]
    server.stdin.close()
    assert server.wait() == 0
    # Of a few kills, none may have met a save.
    assert interrupted > KILLS // 10 or not FULL
    report(
        f"\n{KILLS} kills, {interrupted} during a save, {parts} unfinished files left"
    )


def step_of_or_none(path: Path) -> int | None:
    """Return the step of a file, or None for that of an estimator that saw nothing."""
    loaded = estimator()
    kc.load_checkpoint(path, loaded, backend="numpy")
    return None if loaded.state["a"].statistics is None else step_of(path)


def step_of_first(path: Path) -> bool:
    """Whether a file is the one from before, or that of the first step."""
    return step_of_or_none(path) in (None, 1)
