"""What every curvature operator offers.

Conventions.  An operator stands for one block's matrix at one moment with one damping,
``F_damped``; ``damped=False`` is the same without the damping.  Vectors are matrices V
of shape ``(in(+1), out)``.  `CurvatureOperator.to_dense` flattens row-major, so that the
input factor stands left in ``kron(A, G)``.  A product is computed in the operator's
dtype and returned in the vector's; vectors are never modified.
"""

from __future__ import annotations

from typing import Any, Protocol

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.namespaces import (
    cast,
    namespace_of,
    own_namespace,
    require_floating,
    require_matrix,
)
from kfac_core.array.status import Check
from kfac_core.linalg.groups import join_groups, split_groups
from kfac_core.linalg.shifted import Factorization

__all__ = [
    "FACTORIZATION_OF",
    "VECTOR_PRODUCTS",
    "CurvatureOperator",
    "entering",
    "leaving",
]

VECTOR_PRODUCTS = (
    "multiply",
    "multiply_inverse",
    "multiply_matpower",
    "multiply_cholesky",
    "multiply_cholesky_inverse",
    "sample",
)
"""The methods of `CurvatureOperator` that take and return a vector."""

FACTORIZATION_OF: dict[str, Factorization] = {
    "multiply_inverse": "inverse",
    "multiply_cholesky": "cholesky",
    "multiply_cholesky_inverse": "cholesky",
    "sample": "cholesky",
}
"""What each product needs to be prepared."""


class CurvatureOperator(Protocol):
    """The products of a damped curvature block with vectors.

    Every function raises `ShapeError`, `DtypeError` or `MixedArraysError` for a vector
    that does not fit, and `FactorizationError` where a factorization that was not
    prepared cannot be made; `NotReadyError`, where it would have to be made while a
    program is traced.
    """

    @property
    def shape(self) -> tuple[int, int]:
        """The shape ``(in(+1), out)`` of the vectors."""

    @property
    def factorizations(self) -> frozenset[Factorization]:
        """What has been prepared: products that need it alone make nothing."""

    def prepared(
        self,
        *factorizations: Factorization,
        check: Check = "raise",
        name: str = "block",
    ) -> CurvatureOperator:
        """Return the same operator with factorizations made that were missing.

        Trouble raises, naming the block, or is in the `status` where `check` says so.
        """

    def multiply(self, vector: Array, /, *, damped: bool = True) -> Array:
        """Return ``F v``."""

    def multiply_inverse(self, vector: Array, /) -> Array:
        """Return ``F_damped^-1 v``."""

    def multiply_matpower(self, vector: Array, exponent: float, /) -> Array:
        """Return ``F_damped^p v`` for any real p."""

    def multiply_cholesky(self, vector: Array, /, *, transpose: bool = False) -> Array:
        """Return ``L v`` or ``L^T v``, with ``L L^T = F_damped`` and L lower."""

    def multiply_cholesky_inverse(
        self, vector: Array, /, *, transpose: bool = False
    ) -> Array:
        """Return ``L^-1 v`` or ``L^-T v``."""

    def sample(self, noise: Array, /) -> Array:
        """Turn white noise into noise of covariance ``F_damped^-1``."""

    def trace(self, *, damped: bool = True) -> Array:
        """Return the trace of F, 0-d."""

    def logdet(self) -> Array:
        """Return the log-determinant of ``F_damped``, 0-d."""

    def eigenvalues(self, *, damped: bool = True) -> Array:
        """Return the eigenvalues of F, ascending, shape (in(+1) * out,)."""

    def to_dense(self, *, damped: bool = True) -> Array:
        """Return F as one matrix, for tests."""

    def status(self) -> Array:
        """Return the `Status` flags, 0-d int32."""


def entering(
    vector: Array,
    shape: tuple[int, int],
    dtype: Any,
    /,
    *,
    operator: Array,
    name: str,
    lead: tuple[int, ...] = (),
) -> tuple[Array, Namespace]:
    """Check a vector at the door and bring it into the operator's dtype.

    Parameters
    ----------
    vector : array
        What somebody gave.
    shape, dtype : tuple of int, dtype
        What the operator has.
    operator : array
        Any array of the operator, for its library and device.
    name : str
        What a message should call the vector.
    lead : tuple of int
        The shape of the operator's stack of groups.

    Returns
    -------
    array and namespace
        The vector, as a stack where there are groups, and the namespace of both.
    """
    xp = namespace_of(**{name: vector, "operator": operator})
    require_floating(xp, vector, name)
    if lead and vector.ndim == len(lead) + 2:
        require_matrix(vector, (*lead, shape[0], shape[1] // lead[0]), name)
        return cast(xp, vector, dtype), xp
    require_matrix(vector, shape, name)
    return split_groups(cast(xp, vector, dtype), lead, xp=xp), xp


def leaving(result: Array, vector: Array, /) -> Array:
    """Return a result in the dtype of the vector that it was computed from."""
    xp = own_namespace(result)
    if vector.ndim == 2:
        result = join_groups(result, xp=xp)
    return cast(xp, result, vector.dtype)
