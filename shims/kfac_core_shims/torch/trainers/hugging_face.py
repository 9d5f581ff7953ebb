"""`HuggingFaceCallback`: `KFAC` in the Trainer of transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Unpack

import torch
from transformers import TrainerCallback

import kfac_core as kc
from kfac_core_shims.torch.kfac import KFAC
from kfac_core_shims.torch.options import TrainerOptions


class HuggingFaceCallback(TrainerCallback):
    """Replaces the gradients of a Trainer by natural gradients.

    ``Trainer(..., callbacks=[HuggingFaceCallback()])``, with an optimizer such as
    ``optim="sgd"`` and ``max_grad_norm=0``: the Trainer clips gradients before that.

    Parameters
    ----------
    resumed : path-like, optional
        The checkpoint that the run is resumed from; by default that of the step in the
        Trainer's output folder.
    **options
        Of `KFAC`.

    Attributes
    ----------
    kfac : KFAC or None
        Created when training begins.

    Raises
    ------
    kfac_core.StateError
        When a resumed training begins, if its checkpoint has no state of K-FAC.
    """

    def __init__(
        self,
        resumed: str | os.PathLike[str] | None = None,
        **options: Unpack[TrainerOptions],
    ) -> None:
        self.resumed, self.options = resumed, options
        self.kfac: KFAC | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **objects: Any
    ) -> None:
        """Create K-FAC; a resumed run loads it."""
        self.kfac = KFAC(objects["model"], lr=objects["optimizer"], **self.options)
        if not state.global_step:
            return
        file = _folder(args, state) / "kfac.pt"
        if self.resumed is not None:
            file = Path(self.resumed) / "kfac.pt"
        if not file.exists():
            raise kc.StateError(
                f"The run resumes at step {state.global_step}, but {file} does not exist. "
                "Pass HuggingFaceCallback(resumed=...), the checkpoint's folder."
            )
        device = next(objects["model"].parameters()).device
        saved = torch.load(file, weights_only=True, map_location=device)
        self.kfac.load_state_dict(saved)

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, **objects: Any
    ) -> None:
        """Replace the gradients."""
        assert self.kfac is not None, "training has begun"
        self.kfac.step()

    def on_save(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Save K-FAC in the checkpoint."""
        assert self.kfac is not None, "training has begun"
        saved = self.kfac.state_dict()  # All processes take part.
        if state.is_world_process_zero:
            torch.save(saved, _folder(args, state) / "kfac.pt")


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
