"""Residual checks of factorizations, in O(n^2) operations.

Conventions.  A residual is relative and is measured on one fixed, spread-out probe
vector z, the same at every call: ``|X M z - z| / |z|`` for an inverse X of M.  For a
random z it estimates ``|X M - I|_F / sqrt(n)``; rounding errors have no reason to avoid a
fixed one.  A residual that is not finite counts as infinitely bad.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from kfac_core.array.backend import Array, Namespace
from kfac_core.array.dispatch import dispatched
from kfac_core.array.finite import is_plain
from kfac_core.array.namespaces import device_of
from kfac_core.linalg.symmetric import SymmetricMatrix, multiply_symmetric
from kfac_core.linalg.triangular import multiply_triangular

__all__ = [
    "RESIDUAL_LIMIT",
    "cholesky_residual",
    "constant",
    "eigen_residual",
    "inverse_residual",
    "probe",
    "probe_of",
    "relative_norm",
]

RESIDUAL_LIMIT = 1e-2
"""A factorization whose residual is above this is not accepted."""


def probe(n: int, /, *, dtype: Any, device: Any, xp: Namespace) -> Array:
    """Return the probe vector: fixed, and without visible pattern.

    Parameters
    ----------
    n : int
        Length.
    dtype, device : dtype, device
        Dtype and device of the result.
    xp : namespace
        Array API namespace of the library.

    Returns
    -------
    array, shape (n, 1)
        The vector.
    """
    i = xp.arange(1, n + 1, dtype=dtype, device=device)
    # Two additive sequences of the plastic number, which are badly approximable.
    u = xp.remainder(i * 0.7548776662466927, 1.0)
    v = xp.remainder(i * 0.5698402909980532, 1.0)
    return xp.reshape(xp.cos(41.0 * u * (1.0 + v)) + 0.25, (n, 1))


def probe_of(array: Array, xp: Namespace, /) -> Array:
    """Return the probe vector for a matrix; the same one again where that is safe."""
    make = _kept_probe if is_plain(array, xp=xp) else _new_probe
    return make(array.shape[-1], array.dtype, device_of(array), xp)


def inverse_residual(
    inverse: SymmetricMatrix, z: Array, image: Array, /, *, xp: Namespace
) -> Array:
    """Return ``|X M z - z| / |z|``, shape (...).

    Parameters
    ----------
    inverse : SymmetricMatrix
        Inverse X.
    z : array, shape (n, 1)
        The probe vector.
    image : array, shape (..., n, 1)
        Product ``M z``.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, shape (...)
        The residual, of one product with X.
    """
    return relative_norm(multiply_symmetric(inverse, image, xp=xp) - z, z, xp=xp)


def cholesky_residual(
    lower: Array, z: Array, image: Array, /, *, xp: Namespace
) -> Array:
    """Return ``|L L^T z - M z| / |M z|``, shape (...); as `inverse_residual`."""
    half = multiply_triangular(lower, z, transpose=True, xp=xp)
    got = multiply_triangular(lower, half, transpose=False, xp=xp)
    return relative_norm(got - image, image, xp=xp)


def eigen_residual(
    eigenvalues: Array,
    eigenvectors: Array,
    z: Array,
    image: Array,
    /,
    *,
    xp: Namespace,
) -> Array:
    """Return the larger of two residuals of an eigendecomposition, shape (...).

    ``|Q diag(w) Q^T z - A z| / (max|w| |z|)`` and ``|Q Q^T z - z| / |z|``, with the image
    ``A z``.
    """
    in_basis = xp.matmul(xp.matrix_transpose(eigenvectors), z)
    error = xp.matmul(eigenvectors, eigenvalues[..., None] * in_basis) - image
    largest = xp.max(xp.abs(eigenvalues), axis=-1)[..., None, None]
    backward = relative_norm(error, largest * z, xp=xp)
    orthogonality = relative_norm(xp.matmul(eigenvectors, in_basis) - z, z, xp=xp)
    return xp.where(orthogonality > backward, orthogonality, backward)


@dispatched
def constant(
    make: Callable[..., Array], n: int, /, *, dtype: Any, device: Any, xp: Namespace
) -> Array:
    """Return an array that depends on a size and a dtype alone.

    Parameters
    ----------
    make : callable
        Takes the same arguments, of any namespace.
    n : int
        The size.
    dtype, device : dtype, device
        Dtype and device of the result.
    xp : namespace
        Array API namespace of the library.

    Returns
    -------
    array
        What `make` returns; in a compiled program it need not be computed.
    """
    return make(n, dtype=dtype, device=device, xp=xp)


def _new_probe(n: int, dtype: Any, device: Any, xp: Namespace) -> Array:
    return constant(probe, n, dtype=dtype, device=device, xp=xp)


_kept_probe = functools.lru_cache(maxsize=64)(_new_probe)


@dispatched
def relative_norm(error: Array, scale: Array, /, *, xp: Namespace) -> Array:
    """Return ``|error| / |scale|``: 0 for 0/0, infinity for NaN.

    Parameters
    ----------
    error : array, shape (..., n, 1)
        Error columns.
    scale : array, shape (..., n, 1) or (n, 1)
        What they are measured by.
    xp : namespace
        Array API namespace of the arrays.

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
