"""Damped blocks in arithmetic of 120 digits, from the rows.

A block is given by what its definition says of exact sums over the rows: nothing here is
computed by the library.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mpmath as mp
import numpy as np

DIGITS = 120
"""Enough for 50 correct ones at a damping 1e-40 times, and squares 1e-30 times, smaller."""

mp.mp.dps = DIGITS

Rows = Mapping[str, np.ndarray]
"""What a block saw, by name, exact in its dtype."""


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
class Damped:
    """A damped block ``Q diag(w) Q^T``.

    Attributes
    ----------
    w : list
        Its eigenvalues.
    Q : matrix
        Its eigenvectors.
    parts : number
        The condition number of the parts that it is a sum of products of; 1 for a block
        that is applied in its own eigenbasis or by factors of one product.
    """

    w: list[Any]
    Q: Any
    parts: Any = 1
    logs: Any = 0


class Curvature(Protocol):
    """A block without damping."""

    def damped(self, rule: str, damping: float) -> Damped:
        """Return the block with a damping."""


@dataclass(frozen=True)
class Answer:
    """Products of a damped block with vectors, rounded to float64 at the end.

    Attributes
    ----------
    vectors : array of float32, shape (k + 1, p)
        The vectors v: those that were given, and one in the range of the block.
    product, inverse, root, lower, lower_inverse, lower_adjoint : array, shape (k + 1, p)
        ``F v``, ``F^-1 v``, ``F^-1/2 v``, ``L v``, ``L^-1 v`` and ``L^-T v`` of each, with
        ``L L^T = F``.
    covariance : array, shape (p, p)
        ``F^-1``.
    logdet, logs : float
        ``log det F``, and the sum of the absolute logarithms that it is a sum of.
    condition, norm, inverse_norm : float
        Condition number, and the 2-norms of F and of its inverse.
    parts : float
        See `Damped`.
    singular : bool
        Whether the damped block is singular.
    """

    vectors: np.ndarray
    product: np.ndarray
    inverse: np.ndarray
    root: np.ndarray
    lower: np.ndarray
    lower_inverse: np.ndarray
    lower_adjoint: np.ndarray
    covariance: np.ndarray
    logdet: float
    logs: float
    condition: float
    norm: float
    inverse_norm: float
    parts: float
    singular: bool


@dataclass(frozen=True)
class Product:
    """``S A (x) G`` with any number of factors."""

    sides: tuple[Side, ...]
    scale: Any = 1

    def damped(self, rule: str, damping: float) -> Damped:
        """Return ``S A (x) G + lam I``, or ``S (A + a I) (x) (G + b I)``."""
        lam, k = mp.mpf(damping), len(self.sides)
        spectra = [side.w for side in self.sides]
        if rule != "exact":
            shares = _shares(self.sides, rule)
            root = mp.root(lam / self.scale, k)
            spectra = [
                [w + share * root for w in side.w]
                for side, share in zip(self.sides, shares, strict=True)
            ]
        added = lam if rule == "exact" else mp.mpf(0)
        products = itertools.product(*spectra)
        w = [self.scale * mp.fprod(values) + added for values in products]
        logs = mp.mpf(0)
        if rule != "exact" and min(w) > 0:
            logs = len(w) * abs(mp.log(self.scale))
            for values in spectra:
                logs += len(w) / len(values) * mp.fsum(abs(mp.log(x)) for x in values)
        return Damped(w, _kron([side.Q for side in self.sides]), logs=logs)


@dataclass(frozen=True)
class Series:
    """A chain of T time steps; see `kfac_core.Series`.

    Attributes
    ----------
    inputs, output_grads : tuple of matrix
        The moments of lag 0 and lag 1.
    steps : int
        T.
    infinite : bool
        Whether the chain is the infinite one.
    """

    inputs: tuple[Any, Any]
    output_grads: tuple[Any, Any]
    steps: int
    infinite: bool

    def damped(self, rule: str, damping: float) -> Damped:
        """Return F with damped moments of lag 0."""
        T = mp.mpf(self.steps)
        pair = [self.inputs, self.output_grads]
        sides = [decomposed(lag_0) for lag_0, _ in pair]
        root = mp.sqrt(mp.mpf(damping) / T)
        shares = [share * root for share in _shares(sides, rule)]
        if not min(min(s.w) + a for s, a in zip(sides, shares, strict=True)) > 0:
            raise ZeroDivisionError
        roots, correlations, parts = [], [], mp.mpf(1)
        for (lag_0, lag_1), side, share in zip(pair, sides, shares, strict=True):
            R = mp.cholesky(lag_0 + share * mp.eye(lag_0.rows))
            inverse = mp.inverse(R)
            P = inverse * lag_1 * inverse.T
            if not self.infinite:
                P = (P + P.T) / 2
            roots.append(R)
            correlations.append(P)
            parts = parts * (max(side.w) + share) / (min(side.w) + share)
        R, psi = _kron(roots), _kron(correlations)
        eye = mp.eye(R.rows)
        if self.infinite:
            # The gaps that the inverse divides by.
            gaps = eye - psi.T * psi
            inverse = mp.inverse(eye - psi)
            total = T * (inverse + inverse.T - eye)
        else:
            total, power = T * eye, eye
            for lag in range(1, self.steps):
                power = power * psi
                total = total + 2 * (T - lag) * power
            gaps = total / T
        gap = min(mp.eigsy((gaps + gaps.T) / 2, eigvals_only=True))
        found = decomposed(R * total * R.T)
        return Damped(found.w, found.Q, parts / gap)


@dataclass(frozen=True)
class Tridiagonal:
    """A chain of layers; see `kfac_core.BlockTridiagonal`.

    Attributes
    ----------
    inputs, output_grads : mapping of (int, int) to matrix
        A_ij and G_ij, for j = i and j = i + 1.
    """

    inputs: Mapping[tuple[int, int], Any]
    output_grads: Mapping[tuple[int, int], Any]

    def damped(self, rule: str, damping: float) -> Damped:
        """Return F with damped moments of the layers."""
        layers = 1 + max(i for i, _ in self.inputs)
        own, parts = [], mp.mpf(1)
        for i in range(layers):
            sides = [
                decomposed(side[i, i]) for side in (self.inputs, self.output_grads)
            ]
            root = mp.sqrt(mp.mpf(damping))
            shares = [share * root for share in _shares(sides, rule)]
            smallest = [min(s.w) + a for s, a in zip(sides, shares, strict=True)]
            if not min(smallest) > 0:
                raise ZeroDivisionError
            condition = mp.fprod(
                (max(s.w) + a) / (min(s.w) + a)
                for s, a in zip(sides, shares, strict=True)
            )
            parts = max(parts, condition)
            own.append(
                [
                    side[i, i] + share * mp.eye(side[i, i].rows)
                    for side, share in zip(
                        (self.inputs, self.output_grads), shares, strict=True
                    )
                ]
            )
        blocks = {(i, i): _kron(own[i]) for i in range(layers)}
        for i in reversed(range(layers - 1)):
            between = (self.inputs[i, i + 1], self.output_grads[i, i + 1])
            guess = _kron(
                [
                    moment * mp.inverse(M)
                    for moment, M in zip(between, own[i + 1], strict=True)
                ]
            )
            for j in range(i + 1, layers):
                blocks[i, j] = guess * blocks[i + 1, j]
                blocks[j, i] = blocks[i, j].T
        found = decomposed(_assembled(blocks, layers))
        return Damped(found.w, found.Q, parts * max(found.w) / min(found.w))


def moment(first: Any, second: Any) -> Any:
    """Return ``X^T Y / N`` of two matrices of N rows."""
    return (first.T * second) / first.rows


def side(rows: np.ndarray) -> Side:
    """Return the second moment ``X^T X / N`` of rows, decomposed."""
    X = exact(rows)
    return decomposed(moment(X, X))


def decomposed(matrix: Any) -> Side:
    """Return the eigendecomposition of a semidefinite matrix; its zeros are zero."""
    if matrix.rows == 1:
        return Side([matrix[0, 0]], mp.eye(1))
    w, Q = mp.eigsy(matrix)
    largest = max(w)
    floor = largest * mp.mpf(10) ** (-DIGITS * 3 // 4)
    return Side([x if x > floor else mp.mpf(0) for x in w], Q)


def diagonal(entries: list[Any]) -> Side:
    """Return a diagonal matrix."""
    return Side(list(entries), mp.eye(len(entries)))


def exact(array: np.ndarray) -> Any:
    """Return an array of floating-point numbers without rounding."""
    return mp.matrix([[mp.mpf(float(x)) for x in row] for row in np.atleast_2d(array)])


def answer(
    curvature: Curvature, rule: str, damping: float, vectors: np.ndarray
) -> Answer:
    """Return what a damped block does to vectors of shape (k, p), and to one more."""
    p = vectors.shape[-1]
    try:
        made = curvature.damped(rule, damping)
    except ZeroDivisionError:
        made = Damped([mp.mpf(0)] * p, mp.eye(p))
    w, Q = made.w, made.Q
    smallest, largest = min(w), max(w)
    singular = not smallest > 0
    in_range = _applied(Q, w if largest > 0 else [mp.mpf(1)] * p, vectors[-1:])
    scaled = in_range / np.max(np.abs(in_range))
    vectors = np.concatenate([vectors, scaled / np.linalg.norm(scaled)])
    vectors = vectors.astype(np.float32)
    if singular:
        nothing, none = np.full(vectors.shape, np.nan), math.inf
        return Answer(
            *(vectors, _applied(Q, w, vectors), *(nothing for _ in range(5))),
            *(np.full((p, p), np.nan), math.nan, none, none, _float(largest)),
            *(none, none, True),
        )
    inverse = [1 / x for x in w]
    lower = mp.cholesky(_matrix(Q, w))
    columns = [exact(v).T for v in vectors]
    return Answer(
        vectors=vectors,
        product=_applied(Q, w, vectors),
        inverse=_applied(Q, inverse, vectors),
        root=_applied(Q, [mp.sqrt(x) for x in inverse], vectors),
        lower=np.stack([_rounded(lower * v)[:, 0] for v in columns]),
        lower_inverse=np.stack([_rounded(_solved(lower, v))[:, 0] for v in columns]),
        lower_adjoint=np.stack(
            [_rounded(_solved(lower, v, transpose=True))[:, 0] for v in columns]
        ),
        covariance=_rounded(_matrix(Q, inverse)),
        logdet=_float(mp.fsum(mp.log(x) for x in w)),
        logs=_float(max(made.logs, mp.fsum(abs(mp.log(x)) for x in w))),
        condition=_float(largest / smallest),
        norm=_float(largest),
        inverse_norm=_float(1 / smallest),
        parts=_float(made.parts),
        singular=False,
    )


def _shares(sides: Sequence[Side], rule: str) -> list[Any]:
    """Return by how much of the k-th root of the damping each factor is shifted."""
    means = [side.mean for side in sides]
    if rule == "factored_unit_pi" or not min(means) > 0:
        return [mp.mpf(1)] * len(means)
    middle = mp.root(mp.fprod(means), len(means))
    return [mean / middle for mean in means]


def _kron(matrices: Sequence[Any]) -> Any:
    """Return the Kronecker product of matrices."""
    total = matrices[0]
    for right in matrices[1:]:
        rows, columns = total.rows * right.rows, total.cols * right.cols
        found = mp.matrix(rows, columns)
        for i, j in itertools.product(range(total.rows), range(total.cols)):
            if total[i, j] == 0:
                continue
            for k, m in itertools.product(range(right.rows), range(right.cols)):
                found[i * right.rows + k, j * right.cols + m] = (
                    total[i, j] * right[k, m]
                )
        total = found
    return total


def _assembled(blocks: Mapping[tuple[int, int], Any], layers: int) -> Any:
    """Return a matrix of blocks."""
    sizes = [blocks[i, i].rows for i in range(layers)]
    starts = [0, *itertools.accumulate(sizes)]
    found = mp.matrix(starts[-1], starts[-1])
    for (i, j), block in blocks.items():
        for k, m in itertools.product(range(block.rows), range(block.cols)):
            found[starts[i] + k, starts[j] + m] = block[k, m]
    return found


def _matrix(Q: Any, w: list[Any]) -> Any:
    """Return ``Q diag(w) Q^T``."""
    scaled = mp.matrix(Q.rows, Q.cols)
    for i, j in itertools.product(range(Q.rows), range(Q.cols)):
        scaled[i, j] = Q[i, j] * w[j]
    return scaled * Q.T


def _applied(Q: Any, w: list[Any], vectors: np.ndarray) -> np.ndarray:
    """Return ``Q diag(w) Q^T v`` of each vector."""
    found = []
    for v in vectors:
        inside = Q.T * exact(v).T
        scaled = mp.matrix([inside[i] * w[i] for i in range(len(w))])
        found.append(_rounded(Q * scaled)[:, 0])
    return np.stack(found)


def _solved(lower: Any, v: Any, *, transpose: bool = False) -> Any:
    """Return ``L^-1 v``, or ``L^-T v``."""
    size, x = v.rows, mp.matrix(v.rows, 1)
    for i in reversed(range(size)) if transpose else range(size):
        known = range(i + 1, size) if transpose else range(i)
        done = mp.fdot((lower[j, i] if transpose else lower[i, j], x[j]) for j in known)
        x[i] = (v[i] - done) / lower[i, i]
    return x


def _rounded(matrix: Any) -> np.ndarray:
    return np.array(
        [[_float(matrix[i, j]) for j in range(matrix.cols)] for i in range(matrix.rows)]
    )


def _float(x: Any) -> float:
    try:
        return float(x)
    except OverflowError:
        return math.inf if x > 0 else -math.inf
