"""Weights that a parametrization computes: weight norm, spectral norm, and others.

Conventions.  W is computed from original parameters theta.  The block is of W: its gradient
V is taken where the backward pass leaves it, and the natural gradient is carried back, as
``(dW/dtheta)^T P V`` in the place of ``(dW/dtheta)^T V``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from warnings import warn

import torch

import kfac_core as kc
from kfac_core_shims.torch import private
from kfac_core_shims.torch.sites import Site


@dataclass(eq=False, kw_only=True)
class ComputedSite(Site):
    """A block of a weight that is computed from other parameters.

    Attributes
    ----------
    originals : list of torch.nn.Parameter
        What the weight is computed from.
    gradient : torch.Tensor or None
        The gradient of the weight, summed over the passes since the last step.
    accumulated : bool
        Whether these added to ``.grad``; not those of `torch.autograd.grad`.
    task : int
        The last backward pass that did.
    warned : bool
        Whether a warning was made of gradients that do not come through the weight.
    """

    originals: list[Any]
    gradient: Any = field(default=None)
    accumulated: bool = False
    task: int = -1
    warned: bool = False

    @property
    def trained(self) -> list[Any]:
        """Return all parameters whose gradients are replaced."""
        return [*self.originals, *self.parameters.values()]

    @property
    def roles(self) -> list[str]:
        """Names of what is read in the graph."""
        return ["weight", *self.parameters]

    def key_of(self, role: str) -> Any:
        """Return the key of what is read in the graph: a leaf, or what made it."""
        return self.name if role == "weight" else super().key_of(role)

    def shape_of(self, role: str) -> tuple[int, ...]:
        """Return the shape of what is read."""
        return tuple(self.layer.parameter_shapes[role])

    @property
    def computes(self) -> Any:
        """Return the module that computes the weight."""
        return self.module.parametrizations["weight"]

    def take(self, module: torch.nn.Module, arguments: Any, weight: Any) -> None:
        """Take the gradient of a weight that was computed, when it comes."""
        if torch.is_grad_enabled() and weight.requires_grad:
            weight.register_hook(self._add)

    def gradients(self) -> dict[str, Any] | None:
        """Return the gradients in the layer's layout; None unless all are there."""
        if self.gradient is None or any(p.grad is None for p in self.trained):
            return None
        with torch.enable_grad():
            carried = self._carried(self.gradient)
        # Since it came, gradients may have been unscaled, clipped or averaged.
        # Least squares for one factor: grad is about scale * carried.
        size = sum(float((c * c).sum()) for c in carried)
        pairs = zip(carried, self.originals, strict=True)
        scale = sum(float((c * p.grad).sum()) for c, p in pairs) / size if size else 1.0
        if not self.warned:
            self._warn_of_more([scale * c for c in carried])
        gradients = {"weight": self.part.to_layer(self.gradient * scale)}
        if "bias" in self.parameters:
            gradients["bias"] = self.parameters["bias"].grad
        shapes = self.layer.parameter_shapes
        return {role: x.reshape(shapes[role]) for role, x in gradients.items()}

    def write(self, direction: Mapping[str, Any], scale: float) -> None:
        """Put a multiple of a direction into the place of the gradients."""
        direction = {role: scale * torch.as_tensor(x) for role, x in direction.items()}
        weight = self.part.to_module(direction["weight"]).reshape(self.gradient.shape)
        with torch.enable_grad():
            carried = self._carried(weight)
        for original, x in zip(self.originals, carried, strict=True):
            original.grad.copy_(x)
        if "bias" in direction:
            self.parameters["bias"].grad.copy_(direction["bias"])

    def is_in(self, module: torch.nn.Module) -> bool:
        """Return whether a module is still the one whose weight this is."""
        return module is self.module and hasattr(module, "parametrizations")

    def forget(self) -> None:
        """Forget the gradients that came since the last step."""
        self.gradient, self.accumulated = None, False

    def average(self, communicator: kc.distributed.Communicator) -> None:
        """Make the gradient the average over processes, as those of parameters are."""
        gradient = self.gradient
        if gradient is None:
            with torch.no_grad():
                gradient = torch.zeros_like(_computed_weight(self.module))
        # A process without a pass takes part, with zeros.
        came = gradient.new_full((1,), self.gradient is not None)
        total = communicator.all_reduce(torch.cat([gradient.reshape(-1), came])).wait()
        if total[-1] > 0:
            self.gradient = total[:-1].reshape(gradient.shape) / communicator.size

    def _warn_of_more(self, carried: list[Any]) -> None:
        """Warn if gradients are more than what was carried from the weight."""
        grads = [p.grad for p in self.originals]
        left_out = [g - c for g, c in zip(grads, carried, strict=True)]
        most, least = (
            sum(float((x * x).sum()) for x in xs) for xs in (grads, left_out)
        )
        coarse = 5e-2 if self.gradient.dtype.itemsize < 4 else 1e-4
        if least > coarse * coarse * most:
            self.warned = True
            warn(
                f"A fraction of {(least / most) ** 0.5:.2g} of the gradient of the "
                f"parameters from which the weight of {self.name!r} is computed did "
                "not come through the weight, and K-FAC leaves it out: it comes from a "
                "penalty on them, from clipped or noisy entries, or from passes "
                "between which a spectral norm changed. Pass penalties to the "
                "optimizer, as weight_decay.",
                stacklevel=2,
            )

    def _add(self, g: Any) -> None:
        # A pass that makes a graph, as for a penalty, is not the loss's own.
        adds = None if torch.is_grad_enabled() else private.accumulates(self.originals)
        if adds is None or (self.accumulated and not adds):
            return
        if adds:
            task = private.backward_pass()
            cleared = not any(
                p.grad is not None and bool(p.grad.any()) for p in self.originals
            )
            if not self.accumulated or (task != self.task and cleared):
                self.gradient = None
            self.accumulated, self.task = True, task
        g = g.detach()
        self.gradient = g.clone() if self.gradient is None else self.gradient + g

    def _carried(self, v: Any) -> list[Any]:
        """Return ``(dW/dtheta)^T v`` for each original parameter."""
        weight = _computed_weight(self.module)
        carried = torch.autograd.grad(weight, self.originals, v, allow_unused=True)
        pairs = zip(carried, self.originals, strict=True)
        return [torch.zeros_like(p) if x is None else x for x, p in pairs]


def _computed_weight(module: torch.nn.Module) -> Any:
    """Return the weight of a module, with its graph, without changing buffers."""
    computes = module.parametrizations["weight"]
    training = computes.training
    computes.eval()  # Spectral norm's power iteration stays where it is.
    try:
        return computes.forward()
    finally:
        computes.train(training)
