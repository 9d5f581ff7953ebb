"""What one batch shows: a loss, its gradient, and what curvature is made of.

Everything is computed when it is first asked for, so that a method pays for what it uses.
"""

from functools import cached_property

import numpy as np

import kfac_core as kc
from kfac_core.steps import curvature_of_outputs


class Seen:
    """One batch, at some parameters.

    `noise` is a generator; only sampled targets draw from it.
    """

    def __init__(self, problem, parameters, batch, noise):
        self.problem, self.parameters = problem, parameters
        self.batch, self.noise = batch, noise
        self.inputs, self.logits = problem.forward(parameters, batch.inputs)

    @cached_property
    def loss(self):
        """The mean loss of the batch."""
        likelihood, targets = self.problem.likelihood, self.batch.targets
        return -float(np.mean(likelihood.log_probability(self.logits, targets)))

    @cached_property
    def output_grads(self):
        """Each layer's output gradients, of the loss itself."""
        gradient = self.problem.likelihood.gradient(self.logits, self.batch.targets)
        return self.problem.backward(self.parameters, self.inputs, gradient)

    @cached_property
    def gradient(self):
        """The gradient of the mean loss."""
        return self.problem.gradient(self.inputs, self.output_grads)

    def of_data(self):
        """Return what each layer saw, for the targets of the data."""
        return self._rows(self.output_grads)

    def of_model(self):
        """Return what each layer saw, for targets that are drawn from the model."""
        likelihood = self.problem.likelihood
        noise = self.noise.random(likelihood.noise_shape(self.logits))
        sampled = likelihood.sampled_gradient(self.logits, noise)
        return self._rows(self.problem.backward(self.parameters, self.inputs, sampled))

    def curvature(self, directions):
        """Return ``d_i . F d_j`` with the exact Fisher matrix F of the batch."""
        changes = [
            self.problem.jvp(self.parameters, self.inputs, d) for d in directions
        ]
        multiplied = [
            self.problem.likelihood.fisher_multiply(self.logits, c) for c in changes
        ]
        return curvature_of_outputs(changes, multiplied, examples=len(self.batch))

    def _rows(self, output_grads):
        pairs = zip(self.inputs, output_grads.items(), strict=True)
        return {name: kc.Batch(x, g) for x, (name, g) in pairs}
