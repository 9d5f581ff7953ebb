"""K-FAC for PyTorch: ``kfac = KFAC(model)``, and ``kfac.step()`` before the optimizer.

`KFAC` replaces the gradients of a model by natural gradients, between
``loss.backward()`` and ``optimizer.step()``.  `KFACOptimizer` is an optimizer without a
learning rate, `GaussNewton` one for least-squares problems, and `SOAP` a drop-in for AdamW.
`collect` takes the curvature of a trained model over a data set, for influence, posteriors
and merging.
`register_layer` covers modules of other libraries, and `DistributedState` is for
``torch.distributed.checkpoint``.
"""

import kfac_core_shims

kfac_core_shims.require("torch", extra="torch")


from kfac_core_shims.torch.collecting import Factors, collect, read_factors
from kfac_core_shims.torch.gauss_newton import GaussNewton
from kfac_core_shims.torch.kfac import KFAC
from kfac_core_shims.torch.layers import Part, Parts, Reading, register_layer
from kfac_core_shims.torch.merging import Merged, merge, scipy_operator
from kfac_core_shims.torch.optimizer import KFACOptimizer
from kfac_core_shims.torch.posterior import Posterior
from kfac_core_shims.torch.saving import DistributedState
from kfac_core_shims.torch.scoring import Scores, influence, self_influence
from kfac_core_shims.torch.soap import SOAP

__all__ = [
    "KFAC",
    "SOAP",
    "DistributedState",
    "Factors",
    "GaussNewton",
    "KFACOptimizer",
    "Merged",
    "Part",
    "Parts",
    "Posterior",
    "Reading",
    "Scores",
    "collect",
    "influence",
    "merge",
    "read_factors",
    "register_layer",
    "scipy_operator",
    "self_influence",
]
