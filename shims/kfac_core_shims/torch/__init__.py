"""K-FAC for PyTorch: ``kfac = KFAC(model)``, and ``kfac.step()`` before the optimizer.

`KFAC` replaces the gradients of a model by natural gradients, between
``loss.backward()`` and ``optimizer.step()``.  `register_layer` covers modules of other
libraries.
"""

from kfac_core_shims.torch.kfac import KFAC
from kfac_core_shims.torch.layers import register_layer

__all__ = ["KFAC", "register_layer"]
