"""A small problem in plain NumPy, and the way between flat vectors and parameters.

Conventions.  theta holds twelve numbers, in the order of `SHAPES`.  The objective is a
logistic regression, the mean over N examples of ``log(1 + exp(s)) - y s`` with
``s = X theta``; its Fisher matrix is ``X^T diag(p (1 - p)) X / N``.  `precondition` is
the inverse of the damped blocks of that matrix, one block a layer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "fc1": {"weight": (3, 2), "bias": (2,)},
    "fc2": {"weight": (2, 2)},
}
SIZE = 12
BLOCKS = (slice(0, 8), slice(8, 12))
BIAS = slice(6, 8)
N = 30


def tree(flat: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
    """Cut a flat vector into parameters."""
    parameters: dict[str, dict[str, np.ndarray]] = {}
    start = 0
    for block, shapes in SHAPES.items():
        parameters[block] = {}
        for name, shape in shapes.items():
            stop = start + int(np.prod(shape))
            parameters[block][name] = flat[start:stop].reshape(shape)
            start = stop
    return parameters


def put(backend: Any, flat: np.ndarray, dtype: str) -> dict[str, dict[str, Any]]:
    """Copy a flat vector to a backend, as parameters."""
    return {
        block: {name: backend.asarray(x, dtype) for name, x in parameters.items()}
        for block, parameters in tree(np.asarray(flat, np.float64)).items()
    }


def flat(backend: Any, vector: Any) -> np.ndarray:
    """Bring parameters to the host, as a flat vector in float64."""
    return np.concatenate(
        [
            backend.to_numpy(vector[block][name]).ravel()
            for block, shapes in SHAPES.items()
            for name in shapes
        ]
    )


class Logistic:
    """The regression, with an l2 term on request."""

    def __init__(self, rng: np.random.Generator, *, l2: float = 0.0) -> None:
        self.X = rng.normal(size=(N, SIZE))
        self.y = (rng.uniform(size=N) < 0.5).astype(float)
        self.l2 = l2

    def loss(self, theta: np.ndarray) -> float:
        s = self.X @ theta
        data = np.mean(np.logaddexp(0.0, s) - self.y * s)
        return float(data + 0.5 * self.l2 * theta @ theta)

    def gradient(self, theta: np.ndarray) -> np.ndarray:
        p = 1.0 / (1.0 + np.exp(-self.X @ theta))
        return self.X.T @ (p - self.y) / N + self.l2 * theta

    def fisher(self, theta: np.ndarray) -> np.ndarray:
        """Return the exact matrix of the loss alone, dense."""
        p = 1.0 / (1.0 + np.exp(-self.X @ theta))
        return (self.X.T * (p * (1.0 - p))) @ self.X / N

    def blocks(self, theta: np.ndarray) -> np.ndarray:
        """Return the same without what couples the blocks, dense."""
        F, approximate = self.fisher(theta), np.zeros((SIZE, SIZE))
        for block in BLOCKS:
            approximate[block, block] = F[block, block]
        return approximate

    def precondition(
        self, theta: np.ndarray, vector: np.ndarray, damping: float
    ) -> np.ndarray:
        return np.linalg.solve(self.blocks(theta) + damping * np.eye(SIZE), vector)
