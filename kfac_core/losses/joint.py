"""Several heads with losses of their own, side by side: a joint distribution.

Conventions.  ``natural`` has the outputs of all heads on its last axis, one head after the
other, shape ``(N, ..., P)`` with ``P = sum(sizes)``.  Given the outputs, the targets of the
heads are independent, so that for losses l_k with weights w_k

    l = sum_k w_k l_k,      F = diag(w_k F_k),      B = diag(sqrt(w_k) B_k),

block-diagonal in the outputs; in the parameters that heads share, their curvatures add up.
Targets are a tuple, those of each head as its loss takes them.  A weight belongs to its
term of the loss: gradients have it, and what is drawn has its root, as F is linear in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from kfac_core import constraints, errors
from kfac_core.array import Array, Namespace
from kfac_core.array import namespaces as ns
from kfac_core.losses import outputs
from kfac_core.losses.loss import Loss
from kfac_core.losses.noise import NoiseDistribution


@dataclass(frozen=True, kw_only=True)
class Joint(Loss):
    """``sum_k w_k l_k`` of heads with losses of their own, such as classes and a value.

    See `kfac_core.losses.loss.Loss` for the arguments and errors of its functions.

    Parameters
    ----------
    losses : tuple of Loss
        Loss of each head.
    sizes : tuple of int
        Number of outputs of each head.
    weights : tuple of float, optional
        Weight of each head's loss, finite and positive; 1 by default.

    Raises
    ------
    ConventionError, ShapeError
        For tuples of other lengths or contents.

    Notes
    -----
    `log_probability` is ``-sum_k w_k l_k``, normalized where all weights are 1.  The mode
    ``"empirical"`` needs such weights: it would have their squares.

    References
    ----------
    Wu et al. (2017), arXiv:1708.05144, section 3.1: the Fisher matrix of the joint
    distribution of an actor's actions and a critic's values.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.losses import Categorical, Gaussian, Joint
    >>> loss = Joint(losses=(Categorical(), Gaussian(variance=1.0)), sizes=(2, 1))
    >>> targets = np.array([1]), np.array([[2.0]])
    >>> loss.gradient(np.zeros((1, 3)), targets)
    array([[ 0.5, -0.5, -2. ]])
    """

    losses: tuple[Loss, ...]
    sizes: tuple[int, ...]
    weights: tuple[float, ...] = ()

    noise_distribution: ClassVar[NoiseDistribution] = "uniform"

    def __post_init__(self) -> None:
        """Check the tuples."""
        constraints.require_options(
            self,
            losses=constraints.tuple_of(constraints.implementation_of(Loss)),
            sizes=constraints.tuple_of(constraints.SIZE),
            weights=constraints.tuple_of(constraints.POSITIVE),
        )
        if not self.weights:
            object.__setattr__(self, "weights", (1.0,) * len(self.losses))
        if not len(self.losses) == len(self.sizes) == len(self.weights) > 0:
            raise errors.ConventionError(
                "Expected `losses`, `sizes` and `weights` of one length, at least 1, got "
                f"{len(self.losses)}, {len(self.sizes)} and {len(self.weights)}."
            )

    @property
    def is_weighted(self) -> bool:
        """Whether some weight is not 1."""
        inner = [one.is_weighted for one in self.losses if isinstance(one, Joint)]
        return any(inner) or any(w != 1 for w in self.weights)

    def inner_shape(self, natural: Array, /) -> tuple[int, ...]:
        """Return ``(N, ..., I)``, I the sum of those of the heads."""
        return (*natural.shape[:-1], sum(self._inner_sizes(natural)))

    def noise_shape(self, natural: Array, /) -> tuple[int, ...]:
        """Return ``(N, ..., U)``: the numbers of each head, two for a normal one."""
        return (*natural.shape[:-1], sum(self._noise_sizes(natural)))

    def log_probability(self, natural: Array, targets: Array, /) -> Array:
        """Return ``sum_k w_k log p_k``."""
        terms = self._at_targets("log_probability", natural, targets)
        return sum(w * term for w, term in zip(self.weights, terms, strict=True))

    def gradient(self, natural: Array, targets: Array, /) -> Array:
        """Return the heads' gradients, times w_k."""
        return self._joined(self._at_targets("gradient", natural, targets))

    def sample(self, natural: Array, noise: Array, /) -> tuple[Array, ...]:
        """Return a tuple of the heads' samples."""
        return tuple(self._at_noise("sample", natural, noise))

    def sampled_gradient(self, natural: Array, noise: Array, /) -> Array:
        """Return the heads' gradients at samples, times ``sqrt(w_k)``."""
        drawn = self._at_noise("sampled_gradient", natural, noise)
        return self._joined(drawn, root=True)

    def fisher_multiply(self, natural: Array, v: Array, /) -> Array:
        """Return ``F v``, ``w_k F_k v_k`` of each head."""
        return self._product("fisher_multiply", natural, v)

    def fisher_factor_multiply(self, natural: Array, v: Array, /) -> Array:
        """Return ``B v``, ``sqrt(w_k) B_k v_k`` of each head."""
        return self._product("fisher_factor_multiply", natural, v, inner=True)

    def fisher_factor_transpose_multiply(self, natural: Array, v: Array, /) -> Array:
        """Return ``B^T v``, ``sqrt(w_k) B_k^T v_k`` of each head."""
        return self._product("fisher_factor_transpose_multiply", natural, v)

    def ggn_multiply(self, natural: Array, v: Array, /) -> Array:
        """Return ``H v``, ``w_k H_k v_k`` of each head."""
        return self._product("ggn_multiply", natural, v)

    def ggn_factor_multiply(self, natural: Array, v: Array, /) -> Array:
        """Return ``B v`` with ``B B^T = H``, ``sqrt(w_k) B_k v_k`` of each head."""
        return self._product("ggn_factor_multiply", natural, v, inner=True)

    def _heads(self, natural: Array) -> list[tuple[Loss, Array]]:
        """Return the loss and the outputs of each head."""
        constraints.require_shape("natural", natural, (..., sum(self.sizes)))
        return list(zip(self.losses, _split(natural, self.sizes), strict=True))

    def _inner_sizes(self, natural: Array) -> list[int]:
        return [loss.inner_shape(z)[-1] for loss, z in self._heads(natural)]

    def _noise_sizes(self, natural: Array) -> list[int]:
        sizes = []
        for loss, z in self._heads(natural):
            each = 2 if loss.noise_distribution == "normal" else 1
            sizes.append(each * math.prod(loss.noise_shape(z)[z.ndim - 1 :]))
        return sizes

    def _at_targets(self, name: str, natural: Array, targets: Array) -> list[Array]:
        """Return a function of outputs and targets, of each head."""
        natural, _ = outputs.wide_natural(natural)
        if not isinstance(targets, tuple | list) or len(targets) != len(self.losses):
            raise errors.ShapeError(
                f"Expected `targets` to be a tuple of {len(self.losses)}, the targets of "
                f"each head, got {constraints.shown(targets)}."
            )
        return self._each(name, natural, targets)

    def _at_noise(self, name: str, natural: Array, noise: Array) -> list[Array]:
        """Return a function of outputs and noise, of each head."""
        natural, xp = outputs.wide_natural(natural, noise=noise)
        shape = self.noise_shape(natural)
        u = outputs.wide_companion(noise, shape, "noise", dtype=natural.dtype, xp=xp)
        lead = u.shape[: u.ndim - len(shape)]
        parts = _split(u, self._noise_sizes(natural))
        for k, (loss, z) in enumerate(self._heads(natural)):
            if loss.noise_distribution == "normal":
                parts[k] = _normal(parts[k], xp)
            parts[k] = xp.reshape(parts[k], (*lead, *loss.noise_shape(z)))
        return self._each(name, natural, parts)

    def _product(
        self, name: str, natural: Array, v: Array, *, inner: bool = False
    ) -> Array:
        """Return a product of each head with its part of v, side by side."""
        natural, xp = outputs.wide_natural(natural, v=v)
        inner_sizes = self._inner_sizes(natural)
        sizes = inner_sizes if inner else self.sizes
        shape = (*natural.shape[:-1], sum(sizes))
        v = outputs.wide_companion(v, shape, "v", dtype=natural.dtype, xp=xp)
        products = self._each(name, natural, _split(v, sizes))
        return self._joined(products, root="factor" in name)

    def _each(self, name: str, natural: Array, others: Sequence[Array]) -> list[Array]:
        """Return a function of outputs and something else, of each head."""
        heads = zip(self._heads(natural), others, strict=True)
        return [getattr(loss, name)(z, other) for (loss, z), other in heads]

    def _joined(self, parts: list[Array], *, root: bool = False) -> Array:
        """Return what heads have, times their weights or the roots, side by side."""
        factors = [math.sqrt(w) if root else w for w in self.weights]
        scaled = [w * part for w, part in zip(factors, parts, strict=True)]
        return ns.own_namespace(parts[0]).concat(scaled, axis=-1)


def refuse_squared_weights(loss: object, /) -> None:
    """Raise if gradients of a loss, squared, would have squares of weights of its heads.

    Raises
    ------
    UnsupportedError
        For a `Joint` with weights other than 1.
    """
    if isinstance(loss, Joint) and loss.is_weighted:
        raise errors.UnsupportedError(
            "The heads of the loss have weights, and 'empirical' would square them. Take "
            "'gradients' or 'exact', or weights of 1."
        )


def _split(x: Array, sizes: Sequence[int]) -> list[Array]:
    ends = accumulate(sizes)
    return [x[..., end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _normal(u: Array, xp: Namespace) -> Array:
    """Return standard normal numbers from twice as many uniform ones, by Box and Muller."""
    first, second = _split(u, [u.shape[-1] // 2] * 2)
    # Rounding may make 1 of a number below, whose logarithm would be infinite.
    below_one = 1.0 - ns.roundoff_of(u.dtype, xp=xp)
    radius = xp.sqrt(-2.0 * xp.log1p(-xp.clip(first, 0.0, below_one)))
    good = outputs.is_uniform(first) & outputs.is_uniform(second)
    return xp.where(good, radius * xp.cos(2.0 * math.pi * second), xp.nan)
