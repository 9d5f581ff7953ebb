"""One sample, and what many of them say.

Conventions.  A sample is the mean of a few calls, of which there are enough to last
`SHORTEST`; its seconds are those of one call.  Processor time is of the whole process,
all its threads.  On a GPU the time is that between two events of the device, where the
library has events.  Before and after each sample the process times one and the same
matrix product; a sample is quiet where both took no longer than `QUIET` times the
fastest such product of that process, and the others are left out of the median where at
least `ENOUGH` quiet ones remain.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SHORTEST = 0.02
QUIET = 1.15
ENOUGH = 3


REST = 0.3
"""Seconds before a sample on several threads: those of BLAS, of this process and of the one
before it, go on spinning for a while after their last call."""


@dataclass(frozen=True)
class Sample:
    """Seconds a call: of the wall clock, of the processor, of the device (or None)."""

    wall: float
    cpu: float
    device: float | None
    disturbance: float

    def seconds(self, clock: str, /) -> float:
        """Return the seconds by a clock: ``"cpu"``, ``"wall"`` or ``"device"``."""
        if clock == "device":
            return self.wall if self.device is None else self.device
        return self.cpu if clock == "cpu" else self.wall


class Clock:
    """Takes samples of one process.

    Parameters
    ----------
    name : {"cpu", "wall", "device"}
        By which one the disturbance is judged.
    """

    def __init__(self, name: str, /) -> None:
        self._cpu = name == "cpu"
        self._rest = REST if name == "wall" else 0.0
        generator = np.random.default_rng(0)
        self._probe = generator.standard_normal((384, 384), dtype=np.float32)
        self._fastest = min(self._calibration() for _ in range(8))

    def sample(
        self,
        call: Callable[[], Any],
        finish: Callable[[Any], Any],
        calls: int,
        events: Callable[[], tuple[Callable[[], Any], Callable[[], float]]] | None,
    ) -> Sample:
        """Time some calls of a function.

        Parameters
        ----------
        call : callable
            What is timed.
        finish : callable
            Waits until what it is given has been computed.
        calls : int
            How many.
        events : callable, optional
            Returns a function that marks the end on the device, and one that gives the
            seconds between the marks; calling it marks the start.

        Returns
        -------
        Sample
            Of one call.
        """
        gc.collect()
        gc.disable()
        try:
            time.sleep(self._rest)
            before = self._calibration()
            time.sleep(self._rest)
            stop = None if events is None else events()
            wall, cpu = time.perf_counter(), time.process_time()
            result = None
            for _ in range(calls):
                result = call()
            if stop is not None:
                stop[0]()
            finish(result)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            device = None if stop is None else stop[1]() / calls
            after = self._calibration()
        finally:
            gc.enable()
        self._fastest = min(self._fastest, before, after)
        return Sample(
            wall / calls, cpu / calls, device, max(before, after) / self._fastest
        )

    def _calibration(self) -> float:
        timer = time.process_time if self._cpu else time.perf_counter
        start = timer()
        np.matmul(self._probe, self._probe)
        np.matmul(self._probe, self._probe)
        return timer() - start


def calls_for(seconds: float, /) -> int:
    """Return how many calls of so many seconds make one sample."""
    return max(1, min(10_000, int(SHORTEST / max(seconds, 1e-7))))


@dataclass(frozen=True)
class Summary:
    """What the samples of one stage say, in seconds a call.

    Attributes
    ----------
    median, least, lower, upper : float
        The median, the least and the quartiles.
    quiet, samples : int
        How many samples were quiet, and how many there were; the former are what the
        numbers are of, where there were enough.
    wall, cpu : float
        The medians by both clocks.
    """

    median: float
    least: float
    lower: float
    upper: float
    quiet: int
    samples: int
    wall: float
    cpu: float

    @property
    def noisy(self) -> bool:
        """Whether there were too few quiet samples to do without the others."""
        return self.quiet < min(ENOUGH, self.samples)


def summary(samples: Sequence[Sample], /, *, clock: str) -> Summary:
    """Return the medians and quartiles of samples.

    Parameters
    ----------
    samples : sequence of Sample
        At least one.
    clock : {"cpu", "wall", "device"}
        Which one counts.

    Returns
    -------
    Summary
        Of the quiet ones, where there are enough.
    """
    quiet = [sample for sample in samples if sample.disturbance <= QUIET]
    used = quiet if len(quiet) >= ENOUGH else list(samples)
    seconds = np.array([sample.seconds(clock) for sample in used])
    lower, median, upper = (float(q) for q in np.quantile(seconds, (0.25, 0.5, 0.75)))
    return Summary(
        median,
        float(seconds.min()),
        lower,
        upper,
        len(quiet),
        len(samples),
        wall=float(np.median([sample.wall for sample in used])),
        cpu=float(np.median([sample.cpu for sample in used])),
    )
