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
from benchmarks.stages import GPU_STAGES, LOOPED_STAGES, MAIN_STAGES  # noqa: E402
from benchmarks.worker import Worker  # noqa: E402

LAYERS = (workloads.Layer(5, 3, True, 12), workloads.Layer(4, 5, False, 8))
STAGES = MAIN_STAGES[:1] + LOOPED_STAGES[:1] + GPU_STAGES


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
