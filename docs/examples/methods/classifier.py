"""The classifier: two convolutions and a dense layer tell the digits apart.

8 by 8 pixels, channels last.  The input of a convolution in `forward` is the image that
it sees; its patches are made where they are needed.
"""

import itertools

import array_api_compat.numpy as xp
import numpy as np

import kfac_core as kc
from kfac_core.linalg.patches import extract_patches, resolve_padding
from kfac_core.losses import Categorical
from methods.data import stream
from methods.problem import Examples, digits


class Classifier:
    """Convolutions 3x3 and 3x3 with stride 2, ReLU, then ten logits."""

    name = "classifier"
    held_out_name = "errors in %"
    likelihood = Categorical()
    batch_size = 150
    steps = 100
    targets = (0.1, 0.01)

    def __init__(self, channels=(8, 16)):
        first, second = channels
        self.title = f"Classifier: conv 3x3x{first}, conv 3x3x{second} stride 2, dense"
        self.layers = {
            "conv1": convolution(1, first, stride=1),
            "conv2": convolution(first, second, stride=2),
            "fc": kc.Dense(
                in_features=16 * second, out_features=10, bias=True, weight_layout="io"
            ),
        }

    def start(self, seed):
        rng = stream(seed, "parameters")
        parameters = {}
        for name, layer in self.layers.items():
            fan_in = layer.matrix_shape[0] - 1
            weight = rng.normal(size=layer.parameter_shapes["weight"])
            parameters[name] = {
                "weight": weight * (2.0 / fan_in) ** 0.5,
                "bias": np.zeros(layer.parameter_shapes["bias"]),
            }
        return parameters

    def data(self, seed):
        return [Examples(x.reshape(-1, 8, 8, 1), y) for x, y in digits(seed)]

    def forward(self, parameters, x):
        inputs = []
        for name, layer in self.layers.items():
            if name == "fc":
                x = x.reshape(len(x), -1)
            inputs.append(x)
            part = parameters[name]
            s = rows_of(layer, x) @ kernel(part) + part["bias"]
            x = np.maximum(s, 0.0)
        return inputs, s

    def backward(self, parameters, inputs, logit_grads):
        names = list(self.layers)
        output_grads = {names[-1]: logit_grads}
        for index in range(len(names) - 1, 0, -1):
            name, x = names[index], inputs[index]
            row_grads = output_grads[name] @ kernel(parameters[name]).T
            x_grads = folded(self.layers[name], row_grads, x.shape) * (x > 0.0)
            size = self._output_shape(names[index - 1], len(x))
            output_grads[names[index - 1]] = x_grads.reshape(size)
        return {name: output_grads[name] for name in names}

    def gradient(self, inputs, output_grads):
        gradients = {}
        for x, (name, g) in zip(inputs, output_grads.items(), strict=True):
            rows = rows_of(self.layers[name], x)
            rows, g = rows.reshape(-1, rows.shape[-1]), g.reshape(-1, g.shape[-1])
            shape = self.layers[name].parameter_shapes["weight"]
            weight = (rows.T @ g).reshape(shape) / len(x)
            gradients[name] = {"weight": weight, "bias": g.sum(axis=0) / len(x)}
        return gradients

    def jvp(self, parameters, inputs, tangent):
        x_dot = np.zeros_like(inputs[0])
        for x, (name, layer) in zip(inputs, self.layers.items(), strict=True):
            x_dot = x_dot.reshape(x.shape)
            if name != "conv1":
                x_dot = x_dot * (x > 0.0)
            change = tangent[name]
            s_dot = rows_of(layer, x_dot) @ kernel(parameters[name])
            x_dot = s_dot + rows_of(layer, x) @ kernel(change) + change["bias"]
        return x_dot

    def floor(self, examples):
        return 0.0

    def held_out(self, logits, targets):
        return 100.0 * float(np.mean(np.argmax(logits, axis=1) != targets))

    def _output_shape(self, name, n):
        layer, size = self.layers[name], (8, 8)
        for before in self.layers.values():
            size = before.output_size(size)
            if before is layer:
                return (n, *size, layer.out_channels)
        raise KeyError(name)


def convolution(channels, out, *, stride):
    """Return a convolution of the library, 3 by 3, with a bias."""
    return kc.Conv(
        in_channels=channels,
        out_channels=out,
        kernel_size=(3, 3),
        strides=(stride, stride),
        padding="same",
        bias=True,
        weight_layout="spatial_io",
        data_layout="channels_last",
    )


def kernel(part):
    """Return a weight as a matrix: what a patch, or an input, is multiplied with."""
    return part["weight"].reshape(-1, part["weight"].shape[-1])


def window(layer):
    """Return what the patches of a convolution depend on."""
    names = ("kernel_size", "strides", "padding", "dilation")
    return {name: getattr(layer, name) for name in names}


def rows_of(layer, x):
    """Return the patches of a convolution's input, or a dense layer's input itself."""
    return x if layer.kind == "dense" else extract_patches(x, **window(layer), xp=xp)


def folded(layer, row_grads, shape):
    """Return the gradient of a layer's input from that of its rows."""
    if layer.kind == "dense":
        return row_grads
    n, height, width, channels = shape
    pads = resolve_padding((height, width), **window(layer))
    padded = np.zeros((n, height + sum(pads[0]), width + sum(pads[1]), channels))
    (down, across), (rows, columns) = layer.strides, row_grads.shape[1:3]
    taps = itertools.product(*map(range, layer.kernel_size))
    for tap, (i, j) in enumerate(taps):
        part = row_grads[..., tap * channels : (tap + 1) * channels]
        ends = i + (rows - 1) * down + 1, j + (columns - 1) * across + 1
        padded[:, i : ends[0] : down, j : ends[1] : across] += part
    (top, _), (left, _) = pads
    return padded[:, top : top + height, left : left + width]
