"""The methods that K-FAC is compared with: Nesterov's momentum, and Adam.

An optimizer holds `parameters` and has a method ``step(x)``, which makes one update
from the batch `x` and returns the loss of the batch before it.  A batch whose loss is
not finite makes no update: the run has diverged, and its caller ends it.
"""

from __future__ import annotations

import math
from typing import Protocol

import array_api_compat

from kfac_core.array.backend import Array
from kfac_core.cli.demo.autoencoder import (
    backward,
    bernoulli_loss,
    forward,
    parameter_gradients,
    sigmoid,
)
from kfac_core.cli.demo.parameters import Parameters, map_parameters, zeros_like

__all__ = ["Adam", "NesterovSGD", "Optimizer", "loss_and_gradient"]


class Optimizer(Protocol):
    """What every method of the demonstration offers."""

    parameters: Parameters

    def step(self, x: Array, /) -> float:
        """Make one update from a batch, and return the batch's loss before it."""
        ...


def loss_and_gradient(parameters: Parameters, x: Array, /) -> tuple[float, Parameters]:
    """Return the loss of a batch of images, and its gradient in the parameters.

    Parameters
    ----------
    parameters : Parameters
        Weights and biases.
    x : array
        Images, ``(n, n_pixels)``; an autoencoder's targets are its inputs.

    Returns
    -------
    loss : float
        The mean loss.
    gradient : Parameters
        Its gradient.
    """
    xp = array_api_compat.array_namespace(x)
    activations, logits = forward(xp, parameters, x)
    output_grads = backward(parameters, activations, sigmoid(xp, logits) - x)
    gradient = parameter_gradients(xp, activations, output_grads)
    return float(bernoulli_loss(xp, logits, x)), gradient


class NesterovSGD:
    """Gradient descent with Nesterov's momentum.

    ``v <- momentum * v - learning_rate * gradient``, and the parameters move by
    ``momentum * v - learning_rate * gradient``.

    Parameters
    ----------
    parameters : Parameters
        Where to start.
    learning_rate : float
        The size of a step along the gradient.
    momentum : float
        The part of the velocity that is kept.
    """

    def __init__(
        self, parameters: Parameters, /, *, learning_rate: float, momentum: float = 0.9
    ) -> None:
        self.parameters = parameters
        self.learning_rate = learning_rate
        self.momentum = momentum
        self._velocity = zeros_like(parameters)

    def step(self, x: Array, /) -> float:
        """Make one update from a batch, and return the batch's loss before it."""
        loss, gradient = loss_and_gradient(self.parameters, x)
        if math.isfinite(loss):
            self._velocity = map_parameters(self._advance, self._velocity, gradient)
            update = map_parameters(self._advance, self._velocity, gradient)
            self.parameters = map_parameters(
                lambda parameter, change: parameter + change, self.parameters, update
            )
        return loss

    def _advance(self, velocity: Array, gradient: Array) -> Array:
        return self.momentum * velocity - self.learning_rate * gradient


class Adam:
    """Adam, as published: moments of the gradient, corrected for their start at zero.

    Parameters
    ----------
    parameters : Parameters
        Where to start.
    learning_rate : float
        The size of a step.
    decays : tuple of float
        The decays of the first and of the second moment.
    epsilon : float
        Added to the root of the second moment.
    """

    def __init__(
        self,
        parameters: Parameters,
        /,
        *,
        learning_rate: float,
        decays: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
    ) -> None:
        self.parameters = parameters
        self.learning_rate = learning_rate
        self.decays = decays
        self.epsilon = epsilon
        self._first = zeros_like(parameters)
        self._second = zeros_like(parameters)
        self._steps = 0

    def step(self, x: Array, /) -> float:
        """Make one update from a batch, and return the batch's loss before it."""
        loss, gradient = loss_and_gradient(self.parameters, x)
        if math.isfinite(loss):
            beta1, beta2 = self.decays
            self._steps += 1
            self._first = map_parameters(
                lambda m, g: beta1 * m + (1.0 - beta1) * g, self._first, gradient
            )
            self._second = map_parameters(
                lambda v, g: beta2 * v + (1.0 - beta2) * g * g, self._second, gradient
            )
            self.parameters = map_parameters(
                self._move, self.parameters, self._first, self._second
            )
        return loss

    def _move(self, parameter: Array, first: Array, second: Array) -> Array:
        xp = array_api_compat.array_namespace(parameter)
        beta1, beta2 = self.decays
        mean = first / (1.0 - beta1**self._steps)
        square = second / (1.0 - beta2**self._steps)
        return parameter - self.learning_rate * mean / (xp.sqrt(square) + self.epsilon)
