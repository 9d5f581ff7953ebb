"""Figures of libraries that do not install beside the others, as they were recorded.

Measured once, on one core in float32, as multiples of the roofline of that machine and that
run: what was compared there is a stage with the same stage's roofline, so that they stand
beside a run's own multiples, and not beside its seconds.  kfac-pytorch's refresh by
inverses is LU; its default are eigendecompositions.
"""

from __future__ import annotations

RECORDED: dict[str, dict[str, dict[str, float]]] = {
    "autoencoder": {
        "statistics": {"kfac-pytorch": 2.7, "kronfluence": 2.4},
        "refresh-inverse": {"kfac-pytorch": 6.1, "ASDL": 2.4},
        "refresh-eigen": {"kfac-pytorch": 8.7, "kronfluence, float64": 20.0},
        "precondition-inverse": {"kfac-pytorch": 1.14},
        "precondition-eigen": {"kfac-pytorch": 2.4},
    },
    "transformer": {
        "statistics": {"kfac-pytorch": 3.5, "kronfluence": 2.3},
        "refresh-inverse": {"kfac-pytorch": 5.9, "ASDL": 1.9},
        "refresh-eigen": {"kfac-pytorch": 10.5, "kronfluence, float64": 24.0},
        "precondition-inverse": {"kfac-pytorch": 1.45},
        "precondition-eigen": {"kfac-pytorch": 2.9},
    },
}
"""By workload, stage and library."""


def recorded_cycle(
    workload: str, library: str, flops: dict[str, float], /, *, kind: str
) -> float:
    """Return a library's whole cycle, as a multiple of the cycle's roofline.

    Parameters
    ----------
    workload, library : str
        Of `RECORDED`.
    flops : dict of str to float
        Those of the roofline of each stage.
    kind : {"inverse", "eigen"}
        By which refresh.

    Returns
    -------
    float
        The stages' multiples, weighted by their rooflines.
    """
    stages = ("statistics", f"refresh-{kind}", f"precondition-{kind}")
    of = RECORDED[workload]
    taken = sum(of[stage][library] * flops[stage] for stage in stages)
    return taken / sum(flops[stage] for stage in stages)
