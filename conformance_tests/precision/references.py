"""Damped blocks in arithmetic of 120 digits, from the rows.

A block is given by its eigenvectors and its eigenvalues without damping, all from exact
sums over the rows: nothing here is computed by the library.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mpmath as mp
import numpy as np

DIGITS = 120
"""Enough for 50 correct ones at a damping 1e-40 times, and squares 1e-30 times, smaller."""

mp.mp.dps = DIGITS


@dataclass(frozen=True)
class Side:
    """A factor ``Q diag(w) Q^T``."""

    w: list[Any]
    Q: Any

    @property
    def mean(self) -> Any:
        """The mean eigenvalue."""
        return mp.fsum(self.w) / len(self.w)


@dataclass(frozen=True)
class Answer:
    """Products of a damped block with vectors, rounded to float64 at the end.

    Attributes
    ----------
    product, inverse, root : array, shape (k, n, m)
        ``F v``, ``F^-1 v`` and ``F^-1/2 v`` of each vector, damped.
    condition, norm, inverse_norm : float
        Of the damped block: condition number, and the 2-norms of F and of its inverse.
    singular : bool
        Whether the damped block is singular.
    """

    product: np.ndarray
    inverse: np.ndarray
    root: np.ndarray
    condition: float
    norm: float
    inverse_norm: float
    singular: bool


def side(rows: np.ndarray) -> Side:
    """Return the second moment ``X^T X / N`` of rows, decomposed."""
    X = exact(rows)
    return decomposed((X.T * X) / rows.shape[0])


def decomposed(matrix: Any) -> Side:
    """Return the eigendecomposition of a semidefinite matrix; its zeros are zero."""
    if matrix.rows == 1:
        return Side([matrix[0, 0]], mp.eye(1))
    w, Q = mp.eigsy(matrix)
    largest = max(w)
    floor = largest * mp.mpf(10) ** (-DIGITS // 2)
    return Side([x if x > floor else mp.mpf(0) for x in w], Q)


def diagonal(entries: list[Any]) -> Side:
    """Return a diagonal matrix."""
    return Side(list(entries), mp.eye(len(entries)))


def exact(array: np.ndarray) -> Any:
    """Return an array of floating-point numbers without rounding."""
    return mp.matrix([[mp.mpf(float(x)) for x in row] for row in np.atleast_2d(array)])


def exactly_damped(left: Side, right: Side, scale: Any, damping: float) -> list[Any]:
    """Return the eigenvalues ``S a_i g_j + lam``."""
    lam = mp.mpf(damping)
    return [[scale * a * g + lam for g in right.w] for a in left.w]


def factored(
    left: Side, right: Side, scale: Any, damping: float, *, unit_pi: bool
) -> list[Any]:
    """Return the eigenvalues ``S (a_i + pi d) (g_j + d / pi)``, ``d = sqrt(lam / S)``."""
    share = mp.sqrt(mp.mpf(damping) / scale)
    pi = mp.mpf(1)
    if not unit_pi and left.mean > 0 and right.mean > 0:
        pi = mp.sqrt(left.mean / right.mean)
    return [
        [scale * (a + pi * share) * (g + share / pi) for g in right.w] for a in left.w
    ]


def answer(left: Side, right: Side, spectrum: list[Any], vectors: np.ndarray) -> Answer:
    """Return the products of ``(Q_A (x) Q_G) diag(spectrum) (Q_A (x) Q_G)^T``."""
    flat = [x for row in spectrum for x in row]
    smallest, largest = min(flat), max(flat)
    singular = not smallest > 0
    products: dict[str, list[np.ndarray]] = {"product": [], "inverse": [], "root": []}
    for v in vectors:
        R = left.Q.T * exact(v) * right.Q
        for name, power in (("product", 1), ("inverse", -1), ("root", -0.5)):
            if singular and power < 0:
                products[name].append(np.full(v.shape, np.nan))
                continue
            scaled = mp.matrix(R.rows, R.cols)
            for i in range(R.rows):
                for j in range(R.cols):
                    scaled[i, j] = R[i, j] * spectrum[i][j] ** power
            products[name].append(_rounded(left.Q * scaled * right.Q.T))
    made = {name: np.stack(found) for name, found in products.items()}
    inverse_norm = math.inf if singular else _float(1 / smallest)
    condition = math.inf if singular else _float(largest / smallest)
    return Answer(
        **made,
        condition=condition,
        norm=_float(largest),
        inverse_norm=inverse_norm,
        singular=singular,
    )


def _rounded(matrix: Any) -> np.ndarray:
    return np.array(
        [[_float(matrix[i, j]) for j in range(matrix.cols)] for i in range(matrix.rows)]
    )


def _float(x: Any) -> float:
    try:
        return float(x)
    except OverflowError:
        return math.inf if x > 0 else -math.inf
