"""What the methods are compared on: a network, its data, and the losses to reach.

Conventions.  Examples are rows.  Parameters, gradients and steps are dicts of layers that
hold dicts of arrays.  An output gradient is that of the example's own loss; the gradient
of parameters is that of the mean loss.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from sklearn import datasets

import kfac_core as kc
from methods.data import N_HELD_OUT, stream

Array = np.ndarray[Any, Any]
Parameters = dict[str, dict[str, Array]]


@dataclass(frozen=True)
class Examples:
    """Images, and what the network is to say about them."""

    inputs: Array
    targets: Array

    def chosen(self, index):
        """Return some of the examples."""
        return Examples(self.inputs[index], self.targets[index])

    def __len__(self):
        return len(self.inputs)


class Problem(Protocol):
    """A network and its data.

    `layers` are those of the library, the first one first; `likelihood` is a loss of
    `kfac_core.losses`; `targets` are the training losses, the easier one first, that
    steps and seconds are counted to; a run is ended after `steps`; `held_out_name` says
    what `held_out` measures.
    """

    name: str
    title: str
    held_out_name: str
    layers: Mapping[str, kc.Dense | kc.Conv]
    likelihood: Any
    targets: tuple[float, float]
    batch_size: int
    steps: int

    def start(self, seed: int) -> Parameters:
        """Return the initial parameters."""

    def data(self, seed: int) -> tuple[Examples, Examples]:
        """Return the examples to train on, and those held out."""

    def forward(self, parameters: Parameters, x: Array) -> tuple[list[Array], Array]:
        """Return the input of each layer, and the logits."""

    def backward(
        self, parameters: Parameters, inputs: list[Array], logit_grads: Array
    ) -> dict[str, Array]:
        """Return each layer's output gradients."""

    def gradient(
        self, inputs: list[Array], output_grads: dict[str, Array]
    ) -> Parameters:
        """Return the gradient of the mean loss."""

    def jvp(
        self, parameters: Parameters, inputs: list[Array], tangent: Parameters
    ) -> Array:
        """Return the change of the logits along a change of the parameters."""

    def floor(self, examples: Examples) -> float:
        """Return a loss that no model of the examples can be below."""

    def held_out(self, logits: Array, targets: Array) -> float:
        """Return how far predictions are from the truth."""


@functools.cache
def all_digits():
    """Return all images and labels; reading them takes longer than a step."""
    return datasets.load_digits(return_X_y=True)


def digits(seed):
    """Return the digits and their labels, shuffled by a seed, those held out first."""
    images, labels = all_digits()
    order = stream(seed, "split").permutation(len(images))
    parts = order[N_HELD_OUT:], order[:N_HELD_OUT]
    return [(images[part] / 16.0, labels[part]) for part in parts]


def mean_loss(problem, parameters, examples):
    """Return the mean loss over some examples."""
    _, logits = problem.forward(parameters, examples.inputs)
    return -float(np.mean(problem.likelihood.log_probability(logits, examples.targets)))
