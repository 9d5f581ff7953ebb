"""Shampoo.  Gupta, Koren and Singer (2018), arXiv:1802.09568."""

import kfac_core as kc
from methods.curvature import is_due


class Shampoo:
    """``L^-1/4 V R^-1/4`` with the sums L of ``V V^T`` and R of ``V^T V``."""

    def __init__(self, problem, *, damping):
        self.layers, self.damping, self.steps = problem.layers, damping, 0
        self.factors = {
            name: kc.roots.GradientFactors(shape=layer.matrix_shape)
            for name, layer in problem.layers.items()
        }
        self.statistics, self.roots = {}, {}

    def direction(self, seen):
        directions = {}
        for name, layer in self.layers.items():
            V = layer.parameters_to_matrix(seen.gradient[name])
            direction = self.preconditioned(name, V)
            directions[name] = layer.matrix_to_parameters(direction)
        self.steps += 1
        return directions

    def preconditioned(self, name, V):
        """Return one layer's direction."""
        factors = self.factors[name]
        old = self.statistics.get(name) or factors.initial(V)
        self.statistics[name] = factors.updated(old, V, decay=1.0)
        if is_due(self.steps):
            self.roots[name] = [
                kc.roots.inverse_root(F, damping=self.damping, degree=4).matrix.full()
                for F in factors.values(self.statistics[name], debias=False)
            ]
        return kc.linalg.kronecker_multiply(self.roots[name], V)
