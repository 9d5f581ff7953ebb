"""SOAP as a naive float64 program in NumPy: whole bases, one matrix after the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

BETA2 = 0.9

Sizes = tuple[float, float]
"""Squares of a gradient in the bases, and second moments, both summed."""


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
    ) -> Sizes:
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
        return float(np.sum(self.V**2)), float(self.v.sum())

    def direction(self, jump: float) -> np.ndarray:
        """Return the direction of this gradient, after taking it into the moments."""
        (L, R), V = self.Q, self.V
        if self.t > 5:
            limit = 1.5 * np.sqrt(self.v / (1 - BETA2 ** (self.t - 1)))
            V = np.where(limit > 0, np.clip(V, -limit, limit), V)
            if jump > 1.5:
                self.v = self.v * (1 + (1 - BETA2) * jump**2)
                self.m = self.m * min(1.0, 4 / jump)
        self.v = BETA2 * self.v + (1 - BETA2) * V**2
        d = V / (np.sqrt(self.v / (1 - BETA2**self.t)) + self.eps)
        self.d = L @ d @ R.T
        return self.d

    def step(self, share: float) -> np.ndarray:
        """Return the step between the direction and its average, for a rate of 1."""
        c = 10 / (9 + self.t)
        self.m = (1 - c) * self.m + c * self.d
        own = min(1.0, share**2 * (1 + (self.t - 1) / 400)) ** 2 / 10
        return own * self.d + (1 - own) * self.m


def jump_at(t: int, sizes: Sequence[Sizes]) -> float:
    """Return the size of the gradients of step t beside the usual."""
    if t <= 5:
        return 0.0
    squares, usual = np.sum(sizes, axis=0)
    return float(squares / usual * (1 - BETA2 ** (t - 1))) ** 0.5


def share_at(t: int, share: float, weights: Iterable[Naive], jump: float) -> float:
    """Return the share of the rate at step t, of weights with its directions."""
    if t == 1:
        return share
    D, M = np.concatenate([np.stack([w.d.ravel(), w.m.ravel()], 1) for w in weights]).T
    cosine = D @ M / np.linalg.norm(D) / np.linalg.norm(M)
    excess = np.log(max(1.0, jump / 1.5))
    least, most = (1 + (t - 1) / 400) ** 0.5, (25 + (t - 1) / 20) ** 0.5
    reciprocal = max(least, 1 / share - 0.05 * float(cosine - excess))
    return 1 / min(reciprocal, most)
