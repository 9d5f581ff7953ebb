"""One forward pass of a model, and what a backward pass through it brought."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import kfac_core as kc
from kfac_core_shims.torch.graph import Reached, RecordedCall
from kfac_core_shims.torch.uses import joined

__all__ = ["Observation"]


@dataclass(eq=False)
class Observation:
    """Outputs of one forward pass.

    Attributes
    ----------
    calls : list of RecordedCall
        Calls that they depend on.
    rows : float
        Number of their rows, or the sum of the rows' weights.
    differentiated : bool
        Whether a backward pass went through any of the calls.
    accumulated : bool
        Whether one that added to ``.grad`` did, and not `torch.autograd.grad` alone.
    withdrawn : bool
        Whether another observation stands in its place.
    cleared : bool
        Whether what it added to ``.grad`` is gone.
    untold : frozenset of str
        Blocks whose weights the outputs depend on in a way that is not known.
    weight : torch.Tensor or None
        Weights of the rows.
    share : float
        Weight of all rows, beside those of other passes.
    unread : torch.Tensor of bool, or None
        Rows that the loss did not read; None where it read all, or that is not known.
    in_unlike_parts : bool
        Whether a further part of the loss read some of these.
    scale : float or None
        What the loss multiplied each row's cross-entropy by, besides `weight`; None where
        it was not told.
    unlike : bool
        Whether `scale` is a mean over rows with weights, or of one row.
    coarse : float
        Relative difference that roundoff may make in `scale`.
    replay : tuple or None
        Arguments of the model's call, positional and by name, and the state of the random
        numbers before it; where these are kept.
    kfac : weakref.ref
        The `KFAC` whose step the pass is for.
    """

    calls: list[RecordedCall] = field(default_factory=list)
    rows: float = 0.0
    differentiated: bool = False
    accumulated: bool = False
    withdrawn: bool = False
    cleared: bool = False
    untold: frozenset[str] = frozenset()
    weight: Any = None
    unread: Any = None
    in_unlike_parts: bool = False
    share: float = 1.0
    scale: float | None = None
    unlike: bool = False
    coarse: float = 0.0
    replay: Any = None
    kfac: Any = None

    def watch(self, reached: Reached, *, empirical: bool) -> None:
        """Note when a backward pass reaches a call, and take its gradient if empirical."""
        # A hook that held the node that it is of would keep the graph for ever.
        call = reached.call if empirical else None
        take = Reached(None, reached.call, reached.columns, reached.share).take
        noted = partial(_note, self, call, reached.edge.output_nr, take)
        reached.edge.node.register_prehook(noted)

    def take(self, reached: Reached, gradients: Any) -> None:
        """Take the empirical gradient of a call out of those of its node."""
        self.take_gradient(
            reached.call, reached.take(gradients[reached.edge.output_nr])
        )

    def begin_to_accumulate(self) -> None:
        """Leave behind what `torch.autograd.grad` brought, which is not in ``.grad``."""
        self.accumulated = True
        for call in self.calls:
            call.output_grads = []

    def take_gradient(self, call: Any, g: Any) -> None:
        """Take the empirical gradient of a call, or a further part of it."""
        call.add_to_source(g)

    def note_further_part(self, gradient: Any) -> None:
        """Note that a further part of the loss came back, with its gradient if known."""
        self.scale = None
        known = self.unread is not None and gradient is not None
        if known and bool(gradient[self.unread].any()):
            self.in_unlike_parts = True

    def checked_calls(self) -> list[kc.integration.LayerCall]:
        """Return the calls; raise if they are not what the loss has seen."""
        if self.in_unlike_parts:
            raise kc.UnsupportedError(
                "The loss was differentiated in parts, and a part reads rows of outputs "
                "that the first did not, which were left out as ignored. Add the parts up "
                "and differentiate their sum, or call observe(outputs) before; "
                "kfac.discard() forgets what was no loss."
            )
        for call in self.calls:
            call.require_unchanged()
        return joined(self.calls)

    def clear(self) -> None:
        """Leave all arrays behind: a loss that is kept keeps the calls."""
        for call in self.calls:
            call.clear()
        self.replay = self.weight = self.unread = None


def _note(
    observation: Observation, call: Any, index: int, take: Any, grads: Any
) -> None:
    # A pass that makes a graph, as for a penalty, is not the loss's own.
    if torch.is_grad_enabled():
        return
    kfac = observation.kfac()
    adds = None if kfac is None else kfac.adds_to_gradients()
    if observation.withdrawn or adds is None or (observation.accumulated and not adds):
        return
    observation.cleared = False
    if adds and not observation.accumulated:
        if call is None:
            observation.accumulated = True
        else:
            observation.begin_to_accumulate()
    observation.differentiated = True
    if call is not None and call.inputs is not None:
        observation.take_gradient(call, take(grads[index]))
