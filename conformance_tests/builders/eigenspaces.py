"""EKFAC where a factor has fewer rows than columns, and its dense reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import kfac_core as kc

from .layers import dense_layer

DAMPING = 0.1
BOUNDS = {"float64": 1e-13, "float32": 2e-5}
"""Relative errors of `Singular.direction`, by the dtype of statistics."""


def eigenspaces(A: np.ndarray) -> list[np.ndarray]:
    """Return projectors on the directions of A, and one on its null space."""
    values, Q = np.linalg.eigh(A)
    null = values < 1e-10 * values[-1]
    projectors = [np.outer(q, q) for q in Q.T[~null]]
    return projectors + ([Q[:, null] @ Q[:, null].T] if null.any() else [])


@dataclasses.dataclass(frozen=True)
class Singular:
    """Rows that determine the bases, others that determine the moments, and a vector."""

    first: tuple[np.ndarray, np.ndarray]
    second: tuple[np.ndarray, np.ndarray]
    vector: np.ndarray

    @staticmethod
    def drawn(rng: np.random.Generator, rows: int = 24) -> Singular:
        """Return rows of a layer with 65 inputs and 24 outputs.

        A direction is off by roundoff times the largest eigenvalue of a factor over its
        smallest gap, which is 2 * rows here, and thousands for random rows.
        """
        x, g, *second = (rng.normal(size=(rows, size)) for size in (65, 24, 65, 24))
        spread = np.sqrt(np.linspace(1.0, 2.0, rows))[:, None]
        return Singular(
            (spread * np.linalg.qr(x.T)[0].T, spread * np.linalg.qr(g)[0]),
            tuple(second),
            rng.normal(size=(65, 24)),
        )

    def expected(self) -> np.ndarray:
        """Return ``sum_kl P_k V Q_l / (c_kl + lam)``.

        P_k and Q_l project on eigenspaces of the factors, and c_kl is the mean over
        examples of ``|P_k x|^2 |Q_l g|^2``, over both ranks.
        """
        inputs, outputs = (eigenspaces(x.T @ x) for x in self.first)
        squares = [
            np.stack([((x @ P) * x).sum(axis=1) / np.trace(P) for P in projectors])
            for projectors, x in zip((inputs, outputs), self.second, strict=True)
        ]
        moments = squares[0] @ squares[1].T / len(self.second[0])
        direction: np.ndarray = sum(
            P @ self.vector @ Q / (moments[k, m] + DAMPING)
            for k, P in enumerate(inputs)
            for m, Q in enumerate(outputs)
        )
        return direction

    def direction(
        self, communicator: Any, storage: Any, execution: Any = None
    ) -> np.ndarray:
        """Return the direction of one process, or of a rank that has a part of the rows."""
        rank, size = 0, 1
        if communicator is not None:
            rank, size = communicator.rank, communicator.size
        layer = dense_layer(65, 24, bias=False)
        estimator = kc.Estimator(
            {"a": kc.Block(layer, kc.EKFAC())},
            reduction="sum",
            damping=DAMPING,
            damping_rule="exact",
            execution=execution,
            precision=kc.Precision(storage=storage, compute="float64", apply="float64"),
        )
        shares = [x[rank::size] for x in self.first]
        estimator.update({"a": kc.Batch(*shares)})
        estimator.rebase(moments="zero")
        shares = [x[rank::size] for x in self.second]
        estimator.update({"a": kc.Batch(*shares)})
        estimator.refresh()
        direction: np.ndarray = estimator.precondition({"a": {"weight": self.vector}})[
            "a"
        ]["weight"]
        return direction
