"""Preconditioners of gradients' second moments: roots and bases (Shampoo, SOAP)."""

from kfac_core.roots.factor_root import FactorRoot, factor_root
from kfac_core.roots.gradient_side import GradientFactors
from kfac_core.roots.inverse_free import ikfac_updated, precondition_by_roots
from kfac_core.roots.orthogonal_iteration import (
    OrderedBasis,
    ordered_basis,
    refreshed_basis,
)
from kfac_core.roots.roots import InverseRoot, inverse_root

__all__ = [
    "FactorRoot",
    "GradientFactors",
    "InverseRoot",
    "OrderedBasis",
    "factor_root",
    "ikfac_updated",
    "inverse_root",
    "ordered_basis",
    "precondition_by_roots",
    "refreshed_basis",
]
