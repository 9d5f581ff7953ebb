"""KL-Shampoo.  Lin et al. (2025), arXiv:2509.03378."""

import numpy as np

import kfac_core as kc
from methods.curvature import DECAY, is_due
from methods.shampoo import Shampoo


class KLShampoo(Shampoo):
    """``S^-1/2 V T^-1/2``, where S and T whiten each other."""

    def preconditioned(self, name, V):
        factors = self.factors[name]
        old = self.statistics.get(name) or factors.initial(V)
        roots = self.roots.get(name) or first_roots(V)
        new = factors.updated(old, V, decay=DECAY, roots=roots)
        self.statistics[name] = new
        if is_due(self.steps):
            roots = [
                kc.roots.inverse_root(F, damping=self.damping, degree=2).matrix.full()
                for F in factors.values(new, debias=True)
            ]
        self.roots[name] = roots
        return kc.linalg.kronecker_multiply(roots, V)


def first_roots(V):
    """Return the roots of the multiples of I that one gradient suggests."""
    scale = np.mean(V**2) ** -0.25
    return [scale * np.eye(n) for n in V.shape]
