"""How a direction becomes a step: three rules.

A rule is an object with `change(seen, method, direction)`, which is to be added.
"""

import kfac_core as kc
from kfac_core.steps import kl_clip, linear_combination
from methods.problem import mean_loss
from methods.vectors import map_parameters, zeros_like

RULE = kc.integration.DampingRule(every=5, minimum=1e-6, maximum=1e6)


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
        step = kc.integration.quadratic_step(
            seen.gradient,
            directions,
            curvature=seen.curvature(directions),
            damping=method.damping,
        ).shortened(self.learning_rate)
        self.previous = step.change()
        self.steps += 1
        if self.steps % RULE.every == 0:
            moved = linear_combination([1.0, 1.0], [seen.parameters, self.previous])
            method.damping, _ = RULE.adapted(
                method.damping,
                seen.loss,
                mean_loss(seen.problem, moved, seen.batch),
                predicted=float(step.predicted),
            )
        return self.previous
