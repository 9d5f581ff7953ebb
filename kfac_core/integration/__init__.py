"""Building blocks for the integration of frameworks."""

from kfac_core.integration import defaults as defaults
from kfac_core.integration.collection import (
    Collected,
    collect_statistics,
    digest_of_arrays,
    with_moments,
)
from kfac_core.integration.coverage import coverage_table
from kfac_core.integration.estimation import EstimatorOptions, require_estimation
from kfac_core.integration.framework_conv import framework_conv
from kfac_core.integration.layer_calls import (
    LayerCall,
    batches_in_parts,
    batches_of_calls,
)
from kfac_core.integration.likelihoods import RowLoss, row_loss
from kfac_core.integration.natural_gradient import NaturalGradient
from kfac_core.integration.quadratic_step import (
    DampingRule,
    QuadraticStep,
    quadratic_step,
)
from kfac_core.integration.scheduled import ScheduledSteps
from kfac_core.integration.schedules import (
    Falling,
    Interval,
    PerOutput,
    Schedule,
    Widening,
    bound_at,
    interval_at,
    lengthens,
    require_positive,
    value_at,
)
from kfac_core.integration.wiring import Captured, Wiring, usual_approximation

__all__ = [
    "Captured",
    "Collected",
    "DampingRule",
    "EstimatorOptions",
    "Falling",
    "Interval",
    "LayerCall",
    "NaturalGradient",
    "PerOutput",
    "QuadraticStep",
    "RowLoss",
    "Schedule",
    "ScheduledSteps",
    "Widening",
    "Wiring",
    "batches_in_parts",
    "batches_of_calls",
    "bound_at",
    "collect_statistics",
    "digest_of_arrays",
    "coverage_table",
    "framework_conv",
    "interval_at",
    "lengthens",
    "quadratic_step",
    "require_estimation",
    "require_positive",
    "row_loss",
    "usual_approximation",
    "value_at",
    "with_moments",
]
