"""What the sums of an update show of its rows: that they are finite, unread.

Conventions.  As in `kfac_core.array.finite`: an entry of a diagonal is a sum of squares,
the old sum's among them.  Only that rows are finite is shown; where a diagonal is not,
they may still be, and have to be read.
"""

from __future__ import annotations

from kfac_core.approximations.kronecker import Kronecker
from kfac_core.array.backend import Namespace
from kfac_core.array.finite import known_true
from kfac_core.factors.statistics import Statistics
from kfac_core.linalg.symmetric import SymmetricMatrix

__all__ = ["finite_arguments"]

_NONE: frozenset[str] = frozenset()
_SIDES = {"input": "inputs", "output": "output_grads"}


def finite_arguments(
    approximation: object,
    new: Statistics,
    /,
    *,
    skip: frozenset[str],
    xp: Namespace,
) -> frozenset[str]:
    """Return which arrays of the rows are known to be finite, after an update with them.

    Parameters
    ----------
    approximation : Approximation
        Of the block; only `Kronecker` keeps sums of all rows under these names.
    new : Statistics
        After the update.
    skip : frozenset of str
        The factors that were left as they are.
    xp : namespace
        Of the arrays.

    Returns
    -------
    frozenset of str
        Of ``"inputs"`` and ``"output_grads"``.  None where it would have to be waited for.
    """
    if type(approximation) is not Kronecker:
        return _NONE
    known = []
    for side, argument in _SIDES.items():
        total = new.averages[side].sum
        if side in skip or type(total) is not SymmetricMatrix:
            continue
        if known_true(xp.isfinite(xp.linalg.diagonal(total.array)), xp=xp):
            known.append(argument)
    return frozenset(known)
