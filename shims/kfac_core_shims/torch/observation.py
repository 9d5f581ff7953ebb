"""One observed forward pass: its calls, its rows, and what the loss does with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import kfac_core as kc
from kfac_core_shims.torch import uses
from kfac_core_shims.torch.graph import RecordedCall


@dataclass(eq=False)
class Observation:
    """Outputs of one forward pass.

    Attributes
    ----------
    calls : list of RecordedCall
        Calls that they depend on.
    rows : float
        Number of their rows, or the sum of the rows' weights.
    weight : torch.Tensor or None
        Weights of the rows.
    share : float
        Weight of all rows, beside those of other passes.
    loss_factor : float
        What the loss of a row is of its likelihood's negative log; see `RowLoss`.
    scale : float or None
        What the loss multiplied each row's term by, besides `weight`; None where its
        gradient does not show it.
    is_uniform : bool
        Whether `scale` is that of two rows or more, all alike.
    is_unscaled : bool
        Whether no gradient has shown a scale, and nobody said that there is none.
    largest : float
        Largest entry of the outputs' gradient; see `RowWeights`.
    coarse : float
        Relative difference that roundoff may make in `scale`.
    unread : torch.Tensor of bool, or None
        Rows that the loss did not read; None where it read all, or that is not known.
    reads_more : bool
        Whether a further part of the loss read some of these.
    uncovered : frozenset of str
        Blocks whose weights the outputs depend on in a way that is not known.
    is_differentiated : bool
        Whether it counts.
    is_forgotten : bool
        Whether its gradients were cleared.
    replay : tuple or None
        Arguments of the model's call, positional and by name, and the state of the random
        numbers before it; where these are kept.
    hooks : list of torch.utils.hooks.RemovableHandle
        Hooks of the nodes of the calls.
    """

    calls: list[RecordedCall] = field(default_factory=list)
    rows: float = 0.0
    weight: Any = None
    share: float = 1.0
    loss_factor: float = 1.0
    scale: float | None = None
    is_uniform: bool = False
    is_unscaled: bool = False
    largest: float = 0.0
    coarse: float = 0.0
    unread: Any = None
    reads_more: bool = False
    uncovered: frozenset[str] = frozenset()
    is_differentiated: bool = False
    is_forgotten: bool = False
    replay: Any = None
    hooks: list[Any] = field(default_factory=list)

    def note_further_part(self, gradient: Any) -> None:
        """Note that a further part of the loss came back, with its gradient if known."""
        # The first part's gradient showed a scale that the sum of the parts may not
        # have.
        self.scale = None
        known = self.unread is not None and gradient is not None
        if known and bool(gradient[self.unread].any()):
            self.reads_more = True

    def checked_calls(
        self, *, positions_of: int | None = None
    ) -> list[kc.integration.LayerCall]:
        """Return the calls, joined; raise if they are not those of the loss."""
        if self.reads_more:
            raise kc.UnsupportedError(
                "The loss was differentiated in parts, and a part reads rows of outputs "
                "that the first did not, which were left out as ignored. Add the parts up "
                "and differentiate their sum, or call observe(outputs) before; "
                "kfac.discard() forgets passes that are not part of a loss."
            )
        for call in self.calls:
            call.require_unchanged()
        return uses.joined(self.calls, positions_of=positions_of)

    def forget(self) -> None:
        """Forget the output gradients; the graph may be differentiated once more."""
        self.is_forgotten = True
        for hook in self.hooks:
            hook.remove()
        for call in self.calls:
            call.output_grads, call.is_taken = [], False

    def clear(self) -> None:
        """Release all arrays: a loss that is kept keeps the calls."""
        for call in self.calls:
            call.clear()
        self.replay = self.weight = self.unread = None
