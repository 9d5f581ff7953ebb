"""Influence of training examples, from Kronecker-factored curvature.

An `Influence` is a network's damped inverse curvature.  It preconditions the gradients
of queries once, stores them in as few bits as one likes, and gives their inner products
with the gradients of any number of training examples, in a stated amount of memory.
"""

from kfac_core.influence.damping import mean_eigenvalue_damping
from kfac_core.influence.datamodels import (
    DatamodelingScore,
    linear_datamodeling_score,
    retrained_losses,
)
from kfac_core.influence.network import Influence
from kfac_core.influence.queries import Queries

__all__ = [
    "DatamodelingScore",
    "Influence",
    "Queries",
    "linear_datamodeling_score",
    "mean_eigenvalue_damping",
    "retrained_losses",
]
