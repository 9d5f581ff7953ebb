"""Preconditioners of gradients' second moments: roots and bases (Shampoo, SOAP)."""

from kfac_core.roots.gradient_side import GradientFactors
from kfac_core.roots.roots import InverseRoot, inverse_root
from kfac_core.roots.soap import (
    adapted_share,
    agreement,
    average_weights,
    averaged_factor,
    bounded_gradient,
    carried_moments,
    diagonal_blocks,
    from_basis,
    gradient_jump,
    in_basis,
    momentum_factor,
    normalized_gradient,
    renewed_basis,
    side_blocks,
    squared_sizes,
    width_factor,
)

__all__ = [
    "GradientFactors",
    "InverseRoot",
    "adapted_share",
    "agreement",
    "average_weights",
    "averaged_factor",
    "bounded_gradient",
    "carried_moments",
    "diagonal_blocks",
    "from_basis",
    "gradient_jump",
    "in_basis",
    "inverse_root",
    "momentum_factor",
    "normalized_gradient",
    "renewed_basis",
    "side_blocks",
    "squared_sizes",
    "width_factor",
]
