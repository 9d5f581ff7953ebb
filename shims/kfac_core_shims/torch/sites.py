"""The weights of a model that have a block, and the modules that use each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import kfac_core as kc
from kfac_core_shims.torch import private
from kfac_core_shims.torch.layers import Part


@dataclass(eq=False, kw_only=True)
class Site:
    """One block: a part of a module, and its parameters.

    Attributes
    ----------
    name : str
        Name of the block: that of the first module with this weight, and of its part.
    part : Part
        Geometry, and how it is read.
    parameters : dict of str to torch.nn.Parameter
        Parameters by the layer's names for them.
    module : torch.nn.Module
        The first module that uses it.
    gathered : dict of str to torch.Tensor
        What its module reads in the place of parameters that are divided among processes.
    some_biases : bool
        Whether other modules share the weight that have no bias.
    """

    name: str
    part: Part
    parameters: dict[str, Any]
    module: Any
    gathered: dict[str, Any] = field(default_factory=dict)
    some_biases: bool = False

    @property
    def layer(self) -> Any:
        """Geometry of the block."""
        return self.part.layer

    @property
    def kind(self) -> str:
        """Kind of layer, by which approximations are chosen."""
        return "embedding" if self.part.tied else str(self.layer.kind)

    @property
    def trained(self) -> list[Any]:
        """All parameters whose gradients are replaced."""
        return list(self.parameters.values())

    @property
    def roles(self) -> list[str]:
        """Names of what is read in the graph."""
        return list(self.parameters)

    def key_of(self, role: str) -> Any:
        """Return the key of a role in the graph: of a leaf, or of a computed weight."""
        return id(self.gathered.get(role, self.parameters[role]))

    def shape_of(self, role: str) -> tuple[int, ...]:
        """Return the shape of what is read."""
        return tuple(self.parameters[role].shape)

    def values(self) -> dict[str, Any]:
        """Return the parameters in the layer's layout, without their graph."""
        return self.in_layout({p: p.detach() for p in self.trained})

    def in_layout(self, arrays: Mapping[Any, Any], /) -> dict[str, Any]:
        """Return arrays of the parameters' shapes, by parameter, in the layer's layout."""
        parts: dict[str, Any] = {}
        for role, shape in self.layer.parameter_shapes.items():
            x = self._rows(role, arrays[self.parameters[role]])
            x = self.part.to_layer(x) if role == "weight" else x
            parts[role] = x.reshape(shape)
        return parts

    def place(self, parts: Mapping[str, Any], targets: Mapping[Any, Any], /) -> None:
        """Write vectors in the layer's layout into tensors of the parameters' shapes."""
        for role, x in parts.items():
            target = self._rows(role, targets[self.parameters[role]])
            x = self.part.to_module(x) if role == "weight" else x
            target.copy_(x.reshape(target.shape))

    def gradients(self) -> dict[str, Any] | None:
        """Return the gradients in the layer's layout; None unless the weight has one."""
        gradients: dict[str, Any] = {}
        for role, shape in self.layer.parameter_shapes.items():
            parameter = self.parameters[role]
            g = parameter.grad
            if not parameter.requires_grad or (not gradients and g is None):
                return None
            # A loss of derivatives alone does not read the last bias.
            g = self._rows(role, torch.zeros_like(parameter) if g is None else g)
            if g.shape != shape and g.numel() != math.prod(shape):
                raise kc.UnsupportedError(
                    f"The {role} of layer {self.name!r} had {math.prod(shape)} numbers "
                    f"when KFAC was created, and now has {g.numel()}, in shape "
                    f"{tuple(g.shape)}, as after its vocabulary grew. Create KFAC and "
                    "the optimizer again."
                )
            if role == "weight":
                g = self.part.to_layer(g)
            gradients[role] = g if g.shape == shape else g.reshape(shape)
        return gradients

    def write(self, direction: Mapping[str, Any], scale: float) -> None:
        """Put a multiple of a direction into the place of the gradients."""
        for role, x in direction.items():
            parameter = self.parameters[role]
            # The optimizer skips parameters without a gradient.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            target = self._rows(role, parameter.grad)
            if role == "weight" and self.part.to_module is not Part.to_module:
                x = self.part.to_module(torch.as_tensor(x))
            private.write_product(x, scale, target)

    @property
    def is_stacked(self) -> bool:
        """Whether the weight is one of a stack of matrices, as of experts."""
        weight = self.parameters.get("weight")
        return bool(self.part.rows) and weight is not None and weight.ndim == 3

    def is_in(self, module: torch.nn.Module) -> bool:
        """Return whether a module still holds these very parameters."""
        names = self.part.parameters
        for role, parameter in self.parameters.items():
            if module._parameters.get(names[role]) is parameter:
                continue
            current = getattr(module, names[role], None)
            if current is parameter or (current is None and self.some_biases):
                continue
            if not hasattr(parameter, "placements") or current is None:
                return False
            # During its forward pass a module has its parameters whole.
            self.gathered[role] = current
        return True

    def forget(self) -> None:
        """Forget what belongs to the last step; here nothing."""

    def average(self, communicator: kc.distributed.Communicator) -> None:
        """Average over processes what their loop has not; here nothing."""

    def rows_of(self, role: str) -> slice | None:
        """Return which rows of a parameter are this block's; None for all."""
        return self.part.rows.get(role)

    def _rows(self, role: str, x: Any) -> Any:
        rows = self.rows_of(role)
        return x if rows is None else x[rows]


@dataclass(kw_only=True)
class ModelBlocks:
    """The blocks of a model.

    Attributes
    ----------
    sites : dict of str to Site
        Blocks by name.
    users : list of tuple
        ``(module, names of its blocks, context of its calls or None)``.
    reasons : dict of str to str
        Why parameters without a block have none, by the parameters' names.
    """

    sites: dict[str, Site] = field(default_factory=dict)
    users: list[tuple[Any, list[str], Any]] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
