"""Curvature operators: immutable snapshots that multiply vectors.

Here is what the author of an operator needs beside `kfac_core.CurvatureOperator`, the base
class, and the operators that are names of `kfac_core`.
"""

from kfac_core.operators.dense import DenseOperator
from kfac_core.operators.kronecker import FactoredKronecker, kronecker_operator
from kfac_core.operators.linear_map import LinearMap
from kfac_core.operators.operator import MatrixPower, raise_for
from kfac_core.operators.spectral import SpectralOperator, spectral_operator
from kfac_core.operators.tridiagonal import TridiagonalOperator

__all__ = [
    "DenseOperator",
    "FactoredKronecker",
    "LinearMap",
    "MatrixPower",
    "SpectralOperator",
    "TridiagonalOperator",
    "kronecker_operator",
    "raise_for",
    "spectral_operator",
]
