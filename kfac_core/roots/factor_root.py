"""Roots of inverse factors and their multiplicative updates, for IKFAC.

Conventions.  ``K K^T`` stands for the inverse of a damped factor of d rows.  A direction m
is symmetric, and ``K <- K (I - b m)`` for a step b.  K may be kept dense, lower triangular
or diagonal; the direction is then m itself, ``tril(m) + tril(m, -1)``, which changes
``K K^T`` by the same to first order, or the diagonal of m.  The updates are in
`kfac_core.roots.inverse_free`.
"""

from __future__ import annotations

from typing import Literal, get_args

import array_api_compat

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.namespaces import (
    Scalar,
    cast,
    device_of,
    namespace_of,
    require_floating,
    status_unless,
    wide_dtype,
)
from kfac_core.array.status import Status
from kfac_core.array.structure import structure
from kfac_core.constraints import require_one_of, validated
from kfac_core.errors import ShapeError
from kfac_core.linalg.certificate import probe
from kfac_core.linalg.gram import updated_gram

__all__ = ["FactorRoot", "RootForm", "factor_root"]

RootForm = Literal["dense", "lower", "diagonal"]
"""Storage of a root."""

_POWER_STEPS = 8
"""The products with a vector, of d^2 flops each, that guard a dense root's step."""


@structure(static=("form",))
class FactorRoot:
    """A root K of an inverse factor: ``K K^T`` approximates ``(F + lam I)^-1``.

    Attributes
    ----------
    root : array, shape (d, d), or (d,) where diagonal
        Root K.
    residual : array, 0-d
        ``|m| / sqrt(d)`` in the Frobenius norm, before the last update's step: zero where
        ``K K^T`` was what it moves to.
    flags : array of int32, 0-d
        `Status` flags of the last update: ``INACCURATE`` for a step too long to be taken,
        an eigenvalue of ``b m`` being 1 or more.
    form : {"dense", "lower", "diagonal"}
        Storage of K.
    """

    root: Array
    residual: Array
    flags: Array
    form: RootForm

    @property
    def size(self) -> int:
        """The number d of rows."""
        return int(self.root.shape[-1])

    def multiply_inverse(self, v: Array, /) -> Array:
        """Return ``K K^T v``, for v of shape (d, k)."""
        xp = namespace_of(v=v, root=self.root)
        require_floating(xp, v, "v")
        if v.ndim != 2 or v.shape[0] != self.size:
            raise ShapeError(
                f"Expected `v` to have shape ({self.size}, k), got {tuple(v.shape)}."
            )
        K, columns = self.root, cast(xp, v, self.root.dtype)
        if self.form == "diagonal":
            product = (K * K)[:, None] * columns
        else:
            product = xp.matmul(K, xp.matmul(xp.matrix_transpose(K), columns))
        return cast(xp, product, v.dtype)

    @validated
    def moment(self, rows: Array, scale: Scalar, /) -> Array:
        """Return ``H = scale K^T rows^T rows K``, or its diagonal."""
        xp = array_api_compat.array_namespace(self.root)
        if self.form == "diagonal":
            rotated = rows * self.root
            return scale * xp.sum(rotated * rotated, axis=0)
        rotated = xp.matmul(rows, self.root)
        return updated_gram(
            None, rotated, tail=None, decay=0.0, scale=scale, xp=xp
        ).full()

    @validated
    def direction(self, moment: Array, damping: Scalar, /) -> Array:
        """Return ``m = 1/2 (H + lam K^T K - I)``, in the form that K is kept in."""
        xp = array_api_compat.array_namespace(self.root)
        K = self.root
        if self.form == "diagonal":
            return 0.5 * (moment + damping * K * K - 1.0)
        inner = updated_gram(None, K, tail=None, decay=0.0, scale=1.0, xp=xp).full()
        eye = xp.eye(self.size, dtype=K.dtype, device=device_of(K))
        m = 0.5 * (moment + damping * inner - eye)
        return m if self.form == "dense" else xp.tril(m) + xp.tril(m, k=-1)

    @validated
    def moved(self, direction: Array, step: Scalar, /) -> FactorRoot:
        """Return ``K (I - b m)``; if the step is too long, the old root with a flag.

        That is where an eigenvalue of ``b m`` is 1 or more.  For a dense root the largest
        one is estimated, from below, by a few products of m with a vector.
        """
        xp = array_api_compat.array_namespace(self.root)
        K = self.root
        diagonal = self.form == "diagonal"
        change = K * direction if diagonal else xp.matmul(K, direction)
        norm = xp.linalg.vector_norm(direction)
        short = self._largest(direction, xp) * step < 1
        return FactorRoot(
            xp.where(short, K - step * change, K),
            norm / self.size**0.5,
            status_unless(xp, short, Status.INACCURATE),
            self.form,
        )

    def _largest(self, m: Array, xp: Namespace) -> Array:
        """Return the largest eigenvalue of a direction, 0-d."""
        if self.form == "diagonal":
            return xp.max(m)
        if self.form == "lower":
            return xp.max(xp.linalg.diagonal(m))
        # No eigenvalue of m is below -1/2, so that m + I/2 has none below zero.
        z = probe(self.size, dtype=m.dtype, device=device_of(m), xp=xp)
        growth = xp.linalg.vector_norm(z)
        for _ in range(_POWER_STEPS):
            z = z / xp.where(growth > 0, growth, xp.ones_like(growth))
            z = xp.matmul(m, z) + 0.5 * z
            growth = xp.linalg.vector_norm(z)
        return growth - 0.5


@validated
def factor_root(
    size: int, /, *, form: RootForm, scale: float, like: Array
) -> FactorRoot:
    """Return ``K = scale I``.

    Parameters
    ----------
    size : int
        d, at least 1.
    form : {"dense", "lower", "diagonal"}
        What K is kept as: ``d^2`` numbers, the lower triangle of them, or d.
    scale : float
        Nonzero.  A root that is too small grows by a factor ``1 + b/2`` an update, one
        that is too large makes the step too long: ``(a + lam)^-1/2``, with a the largest
        eigenvalue to be expected or its bound, the trace, is always safe.
    like : array
        Array of the library and device; its dtype, or float32 where that is
        narrower, is that of K.

    Returns
    -------
    FactorRoot
        To be updated.

    Raises
    ------
    ConventionError, ShapeError, DtypeError
        For another form, a size below 1 or a scale of zero, or another kind of array.
    """
    require_one_of("form", form, get_args(RootForm))
    xp = namespace_of(like=like)
    require_floating(xp, like, "like")
    if size < 1 or scale == 0:
        raise ShapeError(
            f"Expected `size` of at least 1 and a nonzero `scale`, got {size} and {scale}."
        )
    dtype, device = wide_dtype(xp, like.dtype), device_of(like)
    if form == "diagonal":
        root = xp.full((size,), float(scale), dtype=dtype, device=device)
    else:
        root = float(scale) * xp.eye(size, dtype=dtype, device=device)
    zero = xp.zeros((), dtype=dtype, device=device)
    return FactorRoot(root, zero, xp.zeros((), dtype=xp.int32, device=device), form)
