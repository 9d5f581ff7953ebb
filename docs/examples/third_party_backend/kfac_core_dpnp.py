"""dpnp, NumPy's interface on the CPUs and GPUs of SYCL, as a backend of kfac_core.

Conventions.  dpnp follows the Array API standard, so that the definitions compute with
its arrays as they are.  Here is what the standard leaves open (the names of devices, the
way to the host), two operations that dpnp has and the standard has not, and a mend.

dpnp 0.19.1 and 0.20.0 compute two things wrongly, and say nothing: a product of stacked
matrices of which one repeats an element (``broadcast_to``), and a choice by a repeated
condition between two arrays that both run backward (``flip``).  Arrays carry their
namespace with them, so that an adapter cannot go around these functions; importing it
replaces them in dpnp, for the whole process, by ones that are right.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import dpctl
import dpnp
import numpy as np
from dpnp.scipy.linalg import lu_solve

name = "dpnp"


def problem() -> str | None:
    """Say why dpnp cannot compute here; None where it can."""
    if dpctl.get_devices():
        return None
    message = "dpnp is installed, but finds no SYCL device"
    driver = Path(sys.prefix, "lib", "libintelocl.so")
    if driver.exists():
        # The wheel of the driver does not tell the OpenCL loader where it lies.
        return f"{message}; for the CPU, set OCL_ICD_FILENAMES={driver}"
    return f"{message}; for the CPU, 'pip install intel-opencl-rt'"


def versions() -> dict[str, str]:
    """Return the versions of dpnp, and of dpctl, which finds the devices."""
    return {"dpnp": dpnp.__version__, "dpctl": dpctl.__version__}


def devices() -> tuple[str, ...]:
    """Return the devices as SYCL's filters name them, such as ``opencl:cpu:0``."""
    return tuple(found.filter_string for found in dpctl.get_devices())


def device(spec: str | None, /) -> Any:
    """Return a device by a filter, from ``gpu`` to ``level_zero:gpu:1``."""
    if spec is None:
        return None
    try:
        return dpctl.SyclDevice(spec)
    except dpctl.SyclDeviceCreationError as error:
        there = ", ".join(devices())
        raise ValueError(f"dpnp has no device {spec!r}; it has {there}") from error


def asarray(values: np.ndarray[Any, Any], /, *, device: Any) -> Any:
    """Return a copy on the device; an error where that lacks the dtype."""
    # Without a dtype, dpnp makes float32 of float64 for a GPU that lacks 64-bit floats.
    return dpnp.array(values, dtype=values.dtype, order="C", device=device)


def to_numpy(x: Any, /) -> np.ndarray[Any, Any]:
    """Return a copy on the host, which dpnp makes only where it is asked by name."""
    host: np.ndarray[Any, Any] = dpnp.asnumpy(x)
    return host


def solve_triangular(
    lower: Any, b: Any, /, *, transpose: bool, overwrite: bool = False, xp: Any
) -> Any:
    """Solve with L or its transpose: the LU factors of ``L^T`` are ``I`` and ``L^T``."""
    if lower.ndim != 2 or lower.shape[0] <= 64:
        return NotImplemented  # for small ones the definition is the faster
    pivots = dpnp.arange(lower.shape[0], dtype=dpnp.int64, device=lower.device)
    trans = 0 if transpose else 1
    return lu_solve((lower.T, pivots), b, trans=trans, check_finite=False)


def count_indices(indices: Any, weights: Any, /, *, size: int, xp: Any) -> Any:
    """Sum the weights of equal indices, in float64, by one ``bincount``."""
    return dpnp.bincount(indices, weights, minlength=size).astype(weights.dtype)


def _mended_matmul(matmul: Any) -> Any:
    """Return a product that reads no repeated element in place."""

    @functools.wraps(matmul)
    def mended(x1: Any, x2: Any, /, *args: Any, **options: Any) -> Any:
        x1, x2 = (dpnp.array(x, order="C") if 0 in x.strides else x for x in (x1, x2))
        return matmul(x1, x2, *args, **options)

    return mended


if not hasattr(dpnp.matmul, "__wrapped__"):
    dpnp.matmul = _mended_matmul(dpnp.matmul)
    # Only a result in the order of its arguments ("K", the default) comes out wrong.
    dpnp.where = functools.wraps(dpnp.where)(functools.partial(dpnp.where, order="C"))
