"""The Gaussian distribution with mean and variance both from the network.

Conventions.  ``natural`` is the concatenation, along the last axis, of the mean m and of
the **logarithm** of the variance s (natural logarithm; not of the standard deviation):
shape ``(N, ..., 2 D)``, the D means first.  So every output is a valid parameter.  Targets
are floating, of shape ``(N, ..., D)``.  The inner space is as wide as the outputs,
``(N, ..., 2 D)``, and

    F = diag(exp(-s), 1/2),        B = diag(exp(-s/2), 1/sqrt(2)).

A network that gives the variance itself has another Fisher matrix: take the logarithm
inside the network, as its last operation.

There is no Gauss-Newton matrix.  The Hessian of the loss with respect to (m, s) depends
on the target, and its determinant for each target is ``-(y - m)^2 exp(-2 s) / 2``: it is
never positive definite.  Its expectation over the model's targets is F.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NoReturn

from kfac_core import errors
from kfac_core.array import Array, Namespace
from kfac_core.losses.loss import Loss
from kfac_core.losses.noise import NoiseDistribution
from kfac_core.losses.outputs import wide_companion, wide_natural


@dataclass(frozen=True)
class GaussianLearnedVariance(Loss):
    """``-log p = sum_d [ (y - m)^2 exp(-s) / 2 + s / 2 ] + D/2 log(2 pi)``.

    See `kfac_core.losses.loss.Loss` for the arguments and errors of its functions.

    References
    ----------
    Martens (2020), arXiv:1412.1193: for which parametrizations the Fisher matrix is a
    Gauss-Newton matrix, and that this is none of them.
    """

    noise_distribution: ClassVar[NoiseDistribution] = "normal"

    def noise_shape(self, natural: Array, /) -> tuple[int, ...]:
        """Return ``(N, ..., D)``: one standard normal number a target."""
        return (*natural.shape[:-1], natural.shape[-1] // 2)

    def log_probability(self, natural: Array, targets: Array, /) -> Array:
        """Return ``-sum_d [ (y - m)^2 exp(-s) + s + log(2 pi) ] / 2``."""
        m, s, y, xp = _opened(natural, targets, "targets")
        standard = (y - m) * xp.exp(-0.5 * s)
        terms = standard * standard + s + math.log(2.0 * math.pi)
        return -0.5 * xp.sum(terms, axis=-1)

    def gradient(self, natural: Array, targets: Array, /) -> Array:
        """Return ``((m - y) exp(-s), (1 - (y - m)^2 exp(-s)) / 2)``."""
        m, s, y, xp = _opened(natural, targets, "targets")
        inverse_deviation = xp.exp(-0.5 * s)
        return _gradient((y - m) * inverse_deviation, inverse_deviation, xp)

    def sample(self, natural: Array, noise: Array, /) -> Array:
        """Return ``m + exp(s/2) e`` for standard normal e."""
        m, s, e, xp = _opened(natural, noise, "noise")
        return m + xp.exp(0.5 * s) * e

    def sampled_gradient(self, natural: Array, noise: Array, /) -> Array:
        """Return ``(-exp(-s/2) e, (1 - e^2) / 2)``."""
        _, s, e, xp = _opened(natural, noise, "noise")
        return _gradient(e, xp.exp(-0.5 * s), xp)

    def fisher_multiply(self, natural: Array, v: Array, /) -> Array:
        """Return ``F v = (exp(-s) v_m, v_s / 2)``."""
        return self.fisher_factor_multiply(
            natural, self.fisher_factor_multiply(natural, v)
        )

    def fisher_factor_multiply(self, natural: Array, v: Array, /) -> Array:
        """Return ``B v = (exp(-s/2) v_m, v_s / sqrt(2))``."""
        z, xp = wide_natural(natural, multiple_of=2, v=v)
        v = wide_companion(v, z.shape, "v", dtype=z.dtype, xp=xp)
        half = z.shape[-1] // 2
        for_mean = xp.exp(-0.5 * z[..., half:]) * v[..., :half]
        # The Fisher of (mean, log-variance) is diag(1 / variance, 1/2).
        return xp.concat([for_mean, v[..., half:] * math.sqrt(0.5)], axis=-1)

    # The factor is diagonal, hence its own transpose.

    def ggn_multiply(self, natural: Array, v: Array, /) -> NoReturn:
        """Raise `UnsupportedError`: the Hessian is never positive definite."""
        raise errors.UnsupportedError(
            "The Gaussian loss with a learned variance has no Gauss-Newton matrix: the "
            "Hessian with respect to mean and log-variance depends on the targets and is "
            "not positive semidefinite. Use a Fisher mode ('gradients', "
            "'curvature_prop' or 'exact')."
        )

    ggn_factor_multiply = ggn_multiply


def _opened(
    natural: Array, companion: Array, name: str
) -> tuple[Array, Array, Array, Namespace]:
    """Return m, s, the companion and the namespace, checked and wide."""
    z, xp = wide_natural(natural, multiple_of=2, **{name: companion})
    half = z.shape[-1] // 2
    shape = (*z.shape[:-1], half)
    companion = wide_companion(companion, shape, name, dtype=z.dtype, xp=xp)
    return z[..., :half], z[..., half:], companion, xp


def _gradient(standard: Array, inverse_deviation: Array, xp: Namespace) -> Array:
    """Return the gradient from the standardized targets ``e = (y - m) exp(-s/2)``."""
    for_mean = -standard * inverse_deviation
    return xp.concat([for_mean, 0.5 * (1.0 - standard * standard)], axis=-1)
