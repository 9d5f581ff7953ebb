"""The quadratic model of the loss that K-FAC steps along and checks itself against.

For a change ``d`` of the parameters, with ``F`` the exact Fisher matrix of the batch,

    M(d) - M(0) = gradient . d  +  1/2 d . (F + damping I) d.

``F`` itself is never formed: ``d . F d'`` is the mean over examples of
``(J d) . F_R (J d')``, where ``F_R`` is the Fisher matrix of the likelihood in its
logits.  For Bernoulli pixels that is diagonal, ``p (1 - p)``.  (Martens and Grosse,
2015, sections 6.4 and 7.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import array_api_compat
import numpy as np

from kfac_core.backend import Array
from kfac_core.cli.demo.autoencoder import jvp
from kfac_core.cli.demo.parameters import Parameters, inner_product

__all__ = ["QuadraticModel", "quadratic_model"]


@dataclass(frozen=True)
class QuadraticModel:
    """The model, restricted to the changes ``sum_i c_i d_i`` of a few directions.

    Attributes
    ----------
    slope : numpy.ndarray
        ``gradient . d_i``, ``(k,)``.
    curvature : numpy.ndarray
        ``d_i . (F + damping I) d_j``, ``(k, k)``.
    """

    slope: np.ndarray[tuple[int], np.dtype[np.float64]]
    curvature: np.ndarray[tuple[int, int], np.dtype[np.float64]]

    def minimizer(self) -> list[float]:
        """Return the coefficients ``c`` at which the model is least."""
        # Scaled to a diagonal of ones, since the directions differ in length.
        scale = 1.0 / np.sqrt(np.diagonal(self.curvature))
        scaled = scale[:, None] * self.curvature * scale
        return [float(c) for c in -scale * np.linalg.solve(scaled, scale * self.slope)]

    def change(self, coefficients: Sequence[float], /) -> float:
        """Return ``M(d) - M(0)`` for ``d = sum_i c_i d_i``."""
        c = np.asarray(coefficients)
        return float(self.slope @ c + 0.5 * c @ self.curvature @ c)


def quadratic_model(
    parameters: Parameters,
    activations: Sequence[Array],
    logit_fisher: Array,
    /,
    *,
    gradient: Parameters,
    directions: Sequence[Parameters],
    damping: float,
) -> QuadraticModel:
    """Restrict the quadratic model of the loss to the span of some directions.

    Parameters
    ----------
    parameters : Parameters
        The point at which the model is made.
    activations : sequence of array
        The inputs of the layers there.
    logit_fisher : array
        The diagonal of ``F_R``, ``(n, n_pixels)``.
    gradient : Parameters
        The gradient of the mean loss.
    directions : sequence of Parameters
        The directions, ``k`` of them.
    damping : float
        The multiple of the identity that is added to ``F``.

    Returns
    -------
    QuadraticModel
        The slopes and the curvature, on the host.
    """
    xp = array_api_compat.array_namespace(logit_fisher)
    n = logit_fisher.shape[0]
    changes = [jvp(parameters, activations, d) for d in directions]
    k = len(directions)
    curvature = np.empty((k, k))
    for i in range(k):
        for j in range(i + 1):
            fisher = float(xp.sum(changes[i] * logit_fisher * changes[j])) / n
            identity = inner_product(directions[i], directions[j])
            curvature[i, j] = curvature[j, i] = fisher + damping * identity
    slope = np.asarray([inner_product(gradient, d) for d in directions])
    return QuadraticModel(slope=slope, curvature=curvature)
