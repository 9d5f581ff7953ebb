"""Squared error, as the Gaussian likelihood that it is.

Conventions.  The loss of a row is ``scale |y - z|^2``, the sum over its D outputs: scale 1
is the plain sum of squares, 1/2 the one whose Hessian is the identity, 1/D the mean over
outputs that many frameworks call mean squared error (say ``loss="mean"`` for the mean
over examples; it is not part of the scale).  It is, up to a constant, the negative
log-probability of a Gaussian of variance ``1 / (2 scale)``, and

    F = H = 2 scale I,        B = sqrt(2 scale) I.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kfac_core.array.backend import Array
from kfac_core.losses.gaussian import Gaussian
from kfac_core.losses.noise import NoiseDistribution
from kfac_core.losses.outputs import require_positive

__all__ = ["SquaredError"]


@dataclass(frozen=True, kw_only=True)
class SquaredError:
    """``scale |y - z|^2``, with outputs and targets of shape ``(N, ..., D)``.

    See `kfac_core.losses.loss.Loss` for the arguments and errors of its functions.

    Parameters
    ----------
    scale : float
        Finite and positive.  It has no default, since frameworks differ.

    Raises
    ------
    ConventionError
        For any other scale.

    Examples
    --------
    >>> from kfac_core.losses import SquaredError
    >>> mean_over_3_outputs = SquaredError(scale=1 / 3)
    """

    scale: float

    noise_distribution: ClassVar[NoiseDistribution] = "normal"

    def __post_init__(self) -> None:
        require_positive(self.scale, "scale")

    @property
    def likelihood(self) -> Gaussian:
        """The Gaussian of variance ``1 / (2 scale)``."""
        return Gaussian(variance=0.5 / self.scale)

    def output_size(self, target_size: int, /) -> int:
        """Return the number of targets itself."""
        return target_size

    def inner_shape(self, natural: Array, /) -> tuple[int, ...]:
        """Return ``(N, ..., D)``."""
        return tuple(natural.shape)

    def noise_shape(self, natural: Array, /) -> tuple[int, ...]:
        """Return ``(N, ..., D)``: one standard normal number a target."""
        return tuple(natural.shape)

    def log_probability(self, natural: Array, targets: Array, /) -> Array:
        """Return ``-scale |y - z|^2 - D/2 log(pi / scale)``: normalized, as for others."""
        return self.likelihood.log_probability(natural, targets)

    def gradient(self, natural: Array, targets: Array, /) -> Array:
        """Return ``2 scale (z - y)``."""
        return self.likelihood.gradient(natural, targets)

    def sample(self, natural: Array, noise: Array, /) -> Array:
        """Return ``z + e / sqrt(2 scale)`` for standard normal e."""
        return self.likelihood.sample(natural, noise)

    def sampled_gradient(self, natural: Array, noise: Array, /) -> Array:
        """Return ``-sqrt(2 scale) e``."""
        return self.likelihood.sampled_gradient(natural, noise)

    def fisher_multiply(self, natural: Array, v: Array, /) -> Array:
        """Return ``F v = 2 scale v``."""
        return self.likelihood.fisher_multiply(natural, v)

    def fisher_factor_multiply(self, natural: Array, v: Array, /) -> Array:
        """Return ``B v = sqrt(2 scale) v``."""
        return self.likelihood.fisher_factor_multiply(natural, v)

    # The Hessian of the loss is the Fisher matrix, and the factor is symmetric.
    fisher_factor_transpose_multiply = fisher_factor_multiply
    ggn_multiply = fisher_multiply
    ggn_factor_multiply = fisher_factor_multiply
    ggn_factor_transpose_multiply = fisher_factor_multiply
