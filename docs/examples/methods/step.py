"""How a direction becomes a step: three rules.

A rule is an object with `change(seen, method, direction)`, which is to be added.
"""

import math

import kfac_core as kc
from kfac_core.steps import (
    kl_clip,
    linear_combination,
    quadratic_model,
    reduction_ratio,
)
from methods.problem import mean_loss
from methods.vectors import map_parameters, zeros_like

ADAPT_EVERY = 5


class Plain:
    """``-lr D``, for directions that have a momentum of their own."""

    def __init__(self, *, learning_rate):
        self.learning_rate = learning_rate

    def change(self, seen, method, direction):
        return map_parameters(lambda d: -self.learning_rate * d, direction)


class Momentum:
    """``v <- mu v - lr nu D``, where ``nu`` is 1, or bounds ``lr^2 nu^2 V . D``.

    Parameters
    ----------
    learning_rate, momentum : float
        ``lr`` and ``mu``.
    clip : float, optional
        The bound, of about twice the divergence of the predictions before and after; see
        `kfac_core.steps.kl_clip`.
    """

    def __init__(self, *, learning_rate, momentum=0.9, clip=None):
        self.learning_rate, self.momentum, self.clip = learning_rate, momentum, clip
        self.velocity = None

    def change(self, seen, method, direction):
        if self.velocity is None:
            self.velocity = zeros_like(direction)
        rate = self.learning_rate
        if self.clip is not None:
            bound = kl_clip(
                seen.gradient, direction, learning_rate=rate, bound=self.clip
            )
            rate = rate * float(bound.scale)
        self.velocity = map_parameters(
            lambda v, d: self.momentum * v - rate * d, self.velocity, direction
        )
        return self.velocity


class QuadraticModel:
    """``lr (alpha D + mu d0)`` of the exact quadratic model, with an adapted damping.

    Martens and Grosse (2015), sections 6.4, 6.5 and 7.  A learning rate of 1 goes all the
    way to the model's minimum.
    """

    def __init__(self, *, learning_rate):
        self.learning_rate = learning_rate
        self.previous, self.steps = None, 0

    def change(self, seen, method, direction):
        directions = [linear_combination([-1.0], [direction])]
        if self.previous is not None:
            directions.append(self.previous)
        model = quadratic_model(
            seen.gradient,
            directions,
            curvature=seen.curvature(directions),
            damping=method.damping,
        )
        coefficients = self.learning_rate * model.minimize().coefficients
        self.previous = linear_combination(coefficients, directions)
        self.steps += 1
        if self.steps % ADAPT_EVERY == 0:
            predicted = float(model.change(coefficients, damped=True))
            method.damping = self.adapted(seen, method.damping, predicted)
        return self.previous

    def adapted(self, seen, damping, predicted):
        """Return the damping by the Levenberg-Marquardt rule."""
        moved = linear_combination([1.0, 1.0], [seen.parameters, self.previous])
        after = mean_loss(seen.problem, moved, seen.batch)
        if not math.isfinite(after):
            after = math.inf
        return kc.levenberg_marquardt(
            damping,
            reduction_ratio(seen.loss, after, predicted=predicted),
            decay=(19 / 20) ** ADAPT_EVERY,
            minimum=1e-6,
            maximum=1e6,
        )
