"""Preconditioners of gradients' second moments: roots and bases (Shampoo, SOAP)."""

from kfac_core.roots.gradient_side import GradientFactors
from kfac_core.roots.orthogonal_iteration import (
    OrderedBasis,
    ordered_basis,
    refreshed_basis,
)
from kfac_core.roots.roots import InverseRoot, inverse_root

__all__ = [
    "GradientFactors",
    "InverseRoot",
    "OrderedBasis",
    "inverse_root",
    "ordered_basis",
    "refreshed_basis",
]
