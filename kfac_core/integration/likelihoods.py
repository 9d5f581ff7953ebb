"""Likelihoods by name, and losses that are also means over outputs.

Conventions.  A *row* is one vector of P outputs: of an example, a token, a pixel.  The
loss is ``sum_n c l_n`` or its mean over the R rows, with ``l_n = -log p(y_n | z_n)`` the
likelihood's loss of a row and c the factor of `RowLoss.multiple`.  Curvature, damping and
KL clip are those of the mean of l, and gradients are divided by c before anything reads
them: so one problem takes the same steps in each notation of its loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kfac_core import constraints, errors
from kfac_core.losses.bernoulli import Bernoulli
from kfac_core.losses.categorical import Categorical
from kfac_core.losses.gaussian import Gaussian, SquaredError
from kfac_core.losses.loss import Loss

_NAMED: dict[str, Loss] = {
    "categorical": Categorical(),
    "bernoulli": Bernoulli(),
    "gaussian": Gaussian(variance=1.0),
}
_NEEDED = ("sampled_gradient", "fisher_factor_multiply", "noise_shape", "inner_shape")


@dataclass(frozen=True, kw_only=True)
class RowLoss:
    """The loss of one row of outputs, ``c l``, with ``c = factor`` or ``factor / P``.

    Parameters
    ----------
    likelihood : Loss
        The likelihood of a row, whose loss is ``l = -log p(y | z)``.
    factor : float
        What the loss has in the place of one l: 2 for a squared error without the half.
    mean_over_outputs : bool
        Whether this is divided by the number P of outputs, as in losses that are means
        over all elements of an (N, P) array.
    """

    likelihood: Loss
    factor: float = 1.0
    mean_over_outputs: bool = False

    def __post_init__(self) -> None:
        """Check the factor."""
        constraints.require_range("factor", self.factor, constraints.POSITIVE)

    def multiple(self, outputs: int, /) -> float:
        """Return c for P outputs, the factor from ``l`` to the loss of a row."""
        return self.factor / outputs if self.mean_over_outputs else self.factor


def row_loss(likelihood: Any, /) -> RowLoss:
    """Return the loss of a row from a name, a likelihood or a `RowLoss`.

    Parameters
    ----------
    likelihood : {"categorical", "bernoulli", "gaussian"}, Loss or RowLoss
        ``"categorical"``: cross-entropy of logits; ``"bernoulli"``: the sum over outputs
        of the sigmoid cross-entropy; ``"gaussian"``: half the squared error, summed over
        outputs.  For a mean over outputs write ``RowLoss(likelihood=...,
        mean_over_outputs=True)``; ``SquaredError(scale=s)`` is the Gaussian of variance 1
        with the factor 2 s.

    Returns
    -------
    RowLoss
        The loss of one row.

    Raises
    ------
    ConventionError
        For an unknown name, and for an object that is not a likelihood.
    """
    if isinstance(likelihood, RowLoss):
        return likelihood
    if isinstance(likelihood, str) and likelihood in _NAMED:
        return RowLoss(likelihood=_NAMED[likelihood])
    if isinstance(likelihood, SquaredError):
        return RowLoss(likelihood=_NAMED["gaussian"], factor=2.0 * likelihood.scale)
    lacking = [name for name in _NEEDED if not hasattr(likelihood, name)]
    if lacking or isinstance(likelihood, type):
        raise errors.ConventionError(
            f"Expected `likelihood` to be one of {', '.join(map(repr, _NAMED))}, or an "
            "object of `kfac_core.losses` such as `Gaussian(variance=1.0)`; got "
            f"{likelihood!r}. PyTorch's KFAC takes loss modules too: nn.MSELoss()."
        )
    return RowLoss(likelihood=likelihood)
