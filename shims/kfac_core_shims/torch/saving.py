"""The state of `KFAC` as ``torch.distributed.checkpoint`` reads and writes it."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch

import kfac_core as kc

__all__ = ["DistributedState"]


class DistributedState:
    """State of a `KFAC` for ``torch.distributed.checkpoint``.

    A checkpoint's reader asks a new object for what it has, and reads that; but before its
    first step `KFAC` has no statistics.  Here all of its state is one entry.

    Parameters
    ----------
    kfac : KFAC
        Whose state is written or read.  The checkpoint has the state of one process with
        all rows, and is read by any number of processes.

    Notes
    -----
    Collective.  Each process holds all statistics and operators while it writes or reads.

    Examples
    --------
    ``checkpoint.save({"kfac": DistributedState(kfac)}, checkpoint_id=folder)`` of
    ``torch.distributed`` calls the first of these, and ``checkpoint.load`` the second:

    >>> import torch
    >>> from kfac_core_shims.torch import KFAC, DistributedState
    >>> kfac = KFAC(torch.nn.Linear(4, 3))
    >>> saved = DistributedState(kfac).state_dict()
    >>> DistributedState(kfac).load_state_dict(saved)
    """

    def __init__(self, kfac: Any) -> None:
        self._kfac = kfac

    def state_dict(self) -> dict[str, Any]:
        """Return the state as bytes of one entry; all processes call it."""
        written = io.BytesIO()
        torch.save(self._kfac.state_dict(), written)
        return {"bytes": written.getvalue()}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Restore a state that `state_dict` returned.

        Parameters
        ----------
        state : mapping
            With one entry.

        Raises
        ------
        kfac_core.StateError
            If it is of another form, or of other blocks; nothing was changed then.
        """
        written = state.get("bytes")
        if not isinstance(written, bytes):
            raise kc.StateError(f"Expected an entry `bytes`, got {[*state]}.")
        device = next(self._kfac.model.parameters()).device
        found = torch.load(io.BytesIO(written), map_location=device, weights_only=True)
        self._kfac.load_state_dict(found)
