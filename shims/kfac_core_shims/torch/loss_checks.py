"""Three checks of the loss that is differentiated, against the options of `KFAC`.

That the gradients of a cross-entropy sum to zero in each row; that it is the sum, or the
mean, over rows that `reduction` says; and that no gradient scaler multiplied it unknown to
`KFAC`.  Any other factor of the loss is one of the gradient, and not of the curvature.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from warnings import warn

import torch

import kfac_core as kc
from kfac_core_shims.torch import private
from kfac_core_shims.torch.likelihoods import CATEGORICAL, Criterion
from kfac_core_shims.torch.observation import Observation
from kfac_core_shims.torch.weights import RowWeights, weights_of_rows

_SCALED = 100.0
"""Largest gradient of a row that is taken for a factor of the loss, times that of one."""


class LossCheck:
    """Compares the loss that is differentiated with the criterion of `KFAC`.

    Parameters
    ----------
    criterion : Criterion
        Likelihood and reduction, and whether these were said or assumed.
    grad_scaler : torch.amp.GradScaler or None
        Scaler of the loss.
    empirical : bool
        Whether the loss's own gradients are squared.
    """

    def __init__(
        self, criterion: Criterion, *, grad_scaler: Any, empirical: bool
    ) -> None:
        self.criterion, self.grad_scaler = criterion, grad_scaler
        self.empirical = empirical
        self._is_checked = self._were_uniform = self._has_warned = False

    def look(self, z: torch.Tensor, gradient: torch.Tensor | None, /) -> RowWeights:
        """Check that a loss is of the likelihood, and return its weights of the rows.

        Parameters
        ----------
        z : torch.Tensor, shape (N, ..., P)
            The outputs.
        gradient : torch.Tensor or None
            What the loss sent back to them; None where it reads others.

        Raises
        ------
        kfac_core.ConventionError
            For a loss that is not of the likelihood.
        kfac_core.UnsupportedError
            For weights whose squares would count.
        """
        if not self._is_checked:
            self._is_checked = self._require_likelihood(z, gradient)
        if gradient is None:
            return RowWeights()
        scaler = self.scale_for_squares(z) if self.empirical else self._scaler_scale()
        weights = weights_of_rows(
            self.criterion,
            z,
            gradient,
            scaled_by=scaler,
            were_uniform=self._were_uniform,
        )
        self._were_uniform = self._were_uniform or weights.is_uniform
        if self.empirical and weights.is_weighted:
            raise kc.UnsupportedError(
                "The loss has weights of classes or rows, and fisher='empirical' would "
                "square them. Take fisher='gradients' or 'exact'."
            )
        return weights

    def unscaled_error(
        self, passes: Sequence[Observation], processes: int, /, *, clips: bool
    ) -> Exception | None:
        """Return an error, or warn, for gradients that only a scaled loss can have.

        Without squares and a KL clip a step is linear, and may be scaled back after it.
        """
        of_means = self.criterion.reduction == "mean"
        # What is said to be a cross-entropy may be any function of the outputs.
        is_bounded = self.empirical or self.criterion.assumed
        times = [
            (o.largest if is_bounded else o.scale or 0.0)
            * (o.rows if of_means else 1.0)
            / processes
            for o in passes
        ]
        largest = max(times, default=0.0)
        # A factor on the gradient alone may be divided out after the step.
        is_linear = not (self.empirical or clips)
        if is_linear or self.grad_scaler is not None:
            return None
        # What is not finite is refused later, as gradients and rows that are not.
        if not _SCALED < largest < math.inf:
            return None
        message = (
            f"Gradients of the loss at the outputs are up to {largest:.3g} times what a "
            f"{self.criterion.reduction} over rows has. Pass `grad_scaler` if a gradient "
            "scaler multiplied the loss, reduction='sum' if it is a sum, or "
            "reduction='mean' if gradients are divided before `step`."
        )
        if self.empirical or self.criterion.reduction_assumed:
            return kc.ConventionError(message)
        if not self._has_warned:
            self._has_warned = True
            warn(message, stacklevel=5)
        return None

    def require_reduction(
        self, scale: float, rows: float, /, *, is_sum: bool, is_mean: bool
    ) -> None:
        """Refuse a loss that is plainly of the other reduction.

        Parameters
        ----------
        scale : float
            What the loss multiplies the term of a row by.
        rows : float
            Rows of all passes and processes.
        is_sum, is_mean : bool
            Whether that is what a sum, or a mean, over rows does.
        """
        each = f"each row's term stands in the loss with a factor of {scale:.3g}"
        if self.criterion.reduction_assumed and is_sum and not is_mean:
            raise kc.ConventionError(
                f"Expected a loss that is a mean over its {rows:.0f} rows, and {each}. "
                "Pass reduction='sum' if it is a sum, or reduction='mean' if gradients "
                "are divided before `step`."
            )
        if self.criterion.reduction == "sum" and is_mean and not is_sum:
            raise kc.ConventionError(
                f"Expected a loss that is a sum over its {rows:.0f} rows, and {each}, as "
                "in a mean. Pass reduction='mean', or the loss module as `likelihood`."
            )

    def refuse_unequal_rows(self) -> None:
        """Raise if means over the rows of each process would pass for means over all."""
        if self.criterion.reduction == "mean":
            raise kc.ConventionError(
                "Processes have unequal numbers of rows, so the average of their means "
                "is not the mean over all rows, and the gradients do not show which of "
                "the two the loss is. Differentiate the sum over the rows of each "
                "process, and pass reduction='sum'; or use equal numbers of rows."
            )

    def scale_for_squares(self, z: Any) -> float:
        """Return what the caller's loss is multiplied by, for fisher="empirical"."""
        if self.grad_scaler is None and z.dtype == torch.float16:
            raise kc.ConventionError(
                "fisher='empirical' squares the gradients of the loss, which is scaled "
                "where outputs are float16. Pass the gradient scaler as `grad_scaler`, or "
                "take fisher='gradients'."
            )
        return self._scaler_scale()

    def is_overflow(self) -> bool:
        """Return whether the scaler will skip this step; raise before `unscale_`."""
        scaler = self.grad_scaler
        if scaler is None or not scaler.is_enabled():
            return False
        found_inf = private.overflows(scaler)
        if not found_inf:
            raise kc.NotReadyError(
                "The gradients are still multiplied by the scale of `grad_scaler`. Call "
                "scaler.unscale_(optimizer) before kfac.step()."
            )
        return any(float(x) > 0 for x in found_inf)

    def _scaler_scale(self) -> float:
        return 1.0 if self.grad_scaler is None else float(self.grad_scaler.get_scale())

    def _require_likelihood(self, z: Any, gradient: Any) -> bool:
        """Raise unless each row's gradient sums to zero; return whether that was visible.

        As of a cross-entropy of logits, whatever the labels and weights.  Where a
        probability is nearly one, roundoff is all that is left of the gradient.
        """
        criterion = self.criterion
        if criterion.row.likelihood != CATEGORICAL:
            return True
        if not criterion.assumed:
            if gradient is None or not bool(gradient.any()):
                return False
            if _reads_classes_second(z, gradient):
                raise kc.ConventionError(
                    "The loss reads classes on the second axis of the outputs, of shape "
                    f"{tuple(z.shape)}, and the likelihood on the last. Say "
                    "output=lambda z: z.movedim(1, -1)."
                )
            return True
        is_good, is_clear = gradient is not None and z.shape[-1] > 1, True
        if is_good:
            sums, sizes = _sums(gradient, -1)
            # Where one probability is nearly 1, the gradient is roundoff.
            clear = torch.softmax(z.float(), -1).amax(-1) < 1 - 1e-3
            # If the targets come from the model itself, the gradient is only roundoff.
            clear &= sizes > 64 * torch.finfo(gradient.dtype).eps / sizes.numel()
            is_clear = bool(clear.any())
            is_good = bool(((sums <= _coarse_sum(gradient) * sizes) | ~clear).all())
        if not is_good:
            raise kc.ConventionError(
                "The loss is not a cross-entropy of logits along the last axis of the "
                f"outputs, of shape {tuple(z.shape)}. Pass the loss module to KFAC, such "
                "as likelihood=nn.MSELoss(), or likelihood=nn.NLLLoss() for outputs of a "
                "log_softmax, or one of 'categorical', 'bernoulli', 'gaussian'. With "
                "classes on the second axis say output=lambda z: z.movedim(1, -1). If "
                "logits are computed from the outputs later, say output=None and call "
                "kfac.observe(logits)."
            )
        return is_clear


def _sums(g: Any, axis: int) -> tuple[Any, Any]:
    """Return the size of a gradient's sum along an axis, and the sum of its sizes."""
    wide = g.double()
    return wide.sum(axis).abs(), wide.abs().sum(axis)


def _coarse_sum(g: Any) -> float:
    return 2e-2 if g.dtype.itemsize < 4 else 1e-3


def _reads_classes_second(z: Any, g: Any) -> bool:
    """Whether a loss plainly reads classes on the second axis, as (N, C, d1, ...).

    Along the axis of the classes the gradient sums to zero, or has one entry for each
    label, as that of log-probabilities.
    """

    def is_of_classes(axis: int) -> bool:
        sums, sizes = _sums(g, axis)
        one_entry = ((g != 0).sum(axis) == 1) | (sizes == 0)
        return bool((sums <= _coarse_sum(g) * sizes).all() or one_entry.all())

    return z.ndim > 2 and is_of_classes(1) and not is_of_classes(-1)
