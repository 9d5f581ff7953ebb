"""The interface of a loss, and the common part of most losses.

Conventions.  ``z`` are a network's outputs, which parametrize a distribution
``p(y | z)`` of targets: ``natural``, of shape ``(N, ..., P)``, one *row* of P numbers for
each example (and shared position).  The loss of a row is ``-log p(y | z)`` and that of a
batch is their **sum**, so that gradients are those of ``reduction="sum"`` and never carry
a ``1/N``.  With ``l = -log p``, for each row,

    F   = E_{y ~ p(y|z)} [ (dl/dz) (dl/dz)^T ]     the Fisher matrix,
    H   = d^2 l / dz^2                             what Gauss-Newton (GGN) puts between
                                                   Jacobians, J^T H J,

both of shape (P, P).  A *factor* is any B with ``B B^T = F`` (or H); it maps the *inner*
space, of shape ``(N, ..., I)``, to outputs.  Where z are natural parameters of an
exponential family, H does not depend on y and equals F.

Targets, noise and vectors may have axes in front of natural's (several sources,
several samples); results then have them too.  Everything is computed in, and returned
in, the dtype of ``natural``, or float32 where that is narrower.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Protocol

from kfac_core.array import Array
from kfac_core.losses.noise import NoiseDistribution


class Loss(Protocol):
    """A negative log-probability: its gradients, its samples and its curvature.

    A loss holds no arrays; it is a frozen description.  What follows for one whose outputs
    are natural parameters, with a symmetric factor of the Fisher matrix, is written here;
    others override it.

    Attributes
    ----------
    noise_distribution : {"uniform", "normal"}
        Noise that `sample` needs: uniform in [0, 1), or standard normal.

    References
    ----------
    Martens (2020), "New insights and perspectives on the natural gradient method",
    arXiv:1412.1193: when the Fisher matrix is the Gauss-Newton matrix.
    """

    noise_distribution: ClassVar[NoiseDistribution]

    def inner_shape(self, natural: Array, /) -> tuple[int, ...]:
        """Return the shape ``(N, ..., I)`` of the space that factors map from.

        By default it is as wide as the outputs.
        """
        return tuple(natural.shape)

    def noise_shape(self, natural: Array, /) -> tuple[int, ...]:
        """Return the shape of the noise for one sample of every row's target.

        By default it is one number an output.
        """
        return tuple(natural.shape)

    @abstractmethod
    def log_probability(self, natural: Array, targets: Array, /) -> Array:
        """Return ``log p(y | z)`` of each row.

        Parameters
        ----------
        natural : array, shape (N, ..., P)
            Natural parameters, real floating-point.
        targets : array
            Targets in the form that the loss expects.

        Returns
        -------
        array, shape (N, ...)
            Normalized: it sums or integrates to one over the targets.

        Raises
        ------
        ShapeError, DtypeError, MixedArraysError
            For invalid arrays; the message names the argument.
        """

    @abstractmethod
    def gradient(self, natural: Array, targets: Array, /) -> Array:
        """Return ``-d log p(y | z) / dz`` of each row.

        Parameters
        ----------
        natural, targets : array
            See `log_probability`.

        Returns
        -------
        array, shape (N, ..., P)
            Gradient of the sum over the batch, hence without any ``1/N``.

        Raises
        ------
        ShapeError, DtypeError, MixedArraysError
            For invalid arrays; the message names the argument.
        """

    @abstractmethod
    def sample(self, natural: Array, noise: Array, /) -> Array:
        """Return targets that are distributed as ``p(y | z)``.

        Parameters
        ----------
        natural : array, shape (N, ..., P)
            Natural parameters, real floating-point.
        noise : array, shape ``(..., *noise_shape(natural))``
            Independent draws from `noise_distribution`.

        Returns
        -------
        array
            What `gradient` takes as targets.

        Raises
        ------
        ShapeError, DtypeError, MixedArraysError
            For invalid arrays; the message names the argument.
        """

    def sampled_gradient(self, natural: Array, noise: Array, /) -> Array:
        """Return `gradient` at the targets of `sample`, without rounding them."""
        return self.gradient(natural, self.sample(natural, noise))

    @abstractmethod
    def fisher_multiply(self, natural: Array, v: Array, /) -> Array:
        """Return ``F v`` of each row.

        Parameters
        ----------
        natural : array, shape (N, ..., P)
            Natural parameters, real floating-point.
        v : array, shape (..., N, ..., P)
            One vector a row, or several sources of them.

        Returns
        -------
        array
            Product in the shape of `v`.

        Raises
        ------
        ShapeError, DtypeError, MixedArraysError
            For invalid arrays; the message names the argument.
        """

    @abstractmethod
    def fisher_factor_multiply(self, natural: Array, v: Array, /) -> Array:
        """Return ``B v`` with ``B B^T = F``, from the inner space.

        Parameters
        ----------
        natural : array, shape (N, ..., P)
            Natural parameters, real floating-point.
        v : array, shape ``(..., *inner_shape(natural))``
            Inner vectors.

        Returns
        -------
        array, shape (..., N, ..., P)
            Vectors of outputs.

        Raises
        ------
        ShapeError, DtypeError, MixedArraysError
            For invalid arrays; the message names the argument.
        """

    def fisher_factor_transpose_multiply(self, natural: Array, v: Array, /) -> Array:
        """Return ``B^T v``, to the inner space; by default B is symmetric."""
        return self.fisher_factor_multiply(natural, v)

    def ggn_multiply(self, natural: Array, v: Array, /) -> Array:
        """Return ``H v`` of each row: by default ``F v``, as for natural parameters.

        Raises
        ------
        UnsupportedError
            If H depends on the targets, or is not positive semidefinite.
        """
        return self.fisher_multiply(natural, v)

    def ggn_factor_multiply(self, natural: Array, v: Array, /) -> Array:
        """Return ``B v`` with ``B B^T = H``; see `ggn_multiply`."""
        return self.fisher_factor_multiply(natural, v)
