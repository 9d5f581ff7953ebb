"""What is timed, and the flops that it cannot do without.

Conventions.  For a layer with factors A (n x n) and G (m x m) and R rows a batch:

================  ==============================  ==========================================
stage             flops of the roofline          what it is
================  ==============================  ==========================================
statistics        ``R (n^2 + m^2)``               SYRK; both factors, with their average
refresh           ``n^3 + m^3``                   POTRF and POTRI, whatever is made
precondition      ``2 n m (n + m)``               two GEMMs, whatever is done
cycle             all three                       everything refreshed at every step
================  ==============================  ==========================================

"Space of samples" is a direction of Gauss-Newton with a residual for each row: the Gram
matrices of x and g (SYRK), POTRF of K, and ``J^T c``, all in float64, where a flop counts
twice.  "SOAP" is ten steps of the optimizer: the rotations to and fro, and once the rows
(a pass), their Gram matrices, QR steps, and moments in the new bases; it is counted with
the blocks that the bases have.

The refresh by factorization alone could be had for a third of its roofline, and by
eigendecompositions for 14/3 of it; preconditioning in the eigenbases needs four GEMMs.
They are put over the same flops, so that the columns of a table compare.

Two stages are of some libraries alone.  "The fastest driver alone" is what LAPACK's own
eigendecompositions of the same factors take, each by whichever driver is the faster for
it, in the array library's binding; `GPU_STAGES` are timed on a GPU alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from kfac_core.roots import side_blocks

TITLES = {
    "statistics": "statistics with moving average",
    "refresh-inverse": "refresh, inverses",
    "refresh-cholesky": "refresh, factorization only",
    "refresh-eigen": "refresh, eigendecompositions",
    "precondition-inverse": "precondition, inverses",
    "precondition-solve": "precondition, triangular solves",
    "precondition-eigen": "precondition, eigenbases (exact damping)",
    "refresh-driver": "eigendecompositions, the fastest driver alone",
    "cycle": "whole cycle",
    "cycle-triangular": "whole cycle, by triangular solves",
    "cycle-status": "whole cycle, failures as statuses",
    "refresh-looped": "refresh, inverses, a call a layer",
    "precondition-looped": "precondition, inverses, a call a layer",
    "samples-direction": "space of samples, Gram and direction",
    "soap-steps": "SOAP, ten steps with one renewal",
}
CORE_STAGES = ("statistics", "refresh-inverse", "precondition-inverse", "cycle")
MAIN_STAGES = (
    *("statistics", "refresh-inverse", "refresh-cholesky"),
    *("precondition-inverse", "precondition-solve", "cycle", "cycle-triangular"),
)
EIGEN_STAGES = ("refresh-eigen", "refresh-driver", "precondition-eigen")
OPTIMIZER_STAGES = ("samples-direction", "soap-steps")
GPU_STAGES = ("cycle-status",)
LOOPED_STAGES = ("refresh-looped", "precondition-looped")
MEMORY_LIMITS = {
    "statistics": 1.1,
    "refresh-inverse": 1.7,
    "refresh-cholesky": 1.2,
    "refresh-eigen": 1.3,
    "precondition-inverse": 1.0,
    "precondition-eigen": 1.2,
    "cycle": 2.7,
}
"""What a call may add to the memory that is held, over the factors' own bytes.

An update makes new sums, and a refresh a factorization beside the operators that there
are, which stay until it is done.  PyTorch's own inverse of the largest factor has its
triangular root beside it; NumPy keeps memory for what is made next.
"""


class Sized(Protocol):
    """A layer, as far as its flops go."""

    @property
    def rows(self) -> int:
        """R."""

    @property
    def inputs(self) -> int:
        """The width of the inputs, without a bias."""

    @property
    def shape(self) -> tuple[int, int]:
        """``(n, m)``."""


def stage_flops(stage: str, layers: Sequence[Sized], /) -> float:
    """Return the flops of a stage's roofline, as the module's table has them."""
    total = 0.0
    for layer in layers:
        R, (n, m) = layer.rows, layer.shape
        parts = {
            "statistics": R * (n * n + m * m),
            "refresh": n**3 + m**3,
            "precondition": 2 * n * m * (n + m),
        }
        parts["cycle"] = sum(parts.values())
        parts["samples"] = 2 * (R * R * (n + m) + 2 * R * n * m)
        parts["soap"] = _soap_flops(layer)
        total += parts[stage.partition("-")[0]]
    if stage.startswith("samples"):
        total += 2 * max(layer.rows for layer in layers) ** 3 / 3
    return total


def basis_blocks(layer: Sized, /) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return number and size of the blocks of SOAP's bases of inputs and outputs."""
    n, m = layer.inputs, layer.shape[1]
    return side_blocks(n, m) or (1, 1), side_blocks(m, n) or (1, 1)


def _soap_flops(layer: Sized) -> float:
    """Return the flops of ten steps: 22 rotations, and a renewal."""
    R, n, m = layer.rows, layer.inputs, layer.shape[1]
    sides = basis_blocks(layer)
    rotation = 2 * n * m * sum(b for _, b in sides)
    # A product C Q, a QR decomposition with its Q, and Q_old^T Q_new.
    renewal = sum(c * b**3 * (2 + 8 / 3 + 2) + R * c * b * b for c, b in sides)
    return 22 * rotation + renewal + 4 * R * n * m


def rule_of(stage: str, /) -> str:
    """Return the damping rule whose answer a stage's work leads to."""
    return "exact" if stage.endswith(("-eigen", "-driver")) else "factored"


def chosen_stages(names: Iterable[str], /) -> tuple[str, ...]:
    """Return stages by name; ValueError for one that there is not."""
    chosen = tuple(names)
    for name in chosen:
        if name not in TITLES:
            raise ValueError(f"no stage {name!r}; there are {', '.join(TITLES)}")
    return chosen
