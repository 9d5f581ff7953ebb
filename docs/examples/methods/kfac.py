"""K-FAC and two better fits of one Kronecker product, KFOC and TNT; and EKFAC.

Martens and Grosse (2015), arXiv:1503.05671; Koroko et al. (2022), arXiv:2201.10285; Ren
and Goldfarb (2021), arXiv:2106.02925; George et al. (2018), arXiv:1806.03884.
"""

from kfoc import KFOC

import kfac_core as kc
from methods.curvature import Estimated, is_due


def kfac(problem, *, damping):
    """``A (x) G``, the expectation of the product taken for that of the factors."""
    return Estimated(problem, kc.Kronecker(), damping=damping)


def kfoc(problem, *, damping):
    """The Kronecker product nearest to the block."""
    return Estimated(problem, KFOC(iterations=3), damping=damping)


def tnt(problem, *, damping):
    """Second moments of the gradient matrix along its axes."""
    return Estimated(problem, kc.TNT(), damping=damping)


class EKFAC(Estimated):
    """The best diagonal in the eigenbases of K-FAC's factors, with exact damping.

    The bases are taken on the schedule of the other methods' inverses, the diagonal with
    every batch.
    """

    def __init__(self, problem, *, damping):
        super().__init__(problem, kc.EKFAC(), damping=damping, rule="exact")

    def due(self, step):
        return True

    def refresh(self):
        if is_due(self.steps):
            start = "carried" if self.steps else "kronecker"
            self.estimator.rebase(moments=start)
        super().refresh()
