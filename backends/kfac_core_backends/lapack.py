"""SciPy's BLAS and LAPACK by their addresses: in place, on parts, and without the lock.

SciPy's own wrappers hold the interpreter's lock, so that no two factorizations run at
the same time, and copy a matrix that is a part of another.  The routines behind them
are in ``scipy.linalg.cython_blas`` and ``cython_lapack`` for callers in C, whose
conventions hold here: matrices are in Fortran order, a part of a matrix has the leading
dimension of the whole, and what is written is written in place.  A call costs some
microseconds more than a wrapper's, so that small matrices go to the wrappers.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from scipy.linalg import cython_blas, cython_lapack

_PREFIX = {np.dtype(np.float32): "s", np.dtype(np.float64): "d"}

_NUMBER = {
    np.dtype(np.float32): ctypes.c_float,
    np.dtype(np.float64): ctypes.c_double,
}

_Matrix = np.ndarray[Any, Any]

_WIDTH = 64
"""Rows of work space, as many as LAPACK's widest panels have."""


def potrf(a: _Matrix, /) -> int:
    """Put the lower Cholesky factor in place of the lower triangle.

    Returns
    -------
    int
        Zero where there is one; else something else is left.
    """
    n, info = _int(a.shape[0]), ctypes.c_int()
    potrf = _routine(cython_lapack, "potrf", a.dtype, 5)
    potrf(b"L", n, *_part(a), ctypes.byref(info))
    return info.value


def sytrd(a: _Matrix, /) -> tuple[_Matrix, _Matrix, _Matrix]:
    """Put reflectors that make a matrix tridiagonal in its lower triangle.

    Returns
    -------
    numpy.ndarray
        The diagonal, the entries beside it (n of them, the last without a meaning), and
        the factors of the reflectors.
    """
    n, info = len(a), ctypes.c_int()
    d, e, tau = np.zeros((3, n), a.dtype)
    work = np.empty(n * _WIDTH, a.dtype)
    sytrd = _routine(cython_lapack, "sytrd", a.dtype, 10)
    outputs = _address(d), _address(e), _address(tau), _address(work)
    sytrd(b"L", _int(n), *_part(a), *outputs, _int(len(work)), ctypes.byref(info))
    return d, e, tau


def ormtr(a: _Matrix, tau: _Matrix, c: _Matrix, /) -> None:
    """Multiply C by the reflectors of `sytrd` from the left, in its place."""
    (n, m), info = c.shape, ctypes.c_int()
    # Beside the rows of C that are worked on it holds a triangle of each panel.
    work = np.empty(m * _WIDTH + 65 * 64, c.dtype)
    ormtr = _routine(cython_lapack, "ormtr", c.dtype, 13)
    ends = _address(work), _int(len(work)), ctypes.byref(info)
    matrices = *_part(a), _address(tau), *_part(c)
    ormtr(b"L", b"L", b"N", _int(n), _int(m), *matrices, *ends)


def stemr(d: _Matrix, e: _Matrix, start: int, stop: int, vectors: _Matrix, /) -> bool:
    """Put eigenvectors ``start:stop`` of a tridiagonal matrix in columns by MRRR.

    In float64; eigenvalues ascend.  Returns whether the vectors are all there.
    """
    n, count = len(d), stop - start
    if not count:
        return True
    d, e, w = d.copy(), e.copy(), np.empty(n)
    support, work = np.empty(2 * n, np.intc), np.empty(18 * n)
    integers = np.empty(10 * n, np.intc)
    written, info, robust = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(1)
    nothing = np.zeros(1)
    stemr = _routine(cython_lapack, "stemr", d.dtype, 21)
    stemr(
        b"V", b"I", _int(n), _address(d), _address(e), _address(nothing),
        _address(nothing), _int(start + 1), _int(stop), ctypes.byref(written), _address(w),
        *_part(vectors), _int(count), _address(support), ctypes.byref(robust),
        _address(work), _int(len(work)), _address(integers), _int(len(integers)),
        ctypes.byref(info),
    )  # fmt: skip
    return info.value == 0 and written.value == count


def lauum(a: _Matrix, /) -> None:
    """Put the lower triangle of ``W^T W`` in place of the lower triangle W."""
    n, info = _int(a.shape[0]), ctypes.c_int()
    lauum = _routine(cython_lapack, "lauum", a.dtype, 5)
    lauum(b"L", n, *_part(a), ctypes.byref(info))


def syrk(alpha: float, rows: _Matrix, beta: float, c: _Matrix, /) -> None:
    """Put ``alpha rows^T rows + beta C`` in place of the lower triangle of C.

    Rows are read where they are, in C order or in Fortran order; another order is copied.
    """
    if not (rows.flags.c_contiguous or rows.flags.f_contiguous):
        rows = np.ascontiguousarray(rows)
    # In C order BLAS sees the transpose.
    x, trans = (rows.T, b"N") if rows.flags.c_contiguous else (rows, b"T")
    sizes = _int(rows.shape[1]), _int(rows.shape[0])
    number = _NUMBER[rows.dtype]
    factors = ctypes.byref(number(alpha)), ctypes.byref(number(beta))
    syrk = _routine(cython_blas, "syrk", rows.dtype, 10)
    syrk(b"L", trans, *sizes, factors[0], *_part(x), factors[1], *_part(c))


def trmm(alpha: float, lower: _Matrix, b: _Matrix, /, *, right: bool) -> None:
    """Put ``alpha L B`` in place of B, or ``alpha B L`` where `right` is true."""
    side, (m, n) = b"R" if right else b"L", b.shape
    scalar = np.asarray(alpha, b.dtype)
    trmm = _routine(cython_blas, "trmm", b.dtype, 11)
    shape = _int(m), _int(n)
    trmm(side, b"L", b"N", b"N", *shape, _address(scalar), *_part(lower), *_part(b))


def trsm(a: _Matrix, b: _Matrix, /, *, right: bool, lower: bool, trans: bool) -> None:
    """Put ``L^-1 B`` in place of B, or ``B L^-1`` where `right` is true.

    L is the lower triangle of A, or its upper one, or the transpose of that.
    """
    ways = b"R" if right else b"L", b"L" if lower else b"U", b"T" if trans else b"N"
    shape, one = (_int(b.shape[0]), _int(b.shape[1])), np.ones((), b.dtype)
    trsm = _routine(cython_blas, "trsm", b.dtype, 11)
    trsm(*ways, b"N", *shape, _address(one), *_part(a), *_part(b))


def symm(a: _Matrix, b: _Matrix, c: _Matrix, /, *, right: bool, lower: bool) -> None:
    """Put ``S B`` in C, or ``B S`` where `right` is true, from one triangle of S."""
    ways = b"R" if right else b"L", b"L" if lower else b"U"
    shape, factors = (_int(b.shape[0]), _int(b.shape[1])), np.asarray([1, 0], b.dtype)
    one, zero = _address(factors), _address(factors[1:])
    symm = _routine(cython_blas, "symm", b.dtype, 12)
    symm(*ways, *shape, one, *_part(a), *_part(b), zero, *_part(c))


@functools.cache
def _routine(module: Any, name: str, dtype: np.dtype[Any], arguments: int) -> Any:
    """Return a routine as a function of so many pointers, which frees the lock."""
    capsule = module.__pyx_capi__[_PREFIX[dtype] + name]
    api = ctypes.pythonapi
    api.PyCapsule_GetName.argtypes = [ctypes.py_object]
    api.PyCapsule_GetName.restype = ctypes.c_char_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    signature = api.PyCapsule_GetName(capsule)
    address = api.PyCapsule_GetPointer(capsule, signature)
    if b"int *" not in signature or signature.count(b"*") != arguments:
        raise ImportError(f"SciPy's {name} has the signature {signature!r}")
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * arguments)(address)


def _int(value: int) -> Any:
    return ctypes.byref(ctypes.c_int(value))


def _address(array: _Matrix) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _part(a: _Matrix) -> tuple[int, Any]:
    """Return the address and the leading dimension of a matrix or a part of one."""
    leading = ctypes.c_int(max(a.strides[1] // a.itemsize, a.shape[0], 1))
    return a.__array_interface__["data"][0], ctypes.byref(leading)
