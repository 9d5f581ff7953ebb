"""What is saved in the place of an optimizer, also by ``torch.distributed.checkpoint``."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch

import kfac_core as kc


def as_bytes(state: Any, /) -> bytes:
    """Return plain data and tensors as bytes."""
    written = io.BytesIO()
    torch.save(state, written)
    return written.getvalue()


def of_bytes(written: Any, device: torch.device, /) -> Any:
    """Return what `as_bytes` wrote, on a device."""
    if not isinstance(written, bytes):
        raise kc.StateError(f"Expected bytes, got a {type(written).__name__}.")
    return torch.load(io.BytesIO(written), map_location=device, weights_only=True)


def require_own_state(optimizer: torch.optim.Optimizer, state: Any, /) -> None:
    """Raise `StateError` for the state of another kind of optimizer, or a count < 0."""
    name = type(optimizer).__name__
    for group in state["param_groups"]:
        if missing := optimizer.defaults.keys() - group.keys():
            raise kc.StateError(
                f"Expected a state of {name}, got one without {sorted(missing)}, as of "
                f"another optimizer: load the model alone, and begin with a new {name}."
            )
    counts = [group.get("steps", 0) for group in state["param_groups"]]
    counts += [entry.get("step", 0) for entry in state["state"].values()]
    if any(not count >= 0 for count in counts):
        raise kc.StateError(f"Expected numbers of steps >= 0, got {min(counts)}.")


class OfOneModel:
    """What belongs to its model: it is saved by its state, and not copied or pickled."""

    def __deepcopy__(self, memo: Any) -> Any:
        self.__reduce__()

    def __reduce__(self) -> Any:
        name = type(self).__name__
        raise kc.UnsupportedError(
            f"{name} belongs to its model and cannot be copied or pickled. Save its "
            f"state_dict(), create {name} for the copied model, and load it there."
        )


class DistributedState:
    """State of a `KFAC` for ``torch.distributed.checkpoint``.

    Each block is an entry, which the process that owns it writes and reads; what all
    processes have is another.  No process holds the state of all.

    Parameters
    ----------
    kfac : KFAC
        Whose state is written or read.  Any number of processes reads what any other
        number has written.

    Notes
    -----
    Collective.  A checkpoint's reader reads the entries that a new object names.  A new
    `KFAC` has no statistics, but it knows its blocks.

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
        """Return the state of this process's blocks as bytes, and what all have."""
        common = self._kfac.state_dict(owned=True)
        blocks = common["estimator"].pop("blocks")
        return {
            "common": as_bytes(common),
            "blocks": {name: as_bytes(block) for name, block in blocks.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Restore a state that `state_dict` returned.

        Parameters
        ----------
        state : mapping
            With the entries of this process's blocks.

        Raises
        ------
        kfac_core.StateError
            If it is of another form, or of other blocks; nothing was changed then.
        """
        device = next(self._kfac.model.parameters()).device
        common = of_bytes(state.get("common"), device)
        blocks = state.get("blocks", {})
        common["estimator"]["blocks"] = {
            name: of_bytes(block, device) for name, block in blocks.items()
        }
        self._kfac.load_state_dict(common, owned=True)
