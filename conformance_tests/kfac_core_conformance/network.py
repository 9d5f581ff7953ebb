"""A small network in NumPy, with its forward pass and its backpropagation.

Inputs have shape ``(N, ..., in)``: the axes between the examples
and the features are those over which a layer's weights are shared.  With `reduce_after`,
they are summed or averaged after that layer (counted from 0) and its activation.  A
convolution can only be the first layer.

The losses are ``"mse"``, half the squared error, and ``"ce"``, the softmax cross-entropy
with targets that are one-hot; an example's loss is the sum over its output positions.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from kfac_core_conformance.layer import HostArray, LinearLayer

Loss = Literal["mse", "ce"]


class Forward(NamedTuple):
    """Each layer's inputs, unfolded inputs and outputs, and the network's result."""

    inputs: list[HostArray]
    unfolded: list[HostArray]
    outputs: list[HostArray]
    result: HostArray


@dataclass(frozen=True, eq=False, kw_only=True)
class Network:
    """Linear layers one after another.

    Parameters
    ----------
    layers : tuple of LinearLayer
        From the inputs to the outputs.
    activation : {"identity", "tanh"}
        Applied after every layer but the last.
    reduce_after : int, optional
        The layer after which the shared axes are reduced; by default none.
    reduction : {"sum", "mean"}
        How the shared axes are reduced.
    """

    layers: tuple[LinearLayer, ...]
    activation: Literal["identity", "tanh"] = "identity"
    reduce_after: int | None = None
    reduction: Literal["sum", "mean"] = "sum"

    def replaced(self, index: int, matrix: HostArray, /) -> Network:
        """Return the network with another matrix in one layer."""
        layer = dataclasses.replace(self.layers[index], matrix=matrix)
        layers = (*self.layers[:index], layer, *self.layers[index + 1 :])
        return dataclasses.replace(self, layers=layers)

    def forward(self, x: HostArray, /) -> Forward:
        """Return all intermediate results of a batch; matrices may be complex."""
        inputs, unfolded, outputs = [], [], []
        for k, layer in enumerate(self.layers):
            inputs.append(x)
            x = layer.unfolded(x)
            unfolded.append(x)
            W = layer.matrix
            x = x @ W[:-1] + W[-1] if layer.bias else x @ W
            outputs.append(x)
            if self._curved(k):
                x = np.tanh(x)
            if k == self.reduce_after:
                axes = tuple(range(1, x.ndim - 1))
                x = x.mean(axis=axes) if self.reduction == "mean" else x.sum(axis=axes)
        return Forward(inputs, unfolded, outputs, x)

    def backward(self, vectors: HostArray, seen: Forward, /) -> list[HostArray]:
        """Propagate vectors (M, N, ..., C) back to each layer's outputs."""
        g, gradients = vectors, []
        for k in reversed(range(len(self.layers))):
            layer, z = self.layers[k], seen.outputs[k]
            if k == self.reduce_after:
                shared = z.shape[1:-1]
                ones = (*g.shape[:-1], *(1 for _ in shared), g.shape[-1])
                g = np.broadcast_to(
                    g.reshape(ones), (*g.shape[:-1], *shared, g.shape[-1])
                )
                if self.reduction == "mean":
                    g = g / math.prod(shared)
            if self._curved(k):
                g = g * (1.0 - np.tanh(z) ** 2)
            gradients.append(g)
            W = layer.matrix[:-1] if layer.bias else layer.matrix
            if k:  # The gradient of the network's inputs is not needed.
                g = g @ W.T
        return gradients[::-1]

    def _curved(self, k: int) -> bool:
        return self.activation == "tanh" and k + 1 < len(self.layers)


def softmax(z: HostArray, /) -> HostArray:
    """Return the probabilities of logits, which may be complex."""
    e = np.exp(z - np.max(z.real, axis=-1, keepdims=True))
    probabilities: HostArray = e / np.sum(e, axis=-1, keepdims=True)
    return probabilities


def losses(loss: Loss, outputs: HostArray, targets: HostArray, /) -> HostArray:
    """Return each example's loss, shape (N,)."""
    if loss == "mse":
        each = 0.5 * np.sum((outputs - targets) ** 2, axis=-1)
    else:
        logits = np.sum(outputs * targets, axis=-1)
        each = np.log(np.sum(np.exp(outputs), axis=-1)) - logits
    by_example: HostArray = each.reshape(len(outputs), -1).sum(axis=1)
    return by_example


def loss_gradient(loss: Loss, outputs: HostArray, targets: HostArray, /) -> HostArray:
    """Return the derivative of the examples' losses with respect to the outputs."""
    return (outputs if loss == "mse" else softmax(outputs)) - targets


def hessian_columns(loss: Loss, outputs: HostArray, /) -> HostArray:
    """Return the columns of a square root of the loss's Hessian, (C, N, ..., C)."""
    C = outputs.shape[-1]
    if loss == "mse":
        return np.stack([np.broadcast_to(row, outputs.shape) for row in np.eye(C)])
    p = softmax(outputs)
    return np.stack([np.sqrt(p[..., c : c + 1]) * (np.eye(C)[c] - p) for c in range(C)])
