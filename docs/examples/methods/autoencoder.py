"""The autoencoder: that of ``kfac-core demo``, narrower.

A sigmoid follows every layer but the last, whose outputs are the logits of pixels.
"""

import itertools

import numpy as np

import kfac_core as kc
from kfac_core.losses import Bernoulli
from methods.data import pixel_entropy, stream
from methods.problem import Examples, digits

# Weights that are not zero into each unit (Martens, 2010, section 5): dense ones leave a
# sigmoid network this deep on a plateau.
CONNECTIONS = 15


class Autoencoder:
    """Images through a bottleneck; sigmoid units, Bernoulli pixels."""

    name = "autoencoder"
    held_out_name = "squared error"
    likelihood = Bernoulli()
    batch_size = 375
    steps = 300
    targets = (20.0, 16.5)

    def __init__(self, widths=(64, 32, 16, 32, 64)):
        self.widths = widths
        self.title = f"Autoencoder {'-'.join(map(str, widths))}"
        self.layers = {
            f"fc{i}": kc.Dense(
                in_features=n, out_features=m, bias=True, weight_layout="io"
            )
            for i, (n, m) in enumerate(itertools.pairwise(widths), start=1)
        }

    def start(self, seed):
        rng = stream(seed, "parameters")
        parameters = {}
        for name, layer in self.layers.items():
            n_in, n_out = layer.parameter_shapes["weight"]
            weight = np.zeros((n_in, n_out))
            for unit in range(n_out):
                sources = rng.permutation(n_in)[:CONNECTIONS]
                weight[sources, unit] = rng.standard_normal(len(sources))
            parameters[name] = {"weight": weight, "bias": np.zeros(n_out)}
        return parameters

    def data(self, seed):
        return [Examples(images, images) for images, _ in digits(seed)]

    def forward(self, parameters, x):
        inputs = []
        for layer in parameters.values():
            inputs.append(x)
            s = x @ layer["weight"] + layer["bias"]
            x = sigmoid(s)
        return inputs, s

    def backward(self, parameters, inputs, logit_grads):
        names = list(parameters)
        output_grads = {names[-1]: logit_grads}
        for index in range(len(names) - 1, 0, -1):
            x, name = inputs[index], names[index]
            x_grads = output_grads[name] @ parameters[name]["weight"].T
            output_grads[names[index - 1]] = x_grads * x * (1.0 - x)
        return {name: output_grads[name] for name in names}

    def gradient(self, inputs, output_grads):
        n = len(inputs[0])
        return {
            name: {"weight": x.T @ g / n, "bias": np.sum(g, axis=0) / n}
            for x, (name, g) in zip(inputs, output_grads.items(), strict=True)
        }

    def jvp(self, parameters, inputs, tangent):
        s_dot = np.zeros_like(inputs[0])
        for x, (name, layer) in zip(inputs, parameters.items(), strict=True):
            x_dot = s_dot * x * (1.0 - x)
            change = tangent[name]
            s_dot = x_dot @ layer["weight"] + x @ change["weight"] + change["bias"]
        return s_dot

    def floor(self, examples):
        return pixel_entropy(examples.inputs)

    def held_out(self, logits, targets):
        error = sigmoid(logits) - targets
        return float(np.mean(np.sum(error**2, axis=1)))


def sigmoid(s):
    """Return ``1 / (1 + exp(-s))``, in a form that cannot overflow."""
    return 0.5 + 0.5 * np.tanh(0.5 * s)
