"""A deep autoencoder, with its derivatives, as a short program in array operations.

Conventions
-----------
* Examples are rows: an array of examples has shape ``(n, n_features)``.
* A layer maps its input ``x`` to ``s = x @ W + b`` with ``W`` of shape
  ``(n_in, n_out)``.  A sigmoid follows every layer but the last, whose outputs are
  logits: pixel ``i`` is one with probability ``sigmoid(s_i)``.
* The loss of an example is its negative log likelihood *summed* over the pixels.  The
  loss of a batch, and the gradient of parameters, is the *mean* over examples.
* An output gradient ``g`` is the derivative, with respect to ``s``, of the loss of its
  own example; no ``1 / n`` is in it.
* `xp` is the namespace of the arrays, from ``array_api_compat.array_namespace``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from kfac_core.array.backend import Array, Namespace
from kfac_core.cli.demo.parameters import Parameters

__all__ = [
    "WIDTHS",
    "backward",
    "bernoulli_loss",
    "forward",
    "initial_parameters",
    "jvp",
    "parameter_gradients",
    "sample_targets",
    "sigmoid",
]

WIDTHS = (64, 256, 128, 32, 16, 32, 128, 256, 64)

# Martens' sparse initialization (ICML 2010, section 5): so many weights into each unit
# are not zero.  Dense ones of Glorot's size leave a sigmoid network this deep on a
# plateau, where every method of the demo stays for most of its steps.
CONNECTIONS = 15


def initial_parameters(
    rng: np.random.Generator, widths: Sequence[int] = WIDTHS
) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    """Draw initial parameters: sparse standard normal weights, and biases of zero.

    Parameters
    ----------
    rng : numpy.random.Generator
        The source of randomness, on the host.
    widths : sequence of int
        The number of units in each layer, the input first.

    Returns
    -------
    dict
        ``{"fc1": {"weight": (n_in, n_out), "bias": (n_out,)}, ...}``, NumPy arrays in
        float64.
    """
    parameters = {}
    shapes = itertools.pairwise(widths)
    for index, (n_in, n_out) in enumerate(shapes, start=1):
        weight = np.zeros((n_in, n_out))
        for unit in range(n_out):
            sources = rng.permutation(n_in)[:CONNECTIONS]
            weight[sources, unit] = rng.standard_normal(len(sources))
        parameters[f"fc{index}"] = {"weight": weight, "bias": np.zeros(n_out)}
    return parameters


def sigmoid(xp: Namespace, s: Array) -> Array:
    """Return ``1 / (1 + exp(-s))``, in a form that cannot overflow."""
    return 0.5 + 0.5 * xp.tanh(0.5 * s)


def forward(
    xp: Namespace, parameters: Parameters, x: Array
) -> tuple[list[Array], Array]:
    """Run the network.

    Parameters
    ----------
    xp : namespace
        The namespace of the arrays.
    parameters : Parameters
        Weights and biases, the first layer first.
    x : array
        Examples, ``(n, widths[0])``.

    Returns
    -------
    activations : list of array
        The input of each layer; the first is `x`.
    logits : array
        The outputs of the last layer, ``(n, widths[-1])``.
    """
    activations = []
    for layer in parameters.values():
        activations.append(x)
        s = x @ layer["weight"] + layer["bias"]
        x = sigmoid(xp, s)
    return activations, s


def bernoulli_loss(xp: Namespace, logits: Array, targets: Array) -> Array:
    """Return the mean over examples of the summed negative log likelihood.

    Parameters
    ----------
    xp : namespace
        The namespace of the arrays.
    logits : array
        ``(n, n_pixels)``.
    targets : array
        ``(n, n_pixels)``, between zero and one.

    Returns
    -------
    array
        0-d: ``sum(log(1 + exp(s)) - t * s) / n``.
    """
    magnitude = xp.abs(logits)
    softplus = 0.5 * (logits + magnitude) + xp.log1p(xp.exp(-magnitude))
    return xp.sum(softplus - targets * logits) / logits.shape[0]


def sample_targets(xp: Namespace, logits: Array, uniforms: Array) -> Array:
    """Draw targets from the model's own distribution.

    Parameters
    ----------
    xp : namespace
        The namespace of the arrays.
    logits : array
        ``(n, n_pixels)``.
    uniforms : array
        ``(n, n_pixels)``, uniform on ``[0, 1)`` and in the dtype of `logits`.  They
        are drawn on the host, so that every backend samples the same targets.

    Returns
    -------
    array
        Zeros and ones, ``(n, n_pixels)``, in the dtype of `logits`.
    """
    return xp.astype(uniforms < sigmoid(xp, logits), logits.dtype)


def backward(
    parameters: Parameters, activations: Sequence[Array], logit_grads: Array
) -> dict[str, Array]:
    """Carry gradients from the logits back to the output of every layer.

    Parameters
    ----------
    parameters : Parameters
        Weights and biases.
    activations : sequence of array
        The inputs of the layers, from `forward`.
    logit_grads : array
        The gradient of each example's loss in its logits, ``(n, n_pixels)``.  For the
        Bernoulli likelihood it is ``sigmoid(s) - t``.

    Returns
    -------
    dict
        The output gradients ``g`` of each layer, ``(n, n_out)``, the first layer first.
    """
    names = list(parameters)
    output_grads = {names[-1]: logit_grads}
    for index in range(len(names) - 1, 0, -1):
        x, name = activations[index], names[index]
        x_grads = output_grads[name] @ parameters[name]["weight"].T
        output_grads[names[index - 1]] = x_grads * x * (1.0 - x)
    return {name: output_grads[name] for name in names}


def parameter_gradients(
    xp: Namespace, activations: Sequence[Array], output_grads: dict[str, Array]
) -> Parameters:
    """Return the gradient of the mean loss in every weight and bias.

    Parameters
    ----------
    xp : namespace
        The namespace of the arrays.
    activations : sequence of array
        The inputs of the layers, from `forward`.
    output_grads : dict
        The output gradients of the layers, from `backward`.

    Returns
    -------
    dict
        ``x.T @ g / n`` and ``sum(g) / n`` for each layer.
    """
    n = activations[0].shape[0]
    return {
        name: {"weight": x.T @ g / n, "bias": xp.sum(g, axis=0) / n}
        for x, (name, g) in zip(activations, output_grads.items(), strict=True)
    }


def jvp(
    parameters: Parameters, activations: Sequence[Array], tangent: Parameters
) -> Array:
    """Return ``J d``, the change of the logits along a change ``d`` of the parameters.

    Parameters
    ----------
    parameters : Parameters
        Where to differentiate.
    activations : sequence of array
        The inputs of the layers, from `forward`.
    tangent : Parameters
        The change ``d``.

    Returns
    -------
    array
        ``(n, n_pixels)``.  It takes one pass forward, at the cost of two.
    """
    s_dot = 0.0 * activations[0]  # the images themselves do not change
    for x, (name, layer) in zip(activations, parameters.items(), strict=True):
        change = tangent[name]
        x_dot = s_dot * x * (1.0 - x)
        s_dot = x_dot @ layer["weight"] + x @ change["weight"] + change["bias"]
    return s_dot
