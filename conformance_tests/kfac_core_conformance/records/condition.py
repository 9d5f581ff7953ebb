"""The accuracy to expect in float32: a tolerance from the problem's condition.

Rounding the inputs to float32 moves a factor by about ``u = 2^-23`` of its
norm, whatever is computed afterwards.  To first order that moves an answer by ``u c``,
relative to its norm, with

=========================  ==========================================================
``multiply``               ``c = |F| |v| / |F v|``
``multiply_inverse``       ``c = k``
``multiply_matpower``      ``c = max(1, |p|) k``
``multiply_cholesky``,     ``c = k``
its inverse
``logdet``                 ``c = n m k / |log det|``
all others                 ``c = 1``
=========================  ==========================================================

where k is the condition number of the damped block, or the sum of those of the damped
factors if a Kronecker product is inverted factor by factor.
The bound is `SLACK` times ``u c``, and `LARGEST_TOLERANCE` at most; numbers are computed
in float64 with NumPy.
Measured with factors of 5 to 150 rows and k up to 1e5, errors reach ``2 u c``.
"""

from __future__ import annotations

import numpy as np

from kfac_core.array import Array
from kfac_core.operators.kronecker import FactoredKronecker
from kfac_core.operators.operator import CurvatureOperator
from kfac_core_conformance.records.answers import Recomputation
from kfac_core_conformance.records.checks import (
    LARGEST_TOLERANCE,
    Logdet,
    Multiply,
    MultiplyMatpower,
)
from kfac_core_conformance.records.record import norm_of

SLACK = 4.0
"""Allows for several roundings: of inputs, sums and factorizations."""

_UNIT = float(np.finfo(np.float32).eps)


def condition_bound(reference: Recomputation, index: int, /) -> float:
    """Return the relative error to expect of the answer to a check in float32.

    Parameters
    ----------
    reference : Recomputation
        The block on NumPy, in float64.
    index : int
        The check's number.

    Returns
    -------
    float
        ``min(SLACK u c, LARGEST_TOLERANCE)``, with u the unit roundoff of float32 and c the
        condition number of the operation.

    Raises
    ------
    KFACError
        If the condition number cannot be computed.
    """
    return min(SLACK * _UNIT * _condition(reference, index), LARGEST_TOLERANCE)


def _condition(reference: Recomputation, index: int) -> float:
    """Return the condition number c of the operation; see the module's table."""
    check = reference.record.document.checks[index]
    if check.tag() not in _CONDITIONED:
        return 1.0
    operator = reference.operator(check)
    expected = norm_of(reference.record.answers[index])
    if isinstance(check, Multiply):
        spectrum = operator.eigenvalues(damped=check.damped)
        vector = norm_of(reference.record.vectors[index])
        return float(np.max(spectrum)) * vector / expected
    k = _condition_number(operator)
    if isinstance(check, MultiplyMatpower):
        return float(k * max(1.0, abs(check.exp)))
    if isinstance(check, Logdet):
        n, m = operator.vector_shape
        return n * m * k / expected
    return k


def _condition_number(operator: CurvatureOperator, /) -> float:
    """Return the condition number of the matrix, or matrices, that are factorized."""
    if isinstance(operator, FactoredKronecker):
        parts = (operator.input, operator.output)
        return float(sum(_ratio(part.eigenvalues(shifted=True)) for part in parts))
    return _ratio(operator.eigenvalues(damped=True))


_CONDITIONED = (
    "multiply",
    "multiply_inverse",
    "multiply_matpower",
    "multiply_cholesky",
    "multiply_cholesky_inverse",
    "logdet",
)


def _ratio(eigenvalues: Array) -> float:
    """Return the largest over the smallest; for stacked groups, the worst ratio."""
    ratios = np.max(eigenvalues, axis=-1) / np.min(eigenvalues, axis=-1)
    return float(np.max(ratios))
