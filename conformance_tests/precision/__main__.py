"""Print the grid: ``python -m conformance_tests.precision [--quick] numpy torch jax``.

``--cost`` prints instead what the checks of a block of 1000 x 1000 add to its refresh.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

import kfac_core as kc
from kfac_core.damping import DampingRule
from kfac_core.linalg import damped
from kfac_core.operators import spectral

from . import grid

QUICK = {"scales": (1.0,), "dampings": (1e-40, 1e-14, 1e-6, 1.0, 1e30)}


def main(arguments: list[str]) -> int:
    """Walk the grid on each backend; return how many cases are silently wrong."""
    if "--cost" in arguments:
        print_cost()
        return 0
    quick = "--quick" in arguments
    backends = [name for name in arguments if not name.startswith("-")] or ["numpy"]
    wrong = 0
    for backend in backends:
        started = time.perf_counter()
        if backend.startswith("jax"):
            kc.enable_float64(backend="jax")
        found: dict[grid.Case, str] = {}
        with kc.use_backend(backend), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for case in grid.cases(**QUICK) if quick else grid.cases():
                found[case], told = grid.verdict(case, backend)
                if found[case] == "silently wrong":
                    wrong += 1
                    print(f"{case}: {told}")
        print(f"\n{backend} ({time.perf_counter() - started:.0f} s)\n")
        print(aligned(grid.table(found)))
    return wrong


def aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows as lines of columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def print_cost(size: int = 1000) -> None:
    """Print the share of a refresh that the checks of the block take, on NumPy."""
    layer = kc.Dense(
        in_features=size, out_features=size, bias=False, weight_layout="io"
    )
    block = kc.Block(layer, kc.Kronecker())
    rng = np.random.default_rng(0)
    x, g = (rng.normal(size=(2 * size, size)).astype(np.float32) for _ in range(2))
    statistics = block.update(
        block.initial(x), kc.Batch(x, g), conventions=grid.SUMMED, decay=0.0
    )
    rules: tuple[DampingRule, ...] = ("factored", "exact")
    for rule in rules:
        checks: list[float] = []
        with timed(checks):
            seconds, added = [], []
            for _ in range(5):
                checks.clear()
                started = time.perf_counter()
                block.operator(statistics, damping=1.0, rule=rule)
                seconds.append(time.perf_counter() - started)
                added.append(sum(checks))
        share = min(added) / min(seconds)
        print(
            f"{rule}: refresh {min(seconds):.3f} s, of which checks of the damped block "
            f"{1000 * min(added):.2f} ms ({100 * share:.2f}%)"
        )


@contextmanager
def timed(seconds: list[float]) -> Iterator[None]:
    """Collect the seconds of every check that a refresh makes, but the factors' own."""
    places = (
        (damped, "settled_eigenvalues"),
        (damped, "pivot_error"),
        (spectral, "accurate_bases"),
    )
    originals = [(module, name, getattr(module, name)) for module, name in places]

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            found = function(*arguments, **options)
            seconds.append(time.perf_counter() - started)
            return found

        return call

    for module, name, function in originals:
        setattr(module, name, watched(function))
    try:
        yield
    finally:
        for module, name, function in originals:
            setattr(module, name, function)


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
