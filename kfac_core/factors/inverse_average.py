"""The inverse of a running second moment, kept up to date without factorizing.

Conventions.  M begins as ``lam I`` and one update with the rows x_1 ... x_k is

    M <- decay M + weight sum_i x_i x_i^T,

so that the identity in it shrinks by the decay at every update; what is left of it is
the ``floor``.  The inverse follows by Woodbury's formula, which for one row is that of
Sherman and Morrison: with ``u = M^-1 x``,

    M^-1 <- (M^-1 - weight u u^T / (decay + weight x^T u)) / decay.

It is exact; rounding errors grow slowly, and every update measures them.  *When to
factorize anew*: after an update for which `needs_refactorization` is true, which is when
the residual is above its limit, a flag stands, or the floor is below a given one.
`refactorized` then puts the floor back to a damping and inverts M itself.

References
----------
Mozaffari, Li, Zhang and Mehri Dehnavi (2023), "MKOR", arXiv:2306.01685, for rank-one
updates of inverse factors.  What is here is the exact inverse of the average, and does
not claim to be the rule of that paper.
"""

from __future__ import annotations

from typing import Any

import array_api_compat

from kfac_core.array.backend import Array
from kfac_core.array.namespaces import (
    Scalar,
    as_scalar,
    cast,
    device_of,
    full_of,
    namespace_of,
    require_floating,
    status_unless,
    wide_dtype,
)
from kfac_core.array.status import Check, Status
from kfac_core.array.structure import map_structure, replaced, structure
from kfac_core.damping import require_damping
from kfac_core.errors import DampingError, DecayError, NotFiniteError, ShapeError
from kfac_core.factors.average import require_decay, require_weight
from kfac_core.linalg.certificate import RESIDUAL_LIMIT, inverse_residual
from kfac_core.linalg.cholesky import (
    add_to_diagonal,
    damped_cholesky,
    is_positive_factor,
)
from kfac_core.linalg.gram import updated_gram
from kfac_core.linalg.ladder import damped_inverse
from kfac_core.linalg.symmetric import SymmetricMatrix, multiply_symmetric
from kfac_core.linalg.triangular import solve_triangular

__all__ = ["InverseAverage", "inverse_average"]


@structure()
class InverseAverage:
    """A running second moment, its inverse, and what the inverse is worth.

    Attributes
    ----------
    matrix : SymmetricMatrix
        M, of d rows.
    inverse : SymmetricMatrix
        ``M^-1``.
    floor : array, 0-d
        The multiple of the identity that is in M.
    residual : array, 0-d
        ``|M M^-1 z - z| / |z|`` for a fixed z, after the last update.
    flags : array of int32, 0-d
        Of `Status`, of the last update.
    """

    matrix: SymmetricMatrix
    inverse: SymmetricMatrix
    floor: Array
    residual: Array
    flags: Array

    @property
    def size(self) -> int:
        """The number d of rows."""
        return self.matrix.size

    def updated(
        self,
        rows: Array,
        /,
        *,
        decay: Scalar,
        weight: Scalar,
        check: Check = "raise",
        name: str = "factor",
    ) -> InverseAverage:
        """Return the state after ``M <- decay M + weight rows^T rows``.

        Parameters
        ----------
        rows : array, shape (k, d)
            The x; a 1 appended to each where there is a homogeneous coordinate.
        decay : float or 0-d array
            In (0, 1]; at 0 the average of fewer than d rows has no inverse.
        weight : float or 0-d array
            Positive; ``(1 - decay) / k`` for a running mean.
        check : {"raise", "status"}
            Whether rows that are not finite raise, or leave the state as it was with a
            flag.
        name : str
            What a message should call it.

        Returns
        -------
        InverseAverage
            New; whether its inverse is still good is what `needs_refactorization` says.

        Raises
        ------
        ShapeError, DtypeError, MixedArraysError, DecayError
            For arguments that do not fit, in either mode.
        NotFiniteError
            For rows that are not finite (``check="raise"``).

        Notes
        -----
        ``4 (k + 1) d^2 + 2 k^2 d`` flops, certificate included, against ``d^3`` for an
        inverse: worth it for k well below d, and cheapest for k = 1, the mean of a
        batch's rows.
        """
        require_decay(decay)
        require_weight(weight)
        if isinstance(decay, int | float) and decay == 0:
            raise DecayError(
                "Expected `decay` in (0, 1], got 0: the rows of one update alone have no "
                "inverse. Begin anew with `inverse_average`."
            )
        xp = namespace_of(rows=rows, average=self.floor)
        require_floating(xp, rows, "rows")
        if rows.ndim != 2 or rows.shape[1] != self.size:
            raise ShapeError(
                f"Expected `rows` to have shape (k, {self.size}), got {tuple(rows.shape)}."
            )
        if rows.shape[0] == 0:
            raise ShapeError("Expected at least one row. Leave an empty batch out.")
        dtype = self.floor.dtype
        x = cast(xp, rows, dtype)
        beta = full_of(xp, as_scalar(xp, decay, dtype, "decay"), self.floor)
        w = full_of(xp, as_scalar(xp, weight, dtype, "weight"), self.floor)
        finite = xp.all(xp.isfinite(x))
        if check == "raise" and not bool(finite):
            raise NotFiniteError(
                f"{name}: `rows` hold NaN or infinity. Nothing was changed."
            )
        good = (beta > 0) & (beta <= 1) & (w > 0) & xp.isfinite(w)
        if check == "raise" and not bool(good):
            raise DecayError(f"{name}: expected `decay` in (0, 1] and `weight` > 0.")
        refused = status_unless(xp, finite, Status.INPUTS_NOT_FINITE)
        refused = refused | status_unless(xp, good, Status.BAD_DECAY)
        safe = xp.where(refused == 0, x, xp.zeros_like(x))
        one = xp.ones_like(beta)
        beta, w = xp.where(refused == 0, beta, one), xp.where(refused == 0, w, one)
        new = self._joined(safe, beta, w)
        kept = map_structure(lambda a, b: xp.where(refused == 0, a, b), new, self)
        return replaced(kept, flags=new.flags | refused)

    def needs_refactorization(
        self, *, minimum_floor: Scalar, limit: float = RESIDUAL_LIMIT
    ) -> Array:
        """Return whether the inverse should be made anew, 0-d bool.

        Parameters
        ----------
        minimum_floor : float or 0-d array
            Below which the identity in M has shrunk too far: a fraction of the damping.
        limit : float
            Of the residual.

        Returns
        -------
        array of bool, 0-d
            True also where a flag stands, or a number is no number.
        """
        good = (self.residual <= limit) & (self.floor >= minimum_floor)
        xp = array_api_compat.array_namespace(self.floor)
        return xp.logical_not(good & (self.flags == 0))

    def refactorized(
        self, *, damping: Scalar, check: Check = "raise", name: str = "factor"
    ) -> InverseAverage:
        """Return the state with the floor put back to a damping, inverted by Cholesky.

        Parameters
        ----------
        damping : float or 0-d array
            The new floor, positive.
        check : {"raise", "status"}
            As for `kfac_core.linalg.ladder.damped_inverse`.
        name : str
            What a message should call it.

        Returns
        -------
        InverseAverage
            New.

        Raises
        ------
        NotFiniteError, DampingError, FactorizationError
            Where M cannot be inverted (``check="raise"``).

        Notes
        -----
        ``d^3`` flops.
        """
        require_damping(damping)
        xp = array_api_compat.array_namespace(self.floor)
        dtype = self.floor.dtype
        floor = full_of(xp, as_scalar(xp, damping, dtype, "damping"), self.floor)
        whole = self.matrix.full()
        matrix = SymmetricMatrix(
            add_to_diagonal(whole, floor - self.floor, xp=xp), whole=True
        )
        options: dict[str, Any] = {"check": check, "name": name, "xp": xp}
        none = xp.zeros_like(floor)
        made = damped_inverse(matrix, none, None, **options)
        return InverseAverage(matrix, made.matrix, floor, made.residual, made.status)

    def solve(self, v: Array, /) -> Array:
        """Return ``M^-1 v``, for v of shape (d, k); ``2 d^2 k`` flops."""
        xp = namespace_of(v=v, average=self.floor)
        require_floating(xp, v, "v")
        if v.ndim != 2 or v.shape[0] != self.size:
            raise ShapeError(
                f"Expected `v` to have shape ({self.size}, k), got {tuple(v.shape)}."
            )
        solved = multiply_symmetric(self.inverse, cast(xp, v, self.floor.dtype), xp=xp)
        return cast(xp, solved, v.dtype)

    def _joined(self, x: Array, beta: Array, w: Array) -> InverseAverage:
        """Return the state after an update with fit arguments."""
        xp = array_api_compat.array_namespace(x)
        rows: dict[str, Any] = {"tail": None, "xp": xp}
        matrix = updated_gram(self.matrix, x, decay=beta, scale=w, **rows)
        turned = multiply_symmetric(self.inverse, xp.matrix_transpose(x), xp=xp)
        inner = w * xp.matmul(x, turned)
        inner = SymmetricMatrix(0.5 * (inner + xp.matrix_transpose(inner)), whole=True)
        lower = damped_cholesky(inner, beta, xp=xp)
        positive = is_positive_factor(lower, xp=xp)
        eye = xp.eye(x.shape[0], dtype=x.dtype, device=device_of(x))
        lower = xp.where(positive, lower, eye)
        root = solve_triangular(
            lower, xp.matrix_transpose(turned), transpose=False, xp=xp
        )
        inverse = updated_gram(
            self.inverse, root, decay=1.0 / beta, scale=-w / beta, **rows
        )
        floor = self.floor * beta
        residual = inverse_residual(matrix, xp.zeros_like(floor), inverse, xp=xp)
        accurate = residual <= RESIDUAL_LIMIT
        flags = status_unless(xp, positive, Status.NOT_POSITIVE)
        flags = flags | status_unless(xp, accurate, Status.INACCURATE)
        return InverseAverage(matrix, inverse, floor, residual, flags)


def inverse_average(size: int, /, *, damping: Scalar, like: Array) -> InverseAverage:
    """Return the state of no rows, ``M = lam I``.

    Parameters
    ----------
    size : int
        d, at least 1.
    damping : float or 0-d array
        lam, positive.
    like : array
        Any array of the library and device; its dtype, or float32 where that is
        narrower, is that of the state.

    Returns
    -------
    InverseAverage
        To be updated.

    Raises
    ------
    ShapeError, DtypeError
        For a size below 1, or an array of another kind.
    DampingError
        For a damping that is not positive and finite.

    Examples
    --------
    >>> import numpy as np
    >>> average = inverse_average(2, damping=1.0, like=np.zeros(()))
    >>> average = average.updated(np.asarray([[1.0, 0.0]]), decay=0.5, weight=0.5)
    >>> average.matrix.full().tolist()
    [[1.0, 0.0], [0.0, 0.5]]
    >>> average.inverse.full().tolist()
    [[1.0, 0.0], [0.0, 2.0]]
    """
    xp = namespace_of(like=like)
    require_floating(xp, like, "like")
    if size < 1:
        raise ShapeError(f"Expected `size` to be at least 1, got {size}.")
    require_damping(damping)
    if isinstance(damping, int | float) and damping == 0:
        raise DampingError(
            "Expected `damping` to be positive, got 0: no rows have no inverse."
        )
    dtype, device = wide_dtype(xp, like.dtype), device_of(like)
    zero = xp.zeros((), dtype=dtype, device=device)
    floor = full_of(xp, as_scalar(xp, damping, dtype, "damping"), zero)
    eye = xp.eye(size, dtype=dtype, device=device)
    status = xp.zeros((), dtype=xp.int32, device=device)
    return InverseAverage(
        SymmetricMatrix(eye * floor, whole=False),
        SymmetricMatrix(eye / floor, whole=False),
        floor,
        zero,
        status,
    )
