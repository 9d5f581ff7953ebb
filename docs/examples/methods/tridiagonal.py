"""The block-tridiagonal inverse.  Martens and Grosse (2015), section 4.3."""

import kfac_core as kc
from methods.curvature import DECAY, is_due


class Tridiagonal:
    """A chain of dense layers, each conditioned on the next one."""

    def __init__(self, problem, *, damping):
        self.chain = kc.BlockTridiagonal(layers=problem.layers)
        self.damping, self.steps = damping, 0
        self.statistics = self.operator = None

    def direction(self, seen):
        rows = seen.of_model()
        if self.statistics is None:
            self.statistics = self.chain.initial(seen.logits)
        self.statistics = self.chain.update(
            self.statistics,
            rows,
            conventions=kc.Conventions(reduction="sum", sources="sum"),
            decay=DECAY,
        )
        if is_due(self.steps):
            self.operator = self.chain.operator(
                self.statistics, damping=self.damping, rule="factored"
            )
        self.steps += 1
        vectors = self.chain.parameters_to_vectors(seen.gradient)
        return self.chain.vectors_to_parameters(self.operator.multiply_inverse(vectors))
