"""CuPy, on the current CUDA device.

Conventions.  CuPy's linear algebra does not check LAPACK's return codes unless it is
told to, since that synchronizes with the device; what a failed factorization leaves is not
specified, and the diagonal test of `kfac_core.linalg.cholesky` is what finds it.
CuPy makes new arrays on the current device whatever ``device=`` says, so that another
than the first is to be made current by the caller: ``with cupy.cuda.Device(1):``.
"""

from __future__ import annotations

from typing import Any

import array_api_compat.cupy as namespace_module
import cupy
import cupyx
import numpy as np

name = "cupy"


def problem() -> str | None:
    """Return why CuPy cannot compute here; None where it can."""
    if cupy.is_available():
        return None
    return "CuPy is installed, but finds no CUDA device"


def versions() -> dict[str, str]:
    """Return CuPy's version."""
    return {"cupy": str(cupy.__version__)}


def namespace() -> Any:
    """Return the Array API namespace of CuPy."""
    return namespace_module


def devices() -> tuple[str, ...]:
    """Return the CUDA devices, by number."""
    return tuple(str(i) for i in range(cupy.cuda.runtime.getDeviceCount()))


def device(spec: str | None, /) -> Any:
    """Return a CUDA device by number; None is the current one."""
    if spec is None:
        return cupy.cuda.Device()
    if spec not in devices():
        raise ValueError(f"cupy has no device {spec!r}; it has {', '.join(devices())}")
    return cupy.cuda.Device(int(spec))


def asarray(values: np.ndarray[Any, Any], /, *, device: Any) -> Any:
    """Return a copy on the device."""
    with device:
        return cupy.array(np.ascontiguousarray(values).reshape(values.shape))


def to_numpy(x: Any, /) -> np.ndarray[Any, Any]:
    """Return a copy on the host."""
    host: np.ndarray[Any, Any] = cupy.asnumpy(x)
    return host


def damped_cholesky(matrix: Any, shift: Any, /, *, factor: Any = 1.0, xp: Any) -> Any:
    """Return the lower factor of ``c B + shift I``, NaN where it fails."""
    array = matrix.full()
    eye = cupy.eye(array.shape[-1], dtype=array.dtype)
    shift, factor = (
        x if isinstance(x, float) else x[..., None, None] for x in (shift, factor)
    )
    with cupyx.errstate(linalg="ignore"):
        lower = cupy.linalg.cholesky(array * factor + shift * eye)
    # Where it fails, finite garbage is left with a diagonal that is not positive.
    positive = cupy.all(cupy.diagonal(lower, axis1=-2, axis2=-1) > 0, axis=-1)
    failed = cupy.full_like(lower, cupy.nan)
    return cupy.where(positive[..., None, None], lower, failed)


def cholesky_inverse(lower: Any, /, *, overwrite: bool = False, xp: Any) -> Any:
    """Return ``(L L^T)^-1`` from the triangular inverse."""
    if lower.ndim != 2:
        return NotImplemented
    from cupyx.scipy.linalg import solve_triangular as cupy_solve_triangular

    eye = cupy.eye(lower.shape[0], dtype=lower.dtype)
    inverse = cupy_solve_triangular(lower, eye, lower=True, check_finite=False)
    return cupy.matmul(inverse.T, inverse), True


def solve_triangular(
    lower: Any, b: Any, /, *, transpose: bool, overwrite: bool = False, xp: Any
) -> Any:
    """Solve with L or its transpose."""
    if lower.ndim != 2 or b.ndim != 2:
        return NotImplemented
    from cupyx.scipy.linalg import solve_triangular as cupy_solve_triangular

    trans = 1 if transpose else 0
    return cupy_solve_triangular(lower, b, trans=trans, lower=True, check_finite=False)


def count_indices(indices: Any, weights: Any, /, *, size: int, xp: Any) -> Any:
    """Sum the weights of equal indices; by atomics, so in no fixed order."""
    sums = cupy.zeros(size, dtype=weights.dtype)
    cupyx.scatter_add(sums, indices, weights)
    return sums


def sum_rows_at(rows: Any, indices: Any, /, *, size: int, xp: Any) -> Any:
    """Sum the rows of equal indices; by atomics, so in no fixed order."""
    sums = cupy.zeros((size, rows.shape[1]), dtype=rows.dtype)
    cupyx.scatter_add(sums, indices, rows)
    return sums


def eigh(matrix: Any, /, *, xp: Any) -> Any:
    """Return eigenvalues and eigenvectors from the lower triangle."""
    with cupyx.errstate(linalg="ignore"):
        return cupy.linalg.eigh(matrix.array, UPLO="L")
