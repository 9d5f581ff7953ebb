"""The estimation modes: the vectors that a framework backpropagates, and their scale.

Conventions.  A mode gives M *sources*, output vectors ``v_1 .. v_M`` for every row, to be
pulled back through the network one after the other.  With w the weight of a row's loss
and B B^T its Fisher (F) or Gauss-Newton (H) matrix,

====================  =========================================  ====  ========  ========
mode                  v of a row                                 M     sources   estimates
====================  =========================================  ====  ========  ========
gradients             sqrt(w) dl/dz at targets of the model      any   mean      w F
empirical             sqrt(w) dl/dz at the targets of the data   1     mean      w g g^T
curvature_prop        sqrt(w) B r, r independent signs           any   mean      w F
curvature_prop_GGN    the same with H                            any   mean      w H
exact                 sqrt(w) B e_i, i = 1 .. I                  I     sum       w F
exact_GGN             the same with H                            I     sum       w H
====================  =========================================  ====  ========  ========

so that the sum or mean of ``v v^T`` over sources estimates a curvature that is linear in w,
in *every* mode.  (For ``empirical`` this means that the vectors are not the gradient of
the weighted loss, which would be ``w dl/dz`` and have a curvature quadratic in w.)
Losses are sums over the batch: feed the result with ``reduction="sum"``.

The exact modes use one index i for all rows at once.  With one row of loss for each
example, ``natural`` of shape (N, P), that is exact for every statistic made of the outer
products of single examples: any layer's, with Kronecker factors, diagonal or full.  It is
**biased** for an estimator that squares gradients which were summed over several rows of
a loss: over the batch (the square of a batch's parameter gradient), or over the time
steps of a sequence whose steps all have a loss and influence each other.  For the steps
``positions="separate"`` of `kfac_core.losses.vectors` is exact, at T times the sources;
`kfac_core.losses.sources.with_random_signs` takes either bias away in expectation, and so
does a sampled mode.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from kfac_core import constraints
from kfac_core.array import Array
from kfac_core.conventions import SourceReduction
from kfac_core.losses.loss import Loss
from kfac_core.losses.noise import NoiseSpec

EstimationMode = Literal[
    "gradients",
    "empirical",
    "curvature_prop",
    "curvature_prop_GGN",
    "exact",
    "exact_GGN",
]
CurvatureMatrix = Literal["fisher", "empirical_fisher", "ggn"]


class _Properties(NamedTuple):
    matrix: CurvatureMatrix
    reduction: SourceReduction


_PROPERTIES: dict[str, _Properties] = {
    "gradients": _Properties("fisher", "mean"),
    "empirical": _Properties("empirical_fisher", "mean"),
    "curvature_prop": _Properties("fisher", "mean"),
    "curvature_prop_GGN": _Properties("ggn", "mean"),
    "exact": _Properties("fisher", "sum"),
    "exact_GGN": _Properties("ggn", "sum"),
}


def curvature_matrix(mode: EstimationMode, /) -> CurvatureMatrix:
    """Return which matrix a mode estimates: Fisher, empirical Fisher or Gauss-Newton.

    Raises
    ------
    ConventionError
        For an unknown mode.
    """
    constraints.require_one_of("mode", mode, get_args(EstimationMode))
    return _PROPERTIES[mode].matrix


def source_reduction_of(mode: EstimationMode, /) -> SourceReduction:
    """Return how a mode's sources are combined, by default.

    Raises
    ------
    ConventionError
        For an unknown mode.

    Examples
    --------
    >>> import kfac_core as kc
    >>> [kc.losses.source_reduction_of(mode) for mode in ("gradients", "exact")]
    ['mean', 'sum']
    """
    constraints.require_one_of("mode", mode, get_args(EstimationMode))
    return _PROPERTIES[mode].reduction


def noise_spec(
    loss: Loss, natural: Array, /, *, mode: EstimationMode, samples: int = 1
) -> NoiseSpec | None:
    """Return which noise an estimation mode needs.

    Parameters
    ----------
    loss : Loss
        Loss of the network.
    natural : array, shape (N, ..., P)
        Natural parameters, of which only the shape is read.
    mode : EstimationMode
        The mode.
    samples : int
        How many vectors are sampled for each row, at least 1.

    Returns
    -------
    NoiseSpec or None
        Noise of shape ``(samples, *loss.noise_shape(natural))`` for ``"gradients"`` and
        ``(samples, *loss.inner_shape(natural))``, uniform, for curvature propagation;
        None for the modes without randomness.

    Raises
    ------
    ConventionError
        For an unknown mode.
    ShapeError
        For fewer than one sample.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> loss, outputs = kc.losses.Categorical(), np.zeros((8, 3))
    >>> spec = kc.losses.noise_spec(loss, outputs, mode="gradients")
    >>> noise = np.random.default_rng(0).uniform(size=spec.shape)
    >>> v = kc.losses.vectors(loss, outputs, mode="gradients", noise=noise)
    >>> v.vectors.shape
    (1, 8, 3)
    """
    constraints.require_range("loss", loss, constraints.implementation_of(Loss))
    constraints.require_range("samples", samples, constraints.SIZE)
    constraints.require_one_of("mode", mode, get_args(EstimationMode))
    if mode == "gradients":
        shape = (samples, *loss.noise_shape(natural))
        return NoiseSpec(loss.noise_distribution, shape)
    if mode in ("curvature_prop", "curvature_prop_GGN"):
        return NoiseSpec("uniform", (samples, *loss.inner_shape(natural)))
    return None
