"""One process: a library, and what it is told to do with it.

A parent writes one request a line to standard input, as JSON, and reads one reply a line
from standard output.  What a library prints goes to standard error.  A `Worker` does the
same for whoever has it in his own process.

Conventions.  A request is ``{"do": name, ...}``, a reply what the function of that name
returns, or ``{"error": text}``, or ``{"absent": reason}`` for a stage that the library
does not have.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
import time
from typing import Any

import numpy as np

from benchmarks.libraries import make_library
from benchmarks.libraries.library import AbsentError, Call
from benchmarks.memory import Resident
from benchmarks.threads import describe, pin
from benchmarks.timing import Clock, calls_for
from benchmarks.workloads import Workload


class Worker:
    """A library, and the stage that is set up.

    Parameters
    ----------
    library : str
        One of `benchmarks.libraries.LIBRARIES`.
    device : {"cpu", "cuda"}
        Where it computes.
    threads : int
        How many of the host.
    clock : {"cpu", "wall", "device"}
        Which one counts.
    """

    def __init__(self, library: str, /, *, device: str, threads: int, clock: str):
        self._library = make_library(library, device=device, threads=threads)
        self._device = device
        self._clock = Clock(clock)
        self._by = clock
        self._call: Call | None = None
        self._calls = 1

    def answer_to(self, request: dict[str, Any], /) -> dict[str, Any]:
        """Do what a request says, and return the reply; nothing raises."""
        arguments = dict(request)
        do = getattr(self, f"do_{arguments.pop('do')}")
        try:
            reply: dict[str, Any] = do(**arguments)
        except AbsentError as absent:
            return {"absent": str(absent)}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return reply

    def do_hello(self) -> dict[str, Any]:
        """Say what runs here, and on how many threads."""
        return {"versions": self._library.versions(), "threads": describe()}

    def do_prepare(self, workload: dict[str, Any]) -> dict[str, Any]:
        """Make the statistics and the vectors of a workload."""
        self._call = None
        gc.collect()
        self._library.prepare(Workload.from_plain(workload))
        return {}

    def do_setup(self, stage: str) -> dict[str, Any]:
        """Make a stage ready, and call it until it is warm."""
        self._call = None
        gc.collect()
        self._call = self._library.stage(stage)
        first, second = self._timed(), self._timed()
        if second < 1.0:
            second = min(second, self._timed(), self._timed())
        self._calls = calls_for(second)
        return {"first": first, "second": second, "calls": self._calls}

    def do_sample(self) -> dict[str, Any]:
        """Take one sample of the stage that was set up."""
        assert self._call is not None
        sample = self._clock.sample(
            self._call, self._library.finish, self._calls, self._library.events
        )
        return dataclasses.asdict(sample)

    def do_counts(self) -> dict[str, Any]:
        """Count launches and synchronizations of the stage that was set up, on a GPU."""
        from benchmarks.libraries.device import device_counts

        assert self._call is not None
        return {"counts": device_counts(self._call, self._library.finish)}

    def do_answer(self, stage: str, path: str) -> dict[str, Any]:
        """Write a stage's answer to a file."""
        np.savez(path, *self._library.answer(stage))
        return {}

    def do_gemm(self, sizes: list[int]) -> dict[str, Any]:
        """Return the best rate of a matrix product, in flops a second."""
        best = 0.0
        for size in sizes:
            call = self._library.gemm(size)
            events = self._library.events
            self._library.finish(call())
            for _ in range(2):
                sample = self._clock.sample(call, self._library.finish, 1, events)
                best = max(best, 2.0 * size**3 / sample.seconds(self._by))
        return {"rate": best}

    def do_peak(self, workload: dict[str, Any], stage: str) -> dict[str, Any]:
        """Return the resident memory around one call of a stage, in bytes."""
        # Whatever a library loads or compiles when first used is not a stage's memory.
        resident = Resident()
        plain = Workload.from_plain(workload)
        nothing = dataclasses.replace(plain, layers=plain.layers[-1:], batches=1)
        self._library.prepare(nothing)
        self._library.stage(stage)()
        before = resident.settled()
        self._library.prepare(plain)
        call = self._library.stage(stage)
        self._library.finish(call())
        held = resident.settled()
        resident.reset_peak()
        self._library.finish(call())
        return {"before": before, "held": held, "peak": resident.peak()}

    def _timed(self) -> float:
        assert self._call is not None
        start = time.perf_counter()
        self._library.finish(self._call())
        return time.perf_counter() - start


def main() -> None:
    """Serve requests until the input ends."""
    library, device, threads, clock = sys.argv[1:5]
    # Replies have a channel of their own; whatever is printed joins the errors.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    pin(int(threads))
    worker: Worker | None = None
    for line in sys.stdin:
        if worker is None:
            try:
                worker = Worker(
                    library, device=device, threads=int(threads), clock=clock
                )
            except Exception as error:
                print(
                    json.dumps({"error": f"{type(error).__name__}: {error}"}),
                    file=replies,
                )
                replies.flush()
                return
        print(json.dumps(worker.answer_to(json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    main()
