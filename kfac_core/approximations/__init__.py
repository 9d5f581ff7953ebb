"""Approximations as mathematics: which statistics are kept, which operator they make.

Here is what the author of an approximation needs beside `kfac_core.Approximation`: the
options that its methods are given.
"""

from kfac_core.approximations.options import OperatorOptions, UpdateOptions

__all__ = ["OperatorOptions", "UpdateOptions"]
