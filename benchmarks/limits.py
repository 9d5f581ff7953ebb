"""The numbers that the library is meant to reach, in float32.

Where there are two, the first is of the autoencoder and the second of the transformer's
shapes, as `benchmarks.measured.PLACES` has them.  Figures that are "over" something are
quotients.
"""

from __future__ import annotations

from benchmarks.measured import CORES

OVER_THE_ROOFLINE: dict[str, dict[str, tuple[float, float]]] = {
    "statistics": {"numpy": (1.25, 1.15), "torch": (1.45, 1.45)},
    "refresh-inverse": {"numpy": (1.7, 1.2), "torch": (2.2, 1.9)},
    "refresh-cholesky": dict.fromkeys(CORES, (0.55, 0.45)),
    "precondition-inverse": dict.fromkeys(CORES, (1.1, 1.1)),
    "precondition-solve": dict.fromkeys(CORES, (1.5, 1.5)),
}
"""The greatest multiple of the roofline, by stage and core."""

DRIVER = 1.05
"""How much longer eigendecompositions may take than the fastest driver alone."""

TWO_CORES = 1.7
"""How many times as fast a refresh with inverses should be on two cores."""

CYCLE_OVER = {"kfac-pytorch": (2.5, 3.5), "curvlinops": (1.5, 1.8)}
"""How many times as fast a whole cycle should be as each peer's."""

LOOPED = {"200 of 16": 4.0, "200 of 64": 1.3}
"""How many times as fast one call for all layers should be as a call a layer."""

CALL = 50e-6
"""The seconds that a call may take for a layer of 1x1."""

EXPONENTS = (
    ("refresh-inverse", "width", 3),
    ("statistics", "width", 2),
    ("statistics", "rows", 1),
    ("statistics", "layers", 1),
    ("refresh-inverse", "layers", 1),
    ("precondition-inverse", "layers", 1),
)
"""With which power of what each stage should grow."""

TOLERANCE = 0.1
"""The relative error that an exponent may have."""
