"""Whether all libraries computed the same thing, and the right one.

Conventions.  The factors A and G are made again from the rows in float64, and an answer U
to a vector V has the residual ``|F U - V| / |V|`` in the Frobenius norm, with F the
damped block: ``(A + a I) U (G + b I)`` or ``A U G + lam U``.  Nothing is solved for it, so
that it shares no algorithm with any library.  Another damping, a lost bias or a wrong
scale gives residuals of order 1; what rounding gives in float32 lies below `LIMIT`.
Layers of equal shape and rows are computed alike, and one of each kind is checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.stages import rule_of
from benchmarks.workloads import DAMPING, DECAY, Workload

LIMIT = 4e-3
"""Of rank-deficient factors of activations, which float32 stores, 3e-3 was measured for
LAPACK's own kernels as for all libraries."""

Matrix = np.ndarray[Any, Any]


class Reference:
    """The factors of a workload in float64.

    Parameters
    ----------
    workload : Workload
        Of which the rows are read again.
    """

    def __init__(self, workload: Workload, /) -> None:
        first: dict[Any, int] = {}
        for i, layer in enumerate(workload.layers):
            first.setdefault(layer, i)
        self._checked = tuple(first.values())
        self._factors = {i: _factors(workload, i) for i in self._checked}
        self._vectors = {i: workload.vector(i) for i in self._checked}

    def compared(self, stage: str, answers: Mapping[str, Path], /) -> dict[str, Any]:
        """Return how good each library's answers are.

        Parameters
        ----------
        stage : str
            Which decides the damping rule.
        answers : mapping of str to pathlib.Path
            The file of each library, with one array a layer.

        Returns
        -------
        dict of str to dict
            For each library its largest ``"residual"``, its largest relative
            ``"difference"`` from the first library, and whether it ``"agrees"``.
        """
        found: dict[str, Any] = {}
        first: list[Matrix] = []
        for name, path in answers.items():
            with np.load(path) as file:
                arrays = [file[f"arr_{i}"] for i in self._checked]
            first = first or arrays
            residuals = [
                self._residual(i, U, rule_of(stage))
                for i, U in zip(self._checked, arrays, strict=True)
            ]
            differences = [
                float(np.linalg.norm(U - other) / np.linalg.norm(other))
                for U, other in zip(arrays, first, strict=True)
            ]
            found[name] = {
                "residual": max(residuals),
                "difference": max(differences),
                "agrees": all(r <= LIMIT for r in residuals),
            }
        return found

    def _residual(self, layer: int, U: Matrix, rule: str) -> float:
        A, G = self._factors[layer]
        V = self._vectors[layer]
        if U.shape != V.shape:
            return math.inf
        U = U.astype(np.float64)
        if rule == "exact":
            product = A @ U @ G + DAMPING * U
        else:
            pi = math.sqrt((np.trace(A) / len(A)) / (np.trace(G) / len(G)))
            left = A @ U + pi * math.sqrt(DAMPING) * U
            product = left @ G + math.sqrt(DAMPING) / pi * left
        return float(np.linalg.norm(product - V) / np.linalg.norm(V))


def _factors(workload: Workload, layer: int) -> tuple[Matrix, Matrix]:
    """Return A and G, averaged over the batches as the statistics are."""
    n, m = workload.layers[layer].shape
    A, G, weight = np.zeros((n, n)), np.zeros((m, m)), 0.0
    for index in range(workload.batches):
        x, g = (rows.astype(np.float64) for rows in workload.rows(index, layer))
        if workload.layers[layer].bias:
            x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
        A = DECAY * A + x.T @ x / len(x)
        G = DECAY * G + g.T @ g / len(g)
        weight = DECAY * weight + 1.0
    return A / weight, G / weight
