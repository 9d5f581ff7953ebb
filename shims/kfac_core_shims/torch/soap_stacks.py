"""Weights of equal shapes as one stack, and the moments of all of them as one vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import kfac_core as kc


@dataclass(eq=False, kw_only=True)
class Side:
    """One side of a weight that has a basis.

    Attributes
    ----------
    count, size : int
        Number of blocks of the basis, and their size.
    layer : str or None
        Layer whose rows make the factor; None for the gradient's own.
    is_input : bool
        Whether these rows are the layer's inputs.
    residual : torch.Tensor or None
        Residuals of the blocks when they were last renewed.
    """

    count: int
    size: int
    layer: str | None = None
    is_input: bool = False
    residual: Any = None


@dataclass(eq=False, kw_only=True)
class Weight:
    """A parameter, or some rows of one, as a matrix with a basis on one side or both.

    Attributes
    ----------
    parameter : torch.nn.Parameter
        The parameter.
    part : str
        What its state's names begin with, where a parameter has several parts.
    rows : slice or None
        Rows of the parameter that belong to the matrix; None for all.
    shape : tuple of int
        Shape ``(n, m)`` of the matrix.
    inputs : int
        Number of inputs, n or m; of an embedding its features.
    sides : dict of str to Side
        Of ``"left"`` and ``"right"`` those that have a basis.
    """

    parameter: Any
    part: str = ""
    rows: slice | None = None
    shape: tuple[int, int]
    inputs: int
    sides: dict[str, Side] = field(default_factory=dict)

    def slice(self, x: Any) -> Any:
        """Return this weight's rows of an array of the parameter's shape."""
        return x if self.rows is None else x[self.rows]


class Stack:
    """Weights of one group with equal shapes, inputs, bases and numbers of steps.

    Parameters
    ----------
    weights : sequence of Weight
        The weights.
    states : sequence of dict
        State of the parameter of each.

    Attributes
    ----------
    exp_avg_sq : torch.Tensor
        Adam's second moments in the bases, shape (k, n, m); see `hold`.
    bases : dict of str to torch.Tensor
        Bases of the sides that have one, shape (k, c, b, b).
    factors : dict of str to torch.Tensor
        Factors of the gradients' own, of sides without rows, likewise.
    is_dense : bool
        Whether coordinates are rarely zero: these have a bound, and decide on the rate.
    """

    def __init__(self, weights: Sequence[Weight], states: Sequence[Any]) -> None:
        self.weights, self.states = list(weights), list(states)
        self._shape = len(weights), *weights[0].shape
        self.exp_avg_sq: Any = None
        self.bases = self._of_states("basis")
        sides = weights[0].sides
        # The rows of rare tokens are usually zero: an embedding has one basis.
        self.is_dense = len(sides) == 2
        self._graded = [name for name, side in sides.items() if side.layer is None]
        factors = self._of_states("factor")
        self.factors = {name: factors[name] for name in self._graded if name in factors}
        self._share_factors()

    @property
    def _pairs(self) -> list[tuple[Weight, Any]]:
        return list(zip(self.weights, self.states, strict=True))

    @property
    def slots(self) -> list[tuple[Any, str]]:
        """The states with the moments, and what their names begin with."""
        return [(s, w.part) for w, s in self._pairs]

    @property
    def targets(self) -> list[Any]:
        """The weights' rows of their parameters, whose memory a program may exchange."""
        return [w.slice(w.parameter.detach()) for w in self.weights]

    def hold(self, second: Any) -> None:
        """Let a part of a vector be the second moments."""
        self.exp_avg_sq = second.view(self._shape)

    def average(self, *, decay: float) -> None:
        """Average the factors that are the gradients' own.

        Parameters
        ----------
        decay : float
            Decay of these factors at each step.
        """
        if not self._graded:
            return
        V = self._gradients()
        for name in self._graded:
            side = self.weights[0].sides[name]
            X = V if name == "left" else V.mT
            X = X.reshape(len(V), side.count, side.size, -1)
            C = self.factors.get(name)
            self.factors[name] = kc.roots.averaged_factor(C, X @ X.mT, decay=decay)
        self._share_factors()

    def gradients(self) -> Any:
        """Return the gradients in the bases, shape (k, n, m)."""
        bases = self.bases.get("left"), self.bases.get("right")
        return kc.roots.in_basis(self._gradients(), *bases)

    def directions(self, d: Any) -> Any:
        """Return directions in the weights' coordinates, shape (k, n, m)."""
        bases = self.bases.get("left"), self.bases.get("right")
        d = kc.roots.from_basis(d.view(self._shape), *bases)
        factor = kc.roots.width_factor(self.weights[0].inputs)
        return d if factor == 1 else d * factor

    def carry(self) -> None:
        """Bring the second moments into the bases that the states have now."""
        bases = self._of_states("basis")
        changes = {s: (self.bases.get(s), bases.get(s)) for s in ("left", "right")}
        self.exp_avg_sq.copy_(kc.roots.carried_moments(self.exp_avg_sq, **changes))
        self.bases = bases

    def _gradients(self) -> Any:
        shape = self.weights[0].shape
        grads = [w.slice(w.parameter.grad).reshape(shape) for w in self.weights]
        V = grads[0][None] if len(grads) == 1 else torch.stack(grads)
        return V.to(self.exp_avg_sq.dtype)

    def _share_factors(self) -> None:
        """Make the factors of the states parts of the stack's."""
        for name, factors in self.factors.items():
            for i, (w, s) in enumerate(self._pairs):
                s[f"{w.part}{name}_factor"] = factors[i]

    def _of_states(self, what: str) -> dict[str, Any]:
        """Return the bases or factors of the states, as stacks."""
        stacks: dict[str, Any] = {}
        for side in self.weights[0].sides:
            each = [s.get(f"{w.part}{side}_{what}") for w, s in self._pairs]
            if each[0] is not None:
                stacks[side] = torch.stack(each)
        return stacks


class Vectors:
    """Parameters without a basis.

    Parameters
    ----------
    parameters : sequence of torch.nn.Parameter
        The parameters.
    states : sequence of dict
        State of each.

    Attributes
    ----------
    is_dense : bool
        Whether coordinates are rarely zero: these have a bound, and decide on the rate.
    """

    def __init__(self, parameters: Sequence[Any], states: Sequence[Any]) -> None:
        self._parameters = list(parameters)
        self.slots = [(s, "") for s in states]
        self.is_dense = all(p.ndim < 2 for p in self._parameters)

    @property
    def targets(self) -> list[Any]:
        """The parameters, real."""
        return [real(p.detach()) for p in self._parameters]

    def hold(self, second: Any) -> None:
        """Note the dtype of the moments."""
        self._dtype = second.dtype

    def gradients(self) -> Any:
        """Return the gradients, shape (n,)."""
        grads = [real(p.grad).reshape(-1) for p in self._parameters]
        return torch.cat(grads).to(self._dtype)

    def directions(self, d: Any) -> Any:
        """Return a vector as it is."""
        return d


class Moments:
    """Stacks and vectors with as many steps, as one vector: one call for all of them.

    Parameters
    ----------
    parts : sequence of Stack and Vectors
        Parts of one parameter group, dtype, device and number of steps.

    Attributes
    ----------
    step, momentum, exp_avg_sq : torch.Tensor
        Number of steps, 0-d; the average of negative directions, in the parameters'
        coordinates, and Adam's second moments, in the bases, both 1-d.
    is_dense : bool
        Whether coordinates are rarely zero: these have a bound, and decide on the rate.
    """

    momentum: Any
    exp_avg_sq: Any

    def __init__(self, parts: Sequence[Stack | Vectors]) -> None:
        self.parts = list(parts)
        self.is_dense = parts[0].is_dense
        slots = [slot for part in parts for slot in part.slots]
        self.step = slots[0][0][f"{slots[0][1]}step"].clone()
        # Views: the states, and so `state_dict`, see what is updated in the vectors.
        for name in ("momentum", "exp_avg_sq"):
            each = [s[prefix + name] for s, prefix in slots]
            whole = torch.cat([x.reshape(-1) for x in each])
            pieces = whole.split([x.numel() for x in each])
            for (s, prefix), x, piece in zip(slots, each, pieces, strict=True):
                s[prefix + name] = piece.view(x.shape)
            vars(self)[name] = whole
        for s, prefix in slots:
            s[f"{prefix}step"] = self.step
        self._sizes = [
            sum(s[f"{prefix}exp_avg_sq"].numel() for s, prefix in part.slots)
            for part in parts
        ]
        pieces = self.exp_avg_sq.split(self._sizes)
        for part, piece in zip(parts, pieces, strict=True):
            part.hold(piece)

    @property
    def taken(self) -> Any:
        """The number of steps so far; on a GPU, where reading it waits, a tensor."""
        return float(self.step) if self.step.device.type == "cpu" else self.step

    @property
    def targets(self) -> list[Any]:
        """The parameters' parts that `directions` is of."""
        return [x for part in self.parts for x in part.targets]

    def gradients(self) -> Any:
        """Return the gradients in the bases, shape (n,)."""
        return torch.cat([part.gradients().reshape(-1) for part in self.parts])

    def directions(self, d: Any) -> Any:
        """Return a vector in the bases in the parameters' coordinates, shape (n,)."""
        pairs = zip(self.parts, d.split(self._sizes), strict=True)
        return torch.cat([part.directions(x).reshape(-1) for part, x in pairs])

    def pieces(self, x: Any) -> list[Any]:
        """Return the parts of a vector that belong to the `targets`."""
        targets = self.targets
        pieces = x.split([target.numel() for target in targets])
        return [x.view(target.shape) for x, target in zip(pieces, targets, strict=True)]


def real(x: Any) -> Any:
    """Return a tensor, or the real and imaginary parts of a complex one."""
    return torch.view_as_real(x) if x.is_complex() else x
