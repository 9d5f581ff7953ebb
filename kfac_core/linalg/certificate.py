"""Residual certificates: what a factorization is worth, for the price of O(n^2).

Conventions.  A residual is relative and is measured on one fixed, spread-out probe
vector z, the same at every call: ``|M X z - z| / |z|``, or with ``X M``, for an inverse X
of M.  For a random z it estimates ``|M X - I|_F / sqrt(n)``; rounding errors have no
reason to avoid a fixed one.  A residual that is not finite counts as infinitely bad.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.dispatch import dispatched
from kfac_core.array.finite import is_plain
from kfac_core.array.namespaces import device_of
from kfac_core.linalg.symmetric import SymmetricMatrix, multiply_symmetric
from kfac_core.linalg.triangular import multiply_triangular

__all__ = [
    "Probed",
    "RESIDUAL_LIMIT",
    "basis_residual",
    "cholesky_residual",
    "inverse_residual",
    "probe",
    "probed",
    "relative_norm",
]

RESIDUAL_LIMIT = 1e-2
"""A factorization whose residual is above this is not accepted on its rung."""


class Probed(NamedTuple):
    """The probe vector of a matrix, and its image.

    Attributes
    ----------
    z : array, shape (n, 1)
        The probe vector.
    image : array, shape (..., n, 1)
        ``M z``, finite only where everything in M is.
    """

    z: Array
    image: Array


def probe(n: int, /, *, dtype: Any, device: Any, xp: Namespace) -> Array:
    """Return the probe vector, shape (n, 1): fixed, and without visible pattern."""
    i = xp.arange(1, n + 1, dtype=dtype, device=device)
    # Two additive sequences of the plastic number, which are badly approximable.
    u = xp.remainder(i * 0.7548776662466927, 1.0)
    v = xp.remainder(i * 0.5698402909980532, 1.0)
    return xp.reshape(xp.cos(41.0 * u * (1.0 + v)) + 0.25, (n, 1))


def probed(matrix: SymmetricMatrix, shift: Array | None, /, *, xp: Namespace) -> Probed:
    """Return the probe vector and its image under ``A + shift I``; under A for None."""
    z = _probe_of(matrix.like, xp)
    if shift is None:
        return Probed(z, _times(matrix, z, xp))
    return Probed(z, _shifted(matrix, shift, z, xp))


def inverse_residual(
    matrix: SymmetricMatrix,
    shift: Array,
    inverse: SymmetricMatrix,
    /,
    *,
    known: Probed | None = None,
    xp: Namespace,
) -> Array:
    """Return ``|M X z - z| / |z|`` with ``M = A + shift I``, shape (...).

    With `known`, what `probed` returns for the same, ``|X M z - z| / |z|``: the two
    errors are each other's transposes, and this one takes half of the products.
    """
    if known is not None:
        z, image = known
        back = multiply_symmetric(inverse, image, xp=xp)
    else:
        z = _probe_of(matrix.like, xp)
        y = multiply_symmetric(inverse, z, xp=xp)
        back = _shifted(matrix, shift, y, xp)
    return relative_norm(back - z, z, xp=xp)


def cholesky_residual(
    matrix: SymmetricMatrix,
    shift: Array,
    lower: Array,
    /,
    *,
    known: Probed | None = None,
    xp: Namespace,
) -> Array:
    """Return ``|L L^T z - M z| / |M z|`` with ``M = A + shift I``, shape (...).

    `known` is what `probed` returns for the same, where that was called before.
    """
    z, expected = known or probed(matrix, shift, xp=xp)
    half = multiply_triangular(lower, z, transpose=True, xp=xp)
    got = multiply_triangular(lower, half, transpose=False, xp=xp)
    return relative_norm(got - expected, expected, xp=xp)


def basis_residual(
    matrix: SymmetricMatrix,
    eigenvalues: Array,
    eigenvectors: Array,
    /,
    *,
    known: Probed | None = None,
    xp: Namespace,
) -> Array:
    """Return the larger of two residuals of an eigendecomposition, shape (...).

    ``|Q diag(w) Q^T z - A z| / (max|w| |z|)`` and ``|Q Q^T z - z| / |z|``; `known` as for
    `cholesky_residual`, of A.
    """
    z, expected = known or probed(matrix, None, xp=xp)
    turned = xp.matmul(xp.matrix_transpose(eigenvectors), z)
    error = xp.matmul(eigenvectors, eigenvalues[..., None] * turned) - expected
    largest = xp.max(xp.abs(eigenvalues), axis=-1)[..., None, None]
    backward = relative_norm(error, largest * z, xp=xp)
    orthogonality = relative_norm(xp.matmul(eigenvectors, turned) - z, z, xp=xp)
    return xp.where(orthogonality > backward, orthogonality, backward)


def _probe_of(array: Array, xp: Namespace) -> Array:
    """Return the probe vector for a matrix; the same one again where that is safe."""
    place = array.shape[-1], array.dtype, device_of(array), xp
    return (_kept_probe if is_plain(array, xp=xp) else _new_probe)(*place)


def _new_probe(n: int, dtype: Any, device: Any, xp: Namespace) -> Array:
    return probe(n, dtype=dtype, device=device, xp=xp)


_kept_probe = functools.lru_cache(maxsize=64)(_new_probe)


def _shifted(matrix: SymmetricMatrix, shift: Array, v: Array, xp: Namespace) -> Array:
    return _times(matrix, v, xp) + shift[..., None, None] * v


def _times(matrix: SymmetricMatrix, v: Array, xp: Namespace) -> Array:
    """Return ``A v`` of one column, without multiplying A out."""
    base, factor = matrix.parts()
    product = multiply_symmetric(base, v, xp=xp)
    return product if factor == 1.0 else product * factor


@dispatched
def relative_norm(error: Array, scale: Array, /, *, xp: Namespace) -> Array:
    """Return ``|error| / |scale|``: 0 for 0/0, infinity where it is no number.

    Parameters
    ----------
    error : array, shape (..., n, 1)
        Columns.
    scale : array, shape (..., n, 1) or (n, 1)
        What they are measured by.
    xp : namespace
        Of both.

    Returns
    -------
    array, shape (...)
        The ratios of Euclidean norms.
    """
    # Dividing by the largest entry first keeps the squares of huge and tiny matrices
    # inside the range of float32.
    largest = xp.max(xp.abs(scale), axis=(-2, -1), keepdims=True)
    unit = xp.where(largest > 0, largest, xp.ones_like(largest))
    top = xp.linalg.vector_norm(error / unit, axis=(-2, -1))
    bottom = xp.linalg.vector_norm(scale / unit, axis=(-2, -1))
    ratio = top / xp.where(bottom == 0, xp.ones_like(bottom), bottom)
    return xp.where(xp.isfinite(ratio), ratio, xp.full_like(ratio, xp.inf))
