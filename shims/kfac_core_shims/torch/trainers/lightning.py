"""`LightningCallback`: `KFAC` in the Trainer of Lightning."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Unpack

from lightning import Callback

from kfac_core_shims.torch.kfac import KFAC
from kfac_core_shims.torch.options import TrainerOptions


class LightningCallback(Callback):
    """Replaces the gradients of a Lightning module by natural gradients.

    ``Trainer(callbacks=[LightningCallback("network")])``.  Lightning clips gradients after
    this.

    Parameters
    ----------
    network : str, optional
        Attribute of the module whose call returns the outputs that the loss reads, where it
        is not the module itself.
    **options
        Of `KFAC`.

    Attributes
    ----------
    kfac : KFAC or None
        Created when training starts.
    """

    def __init__(
        self, network: str | None = None, **options: Unpack[TrainerOptions]
    ) -> None:
        self.network, self.options = network, options
        self.kfac: KFAC | None = None
        self._saved: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Create K-FAC; a resumed run loads it."""
        model = pl_module
        if self.network is not None:
            model = attrgetter(self.network)(pl_module)
        self.kfac = KFAC(model, lr=trainer.optimizers[0], **self.options)
        if self._saved is not None:
            self.kfac.load_state_dict(self._saved)

    def on_before_optimizer_step(
        self, trainer: Any, pl_module: Any, optimizer: Any
    ) -> None:
        """Replace the gradients, which are complete here."""
        assert self.kfac is not None, "training has started"
        self.kfac.step()

    def state_dict(self) -> dict[str, Any]:
        """Return K-FAC's state, for Lightning's checkpoint."""
        return {} if self.kfac is None else self.kfac.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a state until the training starts."""
        self._saved = state_dict or None
