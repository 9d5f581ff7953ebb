"""NumPy, with SciPy's BLAS and LAPACK where SciPy is installed.

Conventions.  A symmetric matrix keeps its lower triangle, ``whole=False``.  BLAS and
LAPACK want Fortran order, so a C-ordered array is handed over transposed, without a
copy: its lower triangle is then the upper one of what LAPACK sees.  NumPy's own float32
``cholesky``, ``inv`` and ``eigh`` compute in float64 and take its time; these do not.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import numpy as np

try:
    from scipy.linalg import blas, lapack
except ImportError:
    blas = lapack = None  # type: ignore[assignment]

name = "numpy"

_PREFIX = {np.dtype(np.float32): "s", np.dtype(np.float64): "d"}


def versions() -> dict[str, str]:
    """Return the versions of NumPy and, where it is used, SciPy."""
    found = {"numpy": np.__version__}
    if lapack is not None:
        found["scipy"] = importlib.metadata.version("scipy")
    return found


def asarray(values: np.ndarray[Any, Any], /, *, device: Any) -> np.ndarray[Any, Any]:
    """Return a contiguous copy."""
    return np.array(values, order="C")


def to_numpy(x: np.ndarray[Any, Any], /) -> np.ndarray[Any, Any]:
    """Return a copy."""
    return np.array(x)


def count_indices(indices: Any, weights: Any, /, *, size: int, xp: Any) -> Any:
    """Sum the weights of equal indices, in float64, by one ``bincount``."""
    return np.bincount(indices, weights, minlength=size).astype(weights.dtype)


def sum_rows_at(rows: Any, indices: Any, /, *, size: int, xp: Any) -> Any:
    """Sum the rows of equal indices."""
    sums = np.zeros((size, rows.shape[1]), dtype=rows.dtype)
    np.add.at(sums, indices, rows)
    return sums


if lapack is not None:

    def gram_update(
        total: Any, rows: Any, /, *, tail: Any, decay: Any, scale: Any, xp: Any
    ) -> Any:
        """Return ``decay total + scale rows^T rows`` by one SYRK, lower triangle."""
        if rows.ndim != 2 or rows.shape[0] == 0 or rows.dtype not in _PREFIX:
            return NotImplemented
        if tail is not None:
            rows = np.concatenate([rows, tail[:, None]], axis=1)
        syrk = getattr(blas, _PREFIX[rows.dtype] + "syrk")
        if total is None:
            updated = syrk(float(scale), rows.T, lower=0)
        else:
            # SYRK adds to a copy: the caller's running sum is not ours to overwrite.
            c = np.array(total.array.T, order="F")
            updated = syrk(
                float(scale), rows.T, beta=float(decay), c=c, lower=0, overwrite_c=1
            )
        return updated.T, False

    def damped_cholesky(matrix: Any, shift: Any, /, *, xp: Any) -> Any:
        """Return the lower factor of ``A + shift I`` by POTRF, NaN where it fails."""
        if matrix.array.ndim != 2 or matrix.array.dtype not in _PREFIX:
            return NotImplemented
        a = np.array(matrix.array.T, order="F")
        np.einsum("ii->i", a)[...] += shift
        potrf = getattr(lapack, _PREFIX[a.dtype] + "potrf")
        factor, info = potrf(a, lower=0, clean=1, overwrite_a=1)
        if info != 0:
            factor[...] = np.nan
        return factor.T

    def cholesky_inverse(lower: Any, /, *, xp: Any) -> Any:
        """Return ``(L L^T)^-1`` by POTRI, lower triangle."""
        if lower.ndim != 2 or lower.dtype not in _PREFIX:
            return NotImplemented
        potri = getattr(lapack, _PREFIX[lower.dtype] + "potri")
        inverse, info = potri(np.array(lower.T, order="F"), lower=0, overwrite_c=1)
        if info != 0:
            inverse[...] = np.nan
        return inverse.T, False

    def solve_triangular(lower: Any, b: Any, /, *, transpose: bool, xp: Any) -> Any:
        """Solve with L or its transpose by TRTRS."""
        if lower.ndim != 2 or b.ndim != 2 or lower.dtype not in _PREFIX:
            return NotImplemented
        trtrs = getattr(lapack, _PREFIX[lower.dtype] + "trtrs")
        x, info = trtrs(lower.T, b, lower=0, trans=0 if transpose else 1)
        return np.full_like(b, np.nan) if info != 0 else x

    def eigh(matrix: Any, /, *, xp: Any) -> Any:
        """Return eigenvalues and eigenvectors by SYEVD."""
        if matrix.array.ndim != 2 or matrix.array.dtype not in _PREFIX:
            return NotImplemented
        syevd = getattr(lapack, _PREFIX[matrix.array.dtype] + "syevd")
        w, Q, info = syevd(matrix.array.T, compute_v=1, lower=0)
        if info != 0:
            return np.full_like(w, np.nan), np.full_like(Q, np.nan)
        return w, Q

    def multiply_symmetric(matrix: Any, v: Any, /, *, xp: Any) -> Any:
        """Return ``S v`` by SYMM, from the lower triangle of S."""
        array = matrix.array
        if matrix.whole or array.ndim != 2 or v.ndim != 2 or array.dtype not in _PREFIX:
            return NotImplemented
        symm = getattr(blas, _PREFIX[array.dtype] + "symm")
        if v.flags.f_contiguous and not v.flags.c_contiguous:
            return symm(1.0, array.T, v, lower=0)
        return symm(1.0, array.T, v.T, side=1, lower=0).T
