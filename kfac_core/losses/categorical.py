"""The categorical distribution of C classes, from logits (softmax cross-entropy).

Conventions.  ``natural`` holds logits z, shape ``(N, ..., C)``; ``p = softmax(z)`` along
the last axis.  A logit of minus infinity excludes a class.  Targets are integer labels
in [0, C), shape ``(N, ...)``, or floating rows of probabilities, shape ``(N, ..., C)``
(one-hot rows, smoothed labels).  A label outside of [0, C) gives NaN, which the
statistics reject unless their mask leaves that row out.

With ``q = sqrt(p)``, and the inner space as wide as the outputs,

    F = H = diag(p) - p p^T,        B = diag(q) - p q^T.

For rows that the network is sure about, the entries of the likeliest class are
differences of nearly equal numbers; they are computed from the probabilities of the
other classes, so that they keep their relative accuracy in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kfac_core import errors
from kfac_core.array import Array, Namespace
from kfac_core.array import namespaces as ns
from kfac_core.losses import outputs
from kfac_core.losses.loss import Loss
from kfac_core.losses.noise import NoiseDistribution


@dataclass(frozen=True)
class Categorical(Loss):
    """Softmax cross-entropy, ``-log p = logsumexp(z) - z_y``.

    Logits are natural parameters: the Hessian of the loss is the Fisher matrix.  See
    `kfac_core.losses.loss.Loss` for the arguments and errors of its functions.

    References
    ----------
    Martens and Grosse (2015), arXiv:1503.05671: the Fisher matrix of a network whose
    outputs parametrize a distribution.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.losses import Categorical
    >>> loss = Categorical()
    >>> loss.gradient(np.zeros((1, 2)), np.array([0]))
    array([[-0.5,  0.5]])
    """

    noise_distribution: ClassVar[NoiseDistribution] = "uniform"

    def noise_shape(self, natural: Array, /) -> tuple[int, ...]:
        """Return ``(N, ...)``: one uniform number a row."""
        return tuple(natural.shape[:-1])

    def log_probability(self, natural: Array, targets: Array, /) -> Array:
        """Return ``z_y - logsumexp(z)``, or ``sum_c t_c log p_c`` for rows t."""
        z, xp = outputs.wide_natural(natural, targets=targets)
        log_p = _log_softmax(z, xp)
        if not outputs.is_integral(xp, targets):
            t = _rows_of_targets(targets, z, xp)
            # An excluded class has log p = -inf, and 0 * inf is NaN.
            log_p = xp.where(t == 0, xp.zeros_like(log_p), log_p)
            return xp.sum(t * log_p, axis=-1)
        hit, valid = _one_hot(targets, z, xp)
        picked = xp.sum(xp.where(hit, log_p, xp.zeros_like(log_p)), axis=-1)
        return xp.where(valid[..., 0], picked, xp.nan)

    def gradient(self, natural: Array, targets: Array, /) -> Array:
        """Return ``p - e_y``, or ``p sum(t) - t`` for rows t."""
        z, xp = outputs.wide_natural(natural, targets=targets)
        p = xp.exp(_log_softmax(z, xp))
        if not outputs.is_integral(xp, targets):
            t = _rows_of_targets(targets, z, xp)
            return p * xp.sum(t, axis=-1, keepdims=True) - t
        return _gradient(p, targets, xp)

    def sampled_gradient(self, natural: Array, noise: Array, /) -> Array:
        """Return `gradient` at the labels of `sample`, from probabilities taken once."""
        p, u, xp = _opened_to_sample(natural, noise)
        return _gradient(p, _label(p, u, xp), xp)

    def sample(self, natural: Array, noise: Array, /) -> Array:
        """Return labels by inversion: the first class whose cumulated p exceeds u.

        Notes
        -----
        Noise outside of [0, 1] gives the label -1, at which the gradient is NaN.
        A class of probability zero is never drawn, however the sums are rounded.
        Probabilities are met to about ``C eps`` of the dtype.
        """
        return _label(*_opened_to_sample(natural, noise))

    def fisher_multiply(self, natural: Array, v: Array, /) -> Array:
        """Return ``F v = p * (v - p.v)``."""
        z, v, p, xp = _opened(natural, v)
        return p * _less_rank_one(v, xp.ones_like(p), p, z, p, xp)

    def fisher_factor_multiply(self, natural: Array, v: Array, /) -> Array:
        """Return ``B v = q * v - p (q.v)``."""
        z, v, p, xp = _opened(natural, v)
        q = xp.exp(0.5 * _log_softmax(z, xp))
        return q * _less_rank_one(v, q, q, z, p, xp)

    def fisher_factor_transpose_multiply(self, natural: Array, v: Array, /) -> Array:
        """Return ``B^T v = q * (v - p.v)``."""
        z, v, p, xp = _opened(natural, v)
        q = xp.exp(0.5 * _log_softmax(z, xp))
        return q * _less_rank_one(v, xp.ones_like(p), p, z, p, xp)


def _opened(natural: Array, v: Array) -> tuple[Array, Array, Array, Namespace]:
    """Return z, v, p and the namespace, checked and wide."""
    z, xp = outputs.wide_natural(natural, v=v)
    v = outputs.wide_companion(v, z.shape, "v", dtype=z.dtype, xp=xp)
    return z, v, xp.exp(_log_softmax(z, xp)), xp


def _opened_to_sample(natural: Array, noise: Array) -> tuple[Array, Array, Namespace]:
    """Return p, the noise and the namespace, checked and wide."""
    z, xp = outputs.wide_natural(natural, noise=noise)
    u = outputs.wide_companion(noise, z.shape[:-1], "noise", dtype=z.dtype, xp=xp)
    return xp.exp(_log_softmax(z, xp)), u, xp


def _label(p: Array, u: Array, xp: Namespace) -> Array:
    # Parallel cumulative sums need not be monotone, so exclude impossible classes.
    cumulated = xp.where(p > 0, xp.cumulative_sum(p, axis=-1), xp.zeros_like(p))
    total = xp.max(cumulated, axis=-1, keepdims=True)
    below_one = 1.0 - ns.roundoff_of(p.dtype, xp=xp)
    threshold = xp.minimum(u[..., None] * total, total * below_one)
    label = xp.argmax(xp.astype(cumulated > threshold, xp.int32), axis=-1)
    return xp.where(outputs.is_uniform(u), label, -1)


def _gradient(p: Array, labels: Array, xp: Namespace) -> Array:
    hit, valid = _one_hot(labels, p, xp)
    # p_y - 1 is minus the sum of the others, which does not cancel for p_y near 1.
    others = xp.sum(xp.where(hit, xp.zeros_like(p), p), axis=-1, keepdims=True)
    return xp.where(valid, xp.where(hit, -others, p), xp.nan)


def _log_softmax(z: Array, xp: Namespace) -> Array:
    shifted = z - xp.max(z, axis=-1, keepdims=True)
    return shifted - xp.log(xp.sum(xp.exp(shifted), axis=-1, keepdims=True))


def _less_rank_one(
    v: Array, a: Array, b: Array, z: Array, p: Array, xp: Namespace
) -> Array:
    """Return ``v - a (b.v)`` where ``a * b = p``, accurate also where p_c is nearly 1.

    For the likeliest class t this is ``v_t (1 - p_t) - a_t sum_{c != t} b_c v_c``, with
    ``1 - p_t`` as the sum of the other probabilities.
    """
    top = _classes(xp.argmax(z, axis=-1, keepdims=True), z, xp)
    complement = xp.sum(xp.where(top, xp.zeros_like(p), p), axis=-1, keepdims=True)
    products = b * v
    others = xp.sum(
        xp.where(top, xp.zeros_like(products), products), axis=-1, keepdims=True
    )
    full = xp.sum(products, axis=-1, keepdims=True)
    return xp.where(top, v * complement - a * others, v - a * full)


def _rows_of_targets(targets: Array, z: Array, xp: Namespace) -> Array:
    """Return rows t of what is no integer; labels that are none are refused as such."""
    if targets.ndim < z.ndim:
        raise errors.DtypeError(
            f"Expected `targets` to be integer labels of shape {tuple(z.shape[:-1])}, or "
            f"rows of probabilities of shape {tuple(z.shape)}, got {targets.dtype} of "
            f"shape {tuple(targets.shape)}. Make integers of labels."
        )
    return outputs.wide_companion(targets, z.shape, "targets", dtype=z.dtype, xp=xp)


def _one_hot(labels: Array, z: Array, xp: Namespace) -> tuple[Array, Array]:
    """Return where the label's class is, and which labels are in range."""
    outputs.require_last_axes(labels, tuple(z.shape[:-1]), "targets")
    if xp.iinfo(labels.dtype).bits < 32:
        # An 8-bit index cannot count a thousand classes.
        labels = ns.cast(xp, labels, xp.int32)
    labels = labels[..., None]
    return _classes(labels, z, xp), (labels >= 0) & (labels < z.shape[-1])


def _classes(index: Array, z: Array, xp: Namespace) -> Array:
    """Return where along the last axis the class of an index ``(..., 1)`` is."""
    return index == xp.arange(z.shape[-1], dtype=index.dtype, device=ns.device_of(z))
