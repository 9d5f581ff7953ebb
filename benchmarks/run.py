"""Who is asked what, and when.

A library has a process of its own, and only one process computes at a time.  Samples of a
stage are taken in rounds, one of each library a round, so that what disturbs the machine
disturbs all alike.  A process that fails or takes too long costs its own figures only.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.agreement import Reference
from benchmarks.machine import describe_machine
from benchmarks.options import Options
from benchmarks.processes import Processes
from benchmarks.stages import GPU_STAGES, MEMORY_LIMITS, TITLES, stage_flops
from benchmarks.timing import ENOUGH, Sample, summary
from benchmarks.workloads import Workload

Found = dict[str, Any]


def run(options: Options, /) -> Found:
    """Run the benchmark.

    Parameters
    ----------
    options : Options
        What is run.

    Returns
    -------
    dict
        Everything that was measured, as JSON has it.
    """
    processes = Processes(options)
    try:
        found: Found = {
            "machine": describe_machine(),
            "device": options.device,
            "threads": options.threads,
            "clock": options.clock,
            "libraries": processes.hello(),
            "workloads": [],
        }
        rates: dict[str, float] = {}
        for workload in options.workloads if processes.names else ():
            processes.revive()
            if not (rates and workload.sweep):
                _best_rates(rates, processes, options.gemm_sizes)
            found["workloads"].append(_run_workload(workload, processes, options))
        _best_rates(rates, processes, options.gemm_sizes)
    finally:
        processes.close()
    found["gemm"] = rates
    found["machine"]["load after"] = describe_machine()["load"]
    rate = max(rates.values(), default=0.0)
    for plain in found["workloads"]:
        for stage, of_stage in plain["stages"].items():
            roofline = plain["flops"][stage] / rate if rate else 0.0
            for figures in of_stage.values():
                if "median" in figures and roofline:
                    figures["rooflines"] = figures["median"] / roofline
    return found


def _best_rates(
    rates: dict[str, float], processes: Processes, sizes: tuple[int, ...]
) -> None:
    """Keep each library's best rate of a matrix product so far."""
    for name in processes.names:
        rate = processes.ask(name, "gemm", sizes=sizes).get("rate", 0.0)
        if rate:
            rates[name] = max(rates.get(name, 0.0), rate)


def _run_workload(workload: Workload, processes: Processes, options: Options) -> Found:
    stages = [s for s in workload.stages if not options.stages or s in options.stages]
    if options.device == "cpu":
        stages = [s for s in stages if s not in GPU_STAGES]
    found: Found = {
        **{
            k: v
            for k, v in workload.to_plain().items()
            if k not in ("layers", "stages")
        },
        "layers": len(workload.layers),
        "factor_bytes": workload.factor_bytes,
        "flops": {s: stage_flops(s, workload.layers) for s in TITLES},
        "unprepared": {},
        "stages": {},
        "agreement": {},
        "memory": {},
    }
    for name in processes.names:
        reply = processes.ask(name, "prepare", workload=workload.to_plain())
        if "error" in reply:
            found["unprepared"][name] = reply["error"]
    ready = [name for name in processes.names if name not in found["unprepared"]]
    for stage in stages:
        options.say(f"{workload.name}: {TITLES[stage]}")
        found["stages"][stage] = _run_stage(stage, ready, processes, options)
    options.say(f"{workload.name}: agreement")
    found["agreement"] = _agreement(workload, stages, ready, processes)
    if workload.memory and options.memory:
        for stage in (s for s in stages if s in MEMORY_LIMITS):
            options.say(f"{workload.name}: memory of {TITLES[stage]}")
            request = {"workload": workload.to_plain(), "stage": stage}
            found["memory"][stage] = {
                name: processes.apart(name, "peak", **request) for name in ready
            }
    return found


def _run_stage(
    stage: str, names: list[str], processes: Processes, options: Options
) -> Found:
    """Return each library's figures for one stage."""
    found: Found = {name: processes.ask(name, "setup", stage=stage) for name in names}
    samples: dict[str, list[Sample]] = {
        name: [] for name in names if "calls" in found[name]
    }
    start = time.monotonic()
    for taken in range(options.repetitions):
        if taken >= ENOUGH and time.monotonic() - start > options.seconds:
            break
        for name, of_library in samples.items():
            reply = processes.ask(name, "sample")
            if "error" in reply:
                found[name] = reply
            else:
                of_library.append(Sample(**reply))
    for name, of_library in samples.items():
        if of_library and "error" not in found[name]:
            numbers = summary(of_library, clock=options.clock)
            found[name] |= dataclasses.asdict(numbers) | {"noisy": numbers.noisy}
            if options.device == "cuda":
                found[name] |= processes.ask(name, "counts")
    return found


def _agreement(
    workload: Workload, stages: list[str], names: list[str], processes: Processes
) -> Found:
    """Return how far each library's answers are from right, and from each other."""
    found: Found = {}
    wanted = [s for s in stages if s.startswith("precondition") and "looped" not in s]
    wanted = wanted if workload.compared else []
    reference = Reference(workload) if wanted else None
    for stage in wanted:
        assert reference is not None
        found[stage] = {}
        with tempfile.TemporaryDirectory() as folder:
            paths: dict[str, Path] = {}
            for name in names:
                path = Path(folder) / f"{name}.npz"
                reply = processes.ask(name, "answer", stage=stage, path=str(path))
                if "error" in reply:
                    found[stage][name] = reply
                elif "absent" not in reply:
                    paths[name] = path
            found[stage] |= reference.compared(stage, paths)
    return found
