"""The covariance of a linearized network's outputs under a block's posterior.

Conventions.  J holds, for each example and each of the K outputs, the derivative of
that output with respect to the block's matrix, shape ``(..., K, in(+1), out)``.  The
block adds ``J P^-1 J^T`` to the covariance of the outputs; blocks are independent, so
that the network's covariance is the sum.  With the coordinates ``R = Q_A^T J Q_G``

    (J P^-1 J^T)_kl = sum_ij R_kij R_lij / (N s_ij + tau),

and R serves every tau.  A layer's rows do where there is one position in each example: x
and the derivatives of the outputs with respect to the layer's output give R as an outer
product that is never formed.
"""

from __future__ import annotations

from kfac_core.array import Array
from kfac_core.layers.layer import AnyRows
from kfac_core.operators.spectral_rows import row_products, row_squares
from kfac_core.posterior.block import BlockPosterior


def functional_covariance(posterior: BlockPosterior, jacobians: Array, /) -> Array:
    """Return ``J P^-1 J^T`` for each example.

    Parameters
    ----------
    posterior : BlockPosterior
        Posterior of the block.
    jacobians : array, shape (..., K, in(+1), out)
        Jacobians J.

    Returns
    -------
    array, shape (..., K, K)
        In the posterior's dtype.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError
        For Jacobians that do not fit.

    Notes
    -----
    ``2 n m (n + m + K)`` flops for each row of J.
    """
    R = posterior.curvature.to_basis(jacobians)
    return covariance_of_coordinates(posterior, R)


def functional_variance(posterior: BlockPosterior, jacobians: Array, /) -> Array:
    """Return the diagonal of `functional_covariance`, shape (..., K).

    Parameters
    ----------
    posterior : BlockPosterior
        Posterior of one block.
    jacobians : array, shape (..., K, in(+1), out)
        Jacobians of K outputs, as matrices.

    Returns
    -------
    array, shape (..., K)
        Variances, without observation noise.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.operators import kronecker_operator
    >>> from kfac_core.posterior import block_posterior, functional_variance
    >>> F = kronecker_operator(np.eye(2), np.eye(1), damping=0.0)
    >>> posterior = block_posterior(F, examples=3.0, prior_precision=1.0)
    >>> functional_variance(posterior, np.asarray([[[1.0], [1.0]]])).tolist()
    [0.5]
    """
    R = posterior.curvature.to_basis(jacobians)
    xp = posterior.curvature.namespace
    weights = 1.0 / posterior.eigenvalues()
    axes = tuple(range(R.ndim - weights.ndim, R.ndim))
    return xp.sum(R * R * weights, axis=axes)


def covariance_of_coordinates(
    posterior: BlockPosterior, coordinates: Array, /
) -> Array:
    """Return the covariance from Jacobians that are in the eigenbasis already.

    Parameters
    ----------
    posterior : BlockPosterior
        Posterior of the block, for any N and tau.
    coordinates : array, shape (..., K, (Q,) n, m) or (..., K, n m, 1)
        Jacobians in the basis, from ``posterior.curvature.to_basis``.

    Returns
    -------
    array, shape (..., K, K)
        In the posterior's dtype; ``2 K^2 n m`` flops for each example.
    """
    xp = posterior.curvature.namespace
    weights = 1.0 / posterior.eigenvalues()
    # In the eigenbasis the covariance is a weighted inner product of coordinates.
    lead = coordinates.shape[: coordinates.ndim - weights.ndim]
    left = xp.reshape(coordinates * weights, (*lead, -1))
    right = xp.reshape(coordinates, (*lead, -1))
    return xp.matmul(left, xp.matrix_transpose(right))


def covariance_of_rows(posterior: BlockPosterior, rows: AnyRows, /) -> Array:
    """Return the covariance from a layer's rows.

    Parameters
    ----------
    posterior : BlockPosterior
        Posterior of the block.
    rows : Rows, IdRows or ExampleGradients
        As the layer makes them of its inputs and of the derivatives of the K outputs
        with respect to its own output, which are the sources.

    Returns
    -------
    array, shape (N, K, K)
        In the posterior's dtype.

    Raises
    ------
    MixedArraysError, UnsupportedError
        For rows that do not fit, or that lack positions.

    Notes
    -----
    ``2 N (n^2 + n m + K m^2 + K^2 m)`` flops and no Jacobian where examples have one
    position; elsewhere the Jacobians are formed.
    """
    return row_products(posterior.curvature, 1.0 / posterior.eigenvalues(), rows)


def variance_of_rows(posterior: BlockPosterior, rows: AnyRows, /) -> Array:
    """Return the diagonal of `covariance_of_rows`, shape (N, K)."""
    xp = posterior.curvature.namespace
    weights = 1.0 / posterior.eigenvalues()
    return xp.matrix_transpose(row_squares(posterior.curvature, weights, rows))
