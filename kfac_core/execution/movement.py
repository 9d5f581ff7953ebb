"""Whether statistics have moved since an operator was made from them.

Conventions.  The mark of a statistic C is its product with one fixed probe z (of a
diagonal one, C itself), kept from the refresh: a vector for a matrix.  C has moved by

    |C z - C_old z| / |C_old z|,

which for a random z estimates the relative change in the Frobenius norm; a fixed one sees
what rounding errors and gradients have no reason to avoid.  The movement of a block is
that of the statistic that moved most.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.namespaces import device_of
from kfac_core.array.structure import leaves
from kfac_core.factors.statistics import Statistics
from kfac_core.linalg.certificate import probe
from kfac_core.linalg.symmetric import SymmetricMatrix, multiply_symmetric

__all__ = ["Marks", "marks_of", "movement"]

Marks = Mapping[str, Array]
"""By the path of a statistic."""


def marks_of(statistics: Statistics, /, *, debias: bool) -> Marks:
    """Return the marks of all averages.

    Parameters
    ----------
    statistics : Statistics
        Never modified.
    debias : bool
        Whether sums are divided by their weights.

    Returns
    -------
    mapping of str to array
        One for each array of the averages' values.

    Notes
    -----
    ``2 n^2`` flops for a matrix of n rows; never waits for a device.
    """
    xp = statistics.namespace
    marks: dict[str, Array] = {}
    for name, average in statistics.averages.items():
        value: Any = average.value(debias=debias)
        if isinstance(value, SymmetricMatrix):
            marks[name] = multiply_symmetric(value, _probe(value.array, xp), xp=xp)
            continue
        for path, x in leaves(value, prefix=name):
            square = x.ndim > 1 and x.shape[-1] == x.shape[-2]
            marks[path] = xp.matmul(x, _probe(x, xp)) if square else x
    return marks


def movement(now: Marks, before: Marks, /, *, xp: Namespace) -> Array:
    """Return the largest relative change of a mark, 0-d; infinite from zero."""
    changes = []
    for name, mark in now.items():
        old = before[name]
        change, size = xp.sum((mark - old) ** 2), xp.sum(old * old)
        positive = size > 0
        ratio = xp.sqrt(change / xp.where(positive, size, xp.ones_like(size)))
        unmoved = xp.where(change > 0, xp.full_like(ratio, xp.inf), change)
        changes.append(xp.where(positive, ratio, unmoved))
    return xp.max(xp.stack(changes))


def _probe(x: Array, xp: Namespace) -> Array:
    return probe(x.shape[-1], dtype=x.dtype, device=device_of(x), xp=xp)
