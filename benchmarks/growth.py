"""How time grows with width, rows and layers: the slopes of straight lines.

Conventions.  A sweep's exponent is the slope of the logarithm of time over the logarithm
of size, by least squares over all its points; the last one is that of the two largest
points alone, where small terms and the better use of a kernel at larger sizes have
mostly died away.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def slope(points: Sequence[tuple[float, float]], /) -> float:
    """Return the slope of the logarithm of the second number over that of the first.

    Parameters
    ----------
    points : sequence of (float, float)
        At least two, all positive, not all at one place.

    Returns
    -------
    float
        By least squares.
    """
    xs = [math.log(x) for x, _ in points]
    ys = [math.log(y) for _, y in points]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    above = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return above / sum((x - x_mean) ** 2 for x in xs)


def growth(workloads: Sequence[dict[str, Any]], /) -> list[dict[str, Any]]:
    """Return the exponents of every sweep, stage and library.

    Parameters
    ----------
    workloads : sequence of dict
        As `benchmarks.run.run` gives them.

    Returns
    -------
    list of dict
        With the ``"sweep"``, ``"stage"``, ``"library"``, its ``"points"`` (size and
        median seconds), its ``"exponent"`` and its ``"last"`` one; for curves of two
        points or more.
    """
    curves: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for workload in workloads:
        if not workload["sweep"]:
            continue
        for stage, of_stage in workload["stages"].items():
            for library, figures in of_stage.items():
                if "median" in figures:
                    key = (workload["sweep"], stage, library)
                    point = (workload["size"], figures["median"])
                    curves.setdefault(key, []).append(point)
    return [
        {
            "sweep": sweep,
            "stage": stage,
            "library": library,
            "points": sorted(points),
            "exponent": slope(points),
            "last": slope(sorted(points)[-2:]),
        }
        for (sweep, stage, library), points in curves.items()
        if len(points) > 1
    ]
