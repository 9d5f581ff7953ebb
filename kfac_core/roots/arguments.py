"""The arguments of functions of one symmetric matrix: a matrix and a damping."""

from __future__ import annotations

from kfac_core import constraints
from kfac_core.array import Array, Namespace, Scalar
from kfac_core.array import namespaces as ns
from kfac_core.linalg.symmetric import SymmetricMatrix


def symmetric_argument(
    matrix: SymmetricMatrix | Array, name: str, /
) -> tuple[SymmetricMatrix, Namespace]:
    """Return an argument as a `SymmetricMatrix`, in float32 or wider.

    Parameters
    ----------
    matrix : SymmetricMatrix, or array of shape (..., n, n)
        Never modified; of an array both triangles are read.
    name : str
        Name used in error messages.

    Returns
    -------
    matrix : SymmetricMatrix
        The same.
    xp : namespace
        Array API namespace of the arrays.

    Raises
    ------
    ShapeError, DtypeError
        For anything but square matrices of a real floating dtype.
    """
    full = True
    array: Array = matrix
    if isinstance(matrix, SymmetricMatrix):
        array, full = matrix.array, matrix.full_storage
    xp = ns.namespace_of(**{name: array})
    ns.require_floating(xp, array, name)
    constraints.require_shape(name, array, (..., "n", "n"))
    wide = ns.cast(xp, array, ns.wide_dtype(xp, array.dtype))
    return SymmetricMatrix(wide, full), xp


def damping_array(
    damping: Scalar, matrix: SymmetricMatrix, /, *, xp: Namespace
) -> Array:
    """Return a damping as an array of the dtype of a matrix, 0-d or of its stack.

    Parameters
    ----------
    damping : float, or array of shape () or (...)
        One for all matrices of the stack, or one for each.
    matrix : SymmetricMatrix
        Array that it is combined with.
    xp : namespace
        Array API namespace of the matrix.

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
        return ns.full_of(xp, damping, matrix.array)
    ns.namespace_of(matrix=matrix.array, damping=damping)
    lead = tuple(matrix.array.shape[:-2])
    if damping.ndim:
        constraints.require_shape("damping", damping, lead)
    return ns.cast(xp, damping, matrix.array.dtype)
