"""The outputs of a model, observed when a loss is differentiated by them.

A forward hook of the model returns its outputs as views of themselves.  The backward pass
of the loss comes to the views first, while all that is below them in the graph is still
there; that is when vectors are backpropagated to the layers.  A forward pass that nobody
differentiates costs nothing and counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch.autograd.graph import get_gradient_edge

import kfac_core as kc
from kfac_core_shims.torch import private
from kfac_core_shims.torch.parallel import require_all_take_part

__all__ = [
    "OutputHook",
    "Pass",
    "RandomHook",
    "RandomState",
    "drawing",
    "is_drawn_through",
    "pick",
]

_drawn_through: list[Any] = []
"""Models through which K-FAC is backpropagating vectors of its own.

Not one for each thread: with a GPU the hooks run in other threads than the call.
"""


@contextmanager
def drawing(model: Any, /) -> Iterator[None]:
    """Backpropagate vectors that no loss sent, which another `KFAC` is not to observe."""
    _drawn_through.append(model)
    try:
        yield
    finally:
        _drawn_through.remove(model)


def is_drawn_through(model: Any, /) -> bool:
    """Whether vectors that no loss sent are on their way through a model or its parts."""
    return any(model is m for drawn in _drawn_through for m in drawn.modules())


def pick(returned: Any, output: Any, /) -> Any:
    """Return the tensor of a model's outputs that the likelihood is of, or None.

    Parameters
    ----------
    returned : object
        What the model returned.
    output : "auto", str, int or callable
        A key or attribute, a place, or a function of what was returned.  ``"auto"`` takes
        a tensor itself, and the ``logits`` of anything else.

    Returns
    -------
    torch.Tensor or None
        None where ``"auto"`` finds no tensor.

    Raises
    ------
    kfac_core.ConventionError
        If what was asked for is not there, or is no tensor.
    """
    if output == "auto":
        if isinstance(returned, torch.Tensor):
            return returned
        found = _entry(returned, "logits")
        return found if isinstance(found, torch.Tensor) else None
    if callable(output):
        found = output(returned)
    elif isinstance(output, int):
        found = _item(returned, output)
    else:
        found = _entry(returned, output)
    if not isinstance(found, torch.Tensor):
        raise kc.ConventionError(
            "Expected `output` to pick a tensor out of what the model returns, a "
            f"{_described(returned)}; output={output!r} gave a {type(found).__name__}."
        )
    return found


class OutputHook:
    """Forward hook of a model; its copies do nothing."""

    def __init__(self, kfac: Any) -> None:
        self.kfac = ref(kfac)

    def __reduce__(self) -> Any:
        return _Inert, ()

    @private.outside_compilers
    def __call__(self, module: Any, arguments: Any, options: Any, returned: Any) -> Any:
        """Return the outputs as views of themselves, where they are to be observed."""
        kfac = self.kfac()
        if kfac is None or not torch.is_grad_enabled() or not kfac.wants_outputs:
            return None
        if kfac.communicator is not None:
            require_all_take_part()
        picked = pick(returned, kfac.output)
        if picked is None:
            kfac.note(
                f"the model returned a {type(returned).__name__}: pick a tensor out of it "
                "with `output`, or call `observe`"
            )
            return None
        if not picked.requires_grad:
            return None
        started = Pass(kfac, picked, returned)
        if kfac.random is not None:
            started.replay = arguments, options, kfac.random
        return _viewed(returned, started)


class RandomHook:
    """Forward pre-hook of a model, which keeps the state of the random numbers."""

    def __init__(self, kfac: Any) -> None:
        self.kfac = ref(kfac)

    def __reduce__(self) -> Any:
        return _Inert, ()

    @private.outside_compilers
    def __call__(self, module: Any, arguments: Any) -> None:
        """Keep the state from which the model's next call draws."""
        kfac = self.kfac()
        if kfac is not None and torch.is_grad_enabled():
            kfac.random = RandomState(module)


class RandomState:
    """The random numbers to come, on the CPU and on the devices of a model."""

    def __init__(self, model: Any) -> None:
        devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
        self._on_host = torch.random.get_rng_state()
        self._on_devices = {d: torch.cuda.get_rng_state(d) for d in devices}

    def restore(self) -> None:
        """Make them the same again."""
        torch.random.set_rng_state(self._on_host)
        for device, state in self._on_devices.items():
            torch.cuda.set_rng_state(state, device)


class _Inert:
    def __call__(self, *arguments: Any) -> None:
        """Do nothing, as a hook of a copied model."""


class Pass:
    """One forward pass of the model, which a backward pass may come to."""

    def __init__(self, kfac: Any, picked: Any, returned: Any) -> None:
        self.kfac, self.plain = ref(kfac), picked is returned
        self.edge: Any = get_gradient_edge(picked)
        self.z = picked.detach()
        self.base: Any = None
        if type(returned) is torch.Tensor and not self.plain:
            self.base = returned.detach()
        self.version = self.z._version
        self.derived = False
        self.replay: Any = None
        self.handle: Any = None
        self.observation: Any = None
        self.done = False
        self.accumulates = False
        self.task = -1

    def arrived(self, gradient: Any) -> None:
        """Take a gradient that came to one of the model's outputs."""
        kfac = self.kfac()
        if torch.is_grad_enabled():
            if kfac is not None:
                kfac.note(
                    "a pass was differentiated with create_graph=True, as for a penalty, "
                    "which does not count; call loss.backward() without it"
                )
            return
        if self.done and self.observation is None:
            return
        task = private.backward_pass()
        if task == self.task:
            return  # It came to another of the outputs before.
        if kfac is None or is_drawn_through(kfac.model):
            return
        self.task = task
        adds = kfac.adds_to_gradients()
        if adds is None or (not adds and kfac.has_accumulated):
            return
        if self.done and self.accumulates == adds:
            self.observation.cleared = False
            self.observation.note_further_part(gradient if self.plain else None)
            return
        if self.done:
            # What autograd.grad returned before was not what made `.grad`.
            kfac.withdraw(self.observation)
            self.observation = None
        if self.edge is None:
            return  # The graph was let go of.
        self.done, self.accumulates = True, adds
        if self.plain:
            self.finish(gradient)
        elif self.derived:
            # Nothing comes back to what was computed from outputs for `output` alone,
            # but the gradient of a view is that of its entries.
            self.finish(_gradient_of_view(self.z, self.base, gradient))
        else:
            kfac.expect(self)
            self.handle = self.edge.node.register_prehook(self.reached)

    def reached(self, gradients: Any) -> None:
        """Take the gradients that came to the node of the picked tensor."""
        if not torch.is_grad_enabled() and self.edge is not None:
            self.finish(gradients[self.edge.output_nr], passing=gradients)

    def finish(self, gradient: Any, passing: Any = None) -> None:
        """Observe, once, and let go of the graph.

        `passing` are the gradients that the outputs' own node is about to be called with.
        """
        kfac, edge, z, replay = self.kfac(), self.edge, self.z, self.replay
        if not self.accumulates and kfac is not None and private.is_graph_kept():
            kfac.expect(self)  # The pass that makes `.grad` may still come.
            self._remove()
        else:
            self.drop()
        if kfac is None or edge is None:
            return
        if z._version != self.version:
            raise kc.UnsupportedError(
                "The model's outputs were modified in place after its forward pass, so "
                "that they cannot be observed. Write y = y + x in the place of y += x."
            )
        self.observation = kfac.observe_pass(
            edge, z, gradient, passing, replay, accumulates=self.accumulates
        )
        if self.observation is None and not self.accumulates:
            self.done = False  # Of what was no loss; that may still come.

    def drop(self) -> None:
        """Let go of the graph."""
        self._remove()
        self.edge = self.z = self.base = self.replay = None

    def _remove(self) -> None:
        if self.handle is not None:
            self.handle.remove()
        self.handle = None


def _gradient_of_view(z: Any, base: Any, gradient: Any) -> Any:
    """Return the gradient of a view of the outputs, None for anything else."""
    if base is None or gradient.shape != base.shape:
        return None
    shared = z.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    if not shared or z.dtype != base.dtype or z.numel() > base.numel():
        return None
    laid = torch.empty_strided(
        base.shape, base.stride(), dtype=gradient.dtype, device=gradient.device
    ).copy_(gradient)
    offset = z.storage_offset() - base.storage_offset()
    return laid.as_strided(z.shape, z.stride(), offset)


def _item(returned: Any, place: int) -> Any:
    """Return what is at a place, or None."""
    try:
        return returned[place]
    except (LookupError, TypeError):
        return None


def _described(returned: Any) -> str:
    kind = type(returned).__name__
    if isinstance(returned, Mapping):
        return f"{kind} with the keys {[*returned]}"
    return f"{kind} of {len(returned)}" if isinstance(returned, tuple | list) else kind


def _entry(returned: Any, name: str) -> Any:
    if isinstance(returned, Mapping):
        return returned.get(name)
    return getattr(returned, name, None)


def _viewed(returned: Any, started: Pass) -> Any:
    """Return a structure with views of its tensors, whose gradients tell of a pass."""
    views = of_picked = 0
    own = started.edge

    def viewed(x: Any) -> Any:
        nonlocal views, of_picked
        if not (isinstance(x, torch.Tensor) and x.requires_grad):
            return x
        if x.grad_fn is None:
            return x
        views += 1
        of_picked += x.grad_fn is own.node
        # A loss may be scaled in place (`loss *= 2`), which a view's hook would not see.
        view = x.view_as(x) if x.ndim > 1 else x.clone()
        view.register_hook(started.arrived)
        return view

    found = _mapped(returned, viewed)
    if not of_picked:
        # The picked tensor lies deeper, or is computed from others.
        found = _mapped(found, partial(_mapped_within, function=viewed))
    kfac = started.kfac()
    if not views and kfac is not None:
        kfac.note(
            f"no tensor was found in what the model returned, a {_described(returned)}; "
            "return a tensor, or a dict, tuple, list or dataclass of them, or call "
            "`observe`"
        )
    started.derived = not of_picked
    return found


def _mapped(returned: Any, function: Callable[[Any], Any]) -> Any:
    if _is_tensor(returned):
        return function(returned)
    if isinstance(returned, MutableMapping):
        for key in list(returned):
            new = function(returned[key])
            if new is not returned[key]:
                returned[key] = new
        return returned
    if isinstance(returned, tuple | list):
        parts = [function(x) for x in returned]
        if all(new is x for new, x in zip(parts, returned, strict=True)):
            return returned
        kind: Any = type(returned)
        return kind(*parts) if hasattr(returned, "_fields") else kind(parts)
    for key, x in _attributes(returned):
        new = function(x)
        if new is not x:
            object.__setattr__(returned, key, new)
    return returned


def _mapped_within(x: Any, /, function: Callable[[Any], Any]) -> Any:
    """Map the tensors of a structure inside of another, at any depth."""
    if not (isinstance(x, MutableMapping | tuple | list) or is_dataclass(x)):
        return x
    return _mapped(
        x, lambda y: function(y) if _is_tensor(y) else _mapped_within(y, function)
    )


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _attributes(x: Any) -> list[tuple[str, Any]]:
    if hasattr(x, "__dict__"):
        return list(vars(x).items())
    named = fields(x) if is_dataclass(x) else ()
    return [(f.name, getattr(x, f.name)) for f in named]
