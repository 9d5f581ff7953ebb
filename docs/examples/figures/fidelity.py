"""How near each approximation comes to the exact block, and what it costs.

Two numbers say how near.  *Block* is ``|F' - F| / |F|`` in the Frobenius norm.  *Decrease*
is about what the block is for: with the damped exact block ``M = F + lam I``, the gradient
v of a mini-batch, and a direction u, the best step along u lowers the quadratic model by
``(v.u)^2 / 2 u.Mu``.  The sum of this over mini-batches is given as a share of the most
that directions can reach, the sum of ``v.M^-1 v / 2``.  It is 1 for the exact block, and
never more.

Two say what it costs.  *Kept* is the number of floats that the statistics hold, counted
in the arrays.  *Flops* are those of a refresh and ten products, by the formulas of
`flops`, in which a Cholesky inverse takes n^3 and an eigendecomposition 9 n^3.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from kfoc import KFOC

import kfac_core as kc
from kfac_core.array.structure import map_structure
from kfac_core.conventions import Conventions

from .network import Array, Seen

DAMPING = 0.1
"""Over the mean eigenvalue of the exact block."""

PRODUCTS = 10
"""How many there are to a refresh."""


@dataclass(frozen=True)
class Fidelity:
    """One approximation of one layer."""

    name: str
    block: float
    decrease: float
    kept: int
    flops: float


def fidelities(seen: Seen) -> list[Fidelity]:
    """Return every approximation that goes together with a layer, cheapest first."""
    F = seen.dense_block()
    lam = DAMPING * np.trace(F) / len(F)
    M, V = F + lam * np.eye(len(F)), seen.gradients
    most = decrease(V, np.linalg.solve(M, flat(V).T).T.reshape(V.shape), M)
    rows = []
    for name, approximation in catalogue(seen).items():
        block = kc.Block(seen.layer, approximation)
        statistics = fed(block, seen)
        rule: Any = "factored" if isinstance(approximation, kc.Series) else "exact"
        operator = kc.operator_of(
            block, statistics, kc.RefreshOptions(damping=float(lam), rule=rule)
        )
        U = np.stack([operator.multiply_inverse(v) for v in V])
        found = operator.to_dense(damped=False)
        rows.append(
            Fidelity(
                name,
                float(np.linalg.norm(found - F) / np.linalg.norm(F)),
                decrease(V, U, M) / most,
                kept(statistics),
                flops(approximation, seen),
            )
        )
    plain = decrease(V, V, M) / most
    rows.append(Fidelity("the gradient itself", 1.0, plain, 0, 0.0))
    return sorted(rows, key=lambda row: row.kept)


def decrease(V: Array, U: Array, M: Array) -> float:
    """Return the sum over gradients of ``(v.u)^2 / u.Mu``, u the direction of each."""
    V, U = flat(V), flat(U)
    slopes = np.sum(V * U, axis=1)
    curvatures = np.sum(U @ M * U, axis=1)
    return float(np.sum(slopes**2 / curvatures))


def flat(V: Array) -> Array:
    """Return matrices as rows."""
    return V.reshape(len(V), -1)


def catalogue(seen: Seen) -> dict[str, Any]:
    """Return the approximations to be compared, by the names of the table."""
    shared = seen.inputs.ndim > 2
    found: dict[str, Any] = {
        "Diagonal()": kc.Diagonal(),
        'Kronecker(input="diagonal")': kc.Kronecker(input="diagonal"),
        "Kronecker()": kc.Kronecker(),
        "TNT()": kc.TNT(),
        "nearest product": KFOC(iterations=5),
        "EKFAC()": kc.EKFAC(),
        "Full()": kc.Full(),
    }
    if shared:
        found['Kronecker(sharing="reduce")'] = kc.Kronecker(sharing="reduce")
        found['EKFAC(sharing="reduce")'] = kc.EKFAC(sharing="reduce")
    if seen.layer.kind == "conv":
        found['Kronecker(input="uncorrelated")'] = kc.Kronecker(input="uncorrelated")
    elif shared:
        steps = seen.inputs.shape[1]
        symmetric = kc.Series(variant="symmetric", steps=steps)
        found['Series(variant="symmetric")'] = symmetric
        found['Series(variant="infinite")'] = kc.Series(variant="infinite")
    return found


def fed(block: kc.Block, seen: Seen) -> kc.Statistics:
    """Return the statistics of one batch; EKFAC sees it twice, the second time in bases."""
    conventions = Conventions(reduction="sum", sources="sum")
    options: dict[str, Any] = {"conventions": conventions, "decay": 1.0}
    statistics = kc.update_block(
        block, block.initial(seen.inputs), seen.batch, kc.UpdateOptions(**options)
    )
    if isinstance(block.approximation, kc.EKFAC):
        statistics = kc.rebase_block(block, statistics, "zero", "raise")
        statistics = kc.update_block(
            block, statistics, seen.batch, kc.UpdateOptions(**options)
        )
    return statistics


def kept(statistics: kc.Statistics) -> int:
    """Return how many floats are held, of a symmetric matrix all and of a basis too."""
    leaves: list[Array] = []

    def collect(x: Array) -> Array:
        leaves.append(x)
        return x

    map_structure(collect, statistics)
    return sum(x.size for x in leaves if x.ndim and x.dtype.kind == "f")


def flops(approximation: Any, seen: Seen) -> float:
    """Return what a refresh and `PRODUCTS` products take."""
    _, n, m = seen.gradients.shape
    cubes, product = float(n**3 + m**3), 2.0 * n * m * (n + m)
    match approximation:
        case kc.Diagonal():
            return PRODUCTS * n * m
        case kc.Full():
            return float((n * m) ** 3) + PRODUCTS * 2.0 * (n * m) ** 2
        case kc.EKFAC():
            return 9.0 * cubes + PRODUCTS * 2.0 * product
        case kc.Series():
            # Roots, correlations and one eigendecomposition a side.
            return 20.0 * cubes + PRODUCTS * 2.0 * product
        case kc.Kronecker(input="diagonal"):
            return float(m**3) + PRODUCTS * (2.0 * n * m * m + n * m)
        case kc.Kronecker(input="uncorrelated"):
            c = seen.layer.in_channels
            return float(c**3 + m**3) + PRODUCTS * 2.0 * n * m * (c + m)
        case _:
            return cubes + PRODUCTS * product
