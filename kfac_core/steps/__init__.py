"""The step of a K-FAC optimizer, as functions of its parts.

`kfac_core.Estimator.precondition` returns a direction.  These functions turn it into a
step: how far to go and how much of the last step to keep (`quadratic_model`, on
the curvature that the caller measures), how far at most (`kl_clip`), what the
parameters' own decay adds (`add_l2`, `decay_decoupled`), whether the step kept its
promise (`reduction_ratio`, for `kfac_core.levenberg_marquardt`), whether it stands
(`select`), and which factored damping was the best (`search_gamma`).

Every function is pure, works on vectors of the form that the estimator takes and gives,
and can be traced; none has an optimizer's state.
"""

from kfac_core.steps.curvature import curvature_of_outputs, curvature_of_products
from kfac_core.steps.gamma import Trial, gamma_candidates, search_gamma
from kfac_core.steps.quadratic_model import Minimum, QuadraticModel, quadratic_model
from kfac_core.steps.reduction import reduction_ratio
from kfac_core.steps.rejection import is_accepted, select
from kfac_core.steps.trust_region import TrustRegion, kl_clip
from kfac_core.steps.vectors import inner_product, linear_combination
from kfac_core.steps.weight_decay import (
    add_l2,
    decay_decoupled,
)

__all__ = [
    "inner_product",
    "linear_combination",
    "quadratic_model",
    "QuadraticModel",
    "Minimum",
    "curvature_of_outputs",
    "curvature_of_products",
    "add_l2",
    "decay_decoupled",
    "kl_clip",
    "TrustRegion",
    "reduction_ratio",
    "is_accepted",
    "select",
    "search_gamma",
    "gamma_candidates",
    "Trial",
]
