"""SOAP.  Vyas et al. (2024), arXiv:2409.11321, algorithm 3."""

import numpy as np

import kfac_core as kc
from methods.curvature import is_due
from methods.shampoo import Shampoo

BETA1, BETA2 = 0.9, 0.95


class SOAP(Shampoo):
    """Adam in the eigenbases of Shampoo's factors, which follow them by QR steps."""

    def __init__(self, problem, *, epsilon):
        super().__init__(problem, damping=epsilon)
        self.bases, self.momentum, self.squares = {}, {}, {}

    def preconditioned(self, name, V):
        factors = self.factors[name]
        old = self.statistics.get(name) or factors.initial(V)
        self.statistics[name] = factors.updated(old, V, decay=BETA2)
        if is_due(self.steps):
            values = factors.values(self.statistics[name], debias=True)
            self.bases[name] = self.followed(name, values)
        left, right = (basis.eigenvectors for basis in self.bases[name])
        zero = np.zeros_like(V)
        mean = BETA1 * self.momentum.get(name, zero) + (1.0 - BETA1) * V
        square = (left.T @ V @ right) ** 2
        square = BETA2 * self.squares.get(name, zero) + (1.0 - BETA2) * square
        self.momentum[name], self.squares[name] = mean, square
        m = left.T @ mean @ right / (1.0 - BETA1 ** (self.steps + 1))
        v = square / (1.0 - BETA2 ** (self.steps + 1))
        return left @ (m / (np.sqrt(v) + self.damping)) @ right.T

    def followed(self, name, values):
        """Return the bases of the factors as they are now."""
        if name not in self.bases:
            return [kc.roots.ordered_basis(F) for F in values]
        pairs = zip(self.bases[name], values, strict=True)
        return [kc.roots.refreshed_basis(basis, F) for basis, F in pairs]


class CarriedSOAP(SOAP):
    """SOAP whose squares follow the bases, as those of EKFAC do when they are rebased.

    With ``R = Q_old^T Q_new`` on each side the squares become ``(R_L^2)^T v R_R^2``, each
    entry squared: the diagonal that the old one has in the new bases.  The published code
    only permutes them with the columns (`OrderedBasis.order`); `SOAP` above leaves them,
    and a direction that had no gradient yet may get a momentum.
    """

    def followed(self, name, values):
        old = self.bases.get(name)
        new = super().followed(name, values)
        if old is not None:
            left, right = (
                (before.eigenvectors.T @ after.eigenvectors) ** 2
                for before, after in zip(old, new, strict=True)
            )
            self.squares[name] = left.T @ self.squares[name] @ right
        return new
