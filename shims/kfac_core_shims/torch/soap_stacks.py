"""Weights of equal shapes as one stack, and vectors as one: gradients and moments."""

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
    sides : dict of str to Side
        Of ``"left"`` and ``"right"`` those that have a basis.
    """

    parameter: Any
    part: str = ""
    rows: slice | None = None
    shape: tuple[int, int]
    sides: dict[str, Side] = field(default_factory=dict)

    def slice(self, x: Any) -> Any:
        """Return this weight's rows of an array of the parameter's shape."""
        return x if self.rows is None else x[self.rows]


class Stack:
    """Weights of one parameter group with the same shape, bases and number of steps.

    Parameters
    ----------
    weights : sequence of Weight
        The weights.
    states : sequence of dict
        State of the parameter of each; its moments become parts of the stack.

    Attributes
    ----------
    step, exp_avg, exp_avg_sq : torch.Tensor
        Number of steps, 0-d; Adam's moments in the bases, shape (k, n, m).
    bases : dict of str to torch.Tensor
        Bases of the sides that have one, shape (k, c, b, b).
    factors : dict of str to torch.Tensor
        Factors of the gradients' own, of sides without rows, likewise.
    is_dense : bool
        Whether coordinates are rarely zero: these have a bound, and decide on the rate.
    """

    def __init__(self, weights: Sequence[Weight], states: Sequence[Any]) -> None:
        self.weights, self.states = list(weights), list(states)
        self.step = self.states[0][f"{weights[0].part}step"].clone()
        self.exp_avg, self.exp_avg_sq = (
            torch.stack([s[w.part + name] for w, s in self._pairs])
            for name in ("exp_avg", "exp_avg_sq")
        )
        # Views: the states, and so `state_dict`, see what is updated in the stack.
        for i, (w, s) in enumerate(self._pairs):
            s[f"{w.part}step"] = self.step
            s[f"{w.part}exp_avg"] = self.exp_avg[i]
            s[f"{w.part}exp_avg_sq"] = self.exp_avg_sq[i]
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
    def targets(self) -> list[Any]:
        """The weights' rows of their parameters, whose memory a program may exchange."""
        return [w.slice(w.parameter.detach()) for w in self.weights]

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

    def directions(self, d: Any) -> list[Any]:
        """Return what is in the bases in the coordinates of each weight."""
        d = kc.roots.from_basis(d, self.bases.get("left"), self.bases.get("right"))
        pairs = zip(d.unbind(0), self.targets, strict=True)
        return [x.view(target.shape) for x, target in pairs]

    def carry(self) -> None:
        """Bring the moments into the bases that the states have now."""
        bases = self._of_states("basis")
        changes = {s: (self.bases.get(s), bases.get(s)) for s in ("left", "right")}
        moments = kc.roots.carried_moments(self.exp_avg, self.exp_avg_sq, **changes)
        self.exp_avg.copy_(moments[0])
        self.exp_avg_sq.copy_(moments[1])
        self.bases = bases

    def _gradients(self) -> Any:
        shape = self.weights[0].shape
        grads = [w.slice(w.parameter.grad).reshape(shape) for w in self.weights]
        V = grads[0][None] if len(grads) == 1 else torch.stack(grads)
        return V.to(self.exp_avg.dtype)

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
    """Parameters without a basis as one vector: one call for all of them.

    Parameters
    ----------
    parameters : sequence of torch.nn.Parameter
        The parameters, of one dtype and device and as many steps.
    states : sequence of dict
        State of each; its moments become parts of the vector.

    Attributes
    ----------
    step, exp_avg, exp_avg_sq : torch.Tensor
        Number of steps, 0-d; Adam's moments, 1-d.
    is_dense : bool
        Whether coordinates are rarely zero: these have a bound, and decide on the rate.
    """

    def __init__(self, parameters: Sequence[Any], states: Sequence[Any]) -> None:
        self._parameters = list(parameters)
        self._shapes = [real(p).shape for p in parameters]
        self._sizes = [shape.numel() for shape in self._shapes]
        self.step = states[0]["step"].clone()
        self.exp_avg, self.exp_avg_sq = (
            torch.cat([s[name].reshape(-1) for s in states])
            for name in ("exp_avg", "exp_avg_sq")
        )
        self.is_dense = all(p.ndim < 2 for p in self._parameters)
        # Views: the states, and so `state_dict`, see what is updated in the vector.
        for name in ("exp_avg", "exp_avg_sq"):
            for s, x in zip(states, self._parts(vars(self)[name]), strict=True):
                s[name] = x
        for s in states:
            s["step"] = self.step

    @property
    def targets(self) -> list[Any]:
        """The parameters, real."""
        return [real(p.detach()) for p in self._parameters]

    def gradients(self) -> Any:
        """Return the gradients, shape (n,)."""
        grads = [real(p.grad).reshape(-1) for p in self._parameters]
        return torch.cat(grads).to(self.exp_avg.dtype)

    def directions(self, d: Any) -> list[Any]:
        """Return the parameters' parts of a vector."""
        return self._parts(d)

    def _parts(self, x: Any) -> list[Any]:
        pairs = zip(x.split(self._sizes), self._shapes, strict=True)
        return [part.view(shape) for part, shape in pairs]


def real(x: Any) -> Any:
    """Return a tensor, or the real and imaginary parts of a complex one."""
    return torch.view_as_real(x) if x.is_complex() else x
