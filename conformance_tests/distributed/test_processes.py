"""Real processes of gloo and MPI: every exchange, every way to fail, and the examples.

They take a minute, and run where ``KFAC_CORE_TEST_PROCESSES`` names the engines, as
``nox -s tests-distributed`` does.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

RANK = Path(__file__).parent / "rank.py"
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples" / "distributed"
ENGINES = os.environ.get("KFAC_CORE_TEST_PROCESSES", "").split(",")

pytestmark = pytest.mark.skipif(
    ENGINES == [""], reason="KFAC_CORE_TEST_PROCESSES names no engine"
)


def require(engine):
    if engine not in ENGINES:
        pytest.skip(f"KFAC_CORE_TEST_PROCESSES does not name {engine}")


def run(engine, scenario, size, tmp_path):
    """Return what each rank said, by rank, and the seconds that it took."""
    start = time.monotonic()
    if engine == "mpi":
        program = [sys.executable, "-m", "mpi4py", str(RANK), "mpi", scenario]
        commands = [[mpirun(), "-n", str(size), *program]]
    else:
        program = [sys.executable, str(RANK), "torch", scenario]
        commands = [
            [*program, str(rank), str(size), str(tmp_path / f"{scenario}_store")]
            for rank in range(size)
        ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    ran = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for command in commands
    ]
    try:
        output = "\n".join(process.communicate(timeout=90)[0] for process in ran)
    finally:
        for process in ran:
            process.kill()
            process.communicate()
    said = re.findall(r"^rank (\d+) says (.*)$", output, re.MULTILINE)
    return {int(k): text for k, text in said}, time.monotonic() - start, output


def mpirun():
    """Return the launcher beside this Python, or the machine's."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("engine", ["torch", "mpi"])
def test_every_exchange_is_that_of_numpy(engine, size, tmp_path):
    """Parts of unequal lengths and none, in three dtypes, several at a time."""
    require(engine)

    said, _, output = run(engine, "exchanges", size, tmp_path)

    assert said == dict.fromkeys(range(size), "fine"), output


@pytest.mark.parametrize("engine", ["torch", "mpi"])
def test_an_integration_that_was_told_nothing_refuses(engine, tmp_path):
    """Several processes with an estimator each are no accident."""
    require(engine)

    said, _, output = run(engine, "noticed", 2, tmp_path)

    for rank in (0, 1):
        assert said[rank].startswith("UnsupportedError: 2 processes of"), output


@pytest.mark.parametrize("engine", ["torch", "mpi"])
def test_a_rank_that_does_not_come_is_named(engine, tmp_path):
    """By those that wait, after their timeout of two seconds."""
    require(engine)

    said, _, output = run(engine, "late", 3, tmp_path)

    for rank in (0, 2):
        assert said[rank].startswith("CommunicationTimeoutError"), output
        assert "for rank 1" in said[rank]


@pytest.mark.parametrize("scenario", ["killed", "raises"])
def test_a_rank_that_ends_is_named(scenario, tmp_path):
    """By the others, at once; their processes go on."""
    require("torch")

    said, _, output = run("torch", scenario, 3, tmp_path)

    for rank in (0, 2):
        assert said[rank].startswith("Communication"), output
        assert "for rank 1" in said[rank]


@pytest.mark.parametrize("scenario", ["killed", "raises"])
def test_a_job_of_mpi_ends_with_its_rank(scenario, tmp_path):
    """MPI's launcher ends all processes; nobody waits."""
    require("mpi")

    said, seconds, _ = run("mpi", scenario, 3, tmp_path)

    assert 1 not in said
    assert seconds < 60


@pytest.mark.parametrize("engine", ["torch", "mpi"])
def test_what_one_rank_gives_is_refused_on_all(engine, tmp_path):
    """A row that is not finite, and another decay; all go on together afterwards."""
    require(engine)

    rows, _, output = run(engine, "nan", 2, tmp_path)
    decays, _, _ = run(engine, "options", 2, tmp_path)

    for rank in (0, 1):
        assert rows[rank].startswith("NotFiniteError: Rank 1: Block 'fc'"), output
        assert decays[rank].startswith("ReplicaError: Rank 0 is at")


@pytest.mark.parametrize("size", [2, 3])
def test_kfac_beside_data_parallel_is_kfac_alone(size, tmp_path):
    """Five steps with shards of unequal sizes and none, in PyTorch, to 1e-10."""
    require("torch")

    said, _, output = run("torch", "ddp", size, tmp_path)

    assert said == dict.fromkeys(range(size), "fine"), output


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("torch_ddp", ()),
        ("torch_ddp", ("--processes", "3", "--dtype", "float32", "--holders", "all")),
        ("torch_fsdp", ()),
        ("torch_tensor_parallel", ()),
        ("jax_sharded", ()),
        ("mpi_numpy", ()),
        ("mpi_numpy", ("--processes", "4", "--holders", "2")),
    ],
)
def test_an_example_is_that_of_one_process(program, arguments):
    """Twenty steps on digits with shards of unequal sizes; the program compares."""
    require(program.partition("_")[0])

    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{program}.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert ran.returncode == 0, ran.stdout + ran.stderr
    ways = 2 if program.startswith("jax") else 1
    assert ran.stdout.count("largest relative difference") == 2 * ways
