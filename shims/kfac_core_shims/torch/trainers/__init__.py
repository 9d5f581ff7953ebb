"""`KFAC` in the training loops of Hugging Face's Trainer, Lightning and accelerate.

Each callback creates K-FAC for the model, takes its step before the optimizer's, and saves
and loads it with the checkpoints of its library: resuming is bit-for-bit reproducible.  The
libraries are imported with their callback.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Unpack

from kfac_core_shims.torch.kfac import KFAC
from kfac_core_shims.torch.options import TrainerOptions

if TYPE_CHECKING:
    from kfac_core_shims.torch.trainers.hugging_face import HuggingFaceCallback
    from kfac_core_shims.torch.trainers.lightning import LightningCallback

__all__ = ["HuggingFaceCallback", "LightningCallback", "accelerated"]

_MODULES = {"HuggingFaceCallback": "hugging_face", "LightningCallback": "lightning"}


def accelerated(
    accelerator: Any, model: Any, optimizer: Any, **options: Unpack[TrainerOptions]
) -> KFAC:
    """Return K-FAC of what ``accelerator.prepare`` returned, saved by its ``save_state``.

    Call ``kfac.step()`` before ``optimizer.step()`` where ``accelerator.sync_gradients``.

    Parameters
    ----------
    accelerator : accelerate.Accelerator
        Saves and loads it, and has the scaler of half precision.
    model, optimizer : object
        From ``accelerator.prepare``.
    **options
        Of `KFAC`.

    Returns
    -------
    KFAC
        Registered for checkpoints.
    """
    kfac = KFAC(model, lr=optimizer, grad_scaler=accelerator.scaler, **options)
    accelerator.register_for_checkpointing(kfac)
    return kfac


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
