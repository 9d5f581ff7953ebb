"""What the gradients of outputs say of a loss, compared with what `KFAC` was told of it.

The gradient that a loss sends back to the outputs tells most of what K-FAC has to know of
it: whether it is of the likelihood, which rows it read and with which weights, and whether
it is a mean or a sum.  What does not agree is refused, or told once where it may be meant.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from warnings import warn

import torch

import kfac_core as kc
from kfac_core_shims.torch import likelihoods

__all__ = ["LossCheck", "RowWeights"]

_MEAN = 1.5
"""How many means a loss may be where nobody said that it is one."""

_UNSCALED = 100.0
"""How many means or sums a loss may be that no gradient scaler multiplied."""

_LARGEST_EMPIRICAL = 16.0
"""Entries of a cross-entropy's gradient are at most 1; beyond this the loss is scaled."""

_LOOKED_AT = 1 << 13
"""Numbers of a pass in which a loss of equal rows is looked at for being one still."""


@dataclasses.dataclass(kw_only=True)
class _Known:
    """What passes have told of the loss, so that it is not looked at or told again.

    Attributes
    ----------
    checked : bool
        Whether it is of the likelihood.
    equal_rows : bool
        Whether it gave all rows of a pass one weight.
    unequal : bool
        Whether it gave them unequal ones.
    weights, targets : bool
        Whether a warning was made of weights, and of targets, that it has.
    """

    checked: bool = False
    equal_rows: bool = False
    unequal: bool = False
    weights: bool = False
    targets: bool = False


@dataclasses.dataclass(kw_only=True)
class RowWeights:
    """What a loss does with the rows of a pass.

    Attributes
    ----------
    unread : torch.Tensor of bool, or None
        Rows that it did not read; None where it read all, or that is not known.
    weight : torch.Tensor or None
        Weights of the rows; None for equal ones.
    scale : float or None
        What it multiplies each row's cross-entropy by, besides `weight`; None where it was
        not told.
    unlike : bool
        Whether `scale` is none of all rows alike, as other passes may have.
    """

    unread: Any = None
    weight: Any = None
    scale: float | None = None
    unlike: bool = False


class LossCheck:
    """Compares the loss that is differentiated with the one that `KFAC` was told of.

    Parameters
    ----------
    criterion : kfac_core_shims.torch.likelihoods.Criterion
        Likelihood and reduction, and whether these were said or assumed.
    grad_scaler : torch.amp.GradScaler or None
        Scaler of the loss.
    empirical : bool
        Whether the loss's own gradients are squared.
    processes : int
        Number of processes that gradients are averages over.
    alone : bool
        Whether no other process has rows.
    """

    def __init__(
        self,
        criterion: likelihoods.Criterion,
        *,
        grad_scaler: Any,
        empirical: bool,
        processes: int,
        alone: bool,
    ) -> None:
        self.criterion, self.grad_scaler = criterion, grad_scaler
        self.reduction = criterion.reduction
        self._empirical, self._processes, self._alone = empirical, processes, alone
        self._known = _Known()
        # Of passes that only returned gradients: what is told if they count.
        self._returns, self._known_then = False, _Known()
        self._doubts: list[kc.KFACError | str] = []

    @contextmanager
    def only_returned(self) -> Iterator[None]:
        """Look at a pass that only returns gradients, and keep errors until it counts.

        A logger may differentiate what is no loss; if it counts is known in the step.
        """
        known = self._known
        self._returns, self._known = True, dataclasses.replace(known)
        try:
            yield
        except kc.KFACError as error:
            self._doubts.append(error)
        finally:
            self._known_then = self._known
            self._returns, self._known = False, known

    @property
    def has_weights(self) -> bool:
        """Whether the loss of a pass gave rows unequal weights."""
        return self._known.unequal

    def tell(self) -> None:
        """Raise or warn of passes that only returned gradients, which count."""
        for doubt in self._doubts:
            if not isinstance(doubt, str):
                raise doubt
            warn(doubt, stacklevel=4)

    def believe(self) -> None:
        """Know from now on what the last of these passes has told."""
        self._known = self._known_then

    def forget(self) -> None:
        """Leave behind what was seen of passes that only returned gradients."""
        self._doubts = []

    def require_likelihood(self, z: Any, gradient: Any, /) -> None:
        """Refuse a loss that is not of the likelihood, until that was told once."""
        if not self._known.checked:
            self._known.checked = self._is_told(z, gradient)

    def row_weights(self, z: Any, gradient: Any, /, *, clips: bool) -> RowWeights:
        """Return what the loss does with the rows of a pass.

        Parameters
        ----------
        z, gradient : torch.Tensor, shape (N, ..., P)
            Outputs, and what the loss sent back to them.
        clips : bool
            Whether there is a KL clip, which takes gradients as they are.

        Returns
        -------
        RowWeights
            As far as it can be told.

        Raises
        ------
        kfac_core.ConventionError
            For a loss of another reduction.
        kfac_core.UnsupportedError
            For weights whose squares would count.
        """
        unread = likelihoods.unread_rows(self.criterion.row, z, gradient)
        weight = None if unread is None else (~unread).to(z.dtype)
        if self._processes == 1:
            scale = self._scale_of_equal_rows(z, gradient)
            if scale is not None:
                return RowWeights(unread=unread, weight=weight, scale=scale)
        weight, scale, unlike = self._weighted(z, gradient, weight, clips)
        return RowWeights(unread=unread, weight=weight, scale=scale, unlike=unlike)

    def require_reduction(
        self, scale: float, rows: int, coarse: float, /, *, clips: bool
    ) -> None:
        """Refuse a loss that is not the mean, or the sum, that `reduction` says.

        A row's cross-entropy stands in a mean with a factor of 1/R, in a sum with 1; on p
        processes, whose gradients are averaged, in a mean with p/R.  It may be less, where
        batches are accumulated, and what somebody said may be so by the time of the step;
        then a scaled loss is only told.
        """
        if self.grad_scaler is not None:
            return
        reduction = self.reduction
        means = scale * rows / self._processes
        times = means if reduction == "mean" else scale
        found = (
            f"each of the {rows} rows' cross-entropies stands in the loss with a factor of "
            f"{scale:.3g}"
        )
        if self._processes > 1:
            found = f"{found} on each of {self._processes} processes"
        if self.criterion.reduction_assumed and times > _MEAN:
            raise kc.ConventionError(
                f"Expected a loss that is a mean over its rows, and {found}. Pass "
                "reduction='sum' if it is a sum, `grad_scaler` if a gradient scaler "
                "multiplied it, or reduction='mean' if gradients are divided by "
                f"{times:.3g} before `step`."
            )
        # Of as many rows as processes a sum may look like a mean.
        is_sum = abs(scale - 1) <= coarse
        if reduction == "sum" and abs(means - 1) <= coarse and not is_sum:
            raise kc.ConventionError(
                f"Expected a loss that is a sum over its rows, and {found}, as in a mean. "
                "Pass reduction='mean', or the loss module as `likelihood`."
            )
        if clips and times > _UNSCALED:
            self._warn(
                f"Expected a loss that is a {reduction} over its rows, and {found}. The KL "
                "clip takes gradients as they are in `step`. Pass `grad_scaler` if a "
                "gradient scaler multiplied the loss."
            )

    def require_unscaled(self, z: Any, gradient: Any, rows: float) -> None:
        """Refuse empirical gradients of a loss that is scaled in secret."""
        bounded = self.criterion.row.likelihood in likelihoods.BOUNDED
        if gradient is None or not bounded or self.grad_scaler is not None:
            return
        if not gradient.numel():
            return
        mean = rows if self.reduction == "mean" else 1.0
        # A process may have all rows, and multiplies its loss by the number of processes.
        largest = float(gradient.abs().max()) * mean / self._processes
        largest /= self.criterion.row.weight(z.shape[-1])
        if largest > _LARGEST_EMPIRICAL:
            raise kc.ConventionError(
                f"Gradients of the loss at the outputs are up to {largest:.3g} times what "
                f"a {self.reduction} over {rows:.0f} rows can have, and fisher='empirical' "
                "squares them. Pass the gradient scaler as `grad_scaler`, or say which "
                "`reduction` the loss has."
            )

    def scale_for_squares(self, z: Any) -> float:
        """Return what the caller's loss is multiplied by, for fisher="empirical"."""
        if self.grad_scaler is not None:
            return float(self.grad_scaler.get_scale())
        if z.dtype == torch.float16:
            raise kc.ConventionError(
                "fisher='empirical' squares the gradients of the loss, which is scaled "
                "where outputs are float16. Pass the gradient scaler as `grad_scaler`, or "
                "take fisher='gradients'."
            )
        return 1.0

    def is_overflow(self) -> bool:
        """Return whether the scaler will leave this step out; raise if it is too early."""
        scaler = self.grad_scaler
        if scaler is None or not scaler.is_enabled():
            return False
        states = list(scaler._per_optimizer_states.values())
        found = [f for state in states for f in state["found_inf_per_device"].values()]
        if not found:
            raise kc.NotReadyError(
                "The gradients are still multiplied by the scale of `grad_scaler`. Call "
                "scaler.unscale_(optimizer) before kfac.step()."
            )
        return any(float(f) > 0 for f in found)

    def _warn(self, message: str) -> None:
        """Warn of a loss; later, if the pass only returns gradients."""
        if self._returns:
            self._doubts.append(message)
        else:
            warn(message, stacklevel=3)

    def _scale_of_equal_rows(self, z: Any, gradient: Any) -> float | None:
        """Return the scale of a large pass whose rows have one weight, as rows before.

        Rows spread over it are looked at; of a small pass `_weighted` looks at all.
        """
        every = z.numel() // _LOOKED_AT
        if not (self._known.equal_rows and every):
            return None
        z, gradient = (x.reshape(-1, x.shape[-1])[::every] for x in (z, gradient))
        scale = likelihoods.scale_of_hard_labels(z, gradient)
        if scale is not None:
            return scale
        scales = likelihoods.row_scales(self.criterion.row, z, gradient)
        if scales is None or not bool((scales > 0).any()):
            return None
        read = scales[scales > 0]
        equal = likelihoods.are_equal(read, likelihoods.coarseness(z))
        return float(read.mean()) if equal else None

    def _weighted(
        self, z: Any, gradient: Any, weight: Any, clips: bool
    ) -> tuple[Any, float | None, bool]:
        """Return weights that the loss gives rows, and what it multiplies them by.

        And whether that is no scale of all rows alike, as other passes may have.
        """
        scales = likelihoods.row_scales(self.criterion.row, z, gradient)
        if scales is None:
            self._look_at_targets(z, gradient, weight)
            return weight, None, False
        read = scales[scales > 0] if weight is None else scales[weight > 0]
        if len(read) < 2:
            return weight, float(read) if len(read) else None, True
        mean = read.mean()
        coarse = likelihoods.coarseness(z)
        if likelihoods.are_equal(read, coarse):
            if self._processes == 1 and not self._known.equal_rows:
                self.require_reduction(float(mean), len(read), coarse, clips=clips)
            self._known.equal_rows = True
            return weight, float(mean), False
        self._known.unequal = True
        if self._empirical:
            raise kc.UnsupportedError(
                "The loss has weights of classes or rows, and fisher='empirical' would "
                "square them. Take fisher='gradients' or 'exact'."
            )
        if self.criterion.assumed and not self._known.weights:
            self._known.weights = True
            if likelihoods.follow_the_prediction(z, gradient, scales):
                self._warn(
                    "The loss weighs each row by a function of its label's probability, as "
                    "a focal loss does. The curvature is that of a cross-entropy with "
                    "these weights, without the derivatives of the weights. Say "
                    "likelihood='categorical' if that is meant."
                )
        if self.reduction == "sum":
            found, scale = scales, 1.0
        else:
            found, scale = scales / mean, float(mean)
        weight = found if weight is None else found * weight
        return weight, scale, True

    def _look_at_targets(self, z: Any, gradient: Any, weight: Any) -> None:
        """Warn once if soft targets of a loss that nobody named are no probabilities.

        Those of a cross-entropy of the outputs are, also where batches are accumulated.
        """
        known = self.criterion.reduction_assumed or self.reduction == "sum"
        if self._known.targets or not (self.criterion.assumed and known):
            return
        if not self._alone:
            return
        rows = z[..., 0].numel() if weight is None else float(weight.sum())
        scale = 1.0 / max(rows, 1) if self.reduction == "mean" else 1.0
        if self.grad_scaler is not None:
            scale *= float(self.grad_scaler.get_scale())
        least = float(likelihoods.implied_targets(z, gradient, scale).min())
        if least < -likelihoods.coarseness(z):
            self._known.targets = True
            self._warn(
                f"The loss is no {self.reduction} of cross-entropies of the outputs: their "
                f"targets would be as low as {least:.2g}, and not probabilities. It may "
                "have a temperature or weights, as in distillation or policy gradients, be "
                "of another `reduction`, or be multiplied by a gradient scaler "
                "(`grad_scaler`). The curvature is that of a plain cross-entropy. Say "
                "likelihood='categorical' if that is meant, output=lambda z: z / T for a "
                "temperature, or pass weights of rows to observe(outputs, weight)."
            )

    def _is_told(self, z: Any, gradient: Any) -> bool:
        """Check that outputs and loss are what the likelihood says; return if it could."""
        told = True
        if gradient is not None and likelihoods.has_classes_second(
            self.criterion.row, z, gradient
        ):
            raise kc.ConventionError(
                "The loss reads classes on the second axis of the outputs, of shape "
                f"{tuple(z.shape)}, and the likelihood on the last. Say "
                "output=lambda z: z.movedim(1, -1), and likelihood='categorical' if none "
                "is said."
            )
        if self.criterion.assumed:
            told = self._check_assumed(z, gradient)
        if gradient is not None and likelihoods.has_weighted_outputs(
            self.criterion.row, z, gradient
        ):
            raise kc.ConventionError(
                "The sigmoid cross-entropy has weights (`weight`, `pos_weight` or rows "
                "that count more), with which it is no likelihood of the outputs. Leave "
                "them out; weights of rows may be passed to observe(outputs, weight)."
            )
        count = 0
        if gradient is not None:
            count = likelihoods.left_out(self.criterion.row, z, gradient)
        if count and self.criterion.row.likelihood in likelihoods.BOUNDED:
            raise kc.ConventionError(
                f"The loss does not read {count} of {z.numel()} outputs, in rows of which "
                "it reads others, and the likelihood reads all. Of a mask, say output=None "
                "and call kfac.observe(outputs[mask][:, None])."
            )
        if count > 1:
            self._warn(
                f"The loss sends nothing back to {count} of {z.numel()} outputs, as where "
                "a mask leaves them out, and the curvature counts them. Say output=None "
                "and call kfac.observe(outputs[mask]) with the rows that it reads."
            )
        if likelihoods.looks_like_probabilities(self.criterion.row, z):
            self._warn(
                "The observed outputs look like probabilities, but the likelihood reads "
                "logits. Observe what comes before the softmax or the sigmoid."
            )
        return told

    def _check_assumed(self, z: Any, gradient: Any) -> bool:
        """Raise unless the loss's gradients are those of a cross-entropy of logits.

        These sum to zero in each row, whatever the labels and weights.  Where a
        probability is nearly one, roundoff is all that is left of them.
        """
        good = gradient is not None and z.shape[-1] > 1
        told = True
        if good:
            g = gradient.double()
            total, size = g.sum(-1).abs(), g.abs().sum(-1)
            coarse = 2e-2 if gradient.dtype.itemsize < 4 else 1e-3
            clear = torch.softmax(z.float(), -1).amax(-1) < 1 - 1e-3
            # Of targets that the model made itself only roundoff is left.
            read = size > 64 * torch.finfo(gradient.dtype).eps / size.numel()
            clear &= read
            told = bool((clear & (size > 0)).any())
            good = bool(((total <= coarse * size) | ~clear).all())
            if good:
                _require_all_read(z, g, read)
                told &= _require_no_temperature(z, g)
        if not good:
            raise kc.ConventionError(
                "The loss is no cross-entropy of logits along the last axis of the "
                f"outputs, of shape {tuple(z.shape)}. Pass the loss module to KFAC, such "
                "as likelihood=nn.MSELoss(), or likelihood=nn.NLLLoss() for outputs of a "
                "log_softmax, or one of 'categorical', 'bernoulli', 'gaussian'. With "
                "classes on the second axis say output=lambda z: z.movedim(1, -1), and for "
                "a loss of z / T output=lambda z: z / T. If logits are made of the "
                "outputs later, say output=None and call kfac.observe(logits)."
            )
        return told


def _require_all_read(z: Any, g: Any, read: Any) -> None:
    """Refuse a cross-entropy of some of the outputs, as of masked logits.

    An output that it reads has no gradient only if the target is the prediction to all
    digits.
    """
    if z.dtype == torch.float16:
        return  # Small gradients are zero.
    likely = torch.softmax(z.double(), -1) > 1e-3
    left_out = (g == 0) & likely & read[..., None]
    if bool(left_out.any()):
        raise kc.ConventionError(
            "The loss does not read all outputs of a row, as a cross-entropy of masked "
            "logits or of some of the classes. Mask them in the model; or say "
            "likelihood='categorical', and which logits the loss reads, as in "
            "output=lambda z: z[..., :k]."
        )


def _require_no_temperature(z: Any, g: Any) -> bool:
    """Refuse a cross-entropy of scaled logits; return whether it could be told."""
    if z.shape[-1] < 3:
        return True
    found = likelihoods.temperature(z, g)
    if found is None or math.isnan(found):
        # Of narrow dtypes rows may be too alike for ever.
        return found is None or z.dtype.itemsize < 4
    raise kc.ConventionError(
        f"The loss is a cross-entropy of the outputs divided by {found:.3g}, and not of "
        "themselves. Say likelihood='categorical', output=lambda z: z / "
        f"{found:.3g}; or divide in the model."
    )
