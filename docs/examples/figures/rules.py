"""What the rules of damping add to a Kronecker block, and what that does to a product.

The block is K-FAC's, of the dense layer of `network`, with one factor multiplied by a
hundred and the other divided by it: the same block, as it might come from a network whose
inputs are small.  The reference is ``numpy.kron(A, G) + lam I``, solved as it stands.
"""

from dataclasses import dataclass

import numpy as np

import kfac_core as kc

from .fidelity import fed
from .network import Array, Seen

RULES = ("factored", "factored_unit_pi", "exact")


@dataclass(frozen=True)
class Damped:
    """One rule at one damping."""

    rule: str
    damping: float
    """Over the mean eigenvalue of the block."""
    error: float
    """``|u - u'| / |u'|``, u' the solution with ``A (x) G + lam I``."""
    length: float
    """``|u| / |u'|``."""


def unbalanced(seen: Seen) -> tuple[kc.Block, kc.Statistics, Array, Array]:
    """Return the block, its statistics, and its two factors in plain NumPy."""
    _, n, m = seen.gradients.shape
    layer = kc.Dense(in_features=n - 1, out_features=m, bias=False, weight_layout="io")
    x, g = seen.inputs * 0.1, seen.output_grads * 10.0
    block = kc.Block(layer, kc.Kronecker())
    scaled = Seen(seen.title, layer, x, g, seen.gradients[:, :-1], x[:, None])
    A = x.T @ x / len(x)
    G = np.einsum("mno,mnp->op", g, g) / len(x)
    return block, fed(block, scaled), A, G


def compared(seen: Seen, *, dampings: Array) -> list[Damped]:
    """Return every rule at every damping, for the gradient of one mini-batch."""
    block, statistics, A, G = unbalanced(seen)
    v = seen.gradients[0, :-1]
    F = np.kron(A, G)
    mean = np.trace(F) / len(F)
    found = []
    for damping in dampings:
        M = F + damping * mean * np.eye(len(F))
        exact = np.linalg.solve(M, v.ravel()).reshape(v.shape)
        size = np.linalg.norm(exact)
        for rule in RULES:
            operator = kc.operator_of(
                block, statistics, kc.RefreshOptions(damping=damping * mean, rule=rule)
            )
            u = operator.multiply_inverse(v)
            error = np.linalg.norm(u - exact) / size
            length = np.linalg.norm(u) / size
            found.append(Damped(rule, float(damping), float(error), float(length)))
    return found


def added(seen: Seen, *, damping: float) -> dict[str, tuple[Array, Array]]:
    """Return, by rule, the block's eigenvalues and what damping adds to each, over lam."""
    block, statistics, A, G = unbalanced(seen)
    F = np.kron(A, G)
    mean = np.trace(F) / len(F)
    lam = damping * mean
    _, Q_A = np.linalg.eigh(A)
    _, Q_G = np.linalg.eigh(G)
    Q = np.kron(Q_A, Q_G)
    eigenvalues = np.diag(Q.T @ F @ Q)
    found = {}
    for rule in RULES:
        operator = kc.operator_of(
            block, statistics, kc.RefreshOptions(damping=lam, rule=rule)
        )
        difference = operator.to_dense() - F
        found[rule] = eigenvalues / mean, np.diag(Q.T @ difference @ Q) / lam
    return found
