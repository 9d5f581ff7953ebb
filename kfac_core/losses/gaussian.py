"""The Gaussian distribution of a mean, with one fixed variance.

Conventions.  ``natural`` holds the mean m, shape ``(N, ..., D)``; targets are floating and
of the same shape.  The variance is a number, the same for all D.  The inner space is as
wide as the outputs, and

    F = H = I / variance,        B = I / sqrt(variance).

Squared error ``scale |y - z|^2``, the sum over the D outputs of a row, is the same up to a
constant, with variance ``1 / (2 scale)``: scale 1 is the plain sum of squares, 1/2 the one
whose Hessian is the identity, 1/D the mean over outputs that many frameworks call mean
squared error (the mean over examples is ``reduction="mean"``, and no part of the scale).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from kfac_core.array import Array
from kfac_core.losses.loss import Loss
from kfac_core.losses.noise import NoiseDistribution
from kfac_core.losses.outputs import require_positive, wide_companion, wide_natural


class _OfVariance(Loss):
    """The functions of a Gaussian distribution, whatever its variance is called."""

    noise_distribution: ClassVar[NoiseDistribution] = "normal"

    @property
    @abstractmethod
    def _variance(self) -> float:
        """The variance."""

    def log_probability(self, natural: Array, targets: Array, /) -> Array:
        """Return ``-|y - m|^2 / (2 variance) - D/2 log(2 pi variance)``."""
        m, xp = wide_natural(natural, targets=targets)
        y = wide_companion(targets, m.shape, "targets", dtype=m.dtype, xp=xp)
        squares = xp.sum((y - m) * (y - m), axis=-1)
        constant = 0.5 * m.shape[-1] * math.log(2.0 * math.pi * self._variance)
        return squares * (-0.5 / self._variance) - constant

    def gradient(self, natural: Array, targets: Array, /) -> Array:
        """Return ``(m - y) / variance``."""
        m, xp = wide_natural(natural, targets=targets)
        y = wide_companion(targets, m.shape, "targets", dtype=m.dtype, xp=xp)
        return (m - y) * (1.0 / self._variance)

    def sample(self, natural: Array, noise: Array, /) -> Array:
        """Return ``m + sqrt(variance) e`` for standard normal e."""
        m, xp = wide_natural(natural, noise=noise)
        e = wide_companion(noise, m.shape, "noise", dtype=m.dtype, xp=xp)
        return m + e * math.sqrt(self._variance)

    def sampled_gradient(self, natural: Array, noise: Array, /) -> Array:
        """Return ``-e / sqrt(variance)``, which adding e to a large mean would round."""
        m, xp = wide_natural(natural, noise=noise)
        e = wide_companion(noise, m.shape, "noise", dtype=m.dtype, xp=xp)
        # Not by `sample`: (m - (m + e s)) / s^2 would cancel for large m.
        return e * (-1.0 / math.sqrt(self._variance))

    def fisher_multiply(self, natural: Array, v: Array, /) -> Array:
        """Return ``F v = v / variance``."""
        return self._scaled(natural, v, 1.0 / self._variance)

    def fisher_factor_multiply(self, natural: Array, v: Array, /) -> Array:
        """Return ``B v = v / sqrt(variance)``."""
        return self._scaled(natural, v, 1.0 / math.sqrt(self._variance))

    def _scaled(self, natural: Array, v: Array, factor: float) -> Array:
        m, xp = wide_natural(natural, v=v)
        return wide_companion(v, m.shape, "v", dtype=m.dtype, xp=xp) * factor


@dataclass(frozen=True, kw_only=True)
class Gaussian(_OfVariance):
    """Least squares, ``-log p = |y - m|^2 / (2 variance) + D/2 log(2 pi variance)``.

    See `kfac_core.losses.loss.Loss` for the arguments and errors of its functions.

    Parameters
    ----------
    variance : float
        Finite and positive.  1 is half the sum of squares, 1/2 the sum of squares; see
        also `SquaredError`.

    Raises
    ------
    ConventionError
        For any other variance.

    References
    ----------
    Martens (2020), arXiv:1412.1193: squared error as a likelihood.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> loss = kc.losses.Gaussian(variance=1.0)
    >>> outputs, targets = np.array([[1.0, 3.0]]), np.array([[0.0, 1.0]])
    >>> loss.gradient(outputs, targets)
    array([[1., 2.]])
    """

    variance: float

    def __post_init__(self) -> None:
        require_positive(self.variance, "variance")

    @property
    def _variance(self) -> float:
        return self.variance


@dataclass(frozen=True, kw_only=True)
class SquaredError(_OfVariance):
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

    def __post_init__(self) -> None:
        require_positive(self.scale, "scale")

    @property
    def _variance(self) -> float:
        # scale |y - z|^2 is the negative log-likelihood of a Gaussian of this variance.
        return 0.5 / self.scale
