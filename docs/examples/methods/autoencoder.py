"""The autoencoder: that of ``kfac-core demo``, narrower."""

import itertools

import array_api_compat.numpy as xp
import numpy as np

import kfac_core as kc
from kfac_core.cli.demo import autoencoder as demo
from kfac_core.cli.demo.data import pixel_entropy, stream
from kfac_core.losses import Bernoulli
from methods.problem import Examples, digits


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
        return demo.initial_parameters(stream(seed, "parameters"), self.widths)

    def data(self, seed):
        return [Examples(images, images) for images, _ in digits(seed)]

    def forward(self, parameters, x):
        return demo.forward(xp, parameters, x)

    def backward(self, parameters, inputs, logit_grads):
        return demo.backward(parameters, inputs, logit_grads)

    def gradient(self, inputs, output_grads):
        return demo.parameter_gradients(xp, inputs, output_grads)

    def jvp(self, parameters, inputs, tangent):
        return demo.jvp(parameters, inputs, tangent)

    def floor(self, examples):
        return pixel_entropy(examples.inputs)

    def held_out(self, logits, targets):
        error = demo.sigmoid(xp, logits) - targets
        return float(np.mean(np.sum(error**2, axis=1)))
