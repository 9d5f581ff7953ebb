"""Gaussian posteriors from Kronecker-factored curvature: Laplace's approximation.

A `Posterior` is the normal distribution about a network's trained parameters whose
precision is ``N F + tau I`` in each block.  It gives the terms of the log-marginal
likelihood, samples, and the covariance of the network's linearized outputs.
"""

from kfac_core.posterior.block import BlockPosterior, block_posterior
from kfac_core.posterior.evidence import Evidence
from kfac_core.posterior.functional import (
    covariance_of_coordinates,
    covariance_of_rows,
    functional_covariance,
    functional_variance,
    variance_of_rows,
)
from kfac_core.posterior.merging import MergedWeight, merged_weight
from kfac_core.posterior.network import Posterior
from kfac_core.posterior.spectra import spectral_blocks

__all__ = [
    "BlockPosterior",
    "Evidence",
    "MergedWeight",
    "Posterior",
    "block_posterior",
    "covariance_of_coordinates",
    "covariance_of_rows",
    "functional_covariance",
    "functional_variance",
    "merged_weight",
    "spectral_blocks",
    "variance_of_rows",
]
