"""Eva: the product of two mean vectors.  Zhang, Shi and Li (2023), arXiv:2308.02123."""

import kfac_core as kc
from methods.curvature import Estimated


class Eva(Estimated):
    """``a a^T (x) b b^T``, of gradients for the data's targets, new in every step."""

    def __init__(self, problem, *, damping):
        super().__init__(problem, kc.Eva(), damping=damping)

    def rows(self, seen):
        # With sampled targets the mean gradient is zero but for noise.
        return seen.of_data()

    def due(self, step):
        return True
