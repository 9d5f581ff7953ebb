"""Approximations as mathematics: which statistics are kept, which operator they make.

This package holds what the author of an approximation needs besides
`kfac_core.Approximation`: the options that its methods are given.
"""

from kfac_core.approximations.options import OperatorOptions, UpdateOptions

__all__ = ["OperatorOptions", "UpdateOptions"]
