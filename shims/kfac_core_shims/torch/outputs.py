"""The outputs of a model, observed when a loss is differentiated by them.

A forward hook of the model returns its outputs as views of themselves.  The backward pass
of the loss reaches the views first, while the graph below them is still there; at that
moment vectors are backpropagated to the layers.  A forward pass that nobody
differentiates costs nothing and counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch

import kfac_core as kc
from kfac_core_shims.torch import private
from kfac_core_shims.torch.hooks import Inert
from kfac_core_shims.torch.likelihoods import CATEGORICAL
from kfac_core_shims.torch.parallel import require_all_take_part
from kfac_core_shims.torch.passes import Pass, PassRecorder


def pick(returned: Any, output: Any, likelihood: Any, /) -> torch.Tensor | None:
    """Return the tensor that the likelihood reads, out of a model's outputs, or None.

    Parameters
    ----------
    returned : object
        What the model returned.
    output : "auto", str, int or callable
        A key or attribute, a place, or a function of what was returned.  ``"auto"`` takes
        a tensor itself, the ``logits`` of anything else, and with a
        `kfac_core.losses.Joint` a tuple of heads side by side.
    likelihood : kfac_core.losses.Loss
        Of one row.

    Returns
    -------
    torch.Tensor or None
        Of shape (N, 1) where outputs (N,) are of one number each; None where ``"auto"``
        finds no tensor.

    Raises
    ------
    kfac_core.ConventionError
        If `output` picks nothing, or not a tensor.
    """
    if output == "auto":
        picked = returned if _is_tensor(returned) else _entry(returned, "logits")
        if isinstance(likelihood, kc.losses.Joint) and isinstance(
            returned, tuple | list
        ):
            picked = _side_by_side(returned, likelihood)
        return rows_of(picked, likelihood) if _is_tensor(picked) else None
    if callable(output):
        picked = output(returned)
    elif isinstance(output, int):
        # Indexing a tensor would pick an example.
        picked = None if _is_tensor(returned) else _item(returned, output)
    else:
        picked = _entry(returned, output)
    if not isinstance(picked, torch.Tensor):
        raise kc.ConventionError(
            "Expected `output` to pick a tensor out of what the model returns, a "
            f"{_described(returned)}; output={output!r} gave a {type(picked).__name__}."
        )
    return rows_of(picked, likelihood)


def rows_of(outputs: Any, likelihood: Any, /) -> Any:
    """Return outputs (N,), of one number each, as rows (N, 1); others as they are."""
    if outputs.ndim != 1 or likelihood == CATEGORICAL:
        return outputs
    return outputs[:, None]


def _side_by_side(heads: Any, likelihood: kc.losses.Joint) -> torch.Tensor | None:
    """Return heads on one last axis, which those of a single number may lack."""
    if len(heads) != len(likelihood.losses) or not all(map(_is_tensor, heads)):
        return None
    axes = max(z.ndim for z in heads)
    return torch.cat([z if z.ndim == axes else z[..., None] for z in heads], dim=-1)


class OutputHook(Inert):
    """Forward hook of a model; its copies do nothing."""

    def __init__(self, recorder: PassRecorder) -> None:
        self.recorder = ref(recorder)

    @private.outside_compilers
    def __call__(self, module: Any, arguments: Any, options: Any, returned: Any) -> Any:
        """Return the outputs as views of themselves, where they are to be observed."""
        recorder = self.recorder()
        if recorder is None or not torch.is_grad_enabled():
            return None
        kfac = recorder.kfac
        if not kfac.wants_outputs:
            return None
        if kfac.communicator is not None:
            require_all_take_part()
        recorder.is_called = True
        picked = pick(returned, kfac.output, kfac.criterion.row.likelihood)
        if picked is None:
            recorder.coverage.note(
                f"the model returned a {type(returned).__name__}: pick a tensor out of it "
                "with `output`, or call `observe`"
            )
            return None
        recorder.watch_tangents(returned if _is_tensor(returned) else picked)
        if not picked.requires_grad:
            return None
        replay = None
        if recorder.random is not None:
            replay = arguments, options, recorder.random
        return _viewed(returned, Pass(recorder, picked, returned, replay))


class RandomHook(Inert):
    """Forward pre-hook of a model, which keeps the state of the random numbers."""

    def __init__(self, recorder: PassRecorder) -> None:
        self.recorder = ref(recorder)

    @private.outside_compilers
    def __call__(self, module: torch.nn.Module, arguments: Any) -> None:
        """Keep the state from which the model's next call draws."""
        recorder = self.recorder()
        if recorder is not None and torch.is_grad_enabled():
            recorder.random = RandomState(module)


class RandomState:
    """The random numbers to come, on the CPU and on the devices of a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
        self._on_host = torch.random.get_rng_state()
        self._on_devices = {d: torch.cuda.get_rng_state(d) for d in devices}

    def restore(self) -> None:
        """Restore the random numbers."""
        torch.random.set_rng_state(self._on_host)
        for device, state in self._on_devices.items():
            torch.cuda.set_rng_state(state, device)


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
    """Return a structure with views of its tensors, whose hooks report a pass."""
    views = of_picked = 0
    edge = started.edge

    def viewed(x: Any) -> Any:
        nonlocal views, of_picked
        if not (isinstance(x, torch.Tensor) and x.requires_grad):
            return x
        # A leaf, such as an input that the model passes on, was computed by no layer.
        if x.grad_fn is None:
            return x
        views += 1
        of_picked += x.grad_fn is edge.node
        # A loss may be scaled in place (`loss *= 2`), which a view's hook would not see.
        view = x.view_as(x) if x.ndim > 1 else x.clone()
        view.register_hook(started.arrived)
        return view

    rebuilt = _mapped(returned, viewed)
    if not of_picked:
        # The picked tensor lies deeper, or is computed from others.
        rebuilt = _mapped(rebuilt, partial(_mapped_within, function=viewed))
    recorder = started.recorder()
    if not views and recorder is not None:
        recorder.coverage.note(
            f"no tensor was found in what the model returned, a {_described(returned)}; "
            "return a tensor, or a dict, tuple, list or dataclass of them, or call "
            "`observe`"
        )
    started.is_derived = not of_picked
    return rebuilt


def _mapped(returned: Any, function: Callable[[Any], Any]) -> Any:
    if _is_tensor(returned):
        return function(returned)
    # In place: classes such as Hugging Face's `ModelOutput` cannot be rebuilt.
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
