"""A deep autoencoder and its derivatives, in operations that every array library has.

Parameters, gradients and updates are dictionaries of layers,

    {"fc1": {"weight": (n_in, n_out), "bias": (n_out,)}, "fc2": ...},

the form that `kfac_core.Estimator.precondition` takes and returns.  Examples are rows.
A sigmoid follows every layer but the last, whose outputs are the logits of Bernoulli
pixels.  The loss of an example is summed over its pixels; the loss and the gradient of
a batch are means over its examples.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeAlias

import array_api_compat
import numpy as np

import kfac_core as kc
from kfac_core.array.backend import Array

__all__ = ["LOSS", "WIDTHS", "Pass", "Vector", "initial_parameters", "map_arrays"]

Vector: TypeAlias = dict[str, dict[str, Array]]

WIDTHS = (64, 256, 128, 32, 16, 32, 128, 256, 64)
LOSS = kc.losses.Bernoulli()

# Weights that are not zero into each unit: the sparse initialization of Martens (2010),
# section 5.  With dense weights of Glorot's size a sigmoid network this deep starts on
# a plateau, where every method spends most of its steps.
CONNECTIONS = 15


def initial_parameters(rng: np.random.Generator, /) -> Vector:
    """Draw sparse standard normal weights; biases are zero."""
    parameters = {}
    for index, (n_in, n_out) in enumerate(itertools.pairwise(WIDTHS), start=1):
        weight = np.zeros((n_in, n_out))
        for unit in range(n_out):
            sources = rng.permutation(n_in)[:CONNECTIONS]
            weight[sources, unit] = rng.standard_normal(len(sources))
        parameters[f"fc{index}"] = {"weight": weight, "bias": np.zeros(n_out)}
    return map_arrays(kc.asarray, parameters)


def map_arrays(function: Callable[..., Array], /, *vectors: Vector) -> Vector:
    """Apply a function to the corresponding arrays of one or more vectors."""
    return {
        layer: {name: function(*(v[layer][name] for v in vectors)) for name in arrays}
        for layer, arrays in vectors[0].items()
    }


class Pass:
    """The forward pass over some images, and what can be computed from it.

    Attributes
    ----------
    inputs : list of array
        The input of each layer, ``(n, n_in)``; the first is the images.
    logits : array
        The output of the last layer, ``(n, n_pixels)``.
    pixels : array
        The reconstructed images, ``sigmoid(logits)``.
    """

    def __init__(self, parameters: Vector, images: Array, /) -> None:
        self.parameters, self.images = parameters, images
        self.xp = array_api_compat.array_namespace(images)
        self.inputs = []
        x = images
        for layer in parameters.values():
            self.inputs.append(x)
            s = x @ layer["weight"] + layer["bias"]
            x = 0.5 + 0.5 * self.xp.tanh(0.5 * s)  # A sigmoid that cannot overflow.
        self.logits, self.pixels = s, x

    def loss(self) -> float:
        """Return the mean over images of the summed negative log likelihood."""
        return -float(self.xp.mean(LOSS.log_probability(self.logits, self.images)))

    def gradient(self) -> Vector:
        """Return the gradient of the mean loss: ``x.T @ g / n`` and ``sum(g) / n``."""
        output_grads = self.backward(LOSS.gradient(self.logits, self.images))
        n = self.images.shape[0]
        return {
            name: {"weight": x.T @ g / n, "bias": self.xp.sum(g, axis=0) / n}
            for x, (name, g) in zip(self.inputs, output_grads.items(), strict=True)
        }

    def backward(self, logit_grads: Array, /) -> dict[str, Array]:
        """Return each layer's output gradients, ``(n, n_out)``, given the last one's."""
        names = list(self.parameters)
        output_grads = {names[-1]: logit_grads}
        for index in range(len(names) - 1, 0, -1):
            x, name = self.inputs[index], names[index]
            x_grads = output_grads[name] @ self.parameters[name]["weight"].T
            output_grads[names[index - 1]] = x_grads * x * (1.0 - x)
        return {name: output_grads[name] for name in names}

    def jvp(self, tangent: Vector, /) -> Array:
        """Return ``J d``, the change of the logits along ``d`` in the parameters."""
        s_dot = 0.0 * self.images
        for x, (name, layer) in zip(self.inputs, self.parameters.items(), strict=True):
            x_dot = s_dot * x * (1.0 - x)
            change = tangent[name]
            s_dot = x_dot @ layer["weight"] + x @ change["weight"] + change["bias"]
        return s_dot
