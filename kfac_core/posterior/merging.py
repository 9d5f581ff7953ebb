"""The mean of several models' weights, weighted by their Kronecker-factored curvature.

Conventions.  Model k has the weight W_k at the minimum of its own loss, whose curvature
there is F_k, summed over its examples.  The sum of their quadratic models is least at

    (sum_k F_k + lam I) W = sum_k (F_k + lam/K I) W_k ,

with lam added to each block in shares, so that where no model has any curvature the result
is the plain mean.  The sum of Kronecker products is none, so that it is solved by conjugate
gradients, preconditioned by the mean of the models' own inverses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kfac_core import constraints
from kfac_core.array import Array
from kfac_core.array import namespaces as ns
from kfac_core.operators.spectral import SpectralOperator


class MergedWeight(NamedTuple):
    """A merged weight, and how well its linear system is solved.

    Attributes
    ----------
    weight : array, shape (in(+1), out)
        W.
    residual : float
        Relative residual, computed from W.
    iterations : int
        Products with all curvatures.
    """

    weight: Array
    residual: float
    iterations: int


def merged_weight(
    curvatures: Sequence[SpectralOperator],
    weights: Sequence[Array],
    /,
    *,
    examples: Sequence[float],
    damping_fraction: float = 1e-3,
    tolerance: float = 1e-6,
    max_iterations: int = 500,
) -> MergedWeight:
    r"""Return the minimum of the sum of several models' quadratic losses.

    .. math:: \Big(\sum_k N_k F_k + \lambda I\Big) \, W
        = \sum_k \Big(N_k F_k + \frac{\lambda}{K} I\Big) W_k

    Parameters
    ----------
    curvatures : sequence of SpectralOperator
        F_k of one block in each model, averaged over examples; see
        `kfac_core.posterior.spectral_blocks`.
    weights : sequence of array, shape (in(+1), out)
        W_k, as matrices of the block.
    examples : sequence of float
        N_k.
    damping_fraction : float
        lambda as a fraction of the mean eigenvalue of the sum.
    tolerance, max_iterations : float, int
        When conjugate gradients stop.

    Returns
    -------
    MergedWeight
        The weight, and the residual that was reached.

    Raises
    ------
    ShapeError
        For lists of other lengths.

    Notes
    -----
    ``8 K n m (n + m)`` flops for each iteration.

    References
    ----------
    Matena and Raffel (2022), arXiv:2111.09832, with diagonal matrices; Tam et al. (2024),
    "Merging by Matching Models in Task Parameter Subspaces", arXiv:2312.04339.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.operators import kronecker_operator
    >>> from kfac_core.posterior import merged_weight
    >>> first, second = (
    ...     kronecker_operator(np.diag(a), np.eye(1), damping=0.0, factorizations=())
    ...     for a in ([1.0, 0.0], [0.0, 1.0])
    ... )
    >>> W = [np.array([[2.0], [9.0]]), np.array([[9.0], [4.0]])]
    >>> parts = [F.spectral() for F in (first, second)]
    >>> merged = merged_weight(parts, W, examples=[1, 1], damping_fraction=1e-9)
    >>> np.round(merged.weight, 3).tolist()
    [[2.0], [4.0]]
    """
    constraints.require_any("curvatures", curvatures)
    lengths = {"curvatures": len(curvatures), "weights": len(weights)}
    lengths["examples"] = len(examples)
    constraints.require_same("number of models", lengths)
    first = curvatures[0]
    xp, dtype = first.namespace, first.dtype
    K = len(weights)
    means = [
        N * float(F.mean_eigenvalue())
        for F, N in zip(curvatures, examples, strict=True)
    ]
    # Damping that is common to all models, relative to the mean eigenvalue of the sum.
    lam = damping_fraction * sum(means)
    values: Any = [F.spectrum for F in curvatures]
    spectra = [s * N for s, N in zip(values, examples, strict=True)]
    W = [ns.cast(xp, w, dtype) for w in weights]

    def product(k: int, V: Array, function: Callable[[Array], Array]) -> Array:
        F = curvatures[k]
        return F.from_basis(F.to_basis(V) * function(spectra[k]))

    def system(V: Array) -> Array:
        return sum((product(k, V, lambda s: s + lam / K) for k in range(K)), 0.0 * V)

    def inverse(V: Array) -> Array:
        # Of K equal curvatures it is the inverse of their sum.
        parts = (product(k, V, lambda s: 1.0 / (s + lam / K)) for k in range(K))
        return sum(parts, 0.0 * V) / K**2

    b = sum((product(k, W[k], lambda s: s + lam / K) for k in range(K)), 0.0 * W[0])
    x = sum(W, 0.0 * W[0]) / K
    size = float(xp.linalg.vector_norm(b)) or 1.0
    r, p, rz, iterations = b - system(x), 0.0 * x, 1.0, 0
    # Without any curvature the mean is the solution, and there is nothing to divide by.
    while iterations < max_iterations:
        if float(xp.linalg.vector_norm(r)) <= tolerance * size:
            break
        z = inverse(r)
        new = float(xp.sum(r * z))
        if not new > 0.0:
            break
        p, rz = z + (new / rz) * p, new
        image = system(p)
        alpha = rz / float(xp.sum(p * image))
        x, r = x + alpha * p, r - alpha * image
        iterations += 1
    residual = float(xp.linalg.vector_norm(b - system(x))) / size
    return MergedWeight(ns.cast(xp, x, weights[0].dtype), residual, iterations)
