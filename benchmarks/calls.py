"""Calls and frames between an estimator and BLAS: ``python -m benchmarks.calls``.

One dense block of 4 x 3 on NumPy, with the plain executor and everything warm.  For each
stage: the Python calls that it makes, in how many files; the deepest stack below the call;
and the most frames of the package's own in a stack.  A count depends on neither the clock
nor the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np

import kfac_core as kc
from kfac_core.stages import plain

OWN = ("kfac_core", "kfac_core_backends")


@dataclass(frozen=True)
class Counted:
    """What one call made.

    Attributes
    ----------
    calls, files : int
        Python calls, and the files that the called functions are in.
    deep, own : int
        The deepest stack below the call, and the most frames of the package's own.
    path : tuple of str
        The own frames of that stack, outermost first.
    """

    calls: int
    files: int
    deep: int
    own: int
    path: tuple[str, ...]


def counted(function: Callable[[], Any], /) -> Counted:
    """Run a function and count what it calls."""
    calls = 0
    files: set[str] = set()
    stack: list[str] = []
    deepest, most = 0, ()

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls, deepest, most
        if event == "call":
            code = frame.f_code
            module = frame.f_globals.get("__name__", "")
            stack.append(f"{module}.{code.co_qualname}")
            files.add(code.co_filename)
            calls += 1
            own = tuple(n for n in stack if n.split(".")[0] in OWN)
            deepest = max(deepest, len(stack))
            most = max(most, own, key=len)
        elif event == "return" and stack:
            stack.pop()

    sys.setprofile(watch)
    try:
        function()
    finally:
        sys.setprofile(None)
    # The last "return" of the profile is that of this function's own caller.
    return Counted(calls, len(files), deepest, len(most), most)


def stages() -> dict[str, Counted]:
    """Count update, refresh and precondition of one dense block."""
    layer = kc.Dense(in_features=4, out_features=3, bias=True, weight_layout="io")
    blocks = {"fc": kc.Block(layer, kc.Kronecker())}
    estimator = kc.Estimator(
        blocks, reduction="mean", damping=0.1, decay=0.9, execution=plain
    )
    rng = np.random.default_rng(0)
    x, g = rng.normal(size=(8, 4)), rng.normal(size=(8, 3))
    batches = {"fc": kc.Batch(x, g)}
    gradients = {"fc": {"weight": rng.normal(size=(4, 3)), "bias": rng.normal(size=3)}}
    run: dict[str, Callable[[], Any]] = {
        "update": lambda: estimator.update(batches),
        "refresh": lambda: estimator.refresh(),
        "precondition": lambda: estimator.precondition(gradients),
    }
    found: dict[str, Counted] = {}
    for _ in range(3):
        for name, stage in run.items():
            found[name] = counted(stage)
    return found


def main() -> None:
    """Print the table, and the deepest path of each stage."""
    found = stages()
    print(f"{'stage':<14}{'calls':>7}{'files':>7}{'frames':>8}{'own':>6}")
    for name, one in found.items():
        print(f"{name:<14}{one.calls:>7}{one.files:>7}{one.deep:>8}{one.own:>6}")
    for name, one in found.items():
        print(f"\n{name}:")
        for place in one.path:
            print(f"  {place}")


if __name__ == "__main__":
    main()
