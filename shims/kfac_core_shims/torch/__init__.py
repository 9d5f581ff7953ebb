"""K-FAC for PyTorch: ``kfac = KFAC(model)``, and ``kfac.step()`` before the optimizer.

`KFAC` replaces the gradients of a model by natural gradients, between
``loss.backward()`` and ``optimizer.step()``.  `KFACOptimizer` is an optimizer without a
learning rate.  `register_layer` covers modules of other libraries.
"""

from kfac_core_shims.torch.kfac import KFAC
from kfac_core_shims.torch.layers import register_layer
from kfac_core_shims.torch.optimizer import KFACOptimizer

__all__ = ["KFAC", "KFACOptimizer", "register_layer"]
