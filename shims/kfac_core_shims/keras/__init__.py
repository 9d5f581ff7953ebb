"""K-FAC for Keras 3 models, on the PyTorch and the JAX backends.

`KFAC` takes a compiled model; from then on ``fit`` and ``train_on_batch`` give natural
gradients to the model's own optimizer.  ``kfac`` is the step, ``layers`` and ``recurrent``
say what of Keras has a block and tap it, ``losses`` reads the compiled losses, and ``taps``
runs the model with its layers tapped.
"""

import kfac_core_shims

kfac_core_shims.require("keras", extra="keras")


from kfac_core_shims.keras.kfac import KFAC

__all__ = ["KFAC"]
