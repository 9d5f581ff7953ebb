"""Independent Bernoulli distributions, from logits (sigmoid cross-entropy).

Conventions.  ``natural`` holds logits z, shape ``(N, ..., D)``; ``p = sigmoid(z)`` for each
of D independent targets, which are 0 or 1 (any real dtype or booleans; numbers between
are taken as probabilities), of the same shape.  The log-probability of a row is the sum
over its D targets.  The inner space is as wide as the outputs, and

    F = H = diag(p (1 - p)),        B = diag(sqrt(p (1 - p))).

All formulas use ``exp(-|z|)``, so that nothing overflows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kfac_core.array import Array, Namespace
from kfac_core.losses.loss import Loss
from kfac_core.losses.noise import NoiseDistribution
from kfac_core.losses.outputs import is_uniform, wide_companion, wide_natural


@dataclass(frozen=True)
class Bernoulli(Loss):
    """Sigmoid cross-entropy, ``-log p = sum_d softplus(z_d) - y_d z_d``.

    Logits are natural parameters: the Hessian of the loss is the Fisher matrix.  Targets
    beyond [0, 1], such as labels of -1 and 1, give NaN, which the statistics refuse.  See
    `kfac_core.losses.loss.Loss` for the arguments and errors of its functions.

    References
    ----------
    Martens and Grosse (2015), arXiv:1503.05671: its autoencoders have this loss.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> loss = kc.losses.Bernoulli()
    >>> loss.gradient(np.zeros((1, 2)), np.array([[0.0, 1.0]]))
    array([[ 0.5, -0.5]])
    """

    noise_distribution: ClassVar[NoiseDistribution] = "uniform"

    def log_probability(self, natural: Array, targets: Array, /) -> Array:
        """Return ``-sum_d [ y softplus(-z) + (1 - y) softplus(z) ]``."""
        z, y, xp = _opened(natural, targets)
        return -xp.sum(y * _softplus(-z, xp) + (1.0 - y) * _softplus(z, xp), axis=-1)

    def gradient(self, natural: Array, targets: Array, /) -> Array:
        """Return ``p - y``, as ``(1 - y) sigmoid(z) - y sigmoid(-z)``."""
        z, y, xp = _opened(natural, targets)
        # sigmoid(z) - y without its cancellation for confident, correct outputs.
        return (1.0 - y) * _sigmoid(z, xp) - y * _sigmoid(-z, xp)

    def sample(self, natural: Array, noise: Array, /) -> Array:
        """Return 1 where u < p, else 0, in the dtype of the outputs.

        Notes
        -----
        Noise outside of [0, 1] gives NaN.
        """
        z, xp = wide_natural(natural, noise=noise)
        u = wide_companion(noise, z.shape, "noise", dtype=z.dtype, xp=xp)
        drawn = xp.astype(u < _sigmoid(z, xp), z.dtype)
        return xp.where(is_uniform(u), drawn, xp.nan)

    def fisher_multiply(self, natural: Array, v: Array, /) -> Array:
        """Return ``F v = p (1 - p) v``."""
        root, v = _root_variance(natural, v)
        return root * (root * v)

    def fisher_factor_multiply(self, natural: Array, v: Array, /) -> Array:
        """Return ``B v = sqrt(p (1 - p)) v``."""
        root, v = _root_variance(natural, v)
        return root * v


def _opened(natural: Array, targets: Array) -> tuple[Array, Array, Namespace]:
    """Return z, y and the namespace, checked and wide; y is NaN beyond [0, 1]."""
    z, xp = wide_natural(natural, targets=targets)
    y = wide_companion(targets, z.shape, "targets", dtype=z.dtype, xp=xp, any_real=True)
    # Targets of -1 and 1 belong to another loss; soft targets may exceed 1 by rounding.
    return z, xp.where(xp.abs(y - 0.5) <= 0.501, y, xp.nan), xp


def _root_variance(natural: Array, v: Array) -> tuple[Array, Array]:
    """Return ``sqrt(p (1 - p)) = h / (1 + h^2)`` with ``h = exp(-|z| / 2)``, and v."""
    z, xp = wide_natural(natural, v=v)
    v = wide_companion(v, z.shape, "v", dtype=z.dtype, xp=xp)
    # sqrt(p (1 - p)) by the decaying exponential, which never overflows.
    half = xp.exp(-0.5 * xp.abs(z))
    return half / (1.0 + half * half), v


def _sigmoid(z: Array, xp: Namespace) -> Array:
    small = xp.exp(-xp.abs(z))
    return xp.where(z >= 0, xp.ones_like(z), small) / (1.0 + small)


def _softplus(z: Array, xp: Namespace) -> Array:
    above = xp.where(z > 0, z, xp.zeros_like(z))
    return above + xp.log1p(xp.exp(-xp.abs(z)))
