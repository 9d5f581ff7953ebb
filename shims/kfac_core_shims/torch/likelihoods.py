"""What a loss module of PyTorch says about the likelihood of a row of outputs."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import kfac_core as kc

__all__ = [
    "Criterion",
    "are_equal",
    "coarseness",
    "criterion_of",
    "follow_the_prediction",
    "has_classes_second",
    "has_weighted_outputs",
    "implied_targets",
    "left_out",
    "looks_like_probabilities",
    "row_scales",
    "scale_of_hard_labels",
    "temperature",
    "unread_rows",
]

_CATEGORICAL, _BERNOULLI = kc.losses.Categorical(), kc.losses.Bernoulli()

BOUNDED: tuple[Any, ...] = (_CATEGORICAL, _BERNOULLI)
"""Likelihoods whose gradients have entries of at most one."""


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
        Whether nobody said which reduction.
    weighted : bool
        Whether rows have weights that only the targets tell, as class weights do.
    assumed : bool
        Whether nobody said which likelihood, so that it has to be checked.
    """

    row: kc.integration.RowLoss
    reduction: Any
    reduction_assumed: bool = False
    weighted: bool = False
    assumed: bool = False


def criterion_of(likelihood: Any, reduction: Any, /) -> Criterion:
    """Return what `likelihood` and `reduction` of `KFAC` say.

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
    own = getattr(likelihood, "reduction", None)
    name = type(likelihood).__name__
    if own == "none" and reduction is None:
        raise kc.ConventionError(
            f"{name} has reduction='none'. Say which `reduction` over the rows the loss "
            "has, 'mean' or 'sum'."
        )
    if reduction not in (None, own) and own != "none":
        raise kc.ConventionError(
            f"`reduction` is {reduction!r}, but that of {name} is {own!r}. Leave it out."
        )
    reduction = own if reduction is None else reduction
    weight = getattr(likelihood, "weight", None)
    if isinstance(likelihood, nn.CrossEntropyLoss | nn.NLLLoss):
        # Smoothed labels move the target, and leave the curvature of the logits as it is.
        smoothing: Any = getattr(likelihood, "label_smoothing", None)
        if weight is not None and smoothing:
            raise kc.ConventionError(
                f"{name} with class weights and label smoothing has a curvature that "
                "depends on the labels. Leave one of the two out."
            )
        row = kc.integration.RowLoss(likelihood=_CATEGORICAL)
        return Criterion(row=row, reduction=reduction, weighted=weight is not None)
    # What these call a mean is one over rows and outputs.
    mean = reduction == "mean"
    if isinstance(likelihood, nn.BCEWithLogitsLoss):
        if weight is not None or likelihood.pos_weight is not None:
            raise kc.ConventionError(
                "BCEWithLogitsLoss with `weight` or `pos_weight` is no likelihood of the "
                "outputs. Leave these out, or pass kfac_core.losses.Bernoulli() to ignore "
                "them."
            )
        row = kc.integration.RowLoss(likelihood=_BERNOULLI, mean_over_outputs=mean)
        return Criterion(row=row, reduction=reduction)
    if isinstance(likelihood, nn.MSELoss):
        squares = kc.losses.SquaredError(scale=1.0)
        row = kc.integration.RowLoss(likelihood=squares, mean_over_outputs=mean)
        return Criterion(row=row, reduction=reduction)
    raise kc.ConventionError(
        f"Expected `likelihood` to be CrossEntropyLoss, NLLLoss, BCEWithLogitsLoss or "
        f"MSELoss where it is a loss module, got {name}. Pass 'categorical', 'bernoulli', "
        "'gaussian' or an object of kfac_core.losses."
    )


def looks_like_probabilities(row: kc.integration.RowLoss, z: Any, /) -> bool:
    """Return whether outputs look like probabilities where logits belong."""
    if z.shape[-1] > 1 and row.likelihood == _CATEGORICAL:
        ones = torch.ones_like(z[..., 0])
        near = torch.isclose(z.sum(-1), ones, rtol=0.0, atol=1e-3)
        return bool((near.all() & (z >= 0).all()).item())
    if row.likelihood == _BERNOULLI and z.numel() >= 64:
        return bool(((z >= 0) & (z <= 1)).all().item())
    return False


def left_out(row: kc.integration.RowLoss, z: Any, g: Any, /) -> int:
    """Return how many single outputs a loss seems not to read, as where it is masked.

    A gradient is exactly zero there; else only where the target is the prediction.

    Parameters
    ----------
    row : RowLoss
        The loss of a row.
    z, g : torch.Tensor, shape (N, ..., P)
        The outputs and the gradient that the loss sent back to them.

    Returns
    -------
    int
        Of sigmoid cross-entropies, in rows that are read in part; of squared errors, in all
        rows.  Zero also where it cannot be told.
    """
    if g.dtype == torch.float16:
        return 0  # Small gradients are zero.
    if row.likelihood == _BERNOULLI:
        found = (g == 0) & (z.abs() < 7.0) & (g != 0).any(-1, keepdim=True)
    elif isinstance(row.likelihood, kc.losses.Gaussian | kc.losses.SquaredError):
        found = (g == 0) & (z != 0)
    else:
        return 0
    return int(found.sum())


def unread_rows(row: kc.integration.RowLoss, z: Any, g: Any, /) -> Any:
    """Return which rows the loss did not read, such as those of ignored labels.

    A cross-entropy's gradient in a row is zero only if the row is not read, or if the
    label's probability is one to roundoff.

    Parameters
    ----------
    row : RowLoss
        The loss of a row.
    z, g : torch.Tensor, shape (N, ..., P)
        The outputs and the gradient that the loss sent back to them.

    Returns
    -------
    torch.Tensor of bool, shape (N, ...), or None
        None if it cannot be told, or all were read.
    """
    if row.likelihood not in (_CATEGORICAL, _BERNOULLI):
        return None
    # A fifth of the time of ``(g == 0).all(-1)``.
    zero = g.abs().amax(-1) == 0
    if not bool(zero.any()):
        return None
    if row.likelihood == _CATEGORICAL:
        certain = torch.softmax(z.float(), -1).amax(-1) > 1 - 1e-3
    else:
        certain = (z.float().abs() > 7.0).all(-1)
    return zero & ~certain


def has_row_scales(row: kc.integration.RowLoss, /) -> bool:
    """Return whether `row_scales` may tell those of a loss."""
    return row.likelihood == _CATEGORICAL


def row_scales(row: kc.integration.RowLoss, z: Any, g: Any, /) -> Any:
    """Return what the loss multiplied each row's cross-entropy by, where labels are hard.

    With probabilities p and the label y, ``g = c (p - e_y)``: the entries other than the
    label's are proportional to p, and c is their ratio.  It is ``1/R`` in a mean over R
    rows, and has the weights of classes or rows as factors.

    Parameters
    ----------
    row : RowLoss
        The loss of a row.
    z, g : torch.Tensor, shape (N, ..., P)
        The outputs and the gradient that the loss sent back to them.

    Returns
    -------
    torch.Tensor, shape (N, ...), or None
        Zero for rows that the loss did not read.  None if it cannot be told: for another
        likelihood, fewer than three classes, or soft labels.
    """
    if not has_row_scales(row) or z.shape[-1] < 3:
        return None
    g = g.to(torch.promote_types(g.dtype, torch.float32))
    label = g.argmin(-1, keepdim=True)
    p = torch.softmax(z.to(g.dtype), -1).scatter(-1, label, 0.0)
    others = g.scatter(-1, label, 0.0)
    scale = others.sum(-1, keepdim=True) / p.sum(-1, keepdim=True)
    coarse = coarseness(z)
    largest = (scale * p).amax(-1)
    apart = (others - scale * p).abs().amax(-1)
    if not bool(((apart <= coarse * largest) & (scale[..., 0] >= 0)).all()):
        return None
    return scale[..., 0]


def scale_of_hard_labels(z: Any, g: Any, /) -> float | None:
    """Return the scale of `row_scales` where it is plainly the same for all rows.

    For losses in which `row_scales` has found hard labels before: here the entry of the
    label alone is looked at, ``g = c (p - 1)``, in a third of the time.

    Parameters
    ----------
    z, g : torch.Tensor, shape (R, P)
        The outputs and the gradient that the loss sent back to them.

    Returns
    -------
    float or None
        None if rows differ, and where a probability is one to roundoff or a row is not
        read, so that it cannot be told so simply.
    """
    label = g.argmin(-1, keepdim=True)
    p = torch.softmax(z.to(torch.promote_types(z.dtype, torch.float32)), -1)
    scale = g.gather(-1, label) / (p.gather(-1, label) - 1)
    low, high = (float(x) for x in torch.aminmax(scale))
    equal = low > 0 and high - low <= coarseness(z) * high
    return 0.5 * (low + high) if equal else None


def coarseness(z: Any, /) -> float:
    """Return the relative difference that roundoff makes in gradients of such outputs."""
    return 5e-2 if z.dtype.itemsize < 4 else 1e-3


def temperature(z: Any, g: Any, /) -> float | None:
    """Return T of a cross-entropy of ``z / T`` with hard labels, NaN if it may be any.

    With p the softmax of ``z / T`` and the label y, ``g = c (p - e_y)``: the logarithms of
    the entries other than the label's lie on a line of slope 1/T over z, the same in all
    rows.  Those of smoothed labels lie on curves.

    Parameters
    ----------
    z, g : torch.Tensor, shape (N, ..., P)
        The outputs and the gradient that the loss sent back to them, P >= 3.

    Returns
    -------
    float or None
        None for labels that are not hard, and for T = 1.
    """
    narrow = z.dtype.itemsize < 4
    z = z.reshape(-1, z.shape[-1])
    g = g.reshape(z.shape)
    read = (g != 0).any(-1)
    z, g = z[read][:64].double(), g[read][:64].double()
    if len(z) < 2 or not bool(((g < 0).sum(-1) == 1).all()):
        return None
    clear = g > 1e-3 * g.amax(-1, keepdim=True)
    clear &= clear.sum(-1, keepdim=True) >= 2
    weight = clear.double()
    count = weight.sum(-1, keepdim=True).clamp(min=1)

    def centered(x: Any) -> Any:
        return weight * (x - (weight * x).sum(-1, keepdim=True) / count)

    x, y = centered(z), centered(torch.where(clear, g, 1.0).log())
    spread = (x.square().sum(-1) / count[:, 0]).sqrt()
    wide = spread > (1.5 if narrow else 0.05)
    unlike = x.shape[-1] > 3 or float(spread.max() - spread.min()) > 0.1
    if int(wide.sum()) < 2 or not unlike:
        return math.nan
    x, y, spread, count = x[wide], y[wide], spread[wide], count[wide, 0]
    slopes = (x * y).sum(-1) / (count * spread.square())
    slope = float(slopes.median())
    noise = 2e-2 if narrow else 3e-5 + 1e-6 * abs(slope) * float(x.abs().max())
    apart = float(((slopes - slope).abs() * spread).max())
    rest = float((y - slopes[:, None] * x).abs().max())
    on_lines = slope > 0 and max(apart, rest) <= 2 * noise
    if not on_lines or abs(slope - 1) <= (0.2 if narrow else 0.04):
        return None
    return 1 / slope


def implied_targets(z: Any, g: Any, scale: float, /) -> Any:
    """Return the targets q of a cross-entropy ``g = scale (softmax(z) - q)``."""
    wide = torch.promote_types(g.dtype, torch.float32)
    return torch.softmax(z.to(wide), -1) - g.to(wide) / scale


def follow_the_prediction(z: Any, g: Any, scales: Any, /) -> bool:
    """Return whether a loss scales rows by a function of their labels' probability.

    As a focal loss does.  In the order of that probability such scales rise and fall once
    at most; of 16 others one order in 10^8 does.

    Parameters
    ----------
    z, g : torch.Tensor, shape (N, ..., P)
        The outputs and the gradient that the loss sent back to them.
    scales : torch.Tensor, shape (N, ...)
        See `row_scales`.
    """
    labels = g.argmin(-1, keepdim=True)
    logits = z.to(torch.promote_types(z.dtype, torch.float32))
    p = torch.softmax(logits, -1).gather(-1, labels).reshape(-1)
    labels, scales = labels.reshape(-1), scales.reshape(-1)
    read = scales > 0
    labels, scales, p = labels[read], scales[read], p[read]
    often = labels == labels.mode().values  # Classes may have weights besides.
    coarse = coarseness(z)
    return _turns_once(p, scales, coarse) or _turns_once(
        p[often], scales[often], coarse
    )


def _turns_once(p: Any, scales: Any, coarse: float) -> bool:
    """Return whether 16 values or more rise and fall once at most, in the order of p."""
    kept: list[float] = []
    for scale in scales[p.argsort()].tolist():
        if not kept or abs(scale - kept[-1]) > coarse * abs(kept[-1]):
            kept.append(scale)
    signs = [b > a for a, b in itertools.pairwise(kept)]
    turns = sum(a != b for a, b in itertools.pairwise(signs))
    return len(kept) >= 16 and turns <= 1


def are_equal(values: Any, coarse: float, /) -> bool:
    """Return whether all values are their mean, up to a relative difference."""
    mean = values.mean()
    return bool(((values - mean).abs() <= coarse * mean).all())


def has_classes_second(row: kc.integration.RowLoss, z: Any, g: Any, /) -> bool:
    """Return whether a loss of classes reads them on the second axis, not on the last.

    As PyTorch's loss modules do of (N, C, d1, ...).  Along the axis of the classes the
    gradient sums to zero, or has one entry for each label.

    Parameters
    ----------
    row : RowLoss
        The loss of a row.
    z, g : torch.Tensor, shape (N, ..., P)
        The outputs and the gradient that the loss sent back to them.

    Returns
    -------
    bool
        False also where it cannot be told.
    """
    if row.likelihood != _CATEGORICAL or z.ndim < 3 or not g.any():
        return False

    def reads(axis: int) -> bool:
        wide = g.double()
        size = wide.abs().sum(axis)
        coarse = 2e-2 if g.dtype.itemsize < 4 else 1e-3
        sums = bool((wide.sum(axis).abs() <= coarse * size).all())
        return sums or bool((((g != 0).sum(axis) == 1) | (size == 0)).all())

    return reads(1) and not reads(-1)


def has_weighted_outputs(row: kc.integration.RowLoss, z: Any, g: Any, /) -> bool:
    """Return whether a sigmoid cross-entropy has weights, where its labels are hard.

    With hard labels ``g = c (p - y)``, and c is found from g and p.  Weights make it differ
    between positive and negative labels, between outputs, or between rows, and equal
    within each; soft labels make it differ everywhere.

    Parameters
    ----------
    row : RowLoss
        The loss of a row.
    z, g : torch.Tensor, shape (N, ..., P)
        The outputs and the gradient that the loss sent back to them.

    Returns
    -------
    bool
        False also where it cannot be told.
    """
    if row.likelihood != _BERNOULLI:
        return False
    z = z.reshape(-1, z.shape[-1])
    g = g.reshape(z.shape).double()
    p = torch.sigmoid(z.double())
    positive = g < 0
    scale = torch.where(positive, -g / (1 - p), g / p)
    rows, outputs = torch.meshgrid(
        torch.arange(len(z), device=z.device),
        torch.arange(z.shape[1], device=z.device),
        indexing="ij",
    )
    read = (g != 0) & (z.abs() < 7.0)
    scale, sign = scale[read], positive[read].long()
    rows, outputs = rows[read], outputs[read]
    coarse = coarseness(z)
    if len(scale) < 8 or _spread(scale, torch.zeros_like(sign)) <= coarse:
        return False
    groups = sign, outputs, 2 * outputs + sign, rows
    return any(
        2 * len(group.unique()) <= len(scale) and _spread(scale, group) <= coarse
        for group in groups
    )


def _spread(values: Any, group: Any) -> float:
    """Return the largest relative range of positive values within a group."""
    names, place = group.unique(return_inverse=True)
    least = torch.full((len(names),), torch.inf, dtype=values.dtype).to(values.device)
    most = torch.zeros_like(least)
    least = least.scatter_reduce(0, place, values, "amin")
    most = most.scatter_reduce(0, place, values, "amax")
    return float(((most - least) / most).max())
