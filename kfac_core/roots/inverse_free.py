"""Inverse factors without inverting: IKFAC and INGD.

Conventions.  ``K K^T`` stands for ``(A + lam I)^-1`` of the inputs and ``C C^T`` for that
of the output gradients, d and p rows each; a block's vector is preconditioned by
``K K^T V C C^T``.  One update with the moments A and G of a batch is, for a step b,

    K <- K (I - b m_K),    m_K = 1/2 ( H_K + lam K^T K - I ),    H_K = K^T A K    (IKFAC)

    m_K = 1/2 ( tr(H_C)/p H_K + lam tr(C^T C)/p K^T K - I ),    H_C = C^T G C      (INGD)

and likewise for C.  IKFAC follows the inverse of the average ``M <- (1-b) M + b (A + lam
I)`` with an error of ``O(b^2)`` a step; INGD is the same for ``K -> c K, C -> C/c``.  Only
products are needed.  There is no momentum here: who wants it averages the directions of
`FactorRoot.direction` before `FactorRoot.moved`.

References
----------
Lin, Dangel, Eschenhagen et al. (2024), "Structured inverse-free natural gradient
descent", arXiv:2312.05705, for IKFAC and the structured roots; Lin et al. (2023),
arXiv:2302.09738, for INGD.
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
from kfac_core.damping import require_damping
from kfac_core.errors import FactorizationError, NotFiniteError, ShapeError
from kfac_core.roots.factor_root import FactorRoot

__all__ = ["ikfac_updated", "ingd_updated", "precondition_by_roots"]


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
        K; never modified.
    rows : array, shape (k, d)
        The x; a 1 appended to each where there is a homogeneous coordinate.
    scale : float or 0-d array
        ``A = scale rows^T rows``; 1/k for a mean.
    damping : float or 0-d array
        lam.
    step : float or 0-d array
        b, which is 1 less the decay of the average that is followed.
    check : {"raise", "status"}
        Whether trouble raises, or is in the flags, the root as it was.
    name : str
        What a message should call it.

    Returns
    -------
    FactorRoot
        New.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError, DampingError
        For arguments that do not fit, in either mode.
    NotFiniteError
        For rows that are not finite (``check="raise"``).
    FactorizationError
        For a step that is too long; see `FactorRoot.moved` (``check="raise"``).

    Notes
    -----
    Dense: ``2 k d^2 + k d^2 + 3 d^3`` flops, all in matrix products; diagonal: ``3 k d``.
    """
    x, finite, xp = _entering(root, rows, "rows")
    require_damping(damping)
    lam, b, s = (_scalar(root, v, n) for v, n in _named(damping, step, scale))
    m = root.direction(root.moment(x, s), 1.0, lam)
    return _accepted(root, root.moved(m, b), finite, check, name, xp)


def ingd_updated(
    input_root: FactorRoot,
    output_root: FactorRoot,
    input_rows: Array,
    output_rows: Array,
    /,
    *,
    input_scale: Scalar,
    output_scale: Scalar,
    damping: Scalar,
    step: Scalar,
    check: Check = "raise",
    name: str = "block",
) -> tuple[FactorRoot, FactorRoot]:
    """Return both roots of a block after one update of INGD.

    Parameters
    ----------
    input_root, output_root : FactorRoot
        K and C; never modified.
    input_rows, output_rows : array, shapes (k, d) and (l, p)
        The x, with their homogeneous coordinate, and the g.
    input_scale, output_scale : float or 0-d array
        ``A = input_scale x^T x`` and ``G = output_scale g^T g``.
    damping, step, check, name
        As for `ikfac_updated`.

    Returns
    -------
    tuple of FactorRoot
        The new K and C, both from the old ones.

    Raises
    ------
    KFACError
        As `ikfac_updated`.

    Notes
    -----
    As two updates of IKFAC.
    """
    x, finite, xp = _entering(input_root, input_rows, "input_rows")
    g, finite_g, _ = _entering(output_root, output_rows, "output_rows")
    require_damping(damping)
    lam, b, a = (
        _scalar(input_root, v, n) for v, n in _named(damping, step, input_scale)
    )
    c = _scalar(output_root, output_scale, "output_scale")
    finite = finite & finite_g
    H_K, H_C = input_root.moment(x, a), output_root.moment(g, c)
    moved = []
    for root, own, other, other_moment in (
        (input_root, H_K, output_root, H_C),
        (output_root, H_C, input_root, H_K),
    ):
        moment_scale = _trace(other_moment, xp) / other.size
        identity_scale = lam * other.squared_norm() / other.size
        moved.append(root.moved(root.direction(own, moment_scale, identity_scale), b))
    # Both move or none does.
    flags = moved[0].flags | moved[1].flags
    K, C = (
        _accepted(old, replaced(new, flags=flags), finite, check, name, xp)
        for old, new in zip((input_root, output_root), moved, strict=True)
    )
    return K, C


def precondition_by_roots(
    input_root: FactorRoot, output_root: FactorRoot, vector: Array, /
) -> Array:
    """Return ``K K^T V C C^T``.

    Parameters
    ----------
    input_root, output_root : FactorRoot
        K and C.
    vector : array, shape (d, p)
        V.

    Returns
    -------
    array, shape (d, p)
        In the dtype of the vector; ``4 d p (d + p)`` flops for dense roots.

    Raises
    ------
    ShapeError, DtypeError, MixedArraysError
        For a vector that does not fit.
    """
    xp = namespace_of(vector=vector, input_root=input_root.root)
    require_floating(xp, vector, "vector")
    require_matrix(vector, (input_root.size, output_root.size), "vector")
    V = cast(xp, vector, input_root.root.dtype)
    left = xp.matrix_transpose(input_root.multiply_inverse(V))
    both = xp.matrix_transpose(output_root.multiply_inverse(left))
    return cast(xp, both, vector.dtype)


def _entering(
    root: FactorRoot, rows: Array, name: str
) -> tuple[Array, Array, Namespace]:
    """Check rows at the door; return them in the root's dtype, and if they are finite."""
    xp = namespace_of(**{name: rows, "root": root.root})
    require_floating(xp, rows, name)
    if rows.ndim != 2 or rows.shape[1] != root.size or rows.shape[0] == 0:
        raise ShapeError(
            f"Expected `{name}` to have shape (k, {root.size}) with k >= 1, got "
            f"{tuple(rows.shape)}."
        )
    finite = xp.all(xp.isfinite(rows))
    x = cast(xp, rows, root.root.dtype)
    return xp.where(finite, x, xp.zeros_like(x)), finite, xp


def _named(
    damping: Scalar, step: Scalar, scale: Scalar
) -> tuple[tuple[Scalar, str], ...]:
    return (damping, "damping"), (step, "step"), (scale, "scale")


def _scalar(root: FactorRoot, value: Scalar, name: str) -> Array:
    xp = array_api_compat.array_namespace(root.root)
    scalar = as_scalar(xp, value, root.root.dtype, name)
    return full_of(xp, scalar, root.residual)


def _trace(moment: Array, xp: Namespace) -> Array:
    return xp.sum(moment) if moment.ndim == 1 else xp.linalg.trace(moment)


def _accepted(
    old: FactorRoot,
    new: FactorRoot,
    finite: Array,
    check: Check,
    name: str,
    xp: Namespace,
) -> FactorRoot:
    """Return the new root where nothing is wrong, else the old one with the flags."""
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
