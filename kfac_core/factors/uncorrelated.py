"""Activations that are uncorrelated between positions: channel moments alone.

Conventions.  For a convolution with K kernel positions and c channels,

    A = blockdiag(I_K (x) Sigma, 0) + u u^T,        u = [1_K (x) mu, 1],

with mu the mean and Sigma the centered covariance of the channels over all pixels of the
inputs (so that padding, strides and cropping are ignored); kernel positions before
channels, as in the weight, and the last entry for a bias.  mu and Sigma are what is
averaged over updates.  Parts of one batch are merged to the moments of all its pixels, each
part with its weight: the number of its rows that count.

References
----------
Grosse and Martens (2016), arXiv:1602.01407, section 4.1.2 and theorem 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import array_api_compat

from kfac_core.array import Array, Namespace, Place, Scalar, map_structure
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import in_dtype, structure
from kfac_core.factors.average import Average
from kfac_core.linalg.damped import damped_matrix
from kfac_core.linalg.gram import gram
from kfac_core.linalg.rank_one import DampedRankOne
from kfac_core.linalg.symmetric import SymmetricMatrix


@structure()
class ChannelMoments:
    """The mean and the centered covariance of the channels.

    Attributes
    ----------
    mean : array, shape (c,)
        Mean ``mu``.
    covariance : SymmetricMatrix
        Covariance ``Sigma``, c x c.
    """

    mean: Array
    covariance: SymmetricMatrix

    def pooled(
        self, other: ChannelMoments, weight: Array, other_weight: Array, /
    ) -> ChannelMoments:
        """Return the weighted sums of the moments of two data sets together.

        With weights w and w', Sigma is the mean of both and
        ``w w' / (w + w')^2 (mu - mu') (mu - mu')^T``.
        """
        xp = array_api_compat.array_namespace(self.mean)
        w, v, total = (
            xp.where(x > 0, x, xp.ones_like(x))
            for x in (weight, other_weight, weight + other_weight)
        )
        d = self.mean / w - other.mean / v
        between = (weight * other_weight / total) * d[:, None] * d[None, :]
        covariance = self.covariance.full() + other.covariance.full() + between
        return ChannelMoments(
            self.mean + other.mean, SymmetricMatrix(covariance, full_storage=True)
        )


@dataclass(frozen=True)
class UncorrelatedFactor:
    """The input factor of a convolution; see `kfac_core.factors.factor.Factor`.

    Parameters
    ----------
    copies : int
        Number of equal blocks ``K``, the positions of the kernel.
    bias : int
        1 where the layer has a bias, else 0.
    """

    copies: int
    bias: int

    def initial(self, shape: tuple[int, ...], place: Place, /) -> Average:
        """Return a zero average, for a factor of n rows; shape is (n,)."""
        c = (shape[-1] - self.bias) // self.copies
        zeros = place.zeros(c, c)
        moments = ChannelMoments(zeros[0, :], SymmetricMatrix(zeros, full_storage=True))
        return Average(moments, place.zeros())

    def updated(
        self,
        average: Average,
        rows: Array,
        decay: Scalar,
        scale: Scalar,
        weight: Scalar,
        /,
        *,
        overwrite: bool = False,
        xp: Namespace,
    ) -> Average:
        """Return the average after an update with the pixels, shape (P, c).

        `scale` is ignored: the moments are means over all pixels.
        """
        # Center first: E[x x^T] - mu mu^T would cancel.
        mean = xp.mean(rows, axis=0)
        covariance = gram(rows - mean) / rows.shape[0]
        new = ChannelMoments(mean, SymmetricMatrix(covariance, full_storage=True))
        total = map_structure(lambda s, c: s * decay + c * weight, average.sum, new)
        return average.following(total, None, decay, weight)

    def mean_eigenvalue(self, value: ChannelMoments, /) -> Array:
        """Return ``tr / n``, 0-d."""
        xp = array_api_compat.array_namespace(value.mean)
        squared = xp.sum(value.mean * value.mean)
        trace = self.copies * (value.covariance.trace() + squared) + self.bias
        return trace / (self.copies * value.covariance.size + self.bias)

    def damped(
        self, value: ChannelMoments, shift: Scalar, /, *, apply_dtype: object = None
    ) -> DampedRankOne:
        """Return ``A + shift I``, by its channel covariance and mean."""
        xp = array_api_compat.array_namespace(value.mean)
        block = damped_matrix(value.covariance, shift, apply_dtype=apply_dtype)
        mean = ns.cast(xp, value.mean, block.dtype)
        return DampedRankOne(block, mean, None, self.copies, self.bias)

    def value(
        self, average: Average, /, *, debias: bool, dtype: object, xp: Namespace
    ) -> ChannelMoments:
        """Return the average in a dtype."""
        moments: ChannelMoments = average.value(debias=debias)
        return in_dtype(moments, dtype, xp)

    def dense(self, value: ChannelMoments, /) -> Array:
        """Return A, shape (n, n)."""
        return self.damped(value, 0.0).dense(shifted=False)
