"""The benchmark's way to a GPU, over stand-ins: no GPU runs, and no number is right.

What is held is that the device's own clock is asked, that launches and synchronizations
are counted without those of counting itself, and that a step of `kfac_core` has none.
"""

from __future__ import annotations

import importlib
import types

import pytest

from ..builders import fake_cupy
from ..builders.benchmark_folder import import_benchmarks

import_benchmarks()

from benchmarks import workloads  # noqa: E402
from benchmarks.libraries import device  # noqa: E402
from benchmarks.run import run  # noqa: E402
from benchmarks.stages import GPU_STAGES, LOOPED_STAGES, MAIN_STAGES  # noqa: E402
from benchmarks.worker import Worker  # noqa: E402

LAYERS = (workloads.Layer(5, 3, True, 12), workloads.Layer(4, 5, False, 8))
STAGES = MAIN_STAGES + LOOPED_STAGES + GPU_STAGES


class Event:
    """An event of CuPy's kind; the clock goes on by a millisecond with each record."""

    records = 0

    def record(self):
        """Stand for the moment at which the stream gets here."""
        Event.records += 1
        self.at = Event.records


@pytest.fixture
def cupy(requires_adapters, monkeypatch):
    """The stand-in for CuPy, with events and a stream."""
    with fake_cupy.installed() as module:
        stream = types.SimpleNamespace(synchronize=lambda: None)
        cuda = importlib.import_module("cupy.cuda")
        monkeypatch.setattr(cuda, "Event", Event, raising=False)
        monkeypatch.setattr(
            cuda, "get_elapsed_time", lambda a, b: float(b.at - a.at), raising=False
        )
        monkeypatch.setattr(cuda, "get_current_stream", lambda: stream, raising=False)
        monkeypatch.setattr(Event, "records", 0)
        yield module


def test_every_stage_runs_on_cupy_and_by_the_clock_of_the_device(cupy):
    """One millisecond between the two events, over the calls of a sample."""
    worker = Worker("cupy", device="cuda", threads=1, clock="device")
    workload = workloads.Workload("tiny", LAYERS, STAGES)
    assert worker.answer_to({"do": "prepare", "workload": workload.to_plain()}) == {}

    for stage in STAGES:
        setup = worker.answer_to({"do": "setup", "stage": stage})
        worker._calls = 2
        sample = worker.answer_to({"do": "sample"})

        assert "first" in setup, (stage, setup)
        assert sample["device"] == pytest.approx(1e-3 / 2), stage
        assert sample["wall"] > 0


@pytest.mark.parametrize(
    ("stage", "waits"),
    [("cycle-status", False), ("precondition-inverse", False), ("cycle", True)],
)
def test_a_step_without_exceptions_waits_for_nothing(cupy, stage, waits):
    """With failures as statuses; the row that must differ raises, and so waits."""
    worker = Worker("cupy", device="cuda", threads=1, clock="device")
    workload = workloads.Workload("tiny", LAYERS, STAGES)
    worker.answer_to({"do": "prepare", "workload": workload.to_plain()})
    call = worker._library.stage(stage)
    call()
    fake_cupy.SYNCHRONIZATIONS.clear()

    call()

    assert bool(fake_cupy.SYNCHRONIZATIONS) == waits


def test_launches_and_waits_are_counted_without_those_of_counting(monkeypatch):
    """PyTorch's profiler synchronizes with the device when it ends."""
    calls = []

    class Profile:
        """A profiler that sees names of the runtime and of the driver."""

        def __enter__(self):
            calls.clear()
            return self

        def __exit__(self, *_):
            calls.append("cudaDeviceSynchronize")

        def key_averages(self):
            return [types.SimpleNamespace(key=key, count=1) for key in calls]

    fake = types.SimpleNamespace(
        cuda=types.SimpleNamespace(is_available=lambda: True),
        profiler=types.SimpleNamespace(
            ProfilerActivity=types.SimpleNamespace(CPU=0, CUDA=1),
            profile=lambda activities: Profile(),
        ),
    )
    monkeypatch.setattr(device.importlib, "import_module", lambda name: fake)

    def step():
        calls.extend(["cudaLaunchKernel", "cuLaunchKernelEx", "cuGraphLaunch"])
        calls.extend(["cudaMalloc", "cuMemcpyDtoH_v2", "cudaStreamSynchronize"])

    assert device.device_counts(step, lambda result: None) == {
        "launches": 3,
        "synchronizations": 2,
    }
    assert device.device_counts(lambda: None, lambda result: None) == {
        "launches": 0,
        "synchronizations": 0,
    }


def test_nothing_is_counted_without_a_gpu(monkeypatch):
    """And PyTorch that is not there is no error."""
    gone = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: False))
    monkeypatch.setattr(device.importlib, "import_module", lambda name: gone)
    assert device.device_counts(lambda: None, lambda result: None) is None
    assert device.device_events("jax", "cuda") is None
    assert device.device_events("torch", "cpu") is None


def test_torch_events_are_milliseconds(monkeypatch):
    """As PyTorch's are."""

    class TorchEvent(Event):
        def __init__(self, *, enable_timing):
            assert enable_timing

        def elapsed_time(self, other):
            return 5.0

    cuda = types.SimpleNamespace(Event=TorchEvent)
    monkeypatch.setattr(device.importlib, "import_module", lambda name: cuda)

    stop, seconds = device.device_events("torch", "cuda")()
    stop()

    assert seconds() == pytest.approx(5e-3)


def test_the_stage_for_a_gpu_is_left_out_on_a_cpu(monkeypatch):
    """Which a target of the GPU alone asks for."""
    asked = []

    class Processes:
        """Answers nothing, and remembers what it was asked."""

        names = ("it",)

        def ask(self, library, do, **arguments):
            asked.append(arguments.get("stage"))
            return {"absent": "a stand-in"}

    module = importlib.import_module(run.__module__)
    workload = workloads.Workload("tiny", LAYERS, ("cycle", *GPU_STAGES))
    options = {"stages": (), "memory": False, "say": print, "repetitions": 1}
    for place in ("cpu", "cuda"):
        given = types.SimpleNamespace(device=place, clock="wall", **options)
        monkeypatch.setattr(given, "seconds", 1.0, raising=False)
        module._run_workload(workload, Processes(), given)

    assert asked.count("cycle") == 2
    assert asked.count("cycle-status") == 1
