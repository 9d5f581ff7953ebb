"""Weights of rows: the factor of each row's term in the loss.

The gradient that a cross-entropy of hard labels sends back to the outputs shows this
factor, row by row.  From it come rows that the loss did not read, weights of classes and
rows, and what rows of one pass, or of one process, count beside those of another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import kfac_core as kc
from kfac_core_shims.torch.likelihoods import BERNOULLI, CATEGORICAL, Criterion

_SAMPLED = 1 << 11
"""Numbers of a large pass that are read to see that its rows still have one factor."""


@dataclass(frozen=True, kw_only=True)
class RowWeights:
    """The weights that a loss gives to the rows of a pass.

    Attributes
    ----------
    unread : torch.Tensor of bool, or None
        Rows that it did not read; None where it read all, or that is not known.
    weight : torch.Tensor or None
        Weights of the rows; None for equal ones.
    scale : float or None
        What it multiplies each row's term by, besides `weight`; None where the gradient
        does not show it.
    is_uniform : bool
        Whether `scale` is that of two rows or more, all alike.
    is_weighted : bool
        Whether rows that were read have unequal weights.
    largest : float
        Largest entry of the gradient, where the likelihood bounds it by one; else 0.
    """

    unread: Any = None
    weight: Any = None
    scale: float | None = None
    is_uniform: bool = False
    is_weighted: bool = False
    largest: float = 0.0


def weights_of_rows(
    criterion: Criterion,
    z: torch.Tensor,
    g: torch.Tensor,
    /,
    *,
    scaled_by: float = 1.0,
    were_uniform: bool = False,
) -> RowWeights:
    """Return the weights of the rows of a pass, as far as the gradient shows them.

    Parameters
    ----------
    criterion : Criterion
        The likelihood, the reduction, and weights of classes.
    z, g : torch.Tensor, shape (N, ..., P)
        The outputs and the gradient that the loss sent back to them.
    scaled_by : float
        Scale of a gradient scaler.
    were_uniform : bool
        Whether rows of passes before had one factor; of a large pass only some are then
        looked at, if these have one factor too.

    Raises
    ------
    kfac_core.ConventionError
        For a gradient that is not of the cross-entropy with the criterion's class weights.
    """
    if criterion.row.likelihood not in (CATEGORICAL, BERNOULLI):
        return RowWeights()
    sizes = g.abs().amax(-1)
    least, largest = (float(x) for x in torch.aminmax(sizes))
    largest /= scaled_by * criterion.row.multiple(z.shape[-1])
    unread = None if least > 0 else _unread_rows(criterion, z, sizes == 0)
    weight = None if unread is None else (~unread).to(z.dtype)
    scales = None
    # A softmax over all rows of a large pass is expensive, and some rows suffice.
    every = z.numel() // _SAMPLED
    if were_uniform and every:
        some_z, some_g = (x.reshape(-1, x.shape[-1])[::every] for x in (z, g))
        scales = _row_scales(criterion, some_z, some_g)
        read = z.new_zeros(0) if scales is None else scales[scales > 0]
        if len(read) and _are_equal(read, coarseness(z)):
            return RowWeights(
                unread=unread,
                weight=weight,
                scale=float(read.mean()) / scaled_by,
                is_uniform=True,
                largest=largest,
            )
    scales = _row_scales(criterion, z, g)
    if scales is None:
        rows = 1 if criterion.reduction == "sum" else sizes.numel()
        if largest * rows <= 8 * torch.finfo(z.dtype).eps:
            # Soft labels that are the model's own probabilities: zeros are roundoff.
            return RowWeights(largest=largest)
        return RowWeights(unread=unread, weight=weight, largest=largest)
    scales = scales / scaled_by
    read = scales[scales > 0] if weight is None else scales[weight > 0]
    mean = float(read.mean()) if len(read) else None
    is_uniform = len(read) > 1 and _are_equal(read, coarseness(z))
    is_weighted = len(read) > 1 and not is_uniform
    if is_weighted:
        # A weighted mean is divided by the sum of the weights, a weighted sum is not.
        relative = scales if criterion.reduction == "sum" else scales / mean
        weight = relative if weight is None else relative * weight
        mean = 1.0 if criterion.reduction == "sum" else mean
    return RowWeights(
        unread=unread,
        weight=weight,
        scale=mean,
        is_uniform=is_uniform,
        is_weighted=is_weighted,
        largest=largest,
    )


def _unread_rows(criterion: Criterion, z: Any, is_zero: Any) -> Any:
    """Return which rows the loss did not read, such as those of ignored labels.

    A cross-entropy's gradient in a row is zero only if the row is not read, or if the
    label's probability is one to roundoff.
    """
    if criterion.row.likelihood == CATEGORICAL:
        certain = torch.softmax(z.float(), -1).amax(-1) > 1 - 1e-3
    else:
        certain = (z.float().abs() > 7.0).all(-1)
    return is_zero & ~certain


def _row_scales(criterion: Criterion, z: Any, g: Any) -> Any:
    """Return the factor of each row's cross-entropy in the loss, for hard labels.

    With probabilities p and the label y, ``g = c (p - e_y)``: the entries other than the
    label's are proportional to p, and c is their ratio.  It is ``1/R`` in a mean over R
    rows, and has the weights of classes or rows as factors.  None for soft labels, and for
    two classes, which look like hard ones of other weights unless these are known.
    """
    known = criterion.class_weights
    if criterion.row.likelihood != CATEGORICAL or z.shape[-1] < 3 - (known is not None):
        return None
    g = g.to(torch.promote_types(g.dtype, torch.float32))
    # In c (p - e_y) only the label's entry is negative.
    label = g.argmin(-1, keepdim=True)
    p = torch.softmax(z.to(g.dtype), -1).scatter(-1, label, 0.0)
    others = g.scatter(-1, label, 0.0)
    scale = others.sum(-1, keepdim=True) / p.sum(-1, keepdim=True)
    largest = (scale * p).amax(-1)
    apart = (others - scale * p).abs().amax(-1)
    scale = scale[..., 0]
    is_hard = bool(((apart <= coarseness(z) * largest) & (scale >= 0)).all())
    if known is not None:
        read = scale > 0
        common = scale[read] / known.to(scale)[label[..., 0][read]]
        if not is_hard or (len(common) and not _are_equal(common, coarseness(z))):
            raise kc.ConventionError(
                "The gradient at the outputs is not that of the loss module: a "
                "cross-entropy with its class weights, for labels that are class "
                "numbers. Pass the same `weight` to the function that you "
                "differentiate; or, for soft labels, take likelihood='categorical' and "
                "observe(outputs, weight=labels @ weight)."
            )
    return scale if is_hard else None


def coarseness(z: Any, /) -> float:
    """Return the relative difference that roundoff makes in gradients of such outputs."""
    return 5e-2 if z.dtype.itemsize < 4 else 1e-3


def _are_equal(values: Any, coarse: float) -> bool:
    mean = values.mean()
    return bool(((values - mean).abs() <= coarse * mean).all())
