"""Likelihoods by name, and losses that are means over outputs too.

Conventions.  A *row* is one vector of P outputs: of an example, a token, a pixel.  The
loss is ``sum_n w l_n`` or its mean over the R rows, with ``l_n = -log p(y_n | z_n)`` the
likelihood's loss of a row and w the weight that all rows have in common.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kfac_core import errors
from kfac_core.losses.bernoulli import Bernoulli
from kfac_core.losses.categorical import Categorical
from kfac_core.losses.gaussian import Gaussian
from kfac_core.losses.loss import Loss

__all__ = ["RowLoss", "row_loss"]

_NAMED: dict[str, Loss] = {
    "categorical": Categorical(),
    "bernoulli": Bernoulli(),
    "gaussian": Gaussian(variance=1.0),
}
_NEEDED = ("sampled_gradient", "fisher_factor_multiply", "noise_shape", "inner_shape")


@dataclass(frozen=True, kw_only=True)
class RowLoss:
    """The loss of one row of outputs, ``l`` or ``l / P``.

    Parameters
    ----------
    likelihood : Loss
        The likelihood of a row, whose loss is ``l = -log p(y | z)``.
    mean_over_outputs : bool
        Whether the row's loss is ``l / P`` for P outputs, as in losses that are means over
        all elements of an (N, P) array.
    """

    likelihood: Loss
    mean_over_outputs: bool = False

    def weight(self, outputs: int, /) -> float:
        """Return the weight of ``l``: 1, or ``1 / P`` for P outputs."""
        return 1.0 / outputs if self.mean_over_outputs else 1.0


def row_loss(likelihood: Any, /) -> RowLoss:
    """Return the loss of a row from a name, a likelihood or a `RowLoss`.

    Parameters
    ----------
    likelihood : {"categorical", "bernoulli", "gaussian"}, Loss or RowLoss
        ``"categorical"``: cross-entropy of logits; ``"bernoulli"``: the sum over outputs
        of the sigmoid cross-entropy; ``"gaussian"``: half the squared error, summed over
        outputs.  For a mean over outputs write ``RowLoss(likelihood=...,
        mean_over_outputs=True)``.

    Returns
    -------
    RowLoss
        The loss of one row.

    Raises
    ------
    ConventionError
        For an unknown name, and for an object that is no likelihood.
    """
    if isinstance(likelihood, RowLoss):
        return likelihood
    if isinstance(likelihood, str) and likelihood in _NAMED:
        return RowLoss(likelihood=_NAMED[likelihood])
    lacking = [name for name in _NEEDED if not hasattr(likelihood, name)]
    if lacking or isinstance(likelihood, type):
        raise errors.ConventionError(
            f"Expected `likelihood` to be one of {', '.join(map(repr, _NAMED))}, or an "
            "object of `kfac_core.losses` such as `Gaussian(variance=1.0)`; got "
            f"{likelihood!r}."
        )
    return RowLoss(likelihood=likelihood)
