"""One run of one method, and what is recorded of it.

Every method starts from the same parameters and sees the same batches in the same
order.  The loss over *all* training images is evaluated every few steps; the clock
stands still meanwhile, so the seconds are those of the method alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import array_api_compat
import numpy as np

import kfac_core as kc
from kfac_core.array.backend import Array
from kfac_core.cli.demo.autoencoder import (
    bernoulli_loss,
    forward,
    initial_parameters,
    sigmoid,
)
from kfac_core.cli.demo.data import (
    Digits,
    batches,
    load_digits,
    stream,
    uniforms,
)
from kfac_core.cli.demo.first_order import Adam, NesterovSGD, Optimizer
from kfac_core.cli.demo.kfac import KFAC
from kfac_core.cli.demo.parameters import Parameters, to_backend, wait_for

__all__ = [
    "BATCH_SIZE",
    "EVALUATE_EVERY",
    "METHODS",
    "Problem",
    "Run",
    "make_optimizer",
    "reconstruct",
    "train",
]

# A quarter of the training images.
BATCH_SIZE = 375
EVALUATE_EVERY = 5
METHODS = ("SGD", "Adam", "K-FAC")


@dataclass(frozen=True)
class Problem:
    """What all methods share: the images, the seed, and where to compute.

    Attributes
    ----------
    seed : int
        Decides the images held out, the first parameters, batches and samples.
    steps : int
        The number of batches in a run.
    dtype : str
        ``"float64"`` or ``"float32"``.
    backend : str or None
        ``name[:device]``; None is the selected one.
    """

    seed: int
    steps: int
    dtype: str = "float64"
    backend: str | None = None

    def to_backend(self, images: np.ndarray[Any, Any], /) -> Array:
        """Copy images to the backend."""
        return kc.asarray(images.astype(self.dtype), backend=self.backend)

    @cached_property
    def digits(self) -> Digits:
        """The images, on the host."""
        return load_digits(self.seed)

    @cached_property
    def train(self) -> Array:
        """The training images, on the backend."""
        return self.to_backend(self.digits.train)

    @cached_property
    def batches(self) -> list[np.ndarray[Any, Any]]:
        """The indices of the images in each batch of a run."""
        return batches(
            self.seed,
            n_examples=len(self.digits.train),
            batch_size=BATCH_SIZE,
            steps=self.steps,
        )


@dataclass
class Run:
    """What happened in one run.

    Attributes
    ----------
    method : str
        One of `METHODS`.
    learning_rate : float
        The learning rate.
    batch_losses : list of float
        The loss of each step's batch, before the step.
    steps, seconds, losses : list
        The loss over all training images, and when it was evaluated; the first is
        that of the initial parameters.
    reconstructions : numpy.ndarray
        The held-out images as the last parameters reconstruct them.
    """

    method: str
    learning_rate: float
    batch_losses: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    reconstructions: np.ndarray[Any, Any] = field(default_factory=lambda: np.empty(0))

    @property
    def diverged(self) -> bool:
        """Whether a loss was not finite, where the run was ended."""
        return not math.isfinite(self.losses[-1])

    @property
    def best(self) -> int:
        """The place in `losses` of the least finite one."""
        finite = [loss if math.isfinite(loss) else math.inf for loss in self.losses]
        return finite.index(min(finite))

    def reached(self, target: float, /) -> int | None:
        """Return the first place in `losses` at or below a target, or None."""
        for index, loss in enumerate(self.losses):
            if loss <= target:
                return index
        return None


def make_optimizer(method: str, problem: Problem, learning_rate: float, /) -> Optimizer:
    """Make an optimizer at the initial parameters of a problem.

    Parameters
    ----------
    method : str
        One of `METHODS`.
    problem : Problem
        What is trained on.
    learning_rate : float
        The learning rate.

    Returns
    -------
    Optimizer
        Ready for its first step.
    """
    rng = stream(problem.seed, "parameters")
    parameters = to_backend(
        initial_parameters(rng), dtype=problem.dtype, backend=problem.backend
    )
    if method == "SGD":
        return NesterovSGD(parameters, learning_rate=learning_rate)
    if method == "Adam":
        return Adam(parameters, learning_rate=learning_rate)
    draw = uniforms(problem.seed, dtype=problem.dtype, backend=problem.backend)
    return KFAC(parameters, learning_rate=learning_rate, draw_uniforms=draw)


def train(
    method: str,
    problem: Problem,
    /,
    *,
    learning_rate: float,
    advance: Callable[[int], None] = lambda steps: None,
) -> Run:
    """Train once, to the last batch or until the loss is not finite.

    Parameters
    ----------
    method : str
        One of `METHODS`.
    problem : Problem
        What is trained on.
    learning_rate : float
        The learning rate.
    advance : callable
        Told how many more steps were made, each time the loss is evaluated.

    Returns
    -------
    Run
        The record of the run.
    """
    optimizer = make_optimizer(method, problem, learning_rate)
    run = Run(method, learning_rate)
    _evaluate(run, optimizer.parameters, problem, seconds=0.0)
    clock = 0.0
    for first in range(0, problem.steps, EVALUATE_EVERY):
        block = problem.batches[first : first + EVALUATE_EVERY]
        images = [problem.to_backend(problem.digits.train[i]) for i in block]
        start = time.perf_counter()
        run.batch_losses += [optimizer.step(x) for x in images]
        wait_for(optimizer.parameters)
        clock += time.perf_counter() - start
        _evaluate(run, optimizer.parameters, problem, seconds=clock)
        advance(len(block))
        if run.diverged:
            advance(problem.steps - first - len(block))
            break
    run.reconstructions = reconstruct(
        optimizer.parameters, problem.to_backend(problem.digits.held_out)
    )
    return run


def reconstruct(parameters: Parameters, images: Array, /) -> np.ndarray[Any, Any]:
    """Return the mean pixels that the network gives for some images.

    Parameters
    ----------
    parameters : Parameters
        Weights and biases.
    images : array
        ``(n, n_pixels)``.

    Returns
    -------
    numpy.ndarray
        ``(n, n_pixels)``, on the host.
    """
    xp = array_api_compat.array_namespace(images)
    _, logits = forward(xp, parameters, images)
    return kc.to_numpy(sigmoid(xp, logits))


def _evaluate(
    run: Run, parameters: Parameters, problem: Problem, *, seconds: float
) -> None:
    xp = array_api_compat.array_namespace(problem.train)
    _, logits = forward(xp, parameters, problem.train)
    run.steps.append(len(run.batch_losses))
    run.seconds.append(seconds)
    run.losses.append(float(bernoulli_loss(xp, logits, problem.train)))
