r"""Likelihoods as least squares: rows of the Fisher's root times the Jacobian.

Conventions.  For outputs f and a likelihood with the Fisher matrix ``F = B B^T`` of f, the
rows are those of ``B^T J``, and residuals r solve ``B r = g`` for the gradient g of the
loss with respect to f, so that

    (B^T J)^T r = J^T g,   (B^T J)^T (B^T J) = J^T F J:

the gradient, and the Gauss-Newton matrix.  For softmax and sigmoid cross-entropy and for
the squared error, F is the Hessian of the loss with respect to f.
"""

from __future__ import annotations

from typing import NamedTuple

from kfac_core import errors
from kfac_core.array import Array
from kfac_core.array import namespaces as ns
from kfac_core.losses.loss import Loss


class LikelihoodResiduals(NamedTuple):
    """A likelihood as a problem of least squares, at some outputs.

    Attributes
    ----------
    root : array, shape (N, C, I)
        The root B of each example's Fisher matrix.
    residuals : array, shape (N, I)
        The residuals r with ``B r = g``.
    loss : array, 0-d
        The mean of ``-log p`` over the examples.
    """

    root: Array
    residuals: Array
    loss: Array

    def rows(self, outputs: Array, /) -> Array:
        """Return ``B^T f``, shape (N, I), of which J is to be the Jacobian."""
        xp = ns.own_namespace(outputs)
        return xp.matmul(outputs[:, None, :], self.root)[:, 0, :]


def likelihood_residuals(
    loss: Loss, outputs: Array, targets: Array, /, *, weight: Array | None = None
) -> LikelihoodResiduals:
    """Return the root of the Fisher matrix, residuals and the loss.

    Parameters
    ----------
    loss : Loss
        The likelihood.
    outputs : array, shape (N, C)
        Its natural parameters; without a graph of derivatives.
    targets : array
        What the likelihood takes: labels of shape (N,), or rows of shape (N, C).
    weight : array, shape (N,), optional
        Weights of the examples, whose mean is 1.

    Returns
    -------
    LikelihoodResiduals
        In the dtype of the outputs.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError
        For arrays that do not fit.

    Notes
    -----
    Some ``N C^3`` flops.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.losses import Bernoulli
    >>> from kfac_core.samples import likelihood_residuals
    >>> B, r, loss = likelihood_residuals(
    ...     Bernoulli(), np.zeros((1, 1)), np.ones((1, 1))
    ... )
    >>> float((B @ r[:, :, None])[0, 0, 0])
    -0.5
    """
    xp = ns.namespace_of(outputs=outputs)
    if outputs.ndim != 2:
        raise errors.ShapeError(
            f"Expected `outputs` of shape (N, C), got {tuple(outputs.shape)}."
        )
    *_, inner = loss.inner_shape(outputs)
    N, device = outputs.shape[0], ns.device_of(outputs)
    eye = xp.eye(inner, dtype=outputs.dtype, device=device)
    each = xp.broadcast_to(eye[:, None, :], (inner, N, inner))
    root = xp.permute_dims(loss.fisher_factor_multiply(outputs, each), (1, 2, 0))
    g = loss.gradient(outputs, targets)
    r = xp.matmul(xp.linalg.pinv(root), g[:, :, None])[:, :, 0]
    nats = -loss.log_probability(outputs, targets)
    if weight is not None:
        w = xp.sqrt(weight)[:, None]
        root, r, nats = root * w[:, :, None], r * w, nats * weight
    nats = xp.mean(nats)
    return LikelihoodResiduals(root, r, nats)
