"""Arguments of `KFAC`, checked where they enter."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

import torch
from torch.nn.parameter import is_lazy

import kfac_core as kc

Likelihood: TypeAlias = (
    str | kc.losses.Loss | kc.integration.RowLoss | torch.nn.Module | None
)
Approximations: TypeAlias = Mapping[str | type, kc.Approximation[Any] | None]
Output: TypeAlias = str | int | Callable[[Any], Any] | None


class CurvatureOptions(kc.integration.EstimatorOptions, total=False):
    """Options of `KFAC` that `KFACOptimizer` passes on; see there."""

    likelihood: Likelihood
    reduction: Literal["mean", "sum"] | None
    fisher: kc.losses.EstimationMode
    samples: int
    positions: kc.losses.Positions
    decay: kc.integration.Schedule
    bases_every: kc.integration.Interval
    approximations: Approximations | None
    skip_layers: Sequence[str]
    output: Output
    communicator: kc.distributed.Communicator | str | None
    execution: kc.Execution | kc.distributed.Distributed | None


class TrainerOptions(CurvatureOptions, total=False):
    """Options of `KFAC` in a trainer, which passes the rate and the scaler itself."""

    damping: kc.integration.Schedule
    damping_rule: kc.damping.DampingRule
    kl_clip: kc.integration.Schedule | None
    update_every: kc.integration.Interval
    refresh_every: kc.integration.Interval
    refresh_lag: int
    overlap: bool


class CollectOptions(TypedDict, total=False):
    """Options of `collect` that `Posterior` passes on; see there."""

    path: str | os.PathLike[str] | None
    fisher: kc.losses.EstimationMode
    samples: int
    positions: kc.losses.Positions
    forward: Callable[[Any, Any], Any] | None
    loss: Callable[[Any, Any], Any] | None
    ekfac: bool
    approximations: Approximations | None
    skip_layers: Sequence[str]
    max_elements: int | None
    save_every: int | None
    progress: Callable[[int, int], None] | None
    communicator: kc.distributed.Communicator | str | None


_RESTING = 1e-30
"""In the place of a learning rate of zero, as at the start of a warmup: no step is long."""


def require_made(model: torch.nn.Module, /) -> None:
    """Raise unless the model is a module with materialized parameters."""
    if not isinstance(model, torch.nn.Module):
        raise kc.ConventionError(
            f"Expected `model` to be a torch.nn.Module, got a {type(model).__name__}: "
            "pass the model itself, and not its parameters."
        )
    for name, p in model.named_parameters():
        if is_lazy(p) or p.is_meta:
            kind = "uninitialized" if is_lazy(p) else "on the meta device"
            raise kc.UnsupportedError(
                f"The parameter {name!r} is {kind}, and PyTorch will replace it. "
                "Create KFAC after to_empty, or after the first call of a model with "
                "lazy modules."
            )


def require_sensible(
    fisher: str, grad_scaler: Any, *, overlap: bool, output: Any
) -> None:
    """Raise for options that exclude each other, or are of another type."""
    if overlap and (fisher == "empirical" or output is None):
        raise kc.ConventionError(
            "`overlap` takes statistics when the outputs' gradients come, which is too "
            "early for fisher='empirical' and for `observe`. Leave it out."
        )
    if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
        raise kc.ConventionError(
            "Expected `grad_scaler` to be the torch.amp.GradScaler of the loop, got "
            f"{type(grad_scaler).__name__}."
        )


def rate_of(lr: Any, /) -> Any:
    """Return the learning rate that the KL clip reads, as a schedule.

    Raises
    ------
    kfac_core.ConventionError
        For an optimizer that divides directions by their own size, as Adam does, so that
        no learning rate says how long a step is.
    """
    if isinstance(lr, torch.optim.Optimizer):
        if any("eps" in group or "betas" in group for group in lr.param_groups):
            # accelerate and others wrap the optimizer.
            kind = type(getattr(lr, "optimizer", lr)).__name__
            raise kc.ConventionError(
                f"The optimizer {kind} divides a direction by its own size: K-FAC's "
                "scaling is lost, and the learning rate is not the length of a step. Use "
                "torch.optim.SGD (optim='sgd' of Hugging Face's Trainer); or pass KFAC a "
                "number, lr=0.1."
            )

        # The list of groups is another after `load_state_dict`.
        def largest(step: int) -> float:
            return max(float(group["lr"]) for group in lr.param_groups) or _RESTING

        return largest
    number = isinstance(lr, int | float) and not isinstance(lr, bool)
    if not callable(lr) and not (number and 0.0 < lr < math.inf):
        raise kc.ConventionError(
            f"Expected `lr` to be the optimizer, a finite number > 0, or a callable of the "
            f"step that returns one; got {lr!r}."
        )
    return (lambda step: lr(step) or _RESTING) if callable(lr) else lr
