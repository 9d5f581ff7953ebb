"""The optimizers that are compared, as their users have them, and their grids of rates.

A method makes an object with ``step(x, y)`` for a problem; peers have six rates each, and
this library's optimizers their defaults.  Published SOAP and kfac-pytorch are read from
folders, and left out where none is given.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import kfac_core as kc
import kfac_core_shims.torch as shims
from benchmarks.tasks.problems import Problem, Task


@dataclass(frozen=True, kw_only=True)
class Method:
    """An optimizer.

    Attributes
    ----------
    title : str
        What the tables call it.
    make : callable
        ``make(problem, rate) -> optimizer``.
    rates : tuple of float
        The grid; empty where nothing is to be chosen.
    uses : {"loss", "preconditioner", "closure", "residuals"}
        How a step is taken.
    cosine : bool
        Whether the rate falls to zero over the run, as a cosine.
    whole : bool
        Whether a step takes all training data.
    apt : callable
        Whether a task is one for it.
    """

    title: str
    make: Callable[[Problem, float], Any]
    rates: tuple[float, ...] = ()
    uses: str = "loss"
    cosine: bool = False
    whole: bool = False
    apt: Callable[[Task], bool] = lambda task: True


class Preconditioned:
    """SGD with momentum behind a preconditioner of the gradients."""

    def __init__(self, sgd: Any, preconditioner: Any) -> None:
        self.sgd, self.preconditioner = sgd, preconditioner
        self.param_groups = sgd.param_groups

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self.sgd.zero_grad()

    def step(self) -> None:
        """Precondition, and take the step."""
        self.preconditioner.step()
        self.sgd.step()


class _LongMomentum(Preconditioned):
    """The same with a momentum over the last tenth of the steps, ten at least.

    The rate falls as the sum of the momentum's weights grows, and the KL clip does not
    read it, so that momentum and clip together move as far as with a momentum of 0.9.
    """

    def __init__(self, problem: Problem) -> None:
        both = kfac(problem, lr=1.0)
        super().__init__(both.sgd, both.preconditioner)

    def step(self) -> None:
        """Set momentum and rate, and take the step."""
        horizon = max(10.0, self.preconditioner.steps / 10.0)
        self.param_groups[0].update(lr=10.0 / horizon, momentum=1.0 - 1.0 / horizon)
        super().step()


class _Muon:
    """`torch.optim.Muon` for hidden matrices, and AdamW for the rest."""

    def __init__(self, network: Any, rate: float) -> None:
        hidden: list[Any] = []
        others: list[Any] = []
        names = [n for n, p in network.named_parameters() if p.ndim == 2]
        for name, p in network.named_parameters():
            # As its authors have it: not embeddings, nor the last layer.
            is_hidden = p.ndim == 2 and "embed" not in name and name != names[-1]
            (hidden if is_hidden else others).append(p)
        self.optimizers = [torch.optim.AdamW(others, lr=min(rate, 3e-3))]
        if hidden:
            self.optimizers.append(torch.optim.Muon(hidden, lr=rate))
        self.param_groups = [g for o in self.optimizers for g in o.param_groups]

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        """Take the step."""
        for optimizer in self.optimizers:
            optimizer.step()


def _sgd(problem: Problem, rate: float) -> Any:
    return torch.optim.SGD(problem.network.parameters(), lr=rate, momentum=0.9)


def kfac(
    problem: Problem, rate: float = 0.0, *, fused: bool = False, **options: Any
) -> Preconditioned:
    """Return ``KFAC(network, lr=sgd)`` with Nesterov's momentum, by default at rate 1."""
    sgd = torch.optim.SGD(
        problem.network.parameters(),
        lr=rate or kc.integration.defaults.LEARNING_RATE,
        momentum=0.9,
        nesterov=True,
        fused=fused,
    )
    options = {"lr": sgd, **options}
    preconditioner = shims.KFAC(
        problem.network, likelihood=problem.likelihood, **options
    )
    return Preconditioned(sgd, preconditioner)


def _kfac_optimizer(problem: Problem, rate: float) -> Any:
    return shims.KFACOptimizer(problem.network, likelihood=problem.likelihood)


def _kfac_pytorch(problem: Problem, rate: float) -> Any:
    module: Any = importlib.import_module("kfac.preconditioner")
    sgd = _sgd(problem, rate)
    return Preconditioned(sgd, module.KFACPreconditioner(problem.network, lr=rate))


def _published_soap(problem: Problem, rate: float) -> Any:
    module: Any = importlib.import_module("soap")
    return module.SOAP(
        problem.network.parameters(),
        lr=rate,
        weight_decay=0.0,
        precondition_frequency=10,
    )


def _lbfgs(problem: Problem, rate: float) -> Any:
    return torch.optim.LBFGS(
        problem.network.parameters(), history_size=20, line_search_fn="strong_wolfe"
    )


_ADAM = 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1

METHODS: dict[str, Method] = {
    "kfac": Method(
        title="`KFAC(model)`",
        make=lambda problem, rate: kfac(problem),
        uses="preconditioner",
    ),
    "kfac-long-momentum": Method(
        title="`KFAC(model)`, long momentum",
        make=lambda problem, rate: _LongMomentum(problem),
        uses="preconditioner",
    ),
    "kfac-optimizer": Method(
        title="`KFACOptimizer(model)`",
        make=_kfac_optimizer,
        uses="closure",
        whole=True,
        apt=lambda task: task.full_batch,
    ),
    "kfac-core-soap": Method(
        title="`SOAP(model)`",
        make=lambda problem, rate: shims.SOAP(problem.network),
    ),
    "gauss-newton": Method(
        title="`GaussNewton(model)`",
        make=lambda problem, rate: shims.GaussNewton(
            problem.network, minibatch=problem.batch < len(problem.train[0])
        ),
        uses="residuals",
        apt=lambda task: task.one_output,
    ),
    "adam": Method(
        title="Adam",
        make=lambda problem, rate: torch.optim.Adam(
            problem.network.parameters(), lr=rate
        ),
        rates=_ADAM,
    ),
    "adamw": Method(
        title="AdamW, cosine",
        make=lambda problem, rate: torch.optim.AdamW(
            problem.network.parameters(), lr=rate
        ),
        rates=_ADAM,
        cosine=True,
    ),
    "sgd": Method(
        title="SGD, momentum", make=_sgd, rates=(0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
    ),
    "muon": Method(
        title="Muon and AdamW",
        make=lambda problem, rate: _Muon(problem.network, rate),
        rates=(1e-3, 3e-3, 1e-2, 2e-2, 4e-2, 1e-1),
    ),
    "published-soap": Method(
        title="SOAP, published", make=_published_soap, rates=_ADAM
    ),
    "lbfgs": Method(
        title="L-BFGS",
        make=_lbfgs,
        uses="closure",
        whole=True,
        apt=lambda task: task.full_batch,
    ),
    "kfac-pytorch": Method(
        title="kfac-pytorch",
        make=_kfac_pytorch,
        rates=(0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
        apt=lambda task: task.kind != "equation" and task.kind != "transformer",
    ),
}
"""Methods by name, this library's first."""


def available(peers: Path | None) -> list[str]:
    """Return the methods that can be run; `peers` is a folder of further packages."""
    if peers is not None:
        sys.path[:0] = [str(peers)]
    missing = {"published-soap": "soap", "kfac-pytorch": "kfac"}
    found = []
    for name in METHODS:
        module = missing.get(name)
        if module is not None and importlib.util.find_spec(module) is None:
            continue
        found.append(name)
    return found


def set_share(optimizer: Any, rates: list[float], share: float) -> None:
    """Set the rates of a cosine that ends at a share of 1 of the run."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = 0.5 * rate * (1.0 + math.cos(math.pi * min(share, 1.0)))
