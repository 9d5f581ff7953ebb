"""Dense references in NumPy: exact curvature, and the definitions of approximations.

Each function returns one matrix for each layer, of shape (P, P) for P parameters in the
order of `kfac_core_conformance.layer`, averaged over examples.  Exact curvature comes from
complex-step differentiation of the forward pass, which has no cancellation and shares no
code with backpropagation.  The approximations are loops over rows that follow their
definitions.  Small problems only: there is one forward pass for each parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kfac_core_conformance.layer import HostArray
from kfac_core_conformance.network import loss_gradient, losses
from kfac_core_conformance.problem import Data, Problem

STEP = 1e-30
"""The complex step; its square is negligible beside any number of a problem."""


class Factors(NamedTuple):
    """A layer's block ``scale * input (x) output``."""

    input: HostArray
    output: HostArray
    scale: float

    def block(self) -> HostArray:
        """Return the dense block."""
        return self.scale * np.kron(self.input, self.output)

    def damped(self, damping: float, rule: str, /) -> HostArray:
        """Return the damped dense block.

        ``S A (x) G + damping I`` for the rule ``exact``; else
        ``S (A + pi r I) (x) (G + r/pi I)`` with ``r = sqrt(damping/S)`` and pi 1, or for
        ``factored`` ``sqrt((tr A/dim A) / (tr G/dim G))``.
        """
        A, G, S = self
        if rule == "exact":
            return self.block() + damping * np.eye(len(A) * len(G))
        pi = 1.0
        if rule == "factored" and np.trace(A) > 0 and np.trace(G) > 0:
            pi = float(np.sqrt(np.trace(A) / len(A) / (np.trace(G) / len(G))))
        root = float(np.sqrt(damping / S))
        A_damped = A + pi * root * np.eye(len(A))
        return S * np.kron(A_damped, G + root / pi * np.eye(len(G)))


def ggn_blocks(problem: Problem, /) -> list[HostArray]:
    """Return ``1/N sum_n J_n^T H_n J_n`` for each layer, of a problem with one update."""
    [data] = problem.updates
    outputs = problem.network.forward(data.inputs.astype(np.float64)).result
    N = len(outputs)
    hessians = _hessians(problem, outputs)
    jacobians = _derivatives(problem, data, lambda out: out.reshape(N, -1))
    return [
        sum((J.T @ H @ J for J, H in zip(Js, hessians, strict=True)), np.zeros(())) / N
        for Js in jacobians
    ]


def fisher_blocks(problem: Problem, /) -> list[HostArray]:
    """Return ``1/N sum_n d_n d_n^T``, with d the gradient of the loss at the targets.

    For a problem with one update; averaged over the labels if there are several.
    """
    [data] = problem.updates
    targets = data.targets if problem.estimation == "labels" else data.targets[None]
    blocks = [np.zeros((x.matrix.size,) * 2) for x in problem.network.layers]
    for t in targets:

        def at_target(outputs: HostArray, t: HostArray = t) -> HostArray:
            return losses(problem.loss, outputs, t)

        derivatives = _derivatives(problem, data, at_target)
        for block, d in zip(blocks, derivatives, strict=True):
            block += d.T @ d / (len(d) * len(targets))
    return blocks


def kronecker_factors(problem: Problem, /) -> list[Factors]:
    """Return A, G and S of each layer after all updates.

    ``A = 1/(NS) sum x x^T``, ``G = 1/(NS) sum g g^T`` for ``sharing="expand"``; for
    ``"reduce"`` x is averaged and g summed over an example's positions, and S is 1.
    """
    factors: list[Factors] = []
    weight = 0.0
    for data in problem.updates:
        new = [_factors_of(problem, X, grads) for X, grads in _rows(problem, data)]
        # v <- decay v + C and w <- decay w + 1, written for v / w.
        weight = problem.decay * weight + 1.0
        factors = (
            new
            if not factors
            else [
                Factors(
                    a.input + (b.input - a.input) / weight,
                    a.output + (b.output - a.output) / weight,
                    b.scale,
                )
                for a, b in zip(factors, new, strict=True)
            ]
        )
    return factors


def _factors_of(problem: Problem, X: HostArray, grads: HostArray) -> Factors:
    """Return the factors of one update from its rows."""
    if problem.sharing == "reduce":
        X, grads = X.mean(axis=1, keepdims=True), grads.sum(axis=2, keepdims=True)
    A, G = np.zeros((X.shape[-1],) * 2), np.zeros((grads.shape[-1],) * 2)
    count = X.shape[0] * X.shape[1]
    for n, s in np.ndindex(X.shape[:2]):
        A += np.outer(X[n, s], X[n, s]) / count
        for g in grads[:, n, s]:
            G += np.outer(g, g) / (count * _averaged(problem, grads))
    return Factors(A, G, float(X.shape[1]))


def approximate_blocks(problem: Problem, /) -> list[HostArray]:
    """Return each layer's undamped block by the definition of the approximation.

    ======================  ==========================================================
    ``kronecker``           ``S A (x) G``
    ``full``, ``diagonal``  the mean of ``v v^T`` over examples and labels, v the row-major
                            flattening of D, ``D = sum_s x g^T``, or its diagonal
    ``tnt``                 ``A (x) G / tr A``, the means of ``D D^T`` and ``D^T D``
    ``eigen``               ``Q diag(Q^T F Q) Q^T``, F the full block and Q the
                            eigenvectors of A (x) G
    ======================  ==========================================================
    """
    factors = kronecker_factors(problem)
    if problem.approximation == "kronecker":
        return [pair.block() for pair in factors]
    [data] = problem.updates
    blocks = []
    for (X, grads), pair in zip(_rows(problem, data), factors, strict=True):
        D = np.einsum("nsi,mnso->mnio", X, grads)
        D /= np.sqrt(len(X) * _averaged(problem, grads))
        flat = D.reshape(-1, X.shape[-1] * grads.shape[-1])
        full: HostArray = flat.T @ flat
        if problem.approximation == "full":
            blocks.append(full)
        elif problem.approximation == "diagonal":
            blocks.append(np.diag(np.diag(full)))
        elif problem.approximation == "tnt":
            A = np.einsum("mnio,mnjo->ij", D, D)
            G = np.einsum("mnio,mnip->op", D, D)
            blocks.append(np.kron(A, G) / np.trace(A))
        else:
            bases = (np.linalg.eigh(x)[1] for x in (pair.input, pair.output))
            Q = np.kron(*bases)
            blocks.append((Q * np.einsum("pi,pq,qi->i", Q, full, Q)) @ Q.T)
    return blocks


def damped_blocks(problem: Problem, /, *, damping: float, rule: str) -> list[HostArray]:
    """Return each layer's damped block; the rule applies to ``kronecker`` blocks only."""
    if problem.approximation == "kronecker":
        return [pair.damped(damping, rule) for pair in kronecker_factors(problem)]
    return [
        block + damping * np.eye(len(block)) for block in approximate_blocks(problem)
    ]


def _rows(problem: Problem, data: Data) -> list[tuple[HostArray, HostArray]]:
    """Return x with its 1 as (N, S, in(+1)), and g of the summed loss as (M, N, S, out)."""
    rows = []
    seen = problem.summed_rows(data)
    for layer, (_, x, g) in zip(problem.network.layers, seen, strict=True):
        X = x.reshape(len(x), -1, x.shape[-1]).astype(np.float64)
        if layer.bias:
            X = np.concatenate([X, np.ones((*X.shape[:-1], 1))], axis=-1)
        rows.append((X, g.reshape(len(g), len(x), -1, g.shape[-1])))
    return rows


def _averaged(problem: Problem, grads: HostArray) -> int:
    """Return the number of labels, over which outer products are averaged; else 1."""
    return len(grads) if problem.estimation == "labels" else 1


def _derivatives(
    problem: Problem, data: Data, function: Callable[[HostArray], HostArray]
) -> list[HostArray]:
    """Differentiate a function of the outputs by each layer's matrix, (..., P)."""
    derivatives = []
    x = data.inputs.astype(np.float64)
    for k, layer in enumerate(problem.network.layers):
        columns = []
        for p in range(layer.matrix.size):
            moved = layer.matrix.astype(np.complex128)
            moved.flat[p] += STEP * 1j
            outputs = problem.network.replaced(k, moved).forward(x).result
            columns.append(function(outputs).imag / STEP)
        derivatives.append(np.stack(columns, axis=-1))
    return derivatives


def _hessians(problem: Problem, outputs: HostArray) -> HostArray:
    """Return each example's Hessian with respect to all of its outputs."""
    N, size = len(outputs), outputs[0].size
    columns = []
    for i in range(size):
        moved = outputs.reshape(N, size).astype(np.complex128)
        moved[:, i] += STEP * 1j
        at = moved.reshape(outputs.shape)
        g = loss_gradient(problem.loss, at, np.zeros_like(outputs))
        columns.append(g.reshape(N, size).imag / STEP)
    return np.stack(columns, axis=-1)
