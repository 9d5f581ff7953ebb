"""A factor on its own: a damped second moment, without a block.

Conventions.  ``M = A + lam I`` with A a second moment, full or diagonal (an
embedding's is diagonal).  Products are with any real power of M, from the left, on
vectors ``(n,)`` and matrices ``(n, k)``.

Examples
--------
>>> import numpy as np
>>> factor = damped_factor(np.asarray([[5.0, 7.0], [7.0, 10.0]]), damping=0.5)
>>> bool(np.allclose(factor.covariance(damped=True), [[5.5, 7.0], [7.0, 10.5]]))
True
"""

from __future__ import annotations

import array_api_compat

from kfac_core import errors
from kfac_core.array import Array, Check, Namespace, Scalar, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import structure
from kfac_core.damping import require_damping
from kfac_core.factors.factor import Damped
from kfac_core.linalg.damped import damped_matrix, real_exponent
from kfac_core.linalg.diagonal import damped_diagonal
from kfac_core.linalg.factorizations import Factorization
from kfac_core.linalg.symmetric import SymmetricMatrix

__all__ = ["DampedFactor", "damped_factor"]


@structure()
class DampedFactor:
    """A damped second moment ``M = A + lam I``, with products by its real powers.

    Attributes
    ----------
    shifted : DampedMatrix or DampedDiagonal
        M, with the factorizations made so far.
    """

    shifted: Damped

    @property
    def size(self) -> int:
        """The number n of rows of M."""
        return self.shifted.size

    def prepared(
        self,
        *factorizations: Factorization,
        check: Check = "raise",
        name: str = "factor",
    ) -> DampedFactor:
        """Return the factor with missing factorizations computed.

        Parameters
        ----------
        *factorizations : {"inverse", "cholesky", "eigenbasis"}
            Factorizations to prepare.
        check : {"raise", "status"}
            Whether a failure raises, or is in ``shifted.status()``.
        name : str
            What a message should call the factor.

        Returns
        -------
        DampedFactor
            New factor.

        Raises
        ------
        NotFiniteError, DampingError, FactorizationError
            If M cannot be factorized (``check="raise"``).
        """
        made = self.shifted.prepared(*factorizations, check=check, name=name)
        return replaced(self, shifted=made)

    def covariance(self, *, damped: bool = False) -> Array:
        """Return the moment, or M, as a dense matrix of shape (n, n)."""
        return self.shifted.dense(shifted=damped)

    def multiply_left(self, v: Array, /, *, exponent: float) -> Array:
        """Return ``M^p v``.

        Parameters
        ----------
        v : array, shape (n,) or (n, k)
            Array of the factor's library and device.
        exponent : float
            p; 1 and -1 need no eigendecomposition.

        Returns
        -------
        array
            Product in the shape and dtype of `v`.

        Raises
        ------
        ShapeError, DtypeError, MixedArraysError
            For a vector of incompatible shape, dtype, library or device.
        FactorizationError
            If M has no such power.
        """
        exponent = real_exponent(exponent)
        xp = self._entering(v)
        if v.ndim not in (1, 2) or v.shape[0] != self.size:
            raise errors.ShapeError(
                f"Expected `v` to have shape ({self.size},) or ({self.size}, k), got "
                f"{tuple(v.shape)}."
            )
        columns = xp.reshape(v, (self.size, -1))
        result = self._power(ns.cast(xp, columns, self.shifted.dtype), exponent)
        return ns.cast(xp, xp.reshape(result, v.shape), v.dtype)

    def trace(self, *, damped: bool = False) -> Array:
        """Return the trace of the moment, or of M, 0-d."""
        return self.shifted.trace(shifted=damped)

    def logdet(self) -> Array:
        """Return ``log det M``, 0-d."""
        return self.shifted.logdet()

    def eigenvalues(self, *, damped: bool = False) -> Array:
        """Return the eigenvalues of the moment, or of M, ascending."""
        xp = array_api_compat.array_namespace(self.shifted.shift)
        return xp.sort(self.shifted.eigenvalues(shifted=damped))

    def _power(self, v: Array, exponent: float) -> Array:
        if exponent == 1:
            return self.shifted.multiply(v, shifted=True)
        if exponent == -1:
            return self.shifted.solve(v)
        return self.shifted.power(v, exponent)

    def _entering(self, v: Array) -> Namespace:
        xp = ns.namespace_of(v=v, factor=self.shifted.shift)
        ns.require_floating(xp, v, "v")
        return xp


def damped_factor(
    moment: SymmetricMatrix | Array,
    /,
    *,
    damping: Scalar,
    factorizations: tuple[Factorization, ...] = (),
    check: Check = "raise",
    name: str = "factor",
) -> DampedFactor:
    r"""Damp a second moment, ``M = A + lam I``.

    .. math:: M = A + \lambda I

    Parameters
    ----------
    moment : SymmetricMatrix, or array of shape (n, n) or (n,)
        A: whole, or its diagonal (as of an embedding's ids).  What an `Average` of a
        block's statistics has for a value, or `kfac_core.gram` over a number of rows.
    damping : float or 0-d array
        Damping ``lam``, finite and >= 0.
    factorizations : tuple of {"inverse", "cholesky", "eigenbasis"}
        Factorizations to prepare now; the rest are made when needed.
    check : {"raise", "status"}
        Whether failures raise, or are reported in ``shifted.status()``.
    name : str
        Name used in error messages.

    Returns
    -------
    DampedFactor
        Result in the dtype of the moment, or float32 where that is narrower.

    Raises
    ------
    ShapeError, DtypeError, DampingError
        For incompatible arguments.
    NotFiniteError, FactorizationError
        If M cannot be factorized (``check="raise"``).
    """
    require_damping(damping)
    array = moment.array if isinstance(moment, SymmetricMatrix) else moment
    xp = ns.namespace_of(moment=array)
    ns.require_floating(xp, array, "moment")
    square = array.ndim == 2 and array.shape[0] == array.shape[1]
    if not square and array.ndim != 1:
        raise errors.ShapeError(
            f"Expected `moment` to have shape (n, n) or (n,), got {tuple(array.shape)}."
        )
    value = ns.cast(xp, array, ns.wide_dtype(xp, array.dtype))
    shift = ns.as_scalar(xp, damping, value.dtype, "damping")
    made: Damped
    if square:
        full = not isinstance(moment, SymmetricMatrix) or moment.full_storage
        made = damped_matrix(
            SymmetricMatrix(value, full),
            shift,
            factorizations=factorizations,
            check=check,
            name=name,
        )
    else:
        made = damped_diagonal(
            value, shift, factorizations=factorizations, check=check, name=name
        )
    return DampedFactor(made)
