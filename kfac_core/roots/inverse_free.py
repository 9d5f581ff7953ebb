"""Inverse factors without inverting: IKFAC.

Conventions.  ``K K^T`` stands for ``(A + lam I)^-1`` of the inputs and ``C C^T`` for that
of the output gradients, d and p rows each; a block's vector is preconditioned by
``K K^T V C C^T``.  One update with the moments A and G of a batch is, for a step b,

    K <- K (I - b m),    m = 1/2 ( H + lam K^T K - I ),    H = K^T A K

and likewise for C.  This follows the inverse of the average ``M <- (1-b) M + b (A + lam
I)`` with an error of ``O(b^2)`` a step, and needs only products.  There is no momentum
here: who wants it averages the directions of `FactorRoot.direction` before
`FactorRoot.moved`.

References
----------
Lin, Dangel, Eschenhagen et al. (2024), "Structured inverse-free natural gradient
descent", arXiv:2312.05705.
"""

from __future__ import annotations

import array_api_compat

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.namespaces import (
    Scalar,
    as_scalar,
    cast,
    full_of,
    namespace_of,
    require_floating,
    require_matrix,
)
from kfac_core.array.status import Check, Status
from kfac_core.array.structure import map_structure, replaced
from kfac_core.constraints import validated
from kfac_core.damping import require_damping
from kfac_core.errors import FactorizationError, NotFiniteError, ShapeError
from kfac_core.roots.factor_root import FactorRoot

__all__ = ["ikfac_updated", "precondition_by_roots"]


@validated
def ikfac_updated(
    root: FactorRoot,
    rows: Array,
    /,
    *,
    scale: Scalar,
    damping: Scalar,
    step: Scalar,
    check: Check = "raise",
    name: str = "factor",
) -> FactorRoot:
    """Return the root after one update of IKFAC.

    Parameters
    ----------
    root : FactorRoot
        K; not modified.
    rows : array, shape (k, d)
        The x; a 1 appended to each where there is a homogeneous coordinate.
    scale : float or 0-d array
        ``A = scale rows^T rows``; 1/k for a mean.
    damping : float or 0-d array
        Damping ``lam``.
    step : float or 0-d array
        b, which is 1 less the decay of the average that is followed.
    check : {"raise", "status"}
        Whether failures raise, or are reported in the flags, the root as it was.
    name : str
        Name used in error messages.

    Returns
    -------
    FactorRoot
        New root.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError, DampingError
        For incompatible arguments, in either mode.
    NotFiniteError
        For rows that are not finite (``check="raise"``).
    FactorizationError
        For a step that is too long; see `FactorRoot.moved` (``check="raise"``).

    Notes
    -----
    Dense: ``2 k d^2 + k d^2 + 3 d^3`` flops, all in matrix products; diagonal: ``3 k d``.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.roots import factor_root, ikfac_updated
    >>> rows = np.sqrt(3.0) * np.eye(2)  # rows^T rows = 3 I
    >>> root = factor_root(2, form="diagonal", scale=0.4, like=rows)
    >>> for _ in range(100):
    ...     root = ikfac_updated(root, rows, scale=1.0, damping=1.0, step=0.2)
    >>> bool(np.allclose(root.root**2, 0.25))
    True
    """
    xp = namespace_of(rows=rows, root=root.root)
    require_floating(xp, rows, "rows")
    if rows.ndim != 2 or rows.shape[1] != root.size or rows.shape[0] == 0:
        raise ShapeError(
            f"Expected `rows` to have shape (k, {root.size}) with k >= 1, got "
            f"{tuple(rows.shape)}."
        )
    require_damping(damping)
    finite = xp.all(xp.isfinite(rows))
    x = cast(xp, rows, root.root.dtype)
    x = xp.where(finite, x, xp.zeros_like(x))
    lam = _scalar(root, damping, "damping")
    m = root.direction(root.moment(x, _scalar(root, scale, "scale")), lam)
    moved = root.moved(m, _scalar(root, step, "step"))
    return _accepted(root, moved, finite, check, name, xp)


@validated
def precondition_by_roots(
    input_root: FactorRoot, output_root: FactorRoot, vector: Array, /
) -> Array:
    """Return ``K K^T V C C^T``.

    Parameters
    ----------
    input_root, output_root : FactorRoot
        Roots K and C.
    vector : array, shape (d, p)
        Matrix V.

    Returns
    -------
    array, shape (d, p)
        In the dtype of the vector; ``4 d p (d + p)`` flops for dense roots.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError
        For a vector of incompatible shape, dtype, library or device.
    """
    xp = namespace_of(vector=vector, input_root=input_root.root)
    require_floating(xp, vector, "vector")
    require_matrix(vector, (input_root.size, output_root.size), "vector")
    V = cast(xp, vector, input_root.root.dtype)
    left = xp.matrix_transpose(input_root.multiply_inverse(V))
    both = xp.matrix_transpose(output_root.multiply_inverse(left))
    return cast(xp, both, vector.dtype)


def _scalar(root: FactorRoot, value: Scalar, name: str) -> Array:
    xp = array_api_compat.array_namespace(root.root)
    scalar = as_scalar(xp, value, root.root.dtype, name)
    return full_of(xp, scalar, root.residual)


def _accepted(
    old: FactorRoot,
    new: FactorRoot,
    finite: Array,
    check: Check,
    name: str,
    xp: Namespace,
) -> FactorRoot:
    """Return the new root if no flag is set, else the old one with the flags."""
    flags = xp.where(
        finite, new.flags, xp.full_like(new.flags, int(Status.INPUTS_NOT_FINITE))
    )
    if check == "raise":
        found = Status(int(flags))
        if Status.INPUTS_NOT_FINITE in found:
            raise NotFiniteError(
                f"{name}: the rows hold NaN or infinity. Nothing was changed."
            )
        if found:
            raise FactorizationError(
                "the step is too long: step times the largest eigenvalue of the direction "
                "is 1 or more, and the root would become singular. Make `step` or the "
                "`scale` that the root began with smaller.",
                factor=name,
            )
        return new
    kept = map_structure(lambda a, b: xp.where(flags == 0, a, b), new, old)
    return replaced(kept, flags=flags)
