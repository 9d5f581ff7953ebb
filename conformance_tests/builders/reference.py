"""Dense references in plain NumPy, which share no code with the library.

Every statistic is a loop over examples and positions that writes the definition down;
every product is a dense matrix.
"""

from __future__ import annotations

import numpy as np


def rows_of(
    inputs: np.ndarray,
    output_grads: np.ndarray,
    *,
    bias: bool,
    mask: np.ndarray | None = None,
) -> list[list[tuple[np.ndarray, list[np.ndarray]]]]:
    """List, for each example, the kept rows as (x with its 1, [g of each source])."""
    N, n = inputs.shape[0], inputs.shape[-1]
    M, m = output_grads.shape[0], output_grads.shape[-1]
    x = inputs.reshape(N, -1, n)
    g = output_grads.reshape(M, N, -1, m)
    keep = np.ones(x.shape[:2], bool) if mask is None else mask.reshape(N, -1) != 0
    rows = []
    for i in range(N):
        example = []
        for s in range(x.shape[1]):
            if keep[i, s]:
                row = np.concatenate([x[i, s], [1.0]]) if bias else x[i, s]
                example.append((row, [g[j, i, s] for j in range(M)]))
        rows.append(example)
    return rows


def kronecker_factors(
    inputs: np.ndarray,
    output_grads: np.ndarray,
    *,
    bias: bool,
    mask: np.ndarray | None = None,
    sharing: str = "expand",
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return A, G and S of one batch; ``output_grads`` has a leading axis of sources."""
    rows = rows_of(inputs, output_grads, bias=bias, mask=mask)
    n, m = inputs.shape[-1] + bias, output_grads.shape[-1]
    A, G = np.zeros((n, n)), np.zeros((m, m))
    if sharing == "expand":
        count = sum(len(example) for example in rows)
        for example in rows:
            for x, gs in example:
                A += np.outer(x, x) / count
                G += sum(np.outer(g, g) for g in gs) / count
        return A, G, count / len(rows)
    for example in rows:
        if example:
            x = sum(x for x, _ in example) / len(example)
            A += np.outer(x, x) / len(rows)
            for j in range(output_grads.shape[0]):
                g = sum(gs[j] for _, gs in example)
                G += np.outer(g, g) / len(rows)
    return A, G, 1.0


def damped_block(
    A: np.ndarray, G: np.ndarray, S: float, *, damping: float, rule: str
) -> np.ndarray:
    """Return the dense damped block, flattened row-major."""
    n, m = len(A), len(G)
    if rule == "exact":
        return S * np.kron(A, G) + damping * np.eye(n * m)
    a, g = np.trace(A) / n, np.trace(G) / m
    pi = 1.0 if rule == "factored_unit_pi" or a * g == 0 else np.sqrt(a / g)
    root = np.sqrt(damping / S)
    return S * np.kron(A + pi * root * np.eye(n), G + root / pi * np.eye(m))


def matrix_power(F: np.ndarray, exponent: float) -> np.ndarray:
    """Return a real power of a symmetric positive-definite matrix."""
    w, Q = np.linalg.eigh(F)
    return (Q * w**exponent) @ Q.T


def spd(
    rng: np.random.Generator,
    n: int,
    *,
    condition: float = 100.0,
    rank: int | None = None,
) -> np.ndarray:
    """Return a symmetric matrix with a stated condition number and rank.

    The eigenvalues are spread geometrically between 1 and ``1 / condition``; those
    beyond the rank are zero.
    """
    Q, _ = np.linalg.qr(rng.normal(size=(n, n)))
    w = np.geomspace(1.0, 1.0 / condition, n)
    w[n if rank is None else rank :] = 0.0
    A = (Q * w) @ Q.T
    return 0.5 * (A + A.T)


def gram(
    rows: np.ndarray, *, weights: np.ndarray | None = None, homogeneous: bool = False
) -> np.ndarray:
    """Return ``sum_i w_i x_i x_i^T``, a 1 appended to each row on demand."""
    d = rows.shape[1] + homogeneous
    total = np.zeros((d, d))
    for i, row in enumerate(rows):
        x = np.concatenate([row, [1.0]]) if homogeneous else row
        total += (1.0 if weights is None else weights[i]) * np.outer(x, x)
    return total


def damped_inverse(
    A: np.ndarray, G: np.ndarray, V: np.ndarray, *, S: float = 1.0, damping: float = 0.1
) -> np.ndarray:
    """Return ``(S A' (x) G')^-1 V`` of the factored rule, by dense solves."""
    pi = np.sqrt((np.trace(A) / len(A)) / (np.trace(G) / len(G)))
    root = np.sqrt(damping / S)
    A, G = A + pi * root * np.eye(len(A)), G + root / pi * np.eye(len(G))
    return np.linalg.solve(A, np.linalg.solve(G, V.T).T) / S
