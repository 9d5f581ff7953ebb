"""The vectors to backpropagate, for each likelihood and estimation mode.

A loss (`Categorical`, `Bernoulli`, `Gaussian`, `GaussianLearnedVariance`,
`SquaredError`, or several in a `Joint`) knows the Fisher and the Gauss-Newton matrix of its
network's outputs, and a factor of each.  `vectors` turns a loss, a network's outputs and an
`EstimationMode` into the output gradients from which a block's statistics are made.
Randomness is always an argument.
"""

from kfac_core.losses.bernoulli import Bernoulli
from kfac_core.losses.categorical import Categorical
from kfac_core.losses.drawn import Positions, drawn_vectors
from kfac_core.losses.gaussian import Gaussian, SquaredError
from kfac_core.losses.gaussian_variance import GaussianLearnedVariance
from kfac_core.losses.joint import Joint
from kfac_core.losses.loss import Loss
from kfac_core.losses.modes import (
    CurvatureMatrix,
    EstimationMode,
    curvature_matrix,
    noise_spec,
    source_reduction_of,
)
from kfac_core.losses.noise import NoiseDistribution, NoiseSpec, draw_noise
from kfac_core.losses.sources import SourceVectors, vectors, with_random_signs

__all__ = [
    "Bernoulli",
    "Categorical",
    "CurvatureMatrix",
    "EstimationMode",
    "Gaussian",
    "GaussianLearnedVariance",
    "Joint",
    "Loss",
    "NoiseDistribution",
    "NoiseSpec",
    "Positions",
    "SourceVectors",
    "SquaredError",
    "curvature_matrix",
    "draw_noise",
    "drawn_vectors",
    "noise_spec",
    "source_reduction_of",
    "vectors",
    "with_random_signs",
]
