"""Gradient descent: what is done with the gradient is up to the rule of the step."""


class SGD:
    """The gradient itself; the damping is only that of the quadratic model."""

    def __init__(self, problem, *, damping=None):
        self.damping = damping

    def direction(self, seen):
        return seen.gradient
