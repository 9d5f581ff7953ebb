"""Dense references of recurrent chains, in plain NumPy and without library code.

The moments are loops over sequences and steps.  The block is made from the covariance
of whole sequences: a block Toeplitz matrix over T steps, each block of which is a power
of the transition matrix times ``V0``, summed over all pairs of steps.
"""

from __future__ import annotations

import numpy as np


def moments(
    inputs: np.ndarray,
    output_grads: np.ndarray,
    *,
    bias: bool,
    mask: np.ndarray | None = None,
) -> dict[str, np.ndarray | float]:
    """Return A0, A1, G0, G1 and S; ``output_grads`` has a leading axis of sources."""
    N, T, n = inputs.shape
    M, m = output_grads.shape[0], output_grads.shape[-1]
    keep = np.ones((N, T)) if mask is None else mask.astype(float)
    x = np.concatenate([inputs, np.ones((N, T, 1))], axis=-1) if bias else inputs
    n = x.shape[-1]
    made = {"A0": np.zeros((n, n)), "A1": np.zeros((n, n))}
    made |= {"G0": np.zeros((m, m)), "G1": np.zeros((m, m))}
    for i in range(N):
        for s in range(T):
            made["A0"] += keep[i, s] * np.outer(x[i, s], x[i, s])
            for j in range(M):
                g = output_grads[j, i, s]
                made["G0"] += keep[i, s] * np.outer(g, g)
            if s + 1 < T:
                pair = keep[i, s] * keep[i, s + 1]
                made["A1"] += pair * np.outer(x[i, s + 1], x[i, s])
                for j in range(M):
                    g = output_grads[j, i]
                    made["G1"] += pair * np.outer(g[s + 1], g[s])
    return {k: v / keep.sum() for k, v in made.items()} | {"S": keep.sum() / N}


def shifts(
    A: np.ndarray, G: np.ndarray, S: float, *, damping: float, unit_pi: bool = False
) -> tuple[float, float]:
    """Return what a factored rule adds to the diagonals of A and G."""
    pi = 1.0
    if not unit_pi:
        pi = np.sqrt((np.trace(A) / len(A)) / (np.trace(G) / len(G)))
    root = np.sqrt(damping / S)
    return pi * root, root / pi


def damped(stats: dict[str, np.ndarray], damping: float) -> dict[str, np.ndarray]:
    """Return the moments with A0 and G0 damped."""
    a, g = shifts(stats["A0"], stats["G0"], stats["S"], damping=damping)
    return stats | {
        "A0": stats["A0"] + a * np.eye(len(stats["A0"])),
        "G0": stats["G0"] + g * np.eye(len(stats["G0"])),
    }


def toeplitz_block(V_0: np.ndarray, V_1: np.ndarray, T: int) -> np.ndarray:
    """Return the sum over all blocks of the covariance of a chain of T steps."""
    k = len(V_0)
    transition = V_1 @ np.linalg.inv(V_0)
    lags = [V_0]
    for _ in range(T - 1):
        lags.append(transition @ lags[-1])
    joint = np.zeros((T * k, T * k))
    for t in range(T):
        for s in range(t + 1):
            V = lags[t - s]
            joint[t * k : (t + 1) * k, s * k : (s + 1) * k] = V
            joint[s * k : (s + 1) * k, t * k : (t + 1) * k] = V.T
    every = np.tile(np.eye(k), (T, 1))
    return every.T @ joint @ every


def symmetric_block(
    stats: dict[str, np.ndarray], lengths: list[int] | np.ndarray
) -> np.ndarray:
    """Return option 1: the mean over sequences of the given lengths."""
    V_0 = np.kron(stats["A0"], stats["G0"])
    halves = [0.5 * (stats[k] + stats[k].T) for k in ("A1", "G1")]
    V_1 = np.kron(*halves)
    total = np.zeros_like(V_0)
    for T in lengths:
        if T > 0:
            total += toeplitz_block(V_0, V_1, int(T)) / len(lengths)
    return total


def infinite_block(stats: dict[str, np.ndarray]) -> np.ndarray:
    """Return option 2: S times the sum of all lags, term by term."""
    V_0 = np.kron(stats["A0"], stats["G0"])
    V_1 = np.kron(stats["A1"], stats["G1"])
    transition = V_1 @ np.linalg.inv(V_0)
    total, V = V_0.copy(), V_0
    for _ in range(100_000):
        V = transition @ V
        total += V + V.T
        if np.linalg.norm(V) < 1e-18 * np.linalg.norm(total):
            return stats["S"] * total
    raise AssertionError("the reference did not converge")


def sequences(
    rng: np.random.Generator, shape: tuple[int, int, int], *, correlation: float
) -> np.ndarray:
    """Return stationary sequences whose neighbors are correlated as stated."""
    N, T, n = shape
    mixing = 0.3 * rng.normal(size=(n, n)) + np.eye(n)
    x = np.empty(shape)
    x[:, 0] = rng.normal(size=(N, n))
    for t in range(1, T):
        noise = rng.normal(size=(N, n))
        x[:, t] = correlation * x[:, t - 1] + np.sqrt(1 - correlation**2) * noise
    return x @ mixing
