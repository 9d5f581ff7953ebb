"""Blocks of every kind that has an eigenbasis, with their dense matrices by loops.

Conventions.  N examples whose gradients make the curvature, and as many whose outputs'
derivatives (K of each) are Jacobians.  A case knows the library's block, its statistics,
and in float64 on the host: the dense curvature, flattened row-major as `to_dense`, and
the Jacobians (N, K, P) of the same order.  The case's rows and the reference's loops
share no code with the library; the basis of EKFAC is NumPy's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import kfac_core as kc

from .layers import conv_layer
from .one_block import operator_for

EXAMPLES, OUTPUTS = 6, 2
SUM = kc.Conventions(reduction="sum", sources="sum")

KINDS = [
    *("kronecker", "shared", "diagonal_input", "eigen", "diagonal", "full"),
    *("grouped", "embedding"),
]

# What JAX leaves out unless asked for: their shapes compile for seconds.
LONG_TO_COMPILE = {"grouped", "embedding", "diagonal_input"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A block on a backend, and what it must be."""

    backend: Any
    dtype: str
    block: kc.Block
    statistics: Any
    dense: np.ndarray
    inputs: np.ndarray
    derivatives: np.ndarray
    jacobians: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        return self.block.layer.matrix_shape

    def array(self, values: Any) -> Any:
        return self.backend.asarray(values, self.dtype)

    def operator(self) -> Any:
        """Return the operator with a damping that must not matter."""
        return operator_for(
            self.block, self.statistics, damping=0.3, rule="exact", factorizations=()
        )

    def batch(self, output_grads: np.ndarray, *, sources: int | None = None) -> Any:
        """Return what the layer saw, with the gradients of something."""
        if self.inputs.dtype.kind == "i":
            inputs = self.backend.asarray(self.inputs, "int64")
        else:
            inputs = self.array(self.inputs)
        return kc.Batch(inputs, self.array(output_grads), sources=sources)

    def parameters(self, matrices: np.ndarray) -> dict[str, Any]:
        """Return matrices (..., n, m) as parameter-shaped arrays, one by one."""
        lead, stack = matrices.shape[:-2], {}
        one_by_one = [
            self.block.layer.matrix_to_parameters(V)
            for V in matrices.reshape(-1, *self.shape)
        ]
        for name, shape in self.block.layer.parameter_shapes.items():
            values = np.stack([one[name] for one in one_by_one])
            stack[name] = self.array(values.reshape(*lead, *shape))
        return stack

    def matrices(self, flat: np.ndarray) -> np.ndarray:
        """Return flat vectors (..., P) as matrices."""
        return flat.reshape(*flat.shape[:-1], *self.shape)


def case_of(request: Any, backend: Any, dtype: str, kind: str) -> Case:
    """Return the case of a kind; on JAX those that compile long only if asked for."""
    if kind in LONG_TO_COMPILE:
        request.getfixturevalue("compiles_long")
    return make_case(backend, dtype, kind)


_made: dict[tuple[str, str, str], Case] = {}


def make_case(backend: Any, dtype: str, kind: str) -> Case:
    """Return the case of a kind, with statistics of one batch; made once."""
    key = backend.spec, dtype, kind
    if key not in _made:
        _made[key] = _make_case(backend, dtype, kind)
    return _made[key]


def _make_case(backend: Any, dtype: str, kind: str) -> Case:
    rng = np.random.default_rng(11)
    layer, inputs, rows = _layer(kind, rng)
    m = layer.matrix_shape[1]
    shared = inputs.shape[1:2] if kind in ("shared", "embedding") else ()
    shared = (inputs.shape[1] - 1,) if kind == "grouped" else shared
    g = rng.normal(size=(EXAMPLES, *shared, m))
    derivatives = rng.normal(size=(OUTPUTS, EXAMPLES, *shared, m))
    approximation = {
        "eigen": kc.EKFAC(),
        "diagonal": kc.Diagonal(),
        "full": kc.Full(),
        "diagonal_input": kc.Kronecker(input="diagonal"),
        "embedding": kc.Kronecker(input="diagonal"),
    }.get(kind, kc.Kronecker())
    block = kc.Block(layer, approximation)
    case = Case(
        backend,
        dtype,
        block,
        None,
        _dense(kind, rows, g.reshape(EXAMPLES, -1, m), layer.groups),
        inputs,
        derivatives,
        _gradients(rows, derivatives.reshape(OUTPUTS, EXAMPLES, -1, m), layer.groups),
    )
    batch = case.batch(g)
    start = block.initial(batch.like)
    options = {"conventions": SUM, "decay": 0.0}
    statistics = kc.update_block(block, start, batch, kc.UpdateOptions(**options))
    if kind == "eigen":
        statistics = kc.rebase_block(block, statistics, "zero", "raise")
        statistics = kc.update_block(
            block, statistics, batch, kc.UpdateOptions(**options)
        )
    return dataclasses.replace(case, statistics=statistics)


def _layer(kind: str, rng: np.random.Generator) -> tuple[Any, np.ndarray, np.ndarray]:
    """Return a layer, its inputs, and the rows x that they make: (Q, N, S, n)."""
    if kind == "grouped":
        x = rng.normal(size=(EXAMPLES, 3, 4))
        layer = conv_layer(4, 4, (2,), groups=2, weight_layout="oi_spatial")
        patches = [
            [
                [np.append(x[i, s : s + 2, 2 * q : 2 * q + 2], 1.0) for s in range(2)]
                for i in range(EXAMPLES)
            ]
            for q in range(2)
        ]
        return layer, x, np.array(patches)
    if kind == "embedding":
        ids = rng.integers(4, size=(EXAMPLES, 2))
        layer = kc.Embedding(num_embeddings=4, features=3, weight_layout="oi")
        return layer, ids, np.eye(4)[ids][None, ...]
    layer = kc.Dense(in_features=3, out_features=3, bias=True, weight_layout="oi")
    x = rng.normal(size=(EXAMPLES, 2, 3) if kind == "shared" else (EXAMPLES, 3))
    ones = np.ones((*x.shape[:-1], 1))
    rows = np.concatenate([x, ones], axis=-1).reshape(1, EXAMPLES, -1, 4)
    return layer, x, rows


def _gradients(rows: np.ndarray, g: np.ndarray, groups: int) -> np.ndarray:
    """Return ``sum_s x g^T`` of each example and source, flattened, (N, K, P)."""
    width = g.shape[-1] // groups
    found = np.zeros((g.shape[1], g.shape[0], rows.shape[-1], g.shape[-1]))
    for q in range(groups):
        columns = slice(q * width, (q + 1) * width)
        for k in range(g.shape[0]):
            for i in range(g.shape[1]):
                for s in range(g.shape[2]):
                    outer = np.outer(rows[q, i, s], g[k, i, s, columns])
                    found[i, k, :, columns] += outer
    return found.reshape(g.shape[1], g.shape[0], -1)


def _dense(kind: str, rows: np.ndarray, g: np.ndarray, groups: int) -> np.ndarray:
    """Return the approximation's matrix of one batch."""
    D = _gradients(rows, g[None, ...], groups)[:, 0, :]
    exact = D.T @ D / len(D)
    if kind == "full":
        return exact
    if kind == "diagonal":
        return np.diag(np.diag(exact))
    n, width = rows.shape[-1], g.shape[-1] // groups
    S = rows.shape[2]
    total = np.zeros((n, g.shape[-1], n, g.shape[-1]))
    for q in range(groups):
        columns = slice(q * width, (q + 1) * width)
        x, gq = rows[q].reshape(-1, n), g[..., columns].reshape(-1, width)
        A, G = x.T @ x / len(x), gq.T @ gq / len(gq)
        if kind in ("diagonal_input", "embedding"):
            A = np.diag(np.diag(A))
        F = S * np.kron(A, G)
        if kind == "eigen":
            Q = np.kron(np.linalg.eigh(A)[1], np.linalg.eigh(G)[1])
            F = (Q * np.mean((D @ Q) ** 2, axis=0)) @ Q.T
        total[:, columns, :, columns] = F.reshape(n, width, n, width)
    return total.reshape(n * g.shape[-1], -1)
