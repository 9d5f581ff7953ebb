"""SOAP.  Vyas et al. (2024), arXiv:2409.11321, algorithm 3."""

import numpy as np

import kfac_core as kc
from methods.curvature import is_due
from methods.shampoo import Shampoo

BETA1, BETA2 = 0.9, 0.95


class SOAP(Shampoo):
    """Adam in the eigenbases of Shampoo's factors, which follow them by QR steps.

    In the order of the published code: the first gradient makes the bases and no step,
    and each later one is used in the bases of those before it.
    """

    def __init__(self, problem, *, epsilon):
        super().__init__(problem, damping=epsilon)
        self.bases, self.momentum, self.squares = {}, {}, {}

    def preconditioned(self, name, V):
        started = name in self.bases
        direction = self.adam(name, V) if started else np.zeros_like(V)
        factors = self.factors[name]
        old = self.statistics.get(name) or factors.initial(V)
        self.statistics[name] = factors.updated(old, V, decay=BETA2)
        values = [F.full() for F in factors.values(self.statistics[name], debias=True)]
        if not started:
            self.bases[name] = [kc.roots.renewed_basis(None, F)[0] for F in values]
            self.momentum[name], self.squares[name] = np.zeros_like(V), np.zeros_like(V)
        elif is_due(self.steps):
            pairs = list(zip(self.bases[name], values, strict=True))
            new = [kc.roots.renewed_basis(Q, F)[0] for Q, F in pairs]
            orders = [np.argsort(-np.sum(Q * (F @ Q), axis=0)) for Q, F in pairs]
            self.squares[name] = self.followed(name, new, orders)
            self.bases[name] = new
        return direction

    def adam(self, name, V):
        """Return Adam's direction in the bases."""
        left, right = self.bases[name]
        rotated = left.T @ V @ right
        self.momentum[name] = BETA1 * self.momentum[name] + (1.0 - BETA1) * V
        self.squares[name] = BETA2 * self.squares[name] + (1.0 - BETA2) * rotated**2
        mean = left.T @ self.momentum[name] @ right / (1.0 - BETA1**self.steps)
        spread = np.sqrt(self.squares[name] / (1.0 - BETA2**self.steps))
        return left @ (mean / (spread + self.damping)) @ right.T

    def followed(self, name, new, orders):
        """Return the squares in the order in which columns are before their step."""
        left, right = orders
        return self.squares[name][left, :][:, right]


class CarriedSOAP(SOAP):
    """SOAP whose squares follow the bases, as those of EKFAC do when they are rebased.

    With ``R = Q_old^T Q_new`` on each side the squares become ``(R_L^2)^T v R_R^2``, each
    entry squared: the diagonal that the old one has in the new bases.  `SOAP` above only
    permutes them, so that a direction that had no gradient yet may get a momentum.
    """

    def followed(self, name, new, orders):
        left, right = (
            (before.T @ after) ** 2
            for before, after in zip(self.bases[name], new, strict=True)
        )
        return left.T @ self.squares[name] @ right
