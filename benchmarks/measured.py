"""What a run measured, asked for by name; None for what it did not.

`benchmarks.targets` is made of such figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.recorded import recorded_cycle

KERNELS = {"numpy": "lapack", "torch": "torch-kernels"}
"""The cores that have targets, and what plays their array library's own kernels."""

CORES = tuple(KERNELS)

PLACES = ("autoencoder", "transformer")
"""The workloads of the targets that are given in pairs."""


class Run:
    """The figures of one run.

    Parameters
    ----------
    plain : dict
        As `benchmarks.run.run` gives it, with ``"growth"``.
    """

    def __init__(self, plain: dict[str, Any], /) -> None:
        self._plain = plain
        self._workloads = {of["name"]: of for of in plain["workloads"]}
        self.threads = str(plain["threads"])
        self.on_gpu = plain["device"] != "cpu"

    @property
    def cores(self) -> tuple[str, ...]:
        """The libraries that the others are peers of."""
        said = self._plain["libraries"].items()
        return tuple(name for name, of in said if of["core"])

    @property
    def peers(self) -> tuple[str, ...]:
        """The others, but for those that are plain kernels."""
        said = self._plain["libraries"].items()
        return tuple(n for n, of in said if not of["core"] and not of["kernels"])

    def title(self, library: str, /) -> str:
        """Return what to call a library."""
        said = self._plain["libraries"].get(library, {})
        return str(said.get("title", library))

    def figure(
        self, workload: str, stage: str, library: str, key: str = "median", /
    ) -> float | None:
        """Return a figure of a stage; ``"rooflines"`` for its multiple of the roofline."""
        return self._of(workload, stage, library).get(key)

    def fastest(
        self, workload: str, stages: Sequence[str], library: str, /
    ) -> tuple[str, float | None]:
        """Return that of some stages which took least, and its multiple of the roofline."""
        found = {s: self.figure(workload, s, library, "rooflines") for s in stages}
        known = {
            stage: rooflines
            for stage, rooflines in found.items()
            if rooflines is not None
        }
        if not known:
            return stages[0], None
        best = min(known, key=known.__getitem__)
        return best, known[best]

    def noisy(self, workload: str, stage: str, library: str, /) -> bool:
        """Whether a figure is of samples that were disturbed."""
        return bool(self._of(workload, stage, library).get("noisy", False))

    def memory(self, workload: str, stage: str, library: str, /) -> float | None:
        """Return what a call adds to the memory held, over the factors' bytes."""
        of = self._workloads.get(workload, {})
        found = of.get("memory", {}).get(stage, {}).get(library, {})
        if "peak" not in found:
            return None
        added: float = (found["peak"] - found["held"]) / of["factor_bytes"]
        return added

    def counts(
        self, workload: str, stage: str, library: str, /
    ) -> tuple[float | None, float | None]:
        """Return how often a stage synchronizes, and how many kernels it launches."""
        found = self._of(workload, stage, library).get("counts") or {}
        return found.get("synchronizations"), found.get("launches")

    def exponent(
        self, sweep: str, stage: str, library: str, sizes: Sequence[int], /
    ) -> float | None:
        """Return the exponent of a sweep, where all sizes were measured."""
        for curve in self._plain["growth"]:
            key = curve["sweep"], curve["stage"], curve["library"]
            if key == (sweep, stage, library):
                complete = set(sizes) <= {size for size, _ in curve["points"]}
                return float(curve["exponent"]) if complete else None
        return None

    def recorded_cycle(self, workload: str, kind: str, /) -> float | None:
        """Return kfac-pytorch's cycle over the roofline, weighted by this run's."""
        flops = self._workloads.get(workload, {}).get("flops")
        if flops is None:
            return None
        return recorded_cycle(workload, "kfac-pytorch", flops, kind=kind)

    def gain(
        self, other: Run, workload: str, stage: str, library: str, /
    ) -> float | None:
        """Return how many times as fast a stage is in another run, by the wall clock."""
        stage_time = self.figure(workload, stage, library, "wall")
        return ratio(stage_time, other.figure(workload, stage, library, "wall"))

    def product_gain(self, other: Run, /) -> str:
        """Return how many times as fast the other run's matrix product is, in words."""
        own_gemm, other_gemm = (
            max(run._plain["gemm"].values(), default=0.0) for run in (self, other)
        )
        if not own_gemm or not other_gemm:
            return ""
        return f"a matrix product: {other_gemm / own_gemm:.2f}"

    def by_kernels(self, core: str, figure: float | None, /, *, unit: str = "x") -> str:
        """Return what the same figure is of a core's kernels, in words."""
        if figure is None:
            return ""
        return f"{self.title(KERNELS[core])}: {with_unit(figure, unit)}"

    def _of(self, workload: str, stage: str, library: str) -> dict[str, Any]:
        stages = self._workloads.get(workload, {}).get("stages", {})
        found: dict[str, Any] = stages.get(stage, {}).get(library, {})
        return found


def ratio(a: float | None, b: float | None, /) -> float | None:
    """Return a quotient; None where a part of it is missing."""
    return a / b if a and b else None


def with_unit(figure: float, unit: str, /) -> str:
    """Return a figure in a unit that suits it: seconds in three digits, else two."""
    if unit != "s":
        return f"{figure:.2f}"
    for name, size in (("s", 1.0), ("ms", 1e-3)):
        if figure >= size:
            return f"{figure / size:.3g} {name}"
    return f"{figure / 1e-6:.3g} µs"
