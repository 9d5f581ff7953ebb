"""PyTorch's large matrices on the CPU by SciPy's BLAS and LAPACK, on one thread.

Conventions.  PyTorch has no SYRK and no SYMM, and copies what it gives to LAPACK; the
same routines of SciPy's OpenBLAS, on the same memory, take two thirds of the time.  Two
libraries with several threads each would spin while waiting for each other's, so that this
is done only where both compute on one: where a program has said so, and in the workers
of a refresh.  Every function here returns None where it does not apply.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import torch

from kfac_core_backends import blas_threads

_FROM = 65
"""Below this size PyTorch's own calls cost no more."""

_STACKED_FROM = 32
"""Likewise for the matrices of a stack, all of which are one call here."""

_FLOATS = (torch.float32, torch.float64)


class _Matrix(NamedTuple):
    """What the functions for NumPy read of a symmetric matrix."""

    array: Any
    full_storage: bool


@functools.cache
def _installed() -> Any:
    """Return NumPy's functions, or None where SciPy is not installed."""
    backend = importlib.import_module("kfac_core_backends.numpy")
    return None if backend.lapack is None else backend


def _host(matrix: Any, /, *, smallest: int | None = None) -> Any:
    """Return NumPy's functions where they are to compute with a matrix, else None."""
    if smallest is None:
        smallest = _FROM if matrix.ndim == 2 else _STACKED_FROM
    if matrix.shape[-1] < smallest or matrix.dtype not in _FLOATS:
        return None
    return _installed() if on_one_thread() else None


def on_one_thread() -> bool:
    """Whether SciPy is there, and PyTorch and every BLAS compute on one thread."""
    if torch.get_num_threads() != 1 or _installed() is None:
        return False
    pools = blas_threads.pools()
    # A loop, since this is asked at each stage.
    for pool in pools or ():
        if pool.num_threads != 1:
            return False
    return pools is not None


def _seen(matrix: Any, /) -> _Matrix:
    return _Matrix(matrix.array.numpy(), matrix.full_storage)


def _taken(array: Any, /) -> Any:
    """Return an array of NumPy as a tensor on the same memory."""
    return None if array is NotImplemented else torch.from_numpy(array)


def _taken_matrix(matrix: Any, /) -> Any:
    return (
        None if matrix is NotImplemented else (torch.from_numpy(matrix[0]), matrix[1])
    )


def gram_update(
    total: Any,
    rows: Any,
    tail: Any,
    decay: Any,
    scale: Any,
    /,
    *,
    overwrite: bool = False,
) -> Any:
    """Return ``decay total + scale rows^T rows`` by SYRK, lower triangle.

    Of many rows that takes less time whatever their length.
    """
    smallest = 1 if len(rows) > _STACKED_FROM else None
    if (host := _host(rows, smallest=smallest)) is None:
        return None
    sums = None if total is None else _seen(total)
    tail = None if tail is None else tail.numpy()
    options = {"tail": tail, "decay": decay, "scale": scale, "overwrite": overwrite}
    options["xp"] = None
    return _taken_matrix(host.gram_update(sums, rows.numpy(), **options))


def damped_cholesky(matrix: Any, shift: Any, factor: Any, /) -> Any:
    """Return the lower factor of ``c B + shift I`` by POTRF, NaN where it fails."""
    if (host := _host(matrix.array)) is None:
        return None
    shift, factor = (x.numpy() if torch.is_tensor(x) else x for x in (shift, factor))
    lower = host.damped_cholesky(_seen(matrix), shift, factor=factor, xp=None)
    return _taken(lower)


def cholesky_inverse(lower: Any, /, *, overwrite: bool) -> Any:
    """Return ``(L L^T)^-1``, both triangles."""
    if (host := _host(lower)) is None:
        return None
    inverse = host.cholesky_inverse(lower.numpy(), overwrite=overwrite, xp=None)
    return _taken_matrix(inverse)


def multiply_symmetric(matrix: Any, v: Any, /) -> Any:
    """Return ``S v`` from the lower triangle of S by SYMM."""
    if (host := _host(matrix.array)) is None or v.dtype != matrix.array.dtype:
        return None
    return _taken(host.multiply_symmetric(_seen(matrix), v.numpy(), xp=None))


def eigh_in_place(matrix: Any, /) -> Any:
    """Return eigenvalues, descending, and eigenvectors with little memory."""
    if (host := _installed()) is None:
        return None
    result = host.eigh_in_place(_seen(matrix), xp=None)
    return None if result is NotImplemented else tuple(map(torch.from_numpy, result))


def scale_symmetric(matrix: Any, factor: Any, /) -> Any:
    """Return the lower triangle times a number."""
    if (host := _host(matrix.array)) is None:
        return None
    return _taken_matrix(host.scale_symmetric(_seen(matrix), float(factor), xp=None))


def solve_triangular(lower: Any, b: Any, /, *, transpose: bool, overwrite: bool) -> Any:
    """Solve with L or its transpose by TRSM."""
    if (host := _host(lower)) is None or lower.ndim != 2 or b.dtype != lower.dtype:
        return None
    options = {"transpose": transpose, "overwrite": overwrite, "xp": None}
    return _taken(host.solve_triangular(lower.numpy(), b.numpy(), **options))
