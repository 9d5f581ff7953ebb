"""What may reach a factorization, and the dtypes on the way there and back.

Conventions.  A problem is ``M = A + shift I`` with A symmetric, leading axes a stack,
and a shift of the shape of the stack, or 0-d for all of it.  Some libraries hang on
NaN, so that nothing is factorized that is not finite: with ``check="raise"`` it is an
error, and with ``check="status"`` the identity takes its place and a flag comes back.
"""

from __future__ import annotations

from typing import TypeVar

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.namespaces import (
    Scalar,
    cast,
    device_of,
    full_of,
    namespace_of,
    require_floating,
    status_unless,
    wide_dtype,
)
from kfac_core.array.status import Status
from kfac_core.array.structure import map_structure
from kfac_core.errors import DampingError, NotFiniteError, ShapeError
from kfac_core.linalg.symmetric import SymmetricMatrix

__all__ = [
    "damping_array",
    "fit_problem",
    "narrowed",
    "require_fit",
    "symmetric_argument",
    "unfit_flags",
    "widened",
]

T = TypeVar("T")


def symmetric_argument(
    matrix: SymmetricMatrix | Array, name: str, /
) -> tuple[SymmetricMatrix, Namespace]:
    """Return an argument as a `SymmetricMatrix`, in float32 or wider.

    Parameters
    ----------
    matrix : SymmetricMatrix, or array of shape (..., n, n)
        Never modified; of an array both triangles are read.
    name : str
        What a message should call it.

    Returns
    -------
    matrix : SymmetricMatrix
        The same.
    xp : namespace
        Of its array.

    Raises
    ------
    ShapeError, DtypeError
        For anything but square matrices of a real floating dtype.
    """
    whole = True
    array: Array = matrix
    if isinstance(matrix, SymmetricMatrix):
        array, whole = matrix.array, matrix.whole
    xp = namespace_of(**{name: array})
    require_floating(xp, array, name)
    if array.ndim < 2 or array.shape[-1] != array.shape[-2] or array.shape[-1] < 1:
        raise ShapeError(
            f"Expected `{name}` to have shape (..., n, n), got {tuple(array.shape)}."
        )
    wide = cast(xp, array, wide_dtype(xp, array.dtype))
    return SymmetricMatrix(wide, whole), xp


def damping_array(
    damping: Scalar, matrix: SymmetricMatrix, /, *, xp: Namespace
) -> Array:
    """Return a damping as an array of the dtype of a matrix, 0-d or of its stack.

    Parameters
    ----------
    damping : float, or array of shape () or (...)
        One for all matrices of the stack, or one for each.
    matrix : SymmetricMatrix
        What it goes together with.
    xp : namespace
        Of the matrix.

    Returns
    -------
    array, shape () or (...)
        The damping.

    Raises
    ------
    ShapeError
        For an array of another shape.
    MixedArraysError
        For an array of another library or device.
    """
    if not hasattr(damping, "shape") or not hasattr(damping, "dtype"):
        return full_of(xp, damping, matrix.array)
    namespace_of(matrix=matrix.array, damping=damping)
    lead = tuple(matrix.array.shape[:-2])
    if tuple(damping.shape) not in ((), lead):
        raise ShapeError(
            f"Expected `damping` to be a number, or an array of shape () or {lead}, got "
            f"shape {tuple(damping.shape)}."
        )
    return cast(xp, damping, matrix.array.dtype)


def unfit_flags(
    matrix: SymmetricMatrix, shift: Array | None, /, *, xp: Namespace
) -> Array:
    """Return the flags of what may not reach a factorization, shape (...)."""
    finite = xp.all(xp.isfinite(matrix.array), axis=(-2, -1))
    flags = status_unless(xp, finite, Status.MATRIX_NOT_FINITE)
    if shift is not None:
        good = xp.isfinite(shift) & (shift >= 0)
        flags = flags | status_unless(xp, good, Status.BAD_DAMPING)
    return flags


def require_fit(unfit: Array, name: str, /, *, xp: Namespace) -> None:
    """Raise for flags that are not zero, which waits for the device.

    Parameters
    ----------
    unfit : array of int32, shape (...)
        As `unfit_flags` made them.
    name : str
        What a message should call the matrix.
    xp : namespace
        Of the flags.

    Raises
    ------
    NotFiniteError, DampingError
        As the flags say.
    """
    if not bool(xp.any(unfit != 0)):
        return
    if bool(xp.any((unfit & int(Status.MATRIX_NOT_FINITE)) != 0)):
        raise NotFiniteError(
            f"{name}: the matrix holds NaN or infinity. Its statistics were not finite, "
            "or their sums overflowed; reset them, or keep them in float64."
        )
    raise DampingError(
        f"{name}: the damping is negative or not finite. Expected a finite number >= 0."
    )


def fit_problem(
    matrix: SymmetricMatrix, shift: Array, unfit: Array, /, *, xp: Namespace
) -> tuple[SymmetricMatrix, Array]:
    """Return the problem, with ``2 I`` in the place of what may not be factorized."""
    good = unfit == 0
    n, array = matrix.size, matrix.array
    eye = xp.eye(n, dtype=array.dtype, device=device_of(array))
    safe = xp.where(good[..., None, None], array, eye)
    ones = xp.ones_like(shift)
    return SymmetricMatrix(safe, matrix.whole), xp.where(good, shift, ones)


def widened(matrix: SymmetricMatrix, /, *, xp: Namespace) -> SymmetricMatrix | None:
    """Return the matrix in float64; None where it is, or where there is no such dtype."""
    device = device_of(matrix.array)
    dtypes = xp.__array_namespace_info__().dtypes(device=device, kind="real floating")
    if "float64" not in dtypes or matrix.array.dtype == xp.float64:
        return None
    return SymmetricMatrix(cast(xp, matrix.array, xp.float64), matrix.whole)


def narrowed(made: T, matrix: SymmetricMatrix, /, *, xp: Namespace) -> T:
    """Cast the floating arrays of a factorization back to the matrix's dtype."""
    dtype = matrix.array.dtype
    return map_structure(
        lambda x: cast(xp, x, dtype) if xp.isdtype(x.dtype, "real floating") else x,
        made,
    )
