"""Real processes of gloo and MPI: every exchange, every way to fail, and the examples.

They take a minute, and run where ``KFAC_CORE_TEST_PROCESSES`` names the engines, as
``nox -s tests-distributed`` does.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

RANK = Path(__file__).parent / "rank.py"
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples" / "distributed"
ENGINES = os.environ.get("KFAC_CORE_TEST_PROCESSES", "").split(",")
QUIET = {
    **os.environ,
    # Ranks use the builders of these tests.
    "PYTHONPATH": os.pathsep.join(sys.path),
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}

pytestmark = pytest.mark.skipif(
    ENGINES == [""], reason="KFAC_CORE_TEST_PROCESSES names no engine"
)

LIMIT = 240
"""Seconds of a job of MPI, on a machine that has much else to do."""
WAITING = "late:3", "killed:3", "raises:3", "lost:3"
# One job of MPI each: what a later one reads, an earlier one has written.
TOGETHER = (
    ("exchanges:3", "shares:3"),
    ("exchanges:2", "noticed:2", "nan:2", "options:2", "code:2"),
    ("foreign:2", "regained:2"),
    ("regained:4",),
)
OF_TORCH = (
    *WAITING,
    *itertools.chain.from_iterable(TOGETHER),
    *("ddp:2", "ddp:3", "divided:2", "divided:3", "soap:2", "soap:3"),
    *("singular:2", "singular:3"),
    *("gauss_newton:2", "gauss_newton:3"),
    *("apart:2", "halves:3", "joined:2", "alone_beside_others:2"),
    *("stepped_by_kfac:2", "meshes:4", "meshes:6"),
    *("in_part:2", "passes:2", "unlike:2", "owned:2", "owned:4"),
    *("owned:6", "owned:8"),
    *("interrupted:3", "resumed:2", "resumed:4", "emptied:2"),
    *("collected:2", "not_collected:2"),
    *("by_accelerate:2", "by_lightning:2"),
)
ENDED_BY_MPI = "killed:3", "raises:3"
FOUR = "--processes", "4", "--dtype", "float32"
EXAMPLES_RUN = [
    ("torch_ddp", ()),
    ("torch_fsdp", ()),
    ("torch_tensor_parallel", ("--processes", "3")),
    ("jax_sharded", ()),
    ("mpi_numpy", ()),
]
KILLS = 3
if "--thorough" in sys.argv:
    KILLS = 30
    EXAMPLES_RUN += [
        ("torch_ddp", (*FOUR, "--holders", "all")),
        ("torch_fsdp", FOUR),
        ("torch_tensor_parallel", FOUR),
        ("mpi_numpy", (*FOUR, "--holders", "2")),
    ]


class Jobs:
    """Programs that run two at a time, from when the first test begins."""

    def __init__(self, folder, items):
        self.folder, self.seconds = folder, {}
        self._pool = ThreadPoolExecutor(2)
        self._started = {}
        wanted = [getattr(item, "callspec", None) for item in items]
        if not all(map(_is_example, wanted)):
            for engine in ("torch", "mpi"):
                self._start(engine, engine, self._all_of, engine)
            self._started["page"] = self._pool.submit(self._page)
            self._start("torch", "kills", self._kills)
        examples = [
            (found.params["program"], found.params["arguments"])
            for found in wanted
            if _is_example(found)
        ]
        of_torch = [job for job in examples if _engine_of(job) == "torch"]
        if of_torch:
            self._start("torch", "programs", self._programs, of_torch)
        for program, arguments in examples:
            job = program, arguments
            if job not in of_torch:
                command = [sys.executable, str(EXAMPLES / f"{program}.py"), *arguments]
                self._start(_engine_of(job), job, ran, command)

    def said(self, engine, scenario, size, *, without=()):
        """Return what each rank said, and require that all others said something."""
        output = self.output(engine)
        places = [self.folder / engine / f"{scenario}_{size}_{k}" for k in range(size)]
        said = {k: p.read_text() for k, p in enumerate(places) if p.exists()}
        assert {*range(size)} - {*without} <= {*said}, output
        return said

    def output(self, job):
        """Return the result of a job, or of a program."""
        engine = job if isinstance(job, str) else _engine_of(job)
        engine = "torch" if job == "kills" else engine
        if engine not in ENGINES:
            pytest.skip(f"KFAC_CORE_TEST_PROCESSES does not name {engine}")
        if job not in self._started:
            return self._started["programs"].result()[job]
        return self._started[job].result()

    def page(self):
        """Return the results of the programs of the page, by name."""
        return self._started["page"].result()

    def _start(self, engine, job, function, *arguments):
        if engine in ENGINES:
            self._started[job] = self._pool.submit(function, *arguments)

    def _programs(self, jobs):
        """Run programs of PyTorch, which are copies of one that has imported it."""
        folder = self.folder / "programs"
        folder.mkdir()
        commands = [
            [str(EXAMPLES / f"{program}.py"), *arguments] for program, arguments in jobs
        ]
        command = [sys.executable, str(RANK), "programs", str(folder)]
        made = ran([*command, json.dumps(commands)])
        codes = (
            json.loads((folder / "codes.json").read_text())
            if not made.returncode
            else []
        )
        assert len(codes) == len(jobs), made.stdout
        return {
            job: subprocess.CompletedProcess(
                command, code, (folder / f"{number}.txt").read_text()
            )
            for number, (job, code) in enumerate(zip(jobs, codes, strict=True))
        }

    def _kills(self):
        """Return what the survivors of killed ranks said, and the losses of their runs."""
        folder = self.folder / "kills"
        folder.mkdir()
        made = ran([sys.executable, str(RANK), "kills", str(folder), str(KILLS)])
        assert not made.returncode, made.stdout
        return json.loads((folder / "results.json").read_text())

    def _all_of(self, engine):
        folder = self.folder / engine
        folder.mkdir()
        if engine == "torch":
            # What is not installed is not run, and its tests are skipped.
            known = [s for s in OF_TORCH if _can_run(s)]
            return ran([sys.executable, str(RANK), "torch", str(folder), *known])
        program = [str(RANK), "mpi", str(folder)]
        surviving = functools.partial(
            of_mpi, program=[sys.executable, *program], survivors=True
        )
        # Those in which ranks wait for one that does not come, which needs no processor.
        with ThreadPoolExecutor(3) as pool:
            found = [*pool.map(surviving, [(wanted,) for wanted in WAITING])]
        found += map(surviving, TOGETHER)
        ended = self.folder / "ended"
        ended.mkdir()
        for wanted in ENDED_BY_MPI:
            program = [sys.executable, "-m", "mpi4py", str(RANK), "mpi", str(ended)]
            start = time.monotonic()
            found.append(of_mpi((wanted,), program, survivors=False))
            self.seconds[wanted] = time.monotonic() - start
        return "\n".join(found)

    def _page(self):
        """Run the programs of the page, each with what its checks add at the end."""
        text = (EXAMPLES.parents[1] / "distributed.md").read_text(encoding="utf-8")
        parts = re.findall(
            r"```\{code-block\} python\n:caption: (\S+)\n(.*?)```", text, re.DOTALL
        )
        found = {}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        starts = {
            "torch": [*torchrun, "--nproc-per-node", "2"],
            "mpi": [mpirun(), "-n", "2", sys.executable, "-m", "mpi4py"],
            "jax": [sys.executable],
        }
        for name, program in parts:
            engine, check = CHECKS[name]
            if engine in ENGINES:
                place = self.folder / name
                # A process that ends without destroying its group is aborted now and then.
                last = "torch.distributed.destroy_process_group()"
                body, destroyed, _ = program.partition(last)
                place.write_text(f"{body}\n{check}\n{destroyed}\nprint('checked')\n")
                found[name] = ran([*starts[engine], str(place)])
        return found


_SAME = "kfac.estimator.check_replicas()\nassert kfac.steps == 5"
CHECKS = {
    "ddp.py": ("torch", _SAME),
    "fsdp.py": ("torch", _SAME),
    "arrays.py": (
        "mpi",
        "estimator.check_replicas(weight=weight)\nassert weight.any()",
    ),
    "devices.py": ("jax", "assert bool(state.is_good()) and weight.any()"),
}
"""The programs of the page, their engines, and what must hold at their ends."""


def _engine_of(job):
    return job[0].partition("_")[0]


def _is_example(found):
    return found is not None and "program" in found.params


def _can_run(scenario):
    return not scenario.startswith("by_") or _installed(scenario[3:].partition(":")[0])


def ran(command, *, timeout=900):
    """Return how a program ended, and what it printed."""
    return subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=QUIET,
        timeout=timeout,
        check=False,
    )


def mpirun():
    """Return the launcher beside this Python, or the machine's."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


@functools.cache
def is_open_mpi():
    return "Open MPI" in ran([mpirun(), "--version"]).stdout


def of_mpi(wanted, program, *, survivors):
    """Run scenarios; with survivors, as the documentation says that ranks survive."""
    scenarios = [name.partition(":")[0] for name in wanted]
    size = wanted[0].partition(":")[2]
    options = []
    if survivors and is_open_mpi():
        options = ["--with-ft", "ulfm"]
    elif survivors:
        options = ["-disable-auto-cleanup"]
        # MPICH ends all where a process of its own is killed, but not that of a shell.
        program = ["sh", "-c", 'trap "" USR1; "$@"; exit $?', "sh", *program]
    command = [mpirun(), *options, "-n", size, *program, *scenarios]
    try:
        return ran(command, timeout=LIMIT).stdout
    except subprocess.TimeoutExpired as late:
        # A launcher may stay when all of its processes have ended.
        return f"{late}: {late.output}"


def _installed(name):
    return importlib.util.find_spec(name) is not None


@pytest.fixture(scope="module")
def jobs(request, tmp_path_factory):
    here = [i for i in request.session.items if i.fspath == request.node.fspath]
    return Jobs(tmp_path_factory.mktemp("processes"), here)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("engine", ["torch", "mpi"])
def test_every_exchange_is_that_of_numpy(jobs, engine, size):
    """Parts of unequal lengths and none, in three dtypes, several at a time."""
    found = jobs.said(engine, "exchanges", size)

    assert found == dict.fromkeys(range(size), "fine")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize("size", [2, 4, 6, 8])
def test_no_rank_holds_a_block_for_each_rank(jobs, size):
    """Peak memory beyond a block of 16 MB is at most 20 MB, whatever their number."""
    assert jobs.said("torch", "owned", size) == dict.fromkeys(range(size), "fine")


@pytest.mark.parametrize("engine", ["torch", "mpi"])
def test_several_processes_without_distributed_raise(jobs, engine):
    """Several processes with an estimator each are no accident."""
    for text in jobs.said(engine, "noticed", 2).values():
        assert text.startswith("UnsupportedError: 2 processes of")


@pytest.mark.parametrize("engine", ["torch", "mpi"])
def test_a_rank_that_does_not_come_is_named(jobs, engine):
    """By those that wait, after their timeout of two seconds."""
    found = jobs.said(engine, "late", 3, without=(1,))

    for rank in (0, 2):
        assert found[rank].startswith("CommunicationTimeoutError")
        assert "for rank 1" in found[rank]


@pytest.mark.parametrize(
    ("engine", "scenario"),
    [
        *(("torch", "killed"), ("torch", "raises"), ("torch", "interrupted")),
        *(("mpi", "killed"), ("mpi", "raises"), ("torch", "lost"), ("mpi", "lost")),
    ],
)
def test_a_rank_that_ends_is_named(jobs, engine, scenario):
    """By all others: at once, or after their timeout of two seconds."""
    found = jobs.said(engine, scenario, 3, without=(1,))

    for rank in (0, 2):
        assert found[rank].startswith("Communication")
        assert "for rank 1" in found[rank]


@pytest.mark.parametrize("wanted", ENDED_BY_MPI)
def test_a_job_of_mpi_ends_with_its_rank(jobs, wanted):
    """Where nothing else was asked of MPI's launcher, it ends all; nobody waits."""
    jobs.output("mpi")

    scenario, _, size = wanted.partition(":")
    assert not (jobs.folder / "ended" / f"{scenario}_{size}_1").exists()
    assert jobs.seconds[wanted] < LIMIT


@pytest.mark.parametrize("engine", ["torch", "mpi"])
def test_bad_input_on_one_rank_raises_on_all(jobs, engine):
    """A row that is not finite, and another decay; all go on together afterwards."""
    rows, decays = jobs.said(engine, "nan", 2), jobs.said(engine, "options", 2)

    for rank in (0, 1):
        assert rows[rank].startswith("NotFiniteError: Rank 1: Block 'fc'")
        assert decays[rank].startswith("ReplicaError: Rank 0 is at")


@pytest.mark.parametrize("engine", ["torch", "mpi"])
def test_a_rank_with_other_code_raises(jobs, engine):
    """Before anything is exchanged."""
    for text in jobs.said(engine, "code", 2).values():
        assert text.startswith(
            "ReplicaError: Rank 1 differs from rank 0 in the code of "
        )
        assert "kfac_core_shims" in text


def test_other_options_of_one_rank_are_named_on_all(jobs):
    """When KFAC is made, or at the first step that they change; within seconds."""
    assert jobs.said("torch", "unlike", 2) == dict.fromkeys((0, 1), "fine")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "scenario", ["ddp", "divided", "soap", "singular", "gauss_newton"]
)
def test_several_processes_take_the_steps_of_one(jobs, scenario, size):
    """Five steps with shards of unequal sizes and none, to 1e-10.

    Beside DistributedDataParallel, where overlap changes no bit, and with parameters that
    `fully_shard` or tensor parallelism divides; EKFAC in a null space.
    """
    assert jobs.said("torch", scenario, size) == dict.fromkeys(range(size), "fine")


@pytest.mark.parametrize("size", [4, 6])
def test_meshes_of_two_dimensions(jobs, size):
    """2 x 2 and 2 x 3: replicas of shards, shards of tensor-parallel layers; and a loss
    that reads logits which are divided.
    """
    assert jobs.said("torch", "meshes", size) == dict.fromkeys(range(size), "fine")


def test_steps_of_the_optimizer_are_those_of_one_process(jobs):
    """Shards have unequal numbers of rows."""
    assert jobs.said("torch", "stepped_by_kfac", 2) == dict.fromkeys((0, 1), "fine")


@pytest.mark.parametrize("scenario", ["collected", "not_collected"])
def test_curvature_of_a_data_set_in_shares(jobs, scenario):
    """That of one process; an error of one process is raised on all, within seconds."""
    assert jobs.said("torch", scenario, 2) == dict.fromkeys((0, 1), "fine")


def test_passes_that_count_with_divided_parameters(jobs):
    """All that are in the gradients of the step, and no others."""
    assert jobs.said("torch", "passes", 2) == dict.fromkeys(range(2), "fine")


def test_exchanges_of_the_program_are_others(jobs):
    """In whatever order the processes come to them."""
    assert jobs.said("torch", "apart", 2) == dict.fromkeys(range(2), "fine")


def test_models_of_some_of_the_processes(jobs):
    """Each is that of one process; without a word K-FAC would take all processes."""
    found = jobs.said("torch", "halves", 3)

    assert found[1] == found[2] == "fine"
    assert found[0].startswith("ConventionError: The model's DistributedDataParallel")
    assert "over 1 processes, and `communicator` has 3" in found[0]


@pytest.mark.parametrize(
    ("scenario", "said"),
    [
        ("joined", "UnsupportedError: DistributedDataParallel.join()"),
        ("alone_beside_others", "ConventionError: The model's DistributedDataParallel"),
        ("in_part", "ConventionError: The gradients are not the same on all processes"),
    ],
)
def test_gradients_that_are_not_those_of_all_are_refused(jobs, scenario, said):
    """On all processes, before the first step."""
    for text in jobs.said("torch", scenario, 2).values():
        assert text.startswith(said)


@pytest.mark.parametrize("size", [2, 4])
def test_a_run_that_lost_a_rank_goes_on_from_its_checkpoint(jobs, size):
    """On fewer or more ranks than wrote it, as if nothing had happened."""
    jobs.said("torch", "interrupted", 3, without=(1,))

    assert jobs.said("torch", "resumed", size) == dict.fromkeys(range(size), "fine")


def test_a_run_survives_kills_at_random(jobs):
    """Survivors name the killed rank within five seconds where K-FAC waits for it, or say
    PyTorch's own error; two ranks then end at the loss of an uninterrupted run.
    """
    for victim, said, loss, expected in jobs.output("kills"):
        for text, seconds in said.values():
            if text.startswith("Communication"):
                named = re.search(r"for rank ([\d, ]+),", text)[1]
                assert str(victim) in named.split(", ")
                assert seconds < 5.0, text
            else:
                # The run had ended before, or PyTorch waited.
                assert re.match(r"\d+\.\d|RuntimeError|CheckpointException", text), text
        assert float(loss) == pytest.approx(float(expected), rel=1e-8)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("engine", ["torch", "mpi"])
def test_a_run_goes_on_from_one_file(jobs, engine, size):
    """A program of arrays alone, after a rank of three was killed."""
    jobs.said(engine, "lost", 3, without=(1,))

    assert jobs.said(engine, "regained", size) == dict.fromkeys(range(size), "fine")


@pytest.mark.parametrize("engine", ["torch", "mpi"])
def test_the_part_of_another_number_of_ranks_is_refused(jobs, engine):
    """On each rank, by what it is and what was expected."""
    assert jobs.said(engine, "shares", 3) == dict.fromkeys(range(3), "fine")
    for rank, text in jobs.said(engine, "foreign", 2).items():
        assert text.startswith("StateError: The state belongs to rank")
        assert f"rank {rank} of 3 processes" in text
        assert f"rank {rank} of 2 processes" in text


def test_a_checkpoint_that_was_read_in_part_is_refused(jobs):
    """torch.distributed.checkpoint reads what a new object has, which is nothing."""
    for text in jobs.said("torch", "emptied", 2).values():
        assert text.startswith("StateError: The state has 1 steps")


@pytest.mark.parametrize("library", ["accelerate", "lightning"])
def test_the_loop_of_another_library(jobs, library):
    """Five steps of K-FAC with two processes are those of one."""
    if not _installed(library):
        pytest.skip(f"{library} is not installed")

    assert jobs.said("torch", f"by_{library}", 2) == dict.fromkeys((0, 1), "fine")


@pytest.mark.parametrize("name", CHECKS)
def test_a_program_of_the_page_runs(jobs, name):
    """As it stands there, with two processes or devices, which agree at its end."""
    if CHECKS[name][0] not in ENGINES:
        pytest.skip(f"KFAC_CORE_TEST_PROCESSES does not name {CHECKS[name][0]}")
    found = jobs.page()[name]

    assert found.returncode == 0, found.stdout
    assert "checked" in found.stdout


@pytest.mark.parametrize(("program", "arguments"), EXAMPLES_RUN)
def test_an_example_is_that_of_one_process(jobs, program, arguments):
    """Twenty steps on digits with shards of unequal sizes; the program compares."""
    found = jobs.output((program, arguments))

    assert found.returncode == 0, found.stdout
    ways = 3 if program.startswith("jax") else 1
    assert found.stdout.count("largest relative difference") == 2 * ways
