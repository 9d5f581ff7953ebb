"""Preconditioners of gradients' second moments: roots and bases (Shampoo, SOAP)."""

from kfac_core.roots.gradient_side import GradientFactors
from kfac_core.roots.roots import InverseRoot, inverse_root
from kfac_core.roots.soap import (
    adam_quotient,
    adapted_share,
    agreement,
    averaged_factor,
    bounded_gradient,
    carried_moments,
    diagonal_blocks,
    from_basis,
    gradient_jump,
    in_basis,
    renewed_basis,
    side_blocks,
)

__all__ = [
    "GradientFactors",
    "InverseRoot",
    "adam_quotient",
    "adapted_share",
    "agreement",
    "averaged_factor",
    "bounded_gradient",
    "carried_moments",
    "diagonal_blocks",
    "from_basis",
    "gradient_jump",
    "in_basis",
    "inverse_root",
    "renewed_basis",
    "side_blocks",
]
