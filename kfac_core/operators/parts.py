"""The interface of damped factors that operators use."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self, TypeVar

from kfac_core import errors
from kfac_core.array import Array, Check, Namespace, Status
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import in_dtype
from kfac_core.factors.factor import Damped
from kfac_core.linalg import certificate
from kfac_core.linalg.diagonal import DampedDiagonal
from kfac_core.linalg.factorizations import Eigendecomposition
from kfac_core.linalg.rank_one import DampedRankOne


class ChainOperator(Protocol):
    """An operator that is computed in the computing dtype and then rounded."""

    @property
    def like(self) -> Array:
        """An array of the operator's library, device and dtype."""

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """The shape of a vector."""

    def flagged(self, flags: Array, /) -> Self:
        """Return the operator with more `Status` flags."""

    def _multiply(self, V: Array, xp: Namespace, damped: bool) -> Array:
        """Return ``F_damped V``, or ``F V``."""

    def _multiply_inverse(self, V: Array, xp: Namespace) -> Array:
        """Return ``F_damped^-1 V``."""

    def _sample(self, Z: Array, xp: Namespace) -> Array:
        """Return a root of ``F_damped^-1`` times Z."""


Chained = TypeVar("Chained", bound=ChainOperator)

Bases = Mapping[str, Eigendecomposition | None]
"""Eigendecompositions of factors by name; None for a diagonal."""


def accurate_bases(
    parts: Mapping[str, Damped],
    bases: Bases,
    /,
    *,
    scale: Array,
    damping: Array,
    check: Check,
    name: str,
) -> tuple[Bases, Array]:
    """Return eigenbases of factors that determine ``S F_1 (x) ... (x) F_k + lam I``.

    An eigenvalue of the product is a product of eigenvalues, each of which is known up to
    its error.  Where that moves a damped eigenvalue by more than `ERROR_LIMIT` of it, the
    eigendecompositions are repeated in float64, which helps where roundoff of storing is
    small for all directions that matter.

    Parameters
    ----------
    parts : mapping of str to DampedMatrix, DampedDiagonal or DampedRankOne
        Factors.
    bases : mapping of str to Eigendecomposition or None
        Their eigendecompositions.
    scale, damping : array, shape (...)
        S and lam.
    check : {"raise", "status"}
        Whether to use float64 and raise, or to set a flag.
    name : str
        Name of the block in error messages.

    Returns
    -------
    mapping of str to Eigendecomposition or None
        Eigendecompositions.
    array of int32, 0-d
        `Status` flags.

    Raises
    ------
    FactorizationError
        If float64 does not determine the block either (``check="raise"``).

    Notes
    -----
    ``O(sum n_i)`` operations; ``check="raise"`` synchronizes with the device.
    """

    def spectrum(of: Bases) -> certificate.DampedSpectrum:
        factors = [part.spectrum(of[side]) for side, part in parts.items()]
        return certificate.DampedSpectrum(factors, scale, damping)

    flags = spectrum(bases).flag()
    if check == "status" or not int(flags):
        return bases, flags
    # Roundoff of the working precision decides, so try float64 once.
    wide = {
        side: eigenbasis_of(part.in_wide_basis(name=f"{name}/{side}"))
        for side, part in parts.items()
    }
    spectrum(wide).require_determined(name)
    return wide, spectrum(wide).flag()


def applied_in(
    operator: Chained, dtype: object, /, *, check: Check, name: str, xp: Namespace
) -> Chained:
    """Return an operator in the dtype of applying, where rounding it changes little.

    Parameters
    ----------
    operator : SeriesOperator or TridiagonalOperator
        Operator in the dtype of computing.
    dtype : dtype
        Dtype of the result.
    check : {"raise", "status"}
        Whether a loss of precision raises, or sets a flag.
    name : str
        Name of the block in error messages.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    SeriesOperator or TridiagonalOperator
        Itself, if it has that dtype.

    Raises
    ------
    FactorizationError
        If the rounded operator, its inverse or its root, times the fixed probe, differs by
        more than the limit of residuals (``check="raise"``).
    """
    if operator.like.dtype == dtype:
        return operator
    narrow = in_dtype(operator, dtype, xp)
    size = math.prod(operator.stack_shape)
    z = certificate.probe(
        size, dtype=operator.like.dtype, device=ns.device_of(operator.like), xp=xp
    )
    z = xp.reshape(z, operator.stack_shape)
    # Rounding may hurt one product and not another, so take the worst of three.
    worst = xp.zeros_like(operator.like)
    # Private formulas, since public products raise where a flagged operator gives NaN.
    formulas: tuple[Callable[[Any, Array], Array], ...] = (
        lambda operator, v: operator._multiply(v, xp, True),
        lambda operator, v: operator._multiply_inverse(v, xp),
        lambda operator, v: operator._sample(v, xp),
    )
    for formula in formulas:
        expected = formula(operator, z)
        rounded = formula(narrow, ns.cast(xp, z, dtype))
        difference = ns.cast(xp, rounded, expected.dtype) - expected
        column = (-1, 1)
        error = certificate.relative_norm(
            xp.reshape(difference, column), xp.reshape(expected, column), xp=xp
        )
        worst = xp.where(error > worst, error, worst)
    flags = ns.status_unless(xp, worst <= certificate.RESIDUAL_LIMIT, Status.INACCURATE)
    if check == "status":
        flagged: Chained = narrow.flagged(flags)
        return flagged
    if int(flags):
        raise errors.FactorizationError(
            f"rounded to {dtype} the block is off by {float(worst):.0e} "
            f"(limit {certificate.RESIDUAL_LIMIT}). Increase `damping`, or take "
            'Precision(apply="float64").',
            factor=name,
        )
    return narrow


def flagged_damping(damping: Array, /, *, xp: Namespace) -> tuple[Array, Array]:
    """Return a damping, NaN where it is negative or not finite, and the flag of that."""
    good = xp.isfinite(damping) & (damping >= 0)
    flags = ns.status_unless(xp, good, Status.BAD_DAMPING)
    return xp.where(good, damping, xp.full_like(damping, xp.nan)), flags


def eigenbasis_of(part: Damped, /) -> Eigendecomposition | None:
    """Return the eigendecomposition of a factor; None for a diagonal, which needs none.

    Parameters
    ----------
    part : DampedMatrix, DampedDiagonal or DampedRankOne
        With its eigenbasis prepared.

    Returns
    -------
    Eigendecomposition or None
        Eigendecomposition of the factor without its shift.
    """
    if isinstance(part, DampedDiagonal):
        return None
    matrix = part.whole if isinstance(part, DampedRankOne) else part
    assert matrix is not None
    return matrix.basis
