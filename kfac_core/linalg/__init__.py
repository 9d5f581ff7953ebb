"""Linear algebra on arrays, independent of curvature.

Each operation is written once in the pure Array API standard; `dispatch` lets a
backend put a native one in its place.  Here are the symmetric matrices that averages and
operators are made of.
"""

from kfac_core.linalg.damped import DampedMatrix, damped_matrix
from kfac_core.linalg.diagonal import DampedDiagonal
from kfac_core.linalg.factorizations import Eigendecomposition, Factorization, Solving
from kfac_core.linalg.gram import HomogeneousRows
from kfac_core.linalg.groups import dense_of_groups
from kfac_core.linalg.kronecker import kronecker_dense, kronecker_multiply
from kfac_core.linalg.rounding import rounded_weight
from kfac_core.linalg.symmetric import ScaledMatrix, SymmetricMatrix

__all__ = [
    "Eigendecomposition",
    "Factorization",
    "HomogeneousRows",
    "ScaledMatrix",
    "DampedDiagonal",
    "DampedMatrix",
    "Solving",
    "SymmetricMatrix",
    "dense_of_groups",
    "kronecker_dense",
    "kronecker_multiply",
    "damped_matrix",
    "rounded_weight",
]
