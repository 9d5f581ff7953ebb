"""What is run, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from benchmarks.workloads import Workload


@dataclass(frozen=True)
class Options:
    """What is run.

    Attributes
    ----------
    workloads : tuple of Workload
        In this order.
    libraries : tuple of str
        Of `LIBRARIES`; one that cannot be used here is named and left out.
    stages : tuple of str
        Which of a workload's stages; all where empty.
    threads, repetitions : int
        Of each library; of each stage.
    seconds : float
        After how long a stage is left, with `ENOUGH` rounds at least.
    patience : float
        See `Process`.
    device : {"cpu", "cuda"}
        Where the libraries compute.
    memory : bool
        Whether peak memory is measured where the workload has it.
    python : str
        The interpreter of the workers.
    pythons : mapping of str to str
        Those of single libraries.
    gemm_sizes : tuple of int
        Of the matrix products whose best rate is the roofline's.
    say : callable
        Is told what is being done.
    """

    workloads: tuple[Workload, ...]
    libraries: tuple[str, ...]
    python: str
    stages: tuple[str, ...] = ()
    threads: int = 1
    repetitions: int = 9
    seconds: float = 60.0
    patience: float = 600.0
    device: str = "cpu"
    memory: bool = True
    pythons: Mapping[str, str] = field(default_factory=dict)
    gemm_sizes: tuple[int, ...] = (512, 1024, 2048)
    say: Callable[[str], None] = print

    @property
    def clock(self) -> str:
        """Which clock counts: the processor's on one core, as load cannot stretch it."""
        if self.device == "cuda":
            return "device"
        return "cpu" if self.threads == 1 else "wall"
