"""Gauss-Newton in the space of samples: the whole network's curvature from rows alone.

With J the Jacobian of N examples' outputs by all parameters, ``K = J J^T`` is a sum over
layers of products of Gram matrices of the rows that K-FAC's factors are made of, and
``(J^T J / N + lam I)^-1 J^T r / N = J^T (K + N lam I)^-1 r`` is the exact direction of
Gauss-Newton.
"""

from kfac_core.samples.comparison import unlike
from kfac_core.samples.curvature import (
    DirectKernel,
    SampleCurvature,
    damped_kernel,
    sample_curvature,
)
from kfac_core.samples.gathered import gathered, gathered_jacobian
from kfac_core.samples.gauss_newton import (
    BatchProgress,
    GaussNewtonOptions,
    GaussNewtonStep,
    gauss_newton_step,
)
from kfac_core.samples.gram import sample_gram
from kfac_core.samples.iterative import IterativeKernel, NystromKernel, nystrom_kernel
from kfac_core.samples.jacobian import Jacobian, LayerJacobian
from kfac_core.samples.likelihood import LikelihoodResiduals, likelihood_residuals
from kfac_core.samples.problem import (
    ResidualProblem,
    complex_parameter,
    not_finite,
    residual_problem,
    residual_terms,
    scales_of,
)
from kfac_core.samples.search import Evaluation, SearchedStep, search_step
from kfac_core.samples.terms import by_output, joined_rows

__all__ = [
    "BatchProgress",
    "DirectKernel",
    "Evaluation",
    "GaussNewtonOptions",
    "GaussNewtonStep",
    "IterativeKernel",
    "Jacobian",
    "LayerJacobian",
    "LikelihoodResiduals",
    "NystromKernel",
    "ResidualProblem",
    "SampleCurvature",
    "SearchedStep",
    "by_output",
    "complex_parameter",
    "damped_kernel",
    "gathered",
    "gathered_jacobian",
    "gauss_newton_step",
    "joined_rows",
    "likelihood_residuals",
    "nystrom_kernel",
    "not_finite",
    "residual_problem",
    "residual_terms",
    "sample_curvature",
    "sample_gram",
    "scales_of",
    "search_step",
    "unlike",
]
