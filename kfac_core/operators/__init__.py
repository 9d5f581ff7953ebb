"""Curvature operators: immutable snapshots that multiply vectors.

Here is what the author of an operator needs beside `kfac_core.CurvatureOperator`, the base
class, and the operators that are names of `kfac_core`.
"""

from kfac_core.operators.operator import raise_for
from kfac_core.operators.spectral import spectral_operator

__all__ = ["raise_for", "spectral_operator"]
