"""The likelihood of a row of outputs, from a loss module of PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

import kfac_core as kc

CATEGORICAL, BERNOULLI = kc.losses.Categorical(), kc.losses.Bernoulli()


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """The likelihood of a row, and how the loss puts rows together.

    Attributes
    ----------
    row : kfac_core.integration.RowLoss
        The loss of one row of outputs.
    reduction : {"mean", "sum"}
        Over the rows; where they have weights, the weighted mean or sum.
    reduction_assumed : bool
        Whether the reduction was left out.
    class_weights : torch.Tensor or None
        Weights of the rows by their labels' class.
    assumed : bool
        Whether the likelihood was left out, so that it must be checked.
    """

    row: kc.integration.RowLoss
    reduction: Any
    reduction_assumed: bool = False
    class_weights: Any = None
    assumed: bool = False


def criterion_of(likelihood: Any, reduction: Any, /) -> Criterion:
    """Return the criterion of `KFAC`'s `likelihood` and `reduction`.

    Parameters
    ----------
    likelihood : str, kfac_core.losses.Loss, RowLoss, torch.nn.Module or None
        A name, a likelihood, or a loss module.
    reduction : {"mean", "sum"} or None
        None for the loss module's own, and "mean" where there is none.

    Returns
    -------
    Criterion
        The likelihood and the reduction.

    Raises
    ------
    kfac_core.ConventionError
        For a loss module that says something else than `reduction`, or too little.
    """
    if not isinstance(likelihood, nn.Module):
        assumed = likelihood is None
        row = kc.integration.row_loss("categorical" if assumed else likelihood)
        return Criterion(
            row=row,
            reduction="mean" if reduction is None else reduction,
            reduction_assumed=reduction is None,
            assumed=assumed,
        )
    of_module = getattr(likelihood, "reduction", None)
    name = type(likelihood).__name__
    if of_module == "none" and reduction is None:
        raise kc.ConventionError(
            f"{name} has reduction='none'. Say which `reduction` over the rows the loss "
            "has, 'mean' or 'sum'."
        )
    if reduction not in (None, of_module) and of_module != "none":
        raise kc.ConventionError(
            f"`reduction` is {reduction!r}, but that of {name} is {of_module!r}. Leave it "
            "out."
        )
    reduction = of_module if reduction is None else reduction
    weight = getattr(likelihood, "weight", None)
    if isinstance(likelihood, nn.CrossEntropyLoss | nn.NLLLoss):
        # Smoothed labels move the target, and leave the curvature of the logits as it is.
        smoothing: Any = getattr(likelihood, "label_smoothing", None)
        if weight is not None and smoothing:
            raise kc.ConventionError(
                f"{name} with class weights and label smoothing has a curvature that "
                "depends on the labels. Take likelihood='categorical', and give the "
                "weights of rows to observe(outputs, weight=...)."
            )
        row = kc.integration.RowLoss(likelihood=CATEGORICAL)
        return Criterion(row=row, reduction=reduction, class_weights=weight)
    # What these call a mean is one over rows and outputs.
    mean = reduction == "mean"
    if isinstance(likelihood, nn.BCEWithLogitsLoss):
        if weight is not None or likelihood.pos_weight is not None:
            raise kc.ConventionError(
                "BCEWithLogitsLoss with `weight` or `pos_weight` is not a likelihood of "
                "the outputs. Leave these out, or pass kfac_core.losses.Bernoulli() to "
                "ignore them."
            )
        row = kc.integration.RowLoss(likelihood=BERNOULLI, mean_over_outputs=mean)
        return Criterion(row=row, reduction=reduction)
    if isinstance(likelihood, nn.MSELoss):
        # Squares without the half.
        gaussian = kc.losses.Gaussian(variance=1.0)
        row = kc.integration.RowLoss(
            likelihood=gaussian, factor=2.0, mean_over_outputs=mean
        )
        return Criterion(row=row, reduction=reduction)
    raise kc.ConventionError(
        f"Expected `likelihood` to be CrossEntropyLoss, NLLLoss, BCEWithLogitsLoss or "
        f"MSELoss where it is a loss module, got {name}. Pass 'categorical', 'bernoulli', "
        "'gaussian' or an object of kfac_core.losses."
    )
