"""Running statistics of rows: sums, each with the weight that belongs to it.

This package holds what the author of an approximation needs besides `kfac_core.Statistics`
and `kfac_core.factors.Average`: the kinds of factors, whose functions start, update and
damp an average, and the shares of one update.
"""

from kfac_core.factors.average import Average
from kfac_core.factors.diagonal import DiagonalFactor
from kfac_core.factors.factor import Factor, FactorKind, factor_of
from kfac_core.factors.full import FullFactor
from kfac_core.factors.shares import Shares

__all__ = [
    "Average",
    "DiagonalFactor",
    "Factor",
    "FactorKind",
    "FullFactor",
    "Shares",
    "factor_of",
]
