"""Training programs of PyTorch, checked against one dense float64 oracle.

A program is a model and a loop: what a user writes between ``KFAC(model)`` and
``kfac.step()``.  It is right if `step` writes ``(F + damping I)^-1 g`` for each block, with
F the block of the Fisher matrix by autograd, one row of outputs at a time; or refused, by
an error or by naming the parameters that it leaves alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import kfac_core as kc
from kfac_core_shims.torch import KFAC

DAMPING = 1e-2

EXACT = {
    "dense": kc.Full(),
    "conv": kc.Full(),
    "embedding": kc.Diagonal(),
    "scale_shift": kc.Diagonal(),
}
"""Approximations that are the Fisher block itself, or its diagonal."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A model, and a loop until `step`.

    Attributes
    ----------
    model : callable
        Makes the model.
    loop : callable
        ``(model, kfac) -> outputs``: passes and a backward pass.  The outputs are those
        that the likelihood is of, with their graph (``retain_graph=True``).
    options : dict
        Of `KFAC`, besides the zoo's own.
    skipped : sequence of str
        Parameters that are left alone, with a warning.
    diagonal : sequence of str
        Parameters of which only the diagonal of the Fisher matrix counts.
    parts : mapping of str to int
        Of how many blocks' rows a parameter consists, where it is not one.
    raises : tuple of (type, str), optional
        Error that the loop or `step` raises, and what it says.
    """

    model: Callable[[], Any]
    loop: Callable[[Any, Any], Any]
    options: dict[str, Any] = field(default_factory=dict)
    skipped: Sequence[str] = ()
    diagonal: Sequence[str] = ()
    parts: Mapping[str, int] = field(default_factory=dict)
    raises: tuple[type[Exception], str] | None = None


def run(program: Program, /, *, rtol: float = 1e-8) -> None:
    """Run a program in PyTorch's default dtype, and compare it with the oracle."""
    torch.manual_seed(0)
    model = program.model().to(torch.get_default_dtype())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kfac = attached(model, **program.options)
    if program.raises is not None:
        error, said = program.raises
        with pytest.raises(error, match=said):
            _step(program, model, kfac)
        return
    outputs = program.loop(model, kfac)
    skipped = check_step(
        model, kfac, outputs, diagonal=program.diagonal, parts=program.parts, rtol=rtol
    )
    assert skipped == {*program.skipped}


def _step(program: Program, model: Any, kfac: KFAC) -> None:
    program.loop(model, kfac)
    kfac.step()


def attached(model: Any, /, **options: Any) -> KFAC:
    """Return a KFAC whose step is the dense one, from its first."""
    defaults: dict[str, Any] = {
        "likelihood": "gaussian",
        "fisher": "exact",
        "damping": DAMPING,
        "damping_rule": "exact",
        "kl_clip": None,
        "approximations": EXACT,
        "update_every": 1,
        "refresh_every": 1,
    }
    return KFAC(model, **{**defaults, **options})


def check_step(
    model: Any,
    kfac: KFAC,
    outputs: Any,
    /,
    *,
    diagonal: Sequence[str] = (),
    parts: Mapping[str, int] | None = None,
    rtol: float = 1e-8,
    weight: Any = None,
) -> set[str]:
    """Take a step, compare each block's direction with the dense one.

    Parameters
    ----------
    model, kfac
        With gradients in place.
    outputs : torch.Tensor, shape (..., P)
        Outputs with their graph.
    diagonal, parts
        As of `Program`.
    rtol : float
        Bound on the relative error of each block.
    weight : torch.Tensor, optional
        Weights of the rows of outputs.

    Returns
    -------
    set of str
        Parameters that keep their gradients, by the library's own account.
    """
    blocks: dict[str, dict[str, Any]] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            block = name if name in kfac.skipped else _block_of(name)
            blocks.setdefault(block, {})[name] = p
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }
    likelihood = kfac.criterion.row.likelihood
    expected = {}
    for own in blocks.values():
        F = fisher(outputs, [*own.values()], likelihood, weight=weight)
        if any(name in diagonal for name in own):
            F = torch.diag(F.diagonal())
        numbers = torch.cat(
            [_numbers(p, (parts or {}).get(name, 1)) for name, p in own.items()]
        )
        F = F * (numbers == numbers[:, None])
        gradient = torch.cat([gradients[name].flatten() for name in own])
        damped = F + DAMPING * torch.eye(len(F), dtype=F.dtype)
        sizes = [p.numel() for p in own.values()]
        directions = torch.linalg.solve(damped, gradient).split(sizes)
        for (name, p), x in zip(own.items(), directions, strict=True):
            expected[name] = x.reshape(p.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kfac.step()
    parameters = dict(model.named_parameters())
    for name, direction in expected.items():
        g = parameters[name].grad
        right = gradients[name] if name in kfac.skipped else direction
        if g is None:
            assert not right.any(), name
        else:
            atol = rtol * 1e-2
            torch.testing.assert_close(g, right, rtol=rtol, atol=atol, msg=name)
    return {*kfac.skipped}


def fisher(
    outputs: Any, parameters: Sequence[Any], likelihood: Any, /, *, weight: Any = None
) -> Any:
    """Return ``sum_r w_r J_r^T H_r J_r / sum_r w_r`` over rows of outputs, by autograd."""
    z = outputs.reshape(-1, outputs.shape[-1])
    weights = z.new_ones(len(z)) if weight is None else weight.reshape(-1)
    total = 0.0
    for row, w in zip(z, weights, strict=True):
        J = torch.stack([gradient_of(entry, parameters) for entry in row])
        H = _hessian(row.detach(), likelihood)
        total = total + w * J.T @ H @ J
    return total / weights.sum()


def _numbers(p: Any, parts: int) -> Any:
    """Return the number of the block that each entry of a parameter is of."""
    rows = torch.arange(len(p)) * parts // len(p)
    return rows.reshape(-1, *[1] * (p.ndim - 1)).expand(p.shape).flatten()


def _block_of(name: str) -> str:
    """Return the block of a parameter; ``weight_ih`` and ``bias_ih`` are of one."""
    return name.replace("weight", "").replace("bias", "")


def gradient_of(entry: Any, parameters: Sequence[Any]) -> Any:
    """Return the derivatives of one number by all parameters, as one vector."""
    found = torch.autograd.grad(
        entry, parameters, retain_graph=True, materialize_grads=True
    )
    return torch.cat([g.flatten() for g in found])


def _hessian(z: Any, likelihood: Any) -> Any:
    """Return the Hessian of the negative log-likelihood by one row of outputs."""
    kind = type(likelihood).__name__
    if kind == "Categorical":
        p = z.softmax(-1)
        return p.diag() - p.outer(p)
    if kind == "Bernoulli":
        p = z.sigmoid()
        return (p * (1 - p)).diag()
    assert kind == "Gaussian"
    return torch.eye(len(z), dtype=z.dtype)
