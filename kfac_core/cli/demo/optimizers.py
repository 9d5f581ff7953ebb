"""K-FAC on the public names of the library, and the methods that it is compared with.

``change(batch)`` of an optimizer returns what is to be added to the parameters.
"""

from __future__ import annotations

from typing import Protocol

import array_api_compat
import numpy as np

import kfac_core as kc
from kfac_core.array.backend import Array
from kfac_core.cli.demo.network import LOSS, Pass, Vector, map_arrays
from kfac_core.steps import (
    curvature_of_outputs,
    linear_combination,
    quadratic_model,
    reduction_ratio,
)

__all__ = ["KFAC", "Adam", "NesterovSGD", "Optimizer"]


class Optimizer(Protocol):
    """What every method offers."""

    def change(self, batch: Pass, /) -> Vector:
        """Return what is to be added to the parameters."""
        ...


class KFAC:
    """Block-diagonal K-FAC, as in Martens and Grosse (2015).

    * The Fisher matrix is estimated with one target an image, sampled from the model,
      and averaged with decay 0.95.
    * The direction is ``D = -A^-1 V G^-1`` with factored damping.
    * The change is ``learning_rate * (alpha D + mu d0)``, where ``d0`` is the change
      before it, and alpha and mu minimize the quadratic model of the batch (section 7).
      A learning rate of 1 goes all the way to that minimum.
    * The damping follows the Levenberg-Marquardt rule (section 6.5).
    """

    ADAPT_EVERY = 5
    REFRESH_EVERY = 10

    def __init__(
        self, parameters: Vector, /, *, learning_rate: float, rng: np.random.Generator
    ) -> None:
        self._learning_rate, self._rng = learning_rate, rng
        self._damping = 1.0
        self._estimator = kc.Estimator(
            {name: _block(layer["weight"]) for name, layer in parameters.items()},
            decay=0.95,
            damping=self._damping,
            damping_rule="factored",
            reduction="sum",
        )
        self._previous: Vector | None = None
        self._steps = 0

    def change(self, batch: Pass, /) -> Vector:
        """Return ``learning_rate * (alpha D + mu d0)``."""
        self._update_curvature(batch)
        gradient = batch.gradient()
        preconditioned = self._estimator.precondition(gradient)
        directions = [linear_combination([-1.0], [preconditioned])]
        if self._previous is not None:
            directions.append(self._previous)

        # The logits' Fisher matrix is B B^T, so d_i . F d_j is a product of two B^T J d.
        changes = [
            LOSS.fisher_factor_transpose_multiply(batch.logits, batch.jvp(direction))
            for direction in directions
        ]
        n = batch.images.shape[0]
        model = quadratic_model(
            gradient,
            directions,
            curvature=curvature_of_outputs(changes, changes, examples=n),
            damping=self._damping,
        )
        coefficients = self._learning_rate * model.minimize().coefficients
        self._previous = linear_combination(coefficients, directions)
        self._steps += 1
        if self._steps % self.ADAPT_EVERY == 0:
            predicted = float(model.change(coefficients, damped=True))
            self._adapt_damping(batch, self._previous, predicted)
        return self._previous

    def _update_curvature(self, batch: Pass) -> None:
        # Drawn by NumPy, so that every backend samples the same targets.
        noise = kc.asarray(self._rng.random(LOSS.noise_shape(batch.logits)))
        output_grads = batch.backward(LOSS.sampled_gradient(batch.logits, noise))
        rows = zip(batch.inputs, output_grads.items(), strict=True)
        self._estimator.update({name: kc.Batch(x, g) for x, (name, g) in rows})
        # Young averages change quickly: the first inverses serve for one step each.
        if self._steps < self.REFRESH_EVERY or self._steps % self.REFRESH_EVERY == 0:
            self._estimator.damping = self._damping
            self._estimator.refresh()

    def _adapt_damping(self, batch: Pass, change: Vector, predicted: float) -> None:
        """Compare the change of the batch's loss with the change that was predicted."""
        moved = linear_combination([1.0, 1.0], [batch.parameters, change])
        after = Pass(moved, batch.images).loss()
        self._damping = kc.levenberg_marquardt(
            self._damping,
            reduction_ratio(batch.loss(), after, predicted=predicted),
            decay=(19 / 20) ** self.ADAPT_EVERY,
            minimum=1e-6,
            maximum=1e6,
        )


def _block(weight: Array) -> kc.Block:
    n_in, n_out = weight.shape
    layer = kc.Dense(
        in_features=n_in, out_features=n_out, bias=True, weight_layout="io"
    )
    return kc.Block(layer, kc.Kronecker())


class NesterovSGD:
    """Gradient descent with Nesterov's momentum, 0.9."""

    def __init__(self, parameters: Vector, /, *, learning_rate: float) -> None:
        self._weights = [0.9, -learning_rate]
        self._velocity = linear_combination([0.0], [parameters])

    def change(self, batch: Pass, /) -> Vector:
        """Set ``v <- mu v - lr V``, and return ``mu v - lr V``."""
        gradient = batch.gradient()
        self._velocity = linear_combination(self._weights, [self._velocity, gradient])
        return linear_combination(self._weights, [self._velocity, gradient])


class Adam:
    """Adam with its usual decays, 0.9 and 0.999 (Kingma and Ba, 2015)."""

    def __init__(self, parameters: Vector, /, *, learning_rate: float) -> None:
        self._learning_rate = learning_rate
        self._mean = self._square = linear_combination([0.0], [parameters])
        self._steps = 0

    def change(self, batch: Pass, /) -> Vector:
        """Return the mean gradient over the root of its mean square, entry by entry."""
        gradient = batch.gradient()
        squared = map_arrays(lambda g: g * g, gradient)
        self._mean = linear_combination([0.9, 0.1], [self._mean, gradient])
        self._square = linear_combination([0.999, 0.001], [self._square, squared])
        self._steps += 1
        return map_arrays(self._entry_change, self._mean, self._square)

    def _entry_change(self, mean: Array, square: Array) -> Array:
        # Both averages started at zero.
        mean = mean / (1.0 - 0.9**self._steps)
        square = square / (1.0 - 0.999**self._steps)
        root = array_api_compat.array_namespace(square).sqrt(square)
        return -self._learning_rate * mean / (root + 1e-8)
