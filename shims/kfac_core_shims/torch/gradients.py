"""The gradients that a step replaces, and the backward passes that computed them.

The loop owns ``.grad``: it clears, accumulates, clips and divides.  This module checks only
that gradients are those of observed passes and not left over from an earlier step, and
that the parameters have not changed since they were differentiated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook

import kfac_core as kc
from kfac_core_shims.torch import private
from kfac_core_shims.torch.sites import Site

_drawn_through: list[Any] = []
"""Models through which K-FAC is backpropagating vectors of its own.

Not one for each thread: with a GPU the hooks run in other threads than the call.
"""


@contextmanager
def drawing(model: torch.nn.Module, /) -> Iterator[None]:
    """Backpropagate vectors that no loss sent, which another `KFAC` is not to observe."""
    _drawn_through.append(model)
    try:
        yield
    finally:
        _drawn_through.remove(model)


def differentiate(loss: Any, parameters: Iterable[Any], /) -> None:
    """Differentiate a loss so that its pass counts, and leave each ``.grad`` as it was."""
    before = [(p, p.grad) for p in parameters]
    for p, _ in before:
        p.grad = None
    try:
        loss.backward()
    finally:
        for p, g in before:
            p.grad = g


def is_drawn_through(model: torch.nn.Module, /) -> bool:
    """Whether vectors that no loss sent are on their way through a model or its parts."""
    return any(model is m for drawn in _drawn_through for m in drawn.modules())


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
        model: torch.nn.Module,
        sites: Mapping[str, Site],
        replaced: set[str],
        division: Any,
    ) -> None:
        self._model, self._sites, self._replaced = model, sites, replaced
        self._division = division
        self._task = -1  # The last backward pass, and what it does.
        self._adds: bool | None = None
        self._came = False  # Gradients of a pass since the last step.
        self._on_cleared: Any = None
        self._uncleared: dict[str, None] = {}
        # What the last step wrote, and the parameters that a pass came to, with the
        # versions that they had then.
        self._written: list[tuple[Any, int]] = []
        self._differentiated: list[Any] = []
        self._versions: list[int] = []

    @property
    def came(self) -> bool:
        """Whether those of a pass since the last step have come to a parameter."""
        return self._came

    @property
    def trained(self) -> Iterator[Any]:
        """Parameters of the blocks that are trained now."""
        for name, site in self._sites.items():
            if name not in self._replaced:
                yield from (p for p in site.trained if p.requires_grad)

    def watch(self, on_cleared: Callable[..., None], /) -> list[Any]:
        """Look at each backward pass as it comes to the parameters.

        Parameters
        ----------
        on_cleared : method
            Held weakly, and called where the gradients of earlier passes are gone, as by
            ``zero_grad``, or the parameters ``changed``, as by an optimizer's step.

        Returns
        -------
        list of torch.utils.hooks.RemovableHandle
            Handles of the hooks.
        """
        self._on_cleared = weakref.WeakMethod(on_cleared)
        watching = weakref.ref(self)
        sharded = self._division is not None and self._division.fully_sharded

        def came(_: Any) -> None:
            gradients = watching()
            if gradients is not None and (sharded or gradients.begin_pass()):
                gradients._came = True

        def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            gradients = watching()
            if gradients is not None:
                gradients._note_step(optimizer)

        # Fused optimizers change parameters without a new version of them.
        handle = register_optimizer_step_post_hook(stepped)
        weakref.finalize(self, handle.remove)
        # With fully_shard gradients lie elsewhere until processes exchange them.
        if sharded:
            hooks = [p.register_post_accumulate_grad_hook(came) for p in self.trained]
        else:
            hooks = []
            for site in self._sites.values():
                trained = [p for p in site.trained if p.requires_grad]
                # One of each block, since the others come with it.
                hooks += [p.register_hook(came) for p in trained[:1]]
        return [handle, *hooks]

    def _note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has changed parameters whose gradients are awaited."""
        awaited = {*map(id, self._differentiated)}
        if awaited and any(
            id(p) in awaited
            for group in optimizer.param_groups
            for p in group["params"]
        ):
            self._versions = [-1] * len(self._differentiated)

    def begin_pass(self) -> bool | None:
        """Note the backward pass that is running.

        Returns
        -------
        bool or None
            Whether it adds to ``.grad`` of any block; False where it returns gradients
            (`torch.autograd.grad`), None where it comes to no block.
        """
        task = private.backward_pass()
        # Each hook of one backward pass comes here; only the first changes anything.
        if task == self._task:
            return self._adds
        if is_drawn_through(self._model):
            return None
        self._task, self._adds = task, True
        if self._division is None:
            self._adds = private.accumulates(self.trained)
        if self._adds:
            self._begin_to_add()
        return self._adds

    def _begin_to_add(self) -> None:
        changed = self._have_changed()
        self._differentiated = [*self.trained]
        self._versions = private.versions(self._differentiated)
        if not self._came:
            self._find_uncleared()
            return
        cleared = not self._are_there()
        if cleared:
            self._came, self._uncleared = False, {}
        forget = self._on_cleared()
        if forget is not None and (cleared or changed):
            forget(changed=changed)

    def _have_changed(self) -> bool:
        """Whether any parameter has changed since the last pass that came to it."""
        return self._versions != private.versions(self._differentiated)

    def _are_there(self) -> bool:
        """Whether any is not zero."""
        grads = [p.grad for p in self.trained if p.grad is not None]
        if self._division is None:
            return any(bool(g.any()) for g in grads)
        return bool(self._division.are_nonzero(grads))

    def _find_uncleared(self) -> None:
        """Find the parameters whose last direction this pass is about to add to."""
        written = [(grad(), version) for grad, version in self._written]
        # Zeroed in place, the tensor is the same one at a later version.
        left = {
            id(g)
            for g, version in written
            if g is not None and (private.version(g) == version or bool(g.any()))
        }
        if left:
            for name, p in self._model.named_parameters():
                if id(p.grad) in left and private.accumulates([p]):
                    self._uncleared[name] = None

    def note_written(self, parameters: Iterable[Any], /) -> None:
        """Remember the gradients of some parameters as what a step wrote."""
        grads = [p.grad for p in parameters if p.grad is not None]
        # NumPy, which may have written them, gives them no new version.
        increment_version(grads)
        versions = private.versions(grads)
        self._written = [*zip(map(weakref.ref, grads), versions, strict=True)]

    def require_new(self) -> None:
        """Raise `NotReadyError` unless they are those of passes since the last step.

        Also if the parameters have changed since: the optimizer's step was then one of
        plain gradients.
        """
        if self._uncleared:
            names = [*self._uncleared][:4] + ["..."] * (len(self._uncleared) > 4)
            raise kc.NotReadyError(
                f"The gradients of {names} were added to what the last step wrote, and "
                "would be preconditioned twice. Clear all gradients before "
                "loss.backward() by model.zero_grad(), including those that the "
                "optimizer does not have; or freeze these, p.requires_grad_(False), "
                "before KFAC is created. To accumulate, call kfac.step() after the "
                "last part."
            )
        if self._have_changed():
            raise kc.NotReadyError(
                "The parameters have changed since loss.backward(), as by "
                "optimizer.step(), which has then used plain gradients. Call kfac.step() "
                "right after loss.backward(), and optimizer.step() after it."
            )
        # Usually the first was cleared.
        for grad, version in self._written:
            if (g := grad()) is None or private.version(g) != version:
                return
        current = {
            id(p.grad)
            for name, site in self._sites.items()
            if name not in self._replaced
            for p in site.trained
        }
        if self._written and all(id(grad()) in current for grad, _ in self._written):
            raise kc.NotReadyError(
                "The gradients are what the last step wrote, and would be preconditioned "
                "twice. Call kfac.step() once, between loss.backward() and "
                "optimizer.step()."
            )

    def forget(self) -> None:
        """Leave the passes of a step behind, and not what the step wrote."""
        self._came, self._uncleared = False, {}
        self._differentiated, self._versions = [], []
