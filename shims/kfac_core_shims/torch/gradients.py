"""The gradients that a step replaces: which passes they are of, and what a step wrote.

``.grad`` belongs to the loop: it is cleared, added to, put back and divided there, and
nobody says so.  What is asked here is only whether gradients are those of the passes that
were observed, and not what an earlier step left behind.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

import kfac_core as kc
from kfac_core_shims.torch import private
from kfac_core_shims.torch.sites import Site

__all__ = ["Gradients"]

_STEPPING: weakref.WeakSet[Any] = weakref.WeakSet()
"""Those that a step was taken of, of which no two may replace one gradient."""


class Gradients:
    """What passes and steps did to the ``.grad`` of the blocks' parameters.

    Parameters
    ----------
    model : torch.nn.Module
        For the names of its parameters.
    sites : mapping of str to Site
        Modules of the blocks.
    replaced : set of str
        Blocks whose parameters the model no longer has; it may grow.
    division : Division or None
        Of parameters that are divided among processes.
    """

    def __init__(
        self,
        model: Any,
        sites: Mapping[str, Site],
        replaced: set[str],
        division: Any,
    ) -> None:
        self._model, self._sites, self._replaced = model, sites, replaced
        self._division = division
        self._task = -1  # The last backward pass that added to `.grad`.
        self._came = False  # Gradients, to where they are divided among processes.
        self._uncleared: list[str] = []
        self._watched: Any = None
        self._watching: Any = None
        self._kept: Any = None
        self._written: list[tuple[Any, int]] = []

    @property
    def trained(self) -> Iterator[Any]:
        """Parameters of the blocks that are trained now."""
        for name, site in self._sites.items():
            if name not in self._replaced:
                yield from (p for p in site.trained if p.requires_grad)

    def are_of_this_pass(self) -> bool:
        """Whether the backward pass that is running was found to add to them before."""
        return bool(private.backward_pass() == self._task)

    def are_to_come(self) -> bool | None:
        """Whether the backward pass that is running adds to any; see `accumulates`."""
        adds = True if self._division is not None else private.accumulates(self.trained)
        if adds:
            self._task = private.backward_pass()
        return adds

    def are_there(self) -> bool:
        """Whether any is not zero, or is still to come to its place."""
        grads = [p.grad for p in self.trained if p.grad is not None]
        if self._division is None:
            return any(bool(g.any()) for g in grads)
        return not self._came or self._division.are_nonzero(grads)

    def watch_arrival(self) -> list[Any]:
        """Note when gradients that are divided among processes come to their places.

        Until processes exchange them, as in the last of several passes, they lie elsewhere.

        Returns
        -------
        list of torch.utils.hooks.RemovableHandle
            Handles of the hooks.
        """
        own = weakref.ref(self)

        def came(p: Any) -> None:
            gradients = own()
            if gradients is not None:
                gradients._came = True

        return [p.register_post_accumulate_grad_hook(came) for p in self.trained]

    def find_uncleared(self) -> None:
        """Find the parameters whose last direction this pass is about to add to."""
        self._uncleared = []
        written = [(grad(), version) for grad, version in self._written]
        left = {
            id(g)
            for g, version in written
            if g is not None and (g._version == version or bool(g.any()))
        }
        if left:
            self._uncleared = [
                name
                for name, p in self._model.named_parameters()
                if id(p.grad) in left and private.accumulates([p])
            ]

    def watch(self) -> None:
        """Keep a copy of what later passes add to one small parameter."""
        self._uncleared = []
        if self._watched is not None:
            return
        divided = self._division is not None
        fed = [p for p in self.trained if divided or private.accumulates([p])]
        self._watched = min(fed, key=lambda p: (p.numel() < 8, p.numel()))
        own, engine = weakref.ref(self), torch.autograd.Variable._execution_engine

        def keep() -> None:
            gradients = own()
            if gradients is not None and gradients._watched is not None:
                gradients._kept = gradients._watched.grad.detach().clone()

        def came(p: Any) -> None:
            # After DistributedDataParallel's own callback, which averages gradients.
            engine.queue_callback(lambda: engine.queue_callback(keep))

        self._watching = self._watched.register_post_accumulate_grad_hook(came)

    def are_of_later_passes(self) -> bool:
        """Whether they are those of the passes since `watch` alone, up to a factor.

        They are not where the loop sums copies of gradients, or clips those of each
        example.  True where nothing is watched.
        """
        if self._watched is None or self._kept is None or self._watched.grad is None:
            return True
        now, kept = self._watched.grad, self._kept
        coarse = 1e-3 if self._kept.dtype.itemsize < 4 else 1e-6
        if self._division is None:
            now, kept = (g.reshape(-1).double() for g in (now, kept))
            product, *squares = (
                float(g @ h) for g, h in ((now, kept), (now, now), (kept, kept))
            )
        else:
            product, *squares = self._division.products(now, kept)
        return product > 0 and product**2 >= (1 - coarse) * math.prod(squares)

    def note_written(self, parameters: Iterable[Any], /) -> None:
        """Remember the gradients of some parameters as what a step wrote."""
        grads = [p.grad for p in parameters if p.grad is not None]
        self._written = [(weakref.ref(g), g._version) for g in grads]

    def require_new(self) -> None:
        """Raise if they are what the last step wrote, or were added to it.

        Raises
        ------
        kfac_core.NotReadyError
            Also for what the step of another `KFAC` wrote.
        """
        if self._uncleared:
            names = self._uncleared[:4] + ["..."] * (len(self._uncleared) > 4)
            raise kc.NotReadyError(
                f"The gradients of {names} were added to what the last step "
                "wrote, and would be preconditioned twice. Clear those of all parameters "
                "before loss.backward(), model.zero_grad(), also of those that the "
                "optimizer does not have; or freeze these, p.requires_grad_(False), "
                "before KFAC is made. To accumulate, call kfac.step() after the last part."
            )
        _STEPPING.add(self)
        held = {
            id(p.grad)
            for name, site in self._sites.items()
            if name not in self._replaced
            for p in site.trained
        }
        for others in _STEPPING:
            if others is not self and any(others._left(held)):
                raise kc.NotReadyError(
                    "The gradients are what the step of another KFAC wrote, and would be "
                    "preconditioned twice. Have one KFAC for each parameter, or clear and "
                    "differentiate again in between."
                )
        left = list(self._left(held))
        if left and all(left):
            raise kc.NotReadyError(
                "The gradients are what the last step wrote, and would be preconditioned "
                "twice. Call kfac.step() once, between loss.backward() and "
                "optimizer.step()."
            )

    def forget(self) -> None:
        """Leave the passes of a step behind, and not what the step wrote."""
        self._came, self._uncleared = False, []
        if self._watched is not None:
            self._watching.remove()
            self._watched = self._kept = None

    def _left(self, held: set[int]) -> Iterator[bool]:
        """Yield of each gradient that the last step wrote whether it is still there."""
        for grad, version in self._written:
            g = grad()
            yield g is not None and id(g) in held and g._version == version
