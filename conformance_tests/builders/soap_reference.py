"""SOAP as a naive float64 program in NumPy: whole bases, one matrix after the other.

The first moment stays in a weight's own coordinates; nothing is stacked or joined.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BETAS = 0.93, 0.93

Moments = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Gradient, first and second moment in the bases."""


class Naive:
    """One weight as a matrix, with a basis on both sides if it has factors."""

    def __init__(self, shape: tuple[int, int], *, eps: float = 1e-10) -> None:
        self.m, self.v, self.t = np.zeros(shape), np.zeros(shape), 0
        self.eps = eps
        self.C: list[np.ndarray | None] = [None, None]
        self.Q = [np.eye(n) for n in shape]

    def rotated(
        self,
        V: np.ndarray,
        grams: Sequence[np.ndarray] = (),
        *,
        decay: float = 0.8,
        every: bool = False,
    ) -> Moments:
        """Begin a step: average the factors, and renew the bases where that is due."""
        self.t += 1
        is_due, old = self.t <= 3 or self.t % 10 == 0, list(self.Q)
        for i, B in enumerate(grams):
            C, B = self.C[i], B / np.trace(B) * len(B)
            if is_due or every:
                self.C[i] = B if C is None else decay * C + (1 - decay) * B
            C = self.C[i]
            if is_due and C is not None:
                w = np.diag(old[i].T @ C @ old[i])
                Q = old[i][:, np.argsort(-w)]
                self.Q[i] = np.linalg.qr(C @ Q)[0]
                if self.t == 1:
                    self.Q[i] = np.linalg.eigh(C)[1]
        S, T = ((a.T @ b) ** 2 for a, b in zip(old, self.Q, strict=True))
        self.v = S.T @ self.v @ T
        L, R = self.Q
        self.V = L.T @ V @ R
        return self.V, L.T @ self.m @ R, self.v

    def direction(self, jump: float) -> np.ndarray:
        """Return the direction of the step, and take the gradient into the moments."""
        (L, R), V = self.Q, self.V
        if self.t > 5:
            limit = 1.5 * np.sqrt(self.v / (1 - BETAS[1] ** (self.t - 1)))
            V = np.where(limit > 0, np.clip(V, -limit, limit), V)
            if jump > 1.5:
                self.v = self.v * (1 + (1 - BETAS[1]) * jump**2)
        self.v = BETAS[1] * self.v + (1 - BETAS[1]) * V**2
        self.m = BETAS[0] * self.m + (1 - BETAS[0]) * (L @ V @ R.T)
        m = L.T @ self.m @ R / (1 - BETAS[0] ** self.t)
        d = m / (np.sqrt(self.v / (1 - BETAS[1] ** self.t)) + self.eps)
        return L @ d @ R.T


def share_at(t: int, share: float, parts: Sequence[Moments]) -> tuple[float, float]:
    """Return the share of the rate at step t, and a gradient's size beside the usual."""
    if t == 1:
        return share, 0.0
    roots = [np.sqrt(v + 2.0**-78 * v.mean()) for _, _, v in parts]
    W, D = (
        np.concatenate(
            [(p[i] / root).ravel() for p, root in zip(parts, roots, strict=True)]
        )
        for i in range(2)
    )
    cosine = W @ D / np.linalg.norm(W) / np.linalg.norm(D)
    jump = 0.0
    if t > 5:
        usual = sum(v.sum() for _, _, v in parts) / (1 - BETAS[1] ** (t - 1))
        jump = float(sum(np.sum(V * V) for V, _, _ in parts) / usual) ** 0.5
    excess = np.log(max(1.0, jump / 1.5))
    least, most = (1 + (t - 1) / 400) ** 0.5, (25 + (t - 1) / 20) ** 0.5
    reciprocal = max(least, 1 / share - 0.2 * float(cosine - excess))
    return 1 / min(reciprocal, most), jump
