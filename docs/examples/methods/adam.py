"""Adam.  Kingma and Ba (2015), arXiv:1412.6980."""

import numpy as np

from methods.vectors import map_parameters, zeros_like

BETA1, EPSILON = 0.9, 1e-8


class Adam:
    """The mean gradient over the root of its mean square, entry by entry."""

    def __init__(self, problem, *, beta2):
        self.beta2, self.steps = beta2, 0
        self.first = self.second = None

    def direction(self, seen):
        beta2 = self.beta2
        if self.first is None:
            self.first = self.second = zeros_like(seen.gradient)
        self.steps += 1
        self.first = map_parameters(
            lambda m, g: BETA1 * m + (1.0 - BETA1) * g, self.first, seen.gradient
        )
        self.second = map_parameters(
            lambda v, g: beta2 * v + (1.0 - beta2) * g * g, self.second, seen.gradient
        )
        means, squares = 1.0 - BETA1**self.steps, 1.0 - beta2**self.steps
        return map_parameters(
            lambda m, v: m / means / (np.sqrt(v / squares) + EPSILON),
            self.first,
            self.second,
        )
