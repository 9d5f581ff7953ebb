"""A small network as a framework has it, and its dense curvature in plain NumPy.

Conventions.  A layer's matrix ``W`` has shape ``(in+1, out)``, the bias its last row:
``z = x W[:-1] + W[-1]``.  Inputs have shape ``(N, *shared, in)``; with `reduce_after` the
shared axes are summed or averaged away behind that layer (counted from 0) and its
activation.  Nothing comes after the last layer but that reduction.

The losses are ``"mse"``, half the squared error, and ``"ce"``, the softmax cross-entropy
with one-hot targets; an example's loss is the sum over its output positions.

The references share no formula with the back-propagation: Jacobians are complex-step
derivatives of the forward pass with respect to ``W.ravel()`` (row-major), Hessians those
of the loss's gradient, and gradients for the Fisher matrices those of the loss itself.
There is no subtraction in a complex step, so all of them are right to roundoff.
`feed` is the only function here that calls the library.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

import kfac_core as kc

from .layers import dense_layer
from .one_block import learn, operator_for
from .tolerances import assert_close

STEP = 1e-30


@dataclasses.dataclass(frozen=True)
class Network:
    """Dense layers with biases; its functions use the Array API standard alone."""

    weights: tuple[Any, ...]
    activation: str
    reduce_after: int | None = None
    reduction: str = "sum"

    def map_weights(self, function: Callable[[Any], Any]) -> Network:
        """Return the same network with every matrix replaced."""
        return dataclasses.replace(self, weights=tuple(map(function, self.weights)))

    def forward(self, x: Any, *, xp: Any) -> tuple[list[Any], list[Any], Any]:
        """Return each layer's inputs and outputs, and the network's outputs."""
        inputs, outputs = [], []
        for k, W in enumerate(self.weights):
            inputs.append(x)
            x = xp.matmul(x, W[:-1, :]) + W[-1, :]
            outputs.append(x)
            if self._curved(k):
                x = xp.tanh(x)
            if k == self.reduce_after:
                average = xp.mean if self.reduction == "mean" else xp.sum
                x = average(x, axis=tuple(range(1, x.ndim - 1)))
        return inputs, outputs, x

    def backward(self, vectors: Any, outputs: list[Any], *, xp: Any) -> list[Any]:
        """Back-propagate vectors ``(..., N, *shared, C)`` to each layer's outputs."""
        g, grads = vectors, []
        for k in reversed(range(len(self.weights))):
            W, z = self.weights[k], outputs[k]
            if k == self.reduce_after:
                lead, shared = g.shape[:-1], z.shape[1:-1]
                g = xp.reshape(g, (*lead, *(1 for _ in shared), g.shape[-1]))
                g = xp.broadcast_to(g, (*lead, *shared, g.shape[-1]))
                if self.reduction == "mean":
                    g = g / math.prod(shared)
            if self._curved(k):
                a = xp.tanh(z)
                g = g * (1.0 - a * a)
            grads.append(g)
            g = xp.matmul(g, xp.matrix_transpose(W[:-1, :]))
        return grads[::-1]

    def outputs(self, x: np.ndarray) -> np.ndarray:
        """Return the network's outputs, on the host."""
        return self.forward(x, xp=np)[2]

    def _curved(self, k: int) -> bool:
        return self.activation == "tanh" and k + 1 < len(self.weights)


def random_network(
    rng: np.random.Generator, widths: tuple[int, ...], activation: str, **options: Any
) -> Network:
    """Return a network with normal weights, whose activations keep their size."""
    weights = tuple(
        rng.normal(size=(n + 1, m)) / np.sqrt(n + 1)
        for n, m in itertools.pairwise(widths)
    )
    return Network(weights, activation, **options)


# What a framework computes from the outputs: the vectors to back-propagate.


def softmax(z: np.ndarray) -> np.ndarray:
    """Return the probabilities of logits, which may be complex."""
    e = np.exp(z - np.max(z.real, axis=-1, keepdims=True))
    return e / np.sum(e, axis=-1, keepdims=True)


def one_hot(labels: np.ndarray, classes: int) -> np.ndarray:
    """Return the targets of integer labels."""
    return np.eye(classes)[labels]


def type2_vectors(kind: str, outputs: np.ndarray) -> np.ndarray:
    """Return the columns of a square root of the loss's Hessian, (C, N, ..., C)."""
    C = outputs.shape[-1]
    if kind == "mse":
        return np.stack([np.broadcast_to(row, outputs.shape) for row in np.eye(C)])
    p = softmax(outputs)
    return np.stack([np.sqrt(p[..., c : c + 1]) * (np.eye(C)[c] - p) for c in range(C)])


def gradient(kind: str, outputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the loss's gradient with respect to the outputs, without reduction."""
    return (outputs if kind == "mse" else softmax(outputs)) - targets


def sigma_point_vectors(outputs: np.ndarray) -> np.ndarray:
    """Return the gradients of half the squared error at 2C labels, (2C, N, ..., C).

    The labels are ``outputs +- sqrt(C) e_c``: their mean and covariance are those of the
    model, a normal distribution about the outputs with covariance I.
    """
    root = np.sqrt(outputs.shape[-1])
    plus = type2_vectors("mse", outputs) * root
    return np.concatenate([-plus, plus])


def reduced(vectors: np.ndarray, loss: str, outputs: np.ndarray) -> np.ndarray:
    """Scale vectors of the summed loss as the loss's reduction scales gradients."""
    return (
        vectors
        / {
            "sum": 1,
            "mean": outputs.shape[0],
            "mean_rows": math.prod(outputs.shape[:-1]),
        }[loss]
    )


# The dense references: one matrix for each layer, (P, P) with P its parameters.


def ggn_blocks(
    net: Network, x: np.ndarray, kind: str, *, loss: str = "mean"
) -> list[np.ndarray]:
    """Return ``R sum_n J_n^T H_n J_n``, with R = 1 (``"sum"``) or 1/N (``"mean"``)."""
    hessians = _hessians(kind, net.outputs(x))
    R = {"sum": 1.0, "mean": 1.0 / len(x)}[loss]
    return [
        R * sum(J.T @ H @ J for J, H in zip(Js, hessians, strict=True))
        for Js in jacobians(net, x)
    ]


def fisher_blocks(
    net: Network, x: np.ndarray, kind: str, targets: Iterable[np.ndarray], weights: Any
) -> list[np.ndarray]:
    """Return ``1/N sum_n sum_y w_ny d_ny d_ny^T``, d the loss's gradient at target y.

    `targets` lists what may be observed, one array like the outputs for each y, and
    `weights` their probabilities, one array (N,) for each y.  The observed targets alone
    with weight 1 give the empirical Fisher matrix.
    """
    blocks = [np.zeros((W.size, W.size)) for W in net.weights]
    for y, w in zip(targets, weights, strict=True):
        losses = _complex_step(net, lambda out, y=y: _losses(kind, out, y), x)
        for block, d in zip(blocks, losses, strict=True):
            block += (d.T * w) @ d / len(x)
    return blocks


def empirical_fisher_blocks(
    net: Network, x: np.ndarray, kind: str, targets: np.ndarray
) -> list[np.ndarray]:
    """Return ``1/N sum_n d_n d_n^T`` at the observed targets."""
    return fisher_blocks(net, x, kind, [targets], [np.ones(len(x))])


def jacobians(net: Network, x: np.ndarray) -> list[np.ndarray]:
    """Return, for each layer, all outputs by all parameters, (N, outputs, P)."""
    return _complex_step(net, lambda out: out.reshape(len(x), -1), x)


def softmax_hessians(logits: np.ndarray) -> np.ndarray:
    """Return the Hessian of the cross-entropy for each row of logits, (N, C, C)."""
    return _hessians("ce", logits)


def _complex_step(
    net: Network, function: Callable[[np.ndarray], np.ndarray], x: np.ndarray
) -> list[np.ndarray]:
    """Differentiate a function of the outputs by each layer's matrix, (..., P)."""
    derivatives = []
    for k, W in enumerate(net.weights):
        columns = []
        for p in range(W.size):
            moved = W.astype(complex)
            moved.flat[p] += STEP * 1j
            weights = (*net.weights[:k], moved, *net.weights[k + 1 :])
            out = dataclasses.replace(net, weights=weights).outputs(x)
            columns.append(function(out).imag / STEP)
        derivatives.append(np.stack(columns, axis=-1))
    return derivatives


def _losses(kind: str, outputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return each example's loss, (N,)."""
    if kind == "mse":
        each = 0.5 * np.sum((outputs - targets) ** 2, axis=-1)
    else:
        logits = np.sum(outputs * targets, axis=-1)
        each = np.log(np.sum(np.exp(outputs), axis=-1)) - logits
    return each.reshape(len(outputs), -1).sum(axis=1)


def _hessians(kind: str, outputs: np.ndarray) -> np.ndarray:
    """Return each example's Hessian with respect to all of its outputs."""
    N, size = len(outputs), outputs[0].size
    columns = []
    for i in range(size):
        moved = outputs.reshape(N, size).astype(complex)
        moved[:, i] += STEP * 1j
        g = gradient(kind, moved.reshape(outputs.shape), np.zeros_like(outputs))
        columns.append(g.reshape(N, size).imag / STEP)
    return np.stack(columns, axis=-1)


# The library's answer.


class Learned(NamedTuple):
    """One layer's block as the library has it, undamped, on the host."""

    dense: np.ndarray
    input_factor: np.ndarray
    output_factor: np.ndarray


def batches(
    backend: Any, net: Network, x: np.ndarray, vectors: np.ndarray
) -> list[Any]:
    """Return what a framework hands over for each layer, as `kc.Batch`.

    The vectors have the shape of the outputs, or a leading axis of sources before it.
    """
    sources = None
    if vectors.ndim > net.outputs(x).ndim:
        sources = len(vectors)
    there = net.map_weights(backend.asarray)
    inputs, outputs, _ = there.forward(backend.asarray(x), xp=backend.xp)
    grads = there.backward(backend.asarray(vectors), outputs, xp=backend.xp)
    return [kc.Batch(a, g, sources=sources) for a, g in zip(inputs, grads, strict=True)]


def blocks_of(net: Network, *, sharing: str = "expand") -> list[kc.Block]:
    """Return the library's block of each layer."""
    approximation = kc.Kronecker(sharing=sharing)
    layers = [dense_layer(W.shape[0] - 1, W.shape[1]) for W in net.weights]
    return [kc.Block(layer, approximation) for layer in layers]


def feed(
    backend: Any,
    net: Network,
    x: np.ndarray,
    vectors: np.ndarray,
    *,
    loss: str,
    sources: str = "sum",
    sharing: str = "expand",
) -> list[Learned]:
    """Return the library's curvature of each layer from one batch."""
    learned = []
    conventions = kc.Conventions(reduction=loss, sources=sources)
    fed = batches(backend, net, x, reduced(vectors, loss, net.outputs(x)))
    for block, batch in zip(blocks_of(net, sharing=sharing), fed, strict=True):
        statistics = learn(block, batch, conventions=conventions)
        operator = operator_for(block, statistics, damping=0.0, factorizations=())
        arrays = (
            operator.to_dense(damped=False),
            operator.input.dense(shifted=False),
            operator.output.dense(shifted=False),
        )
        learned.append(Learned(*map(backend.to_numpy, arrays)))
    return learned


def assert_all_close(learned: list[Learned], expected: list[np.ndarray]) -> None:
    """Compare the blocks of every layer."""
    assert len(learned) == len(expected)
    for block, dense in zip(learned, expected, strict=True):
        assert_close(block.dense, dense, "identity", "float64")
