"""What the programs of this folder share: data, unequal shards, and the comparison."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

STEPS = 20
BATCH = 48
LIMITS = {"float64": 1e-10, "float32": 1e-5}

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]


def options(text: str, holders: str = "1") -> argparse.Namespace:
    """Return the options of a program of this folder."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--dtype", choices=[*LIMITS], default="float64")
    parser.add_argument(
        "--holders", default=holders, help="a divisor of P, auto or all"
    )
    return parser.parse_args()


def holders_of(text: str) -> Any:
    """Return the option `holders` as `Distributed` takes it."""
    return int(text) if text.isdigit() else text


def digits(dtype: str) -> tuple[Array, Array]:
    """Return scikit-learn's digits, shape (1797, 64), and their labels, shuffled."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    return (images[order] / 16.0).astype(dtype), labels[order]


def batch(step: int) -> slice:
    """Return the examples of a step."""
    start = step * BATCH
    return slice(start, start + BATCH)


def shard(step: int, rank: int, size: int) -> slice:
    """Return a rank's part of the examples of a step: unequal, and sometimes none."""
    start = step * BATCH
    if size == 1:
        return batch(step)
    rng = np.random.default_rng(step)
    inner = np.sort(rng.integers(0, BATCH + 1, size=size - 1))
    if step % 5 == 4:
        inner[0] = 0
    cuts = [0, *(int(n) for n in inner), BATCH]
    return slice(start + cuts[rank], start + cuts[rank + 1])


def difference(one: Arrays, other: Arrays) -> float:
    """Return the largest relative difference of two sets of arrays, in norm by layer.

    A layer's weight and bias are one vector, to which one matrix is applied; the bias alone
    may be so small a part of it that it is mostly roundoff.
    """
    return max(
        float(np.linalg.norm(result - wanted) / np.linalg.norm(wanted))
        for result, wanted in zip(
            _by_layer(one).values(), _by_layer(other).values(), strict=True
        )
    )


def _by_layer(arrays: Arrays) -> Arrays:
    """Return the arrays ``"layer.parameter"`` of each layer as one vector."""
    parts: dict[str, list[Array]] = {}
    for name in sorted(arrays):
        parts.setdefault(name.partition(".")[0], []).append(arrays[name].reshape(-1))
    return {layer: np.concatenate(shards) for layer, shards in parts.items()}


def compared(
    run: Callable[[], tuple[Arrays, Arrays]],
    alone: Callable[[], tuple[Arrays, Arrays]],
    *,
    rank: int,
    size: int,
    dtype: str,
) -> None:
    """Print how far a run of several processes is from that of one, on rank 0.

    Exits with 1 above the limit of the dtype.
    """
    parameters, directions = run()
    if rank:
        return
    expected, expected_directions = alone()
    errors = {
        "parameters": difference(parameters, expected),
        "directions": difference(directions, expected_directions),
    }
    for what, error in errors.items():
        print(
            f"{size} processes, {STEPS} steps, {dtype}: largest relative difference of "
            f"{what} to one process {error:.1e} (limit {LIMITS[dtype]:.0e})",
            flush=True,
        )
    # NaN is not below a limit.
    if not all(error <= LIMITS[dtype] for error in errors.values()):
        sys.exit(1)
