"""NumPy, with SciPy's BLAS and LAPACK where SciPy is installed.

Conventions.  A symmetric matrix keeps its lower triangle alone and is made in Fortran
order, in which LAPACK factorizes a lower triangle faster than an upper one.
An array in C order is read all the same, as its transpose and without a copy.  NumPy's
own float32 ``cholesky``, ``inv`` and ``eigh`` compute in float64 and take its time;
these do not.
"""

from __future__ import annotations

import importlib.metadata
import math
from typing import Any

import numpy as np

from kfac_core.array.optional import optional_module
from kfac_core_backends.blas_threads import hold_threads as hold_threads
from kfac_core_backends.blas_threads import threads as threads
from kfac_core_backends.reused_memory import empty

if optional_module("scipy.linalg") is not None:
    from scipy.linalg import blas, lapack

    from kfac_core_backends.lapack import (
        lauum,
        ormtr,
        potrf,
        stemr,
        symm,
        syrk,
        sytrd,
        trmm,
        trsm,
    )
else:
    blas = lapack = None  # type: ignore[assignment]

name = "numpy"

_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))

_DOT: dict[np.dtype[Any], Any] = {}
"""SciPy's scalar products, where SciPy is installed."""

_SHORT = 512
"""Up to so many numbers, a product with ones takes less time than NumPy's sum."""

_ONES = {dtype: np.ones(_SHORT, dtype) for dtype in _FLOATS}

_PAIRWISE = 2**16
"""From so many numbers on, NumPy's sum in pairs is plainly more accurate than BLAS."""

_FEW = 4096
"""Up to so many numbers, copying or reading them takes less time than another call."""


def versions() -> dict[str, str]:
    """Return the versions of NumPy and, where it is used, SciPy."""
    libraries = {"numpy": np.__version__}
    if lapack is not None:
        libraries["scipy"] = importlib.metadata.version("scipy")
    return libraries


def asarray(values: np.ndarray[Any, Any], /, *, device: Any) -> np.ndarray[Any, Any]:
    """Return a contiguous copy."""
    return np.array(values, order="C")


def to_numpy(x: np.ndarray[Any, Any], /) -> np.ndarray[Any, Any]:
    """Return a copy."""
    return np.array(x)


def all_finite(x: Any, /, *, xp: Any) -> Any:
    """Return whether every number is finite, from the sum of squares where that is."""
    return np.True_ if math.isfinite(_sum_of_squares(x)) else NotImplemented


def known_finite(x: Any, /, *, xp: Any) -> bool:
    """Return the same as a bool."""
    if x.ndim == 0:
        return math.isfinite(x)
    return math.isfinite(_sum_of_squares(x)) or bool(np.isfinite(x).all())


def _sum_of_squares(x: Any) -> float:
    """Return the sum of squares, in which no terms cancel; NaN where it is not quick.

    ``isfinite`` takes twice the time, and as many bytes as numbers.
    """
    if x.dtype not in _FLOATS or not x.flags.forc or x.size == 0:
        return math.nan
    numbers, dot = x.ravel("K"), _DOT.get(x.dtype)
    if dot is not None:
        return float(dot(numbers, numbers))
    # BLAS itself gives no warning, NumPy does.
    with np.errstate(all="ignore"):
        return float(numbers.dot(numbers))


def known_all(condition: Any, /, *, xp: Any) -> bool:
    """Whether all of a condition holds."""
    return bool(condition.all() if condition.ndim else condition)


def is_plain(x: Any, /, *, xp: Any) -> bool:
    """Whether it is an array of NumPy's own class, or what it makes of 0-d arrays."""
    return type(x) is np.ndarray or isinstance(x, np.generic)


def sum_of_products(x: Any, y: Any, /, *, xp: Any) -> Any:
    """Return the sum of ``x * y``, of not too many numbers by BLAS."""
    if x.dtype not in _FLOATS or x.size > _PAIRWISE:
        return NotImplemented
    if x.flags.f_contiguous:
        x, y = x.T, y.T
    return x.ravel().dot(y.ravel())


def matrix_diagonal(x: Any, /, *, xp: Any) -> Any:
    """Return the diagonals of square matrices, as views."""
    return x.diagonal(axis1=-2, axis2=-1)


def matrix_trace(x: Any, /, *, xp: Any) -> Any:
    """Return the traces of square matrices."""
    if x.ndim == 2 and x.shape[0] <= _SHORT and x.dtype in _FLOATS:
        diagonal = x.diagonal()
        return diagonal.dot(_ONES[x.dtype][: diagonal.size])
    return x.trace(axis1=-2, axis2=-1)


def count_indices(indices: Any, weights: Any, /, *, size: int, xp: Any) -> Any:
    """Sum the weights of equal indices, in float64, by one ``bincount``."""
    return np.bincount(indices, weights, minlength=size).astype(weights.dtype)


def sum_rows_at(rows: Any, indices: Any, /, *, size: int, xp: Any) -> Any:
    """Sum the rows of equal indices."""
    sums = np.zeros((size, rows.shape[1]), dtype=rows.dtype)
    np.add.at(sums, indices, rows)
    return sums


if lapack is not None:

    def _by_dtype(single: Any, double: Any) -> dict[np.dtype[Any], Any]:
        """Return a routine of BLAS or LAPACK for each dtype."""
        return dict(zip(_FLOATS, (single, double), strict=True))

    # Small matrices get their options by position, since three keywords take f2py as long
    # as the rest of the call: SYRK beta, c, trans, lower; SYMV beta, y, the offsets and
    # steps of x and y, lower; POTRF lower, clean, overwrite; POTRI lower, overwrite.
    _SYRK = _by_dtype(blas.ssyrk, blas.dsyrk)
    _SYMM = _by_dtype(blas.ssymm, blas.dsymm)
    _SYMV = _by_dtype(blas.ssymv, blas.dsymv)
    _TRMM = _by_dtype(blas.strmm, blas.dtrmm)
    _TRMV = _by_dtype(blas.strmv, blas.dtrmv)
    _TRSV = _by_dtype(blas.strsv, blas.dtrsv)
    _DOT.update(_by_dtype(blas.sdot, blas.ddot))
    _NRM2 = _by_dtype(blas.snrm2, blas.dnrm2)
    _POTRF = _by_dtype(lapack.spotrf, lapack.dpotrf)
    _POTRI = _by_dtype(lapack.spotri, lapack.dpotri)
    _TRTRI = _by_dtype(lapack.strtri, lapack.dtrtri)
    _TRSM = _by_dtype(blas.strsm, blas.dtrsm)
    _SYEVD = _by_dtype(lapack.ssyevd, lapack.dsyevd)

    _IN_PLACE_FROM = 256
    """Below this size the work space of LAPACK's own driver is small."""

    _EIGENVECTORS = 128
    """Eigenvectors that are computed at a time, in float64."""

    _ZERO = 8
    """Roundoff of the largest eigenvalue, in units of it, up to which others are zero."""

    _LEAF = 64
    """Below this size LAPACK's own triangular inverse is the faster one."""

    _COPIED = 512
    """Up to this size a copy takes a tenth of the time of moving a triangle."""

    _SHORT_SYRK = 2**24
    """Multiplications up to which SciPy's wrapper, which keeps the lock, is faster."""

    _FEW_MATRICES = 16
    """Matrices of a stack that are computed together, so that they stay in the cache."""

    _BELOW = {dtype: np.asfortranarray(np.tri(_LEAF, dtype=dtype)) for dtype in _FLOATS}

    _ABOVE = np.triu(np.ones((_LEAF, _LEAF), dtype=bool), 1)

    def _stored(array: Any) -> tuple[Any, int]:
        """Return a matrix as LAPACK reads it, and whether it is in its lower triangle.

        In Fortran order it is; in C order LAPACK sees the transpose.
        """
        if array.flags.f_contiguous:
            return array, 1
        if array.flags.c_contiguous:
            return array.T, 0
        return np.asfortranarray(array), 1

    def _is_ours(array: Any) -> bool:
        """Whether LAPACK can write to an array that we may overwrite."""
        return bool(array.flags.f_contiguous and array.flags.writeable)

    def _lower_copy(array: Any, factor: Any = 1.0) -> Any:
        """Return the lower triangle times a number, in Fortran order, zero above it.

        One copy of all of it takes a third of the time of one that picks the triangle.
        """
        n, below = array.shape[0], _BELOW[array.dtype]
        copy = empty((n, n), array.dtype)
        if factor == 1.0:
            copy[...] = array
        else:
            np.multiply(array, factor, out=copy)
        for start in range(0, n, _LEAF):
            stop = min(start + _LEAF, n)
            width = stop - start
            copy[:start, start:stop] = 0.0
            copy[start:stop, start:stop] *= below[:width, :width]
        return copy

    def gram_update(
        total: Any,
        rows: Any,
        /,
        *,
        tail: Any,
        decay: Any,
        scale: Any,
        overwrite: bool = False,
        xp: Any,
    ) -> Any:
        """Return ``decay total + scale rows^T rows`` by one SYRK, lower triangle.

        What the tail adds is a last row of its own, so that no rows are copied.
        """
        if rows.ndim not in (2, 3) or 0 in rows.shape or rows.dtype not in _FLOATS:
            return NotImplemented
        sums = None if total is None else total.array
        # SYRK has the memory's address, not its dtype.
        if tail is not None and tail.dtype != rows.dtype:
            return NotImplemented
        if sums is not None and sums.dtype != rows.dtype:
            return NotImplemented
        alpha, beta = float(scale), 0.0 if total is None else float(decay)
        if alpha == 0.0:
            return NotImplemented  # BLAS would not look at the rows, NaN or not
        if tail is not None and (rows.size <= _FEW or rows.ndim == 3):
            rows, tail = np.concatenate([rows, tail[..., None]], axis=-1), None
        if rows.ndim == 3:
            return _gram_of_stack(sums, rows, beta, alpha)
        d = rows.shape[1]
        n = d if tail is None else d + 1
        if sums is not None and total.full_storage and sums.flags.c_contiguous:
            sums = sums.T
        is_short = sums is None and rows.size * d <= _SHORT_SYRK
        if tail is None and (d <= _LEAF or is_short):
            # Rows in C order are in Fortran order transposed, and the sum is copied.
            x, trans = (rows.T, 0) if rows.flags.c_contiguous else (rows, 1)
            return _SYRK[rows.dtype](alpha, x, beta, sums, trans, 1), False
        if overwrite and sums is not None and _is_ours(sums):
            c = sums
        else:
            # SYRK adds to a copy, since the running sum is the caller's.
            c = empty((n, n), rows.dtype)
        if sums is None:
            c[...] = 0.0
        elif c is not sums or beta != 1.0:
            # BLAS would read the sum once more to multiply it by the decay.
            np.multiply(sums, beta, out=c)
        syrk(alpha, rows, 1.0, c[:d, :d])
        if tail is not None:
            c[d, :d] += alpha * (tail @ rows)
            c[d, d] += alpha * (tail @ tail)
        return c, False

    def _gram_of_stack(sums: Any, rows: Any, beta: float, alpha: float) -> Any:
        """Return the same for a stack by NumPy's product, which calls SYRK itself."""
        if sums is None or sums.ndim != 3:
            return NotImplemented
        c = empty(sums.shape[::-1], sums.dtype).T
        for start in range(0, c.shape[0], _FEW_MATRICES):
            x, total = (array[start : start + _FEW_MATRICES] for array in (rows, c))
            np.matmul(np.matrix_transpose(x), x, out=total)
            total *= alpha
            total += beta * sums[start : start + _FEW_MATRICES]
        return c, False

    def damped_cholesky(
        matrix: Any, shift: Any, /, *, factor: Any = 1.0, xp: Any
    ) -> Any:
        """Return the lower factor of ``c B + shift I`` by POTRF, NaN where it fails."""
        array = matrix.array
        if array.dtype not in _FLOATS:
            return NotImplemented
        if array.ndim != 2:
            return _cholesky_of_stack(array, shift, factor)
        if matrix.full_storage and array.flags.c_contiguous:
            array = array.T
        n = array.shape[0]
        small = n <= _LEAF
        a = np.asfortranarray(array * factor) if small else _lower_copy(array, factor)
        diagonal = a.T.reshape(-1)[:: n + 1]
        diagonal += shift
        info = _POTRF[a.dtype](a, 1, 1, 1)[1] if small else potrf(a)
        if info != 0:
            a[...] = np.nan
        return a

    def cholesky_in_place(matrix: Any, shift: Any, /, *, xp: Any) -> Any:
        """Put the lower factor of ``B + shift I`` below B, which is moved above it.

        A small B is copied, and what is above the diagonal has no meaning.
        """
        a = matrix.array
        if a.ndim != 2 or a.dtype not in _FLOATS or not _is_ours(a):
            return NotImplemented
        if len(a) <= _COPIED:
            a = a.copy("F")
        elif not matrix.full_storage:
            _mirror(a)
        diagonal = a.T.reshape(-1)[:: len(a) + 1]
        diagonal += shift
        if potrf(a) != 0:
            diagonal[...] = np.nan
        return a

    def certified_cholesky(
        matrix: Any, z: Any, shift: Any, /, *, limit: float, xp: Any
    ) -> Any:
        """Return a factor of a small matrix and its residual, without calls in between."""
        a, x = matrix.array, z[:, 0]
        if a.ndim != 2 or len(a) > _COPIED or a.dtype not in _FLOATS or not _is_ours(a):
            return None
        symv, trmv, nrm2 = _SYMV[a.dtype], _TRMV[a.dtype], _NRM2[a.dtype]
        image = symv(1.0, a, x, shift, x, 0, 1, 0, 1, 1)
        lower = a.copy("F")
        diagonal = lower.T.reshape(-1)[:: len(a) + 1]
        diagonal += shift
        root = math.sqrt(max(0.0, diagonal.max()))
        # NaN and infinity fail in each of the comparisons.
        if not (shift >= 0.0 and nrm2(image) < math.inf) or potrf(lower) != 0:
            return None
        error = trmv(lower, trmv(lower, x, 0, 1, 1, 1), 0, 1, 1, 0) - image
        ratio = root / diagonal.min()
        solving = np.finfo(a.dtype).eps * ratio * ratio
        residual = max(nrm2(error) / (nrm2(image) or 1.0), solving)
        return (lower, np.asarray(residual)) if residual <= limit else None

    def restored_matrix(matrix: Any, diagonal: Any, /, *, xp: Any) -> Any:
        """Mirror what stands above the diagonal, and put the diagonal back."""
        a = matrix.array
        if (
            a.ndim != 2
            or len(a) <= _COPIED
            or a.dtype not in _FLOATS
            or not _is_ours(a)
        ):
            return NotImplemented
        _mirror(a.T)
        a.T.reshape(-1)[:: len(a) + 1] = diagonal
        return matrix

    def cholesky_inverse(lower: Any, /, *, overwrite: bool = False, xp: Any) -> Any:
        """Return ``(L L^T)^-1`` as ``L^-T L^-1``, both triangles.

        Mirroring takes some hundredths of an inversion's time.  A product with one triangle
        takes a tenth longer than one with both, and with few rows half as long again.
        """
        if lower.dtype not in _FLOATS:
            return NotImplemented
        if lower.ndim != 2:
            return _inverse_of_stack(lower), True
        n, ours = lower.shape[0], overwrite and _is_ours(lower)
        if n <= _LEAF:
            inverse = _POTRI[lower.dtype](lower, 1, ours)[0]
            np.copyto(inverse, inverse.T, where=_ABOVE[:n, :n])
            return inverse, True
        root = lower if ours else _lower_copy(lower)
        _invert_lower(root)
        lauum(root)
        _mirror(root)
        return root, True

    def _mirror(x: Any) -> None:
        """Copy the lower triangle to the upper one, in place."""
        n = x.shape[0]
        for start in range(0, n, _LEAF):
            stop = min(start + _LEAF, n)
            x[:start, start:stop] = x[start:stop, :start].T
            corner, width = x[start:stop, start:stop], stop - start
            np.copyto(corner, corner.T, where=_ABOVE[:width, :width])

    def _cholesky_of_stack(array: Any, shift: Any, factor: Any) -> Any:
        """Return the lower factors of a stack, each by POTRF in its place."""
        n, wrapper = array.shape[-1], _POTRF[array.dtype]
        if not isinstance(factor, float):
            factor = factor[..., None, None]
        lower = np.multiply(array, factor, order="C")
        np.einsum("...ii->...i", lower)[...] += np.asarray(shift)[..., None]
        for matrix in lower.reshape(-1, n, n):
            # In C order LAPACK sees the transpose, and its upper triangle.
            _, info = wrapper(matrix.T, lower=0, clean=1, overwrite_a=1)
            if info != 0:
                matrix[...] = np.nan
        return lower

    def _inverse_of_stack(lower: Any) -> Any:
        """Return ``(L L^T)^-1`` of a stack, both triangles, as ``W^T W``."""
        n = lower.shape[-1]
        root = np.array(lower, order="C")
        _invert_stack(root.reshape(-1, n, n))
        # NumPy knows a product with its own transpose: SYRK, mirrored.
        return np.matmul(np.matrix_transpose(root), root)

    def _invert_stack(x: Any) -> None:
        """Put the inverses of lower triangular matrices in their place, by halves.

        As `_invert_lower`, but that the products are those of whole matrices: LAPACK's
        small triangles are further from the best rate than half of the flops.
        """
        n, trtri = x.shape[-1], _TRTRI[x.dtype]
        if n <= _LEAF // 2:
            for matrix in x:
                # In C order LAPACK sees the transpose.
                inverse, info = trtri(matrix.T, lower=0)
                matrix[...] = np.nan if info != 0 else inverse.T
            return
        h = n // 2
        first, coupling, second = x[:, :h, :h], x[:, h:, :h], x[:, h:, h:]
        _invert_stack(first)
        _invert_stack(second)
        np.matmul(np.matmul(second, coupling), first, out=coupling)
        np.negative(coupling, out=coupling)

    def _invert_lower(x: Any) -> None:
        """Put the inverse of a lower triangular matrix in its place, by halves.

        With halves ``[[P, 0], [C, R]]`` it is ``[[P^-1, 0], [-R^-1 C P^-1, R^-1]]``:
        two TRMM, which run at twice the rate of LAPACK's own TRTRI.
        """
        n = x.shape[0]
        if n <= _LEAF:
            inverse, info = _TRTRI[x.dtype](x, lower=1)
            x[...] = np.nan if info != 0 else inverse
            return
        h = n // 2
        first, coupling, second = x[:h, :h], x[h:, :h], x[h:, h:]
        _invert_lower(first)
        _invert_lower(second)
        trmm(-1.0, first, coupling, right=True)
        trmm(1.0, second, coupling, right=False)

    def solve_triangular(
        lower: Any, b: Any, /, *, transpose: bool, overwrite: bool = False, xp: Any
    ) -> Any:
        """Solve with L or its transpose by TRSM; TRSV for one column."""
        alike = lower.shape[:-2] == b.shape[:-2]
        if not alike or lower.dtype not in _FLOATS or b.size == 0:
            return NotImplemented
        if b.ndim > 2:
            return _solve_stack(lower, b, transpose)
        if b.shape[1] == 1:
            x = _by_vector(_TRSV, lower, b, transpose=transpose)
        else:
            x = _beside(_TRSM, lower, b, transpose=transpose, overwrite=overwrite)
        # A zero on the diagonal is divided by.
        return x if lower.diagonal().all() else np.full_like(b, np.nan)

    def _solve_stack(lower: Any, b: Any, transpose: bool) -> Any:
        """Solve with each triangle of a stack: NumPy's solve would factorize them again."""
        n, k = b.shape[-2:]
        x, solve = np.array(b, order="C"), _TRSM[lower.dtype]
        options = {"side": 1, "trans_a": int(transpose), "overwrite_b": 1}
        pairs = zip(lower.reshape(-1, n, n), x.reshape(-1, n, k), strict=True)
        for triangle, part in pairs:
            # In C order BLAS sees both transposed, and the triangle on the right.
            solve(1.0, triangle.T, part.T, **options)
        x[~np.diagonal(lower, axis1=-2, axis2=-1).all(axis=-1)] = np.nan
        return x

    def multiply_triangular(lower: Any, v: Any, /, *, transpose: bool, xp: Any) -> Any:
        """Return ``L v`` or ``L^T v`` by TRMM; TRMV for one column."""
        if lower.ndim != 2 or v.ndim != 2 or lower.dtype not in _FLOATS or v.size == 0:
            return NotImplemented
        if v.shape[1] == 1:
            return _by_vector(_TRMV, lower, v, transpose=transpose)
        return _beside(_TRMM, lower, v, transpose=transpose)

    def solve_cholesky(lower: Any, b: Any, /, *, xp: Any) -> Any:
        """Solve with L and its transpose by TRSV, for one column."""
        if lower.ndim != 2 or b.shape[1:] != (1,) or lower.dtype not in _FLOATS:
            return NotImplemented
        a, is_lower = _stored(lower)
        # By position as above: the step and the offset of x, lower, trans.
        half = _TRSV[a.dtype](a, b[:, 0], 1, 0, is_lower, 1 - is_lower)
        x = _TRSV[a.dtype](a, half, 1, 0, is_lower, is_lower)[:, None]
        # A zero on the diagonal is divided by.
        return x if lower.diagonal().all() else np.full_like(b, np.nan)

    def _by_vector(
        routine: dict[np.dtype[Any], Any], lower: Any, v: Any, /, *, transpose: bool
    ) -> Any:
        """Return what TRMV or TRSV makes of one column, with L or its transpose."""
        a, is_lower = _stored(lower)
        trans = int(transpose) if is_lower else 1 - int(transpose)
        return routine[lower.dtype](a, v[:, 0], lower=is_lower, trans=trans)[:, None]

    def _beside(
        routine: dict[np.dtype[Any], Any],
        lower: Any,
        v: Any,
        /,
        *,
        transpose: bool,
        overwrite: bool = False,
    ) -> Any:
        """Return what TRMM or TRSM makes of v or a copy, with L or its transpose.

        In C order BLAS sees ``v^T``, with the transposed triangle on its right.
        """
        a, is_lower = _stored(lower)
        trans = int(transpose) if is_lower else 1 - int(transpose)
        transposed = v.flags.c_contiguous or not v.flags.f_contiguous
        x = v.T if transposed else v
        if not (overwrite and _is_ours(x) and x.dtype == lower.dtype):
            x = empty(x.shape, lower.dtype)
            x[...] = v.T if transposed else v
        trans ^= transposed
        if routine is _TRSM and a.shape[0] > _LEAF:
            trsm(a, x, right=transposed, lower=bool(is_lower), trans=bool(trans))
            return x.T if transposed else x
        options = {"lower": is_lower, "trans_a": trans, "overwrite_b": 1}
        x = routine[lower.dtype](1.0, a, x, side=int(transposed), **options)
        return x.T if transposed else x

    def eigh(matrix: Any, /, *, xp: Any) -> Any:
        """Return eigenvalues and eigenvectors by SYEVD."""
        if matrix.array.ndim != 2 or matrix.array.dtype not in _FLOATS:
            return NotImplemented
        a, is_lower = _stored(matrix.array)
        w, Q, info = _SYEVD[a.dtype](a, compute_v=1, lower=is_lower)
        if info != 0:
            return np.full_like(w, np.nan), np.full_like(Q, np.nan)
        return w, Q

    def eigh_in_place(matrix: Any, /, *, xp: Any) -> Any:
        """Return eigenvalues, descending, and eigenvectors with little memory.

        SYTRD writes below the diagonal, so that the matrix stays above it.  SYEVD would
        need two further matrices, and MRRR needs none.
        """
        a = matrix.array
        n, is_large = len(a), a.ndim == 2 and len(a) >= _IN_PLACE_FROM
        if not is_large or a.dtype not in _FLOATS or not _is_ours(a):
            return NotImplemented
        _mirror(a)
        diagonal = a.diagonal().copy()
        d, e, tau = sytrd(a)
        # The eigenvalues of minus the matrix ascend, so that its own descend.
        d, e = (-x.astype(np.float64) for x in (d, e))
        w, info = lapack.dsterf(d, e[:-1])
        done = info == 0
        if done:
            vectors = _narrow_vectors if a.dtype == np.float32 else _vectors
            Q, done = vectors(d, e, w)
        if done:
            ormtr(a, tau, Q)
        _mirror(a.T)
        a.T.reshape(-1)[:: n + 1] = diagonal
        return (-w.astype(a.dtype), Q) if done else NotImplemented

    def _vectors(d: Any, e: Any, w: Any) -> tuple[Any, bool]:
        """Return eigenvectors of a tridiagonal matrix, and if all are there.

        MRRR often fails on the many eigenvalues of a matrix of low rank that are roundoff
        of the largest.  They are one eigenspace, which the columns of a QR complete.
        """
        n = len(w)
        Q = np.eye(n, order="F")
        roundoff = _ZERO * np.finfo(w.dtype).eps * max(-w[0], w[-1])
        count = n if w[-1] > roundoff else int(np.searchsorted(w, -roundoff))
        done = stemr(d, e, 0, count, Q[:, :count])
        if done and 0 < count < n:
            _, tau, _, _ = lapack.dgeqrf(Q[:, :count], overwrite_a=1)
            Q, _, info = lapack.dorgqr(Q, tau, overwrite_a=1)
            done = info == 0
        return Q, done

    def _narrow_vectors(d: Any, e: Any, w: Any) -> tuple[Any, bool]:
        """Return the same in float32.

        MRRR takes the digits of float64 to tell apart the eigenvalues of a matrix in
        float32: some vectors at a time.
        """
        n, start, done = len(w), 0, True
        Q = np.empty((n, n), np.float32, order="F")
        while done and start < n:
            stop = _after_widest_gap(w, start)
            vectors = np.empty((n, stop - start), order="F")
            done = stemr(d, e, start, stop, vectors)
            Q[:, start:stop] = vectors
            start = stop
        return Q, done

    def _after_widest_gap(w: Any, start: int) -> int:
        """Return where the next eigenvectors end: those apart are orthogonal by far."""
        last = start + _EIGENVECTORS
        if last >= len(w):
            return len(w)
        first = start + _EIGENVECTORS // 2
        return first + 1 + int(np.argmax(np.diff(w[first : last + 1])))

    def scale_symmetric(matrix: Any, factor: Any, /, *, xp: Any) -> Any:
        """Return the lower triangle times a number."""
        array = matrix.array
        n = array.shape[-1]
        if matrix.full_storage or array.ndim != 2 or n <= _LEAF:
            return NotImplemented
        # One pass over all of it takes a third of the time of one over the triangle.
        scaled = empty((n, n), array.dtype)
        if array.flags.c_contiguous:
            scaled = scaled.T
        np.multiply(array, factor, out=scaled)
        return scaled, False

    def multiply_symmetric(matrix: Any, v: Any, /, *, xp: Any) -> Any:
        """Return ``S v`` from one triangle of S by SYMM; SYMV for one column."""
        array = matrix.array
        if array.ndim == 3 and matrix.full_storage:
            return _product_of_stack(array, v)
        if array.ndim != 2 or v.ndim != 2:
            return NotImplemented
        if matrix.full_storage and (v.shape[1] > 1 or array.shape[0] <= _LEAF):
            # In the order of v, so that what follows reads both in one order.  (A method
            # takes a third of the time of a function.)
            return v.T.dot(array).T if v.flags.f_contiguous else array.dot(v)
        if array.dtype not in _FLOATS:
            return NotImplemented
        if v.shape[1] == 1:
            a, is_lower = _stored(array)
            return _SYMV[a.dtype](1.0, a, v[:, 0], lower=is_lower)[:, None]
        if v.size == 0:
            return NotImplemented
        a, is_lower = _stored(array)
        transposed = v.flags.c_contiguous or not v.flags.f_contiguous
        if transposed:
            v = v.T
        out = empty(v.shape, a.dtype)
        if a.shape[0] > _LEAF and v.flags.f_contiguous and v.dtype == a.dtype:
            symm(a, v, out, right=transposed, lower=bool(is_lower))
            return out.T if transposed else out
        options = {"side": int(transposed), "lower": is_lower, "c": out}
        product = _SYMM[a.dtype](1.0, a, v, beta=0.0, overwrite_c=1, **options)
        return product.T if transposed else product

    def multiply_shifted(
        matrix: Any, v: Any, /, *, factor: Any, shift: Any, xp: Any
    ) -> Any:
        """Return ``(c B + shift I) v`` of one column, by one SYMV."""
        array = matrix.array
        if array.ndim != 2 or v.ndim != 2 or v.shape[1] != 1 or v.dtype not in _FLOATS:
            return NotImplemented
        # BLAS would not look at a matrix that is multiplied by zero, NaN or not.
        if v.dtype != array.dtype or not factor:
            return NotImplemented
        a, is_lower = _stored(array)
        x, symv = v[:, 0], _SYMV[a.dtype]
        return symv(factor, a, x, shift, x, 0, 1, 0, 1, is_lower)[:, None]

    def _product_of_stack(array: Any, v: Any) -> Any:
        """Return the products of a stack, in the order of v and in reused memory."""
        rows = np.matrix_transpose(v)
        if v.ndim != 3 or len(v) != len(array) or v.dtype != array.dtype:
            return NotImplemented
        if not rows.flags.c_contiguous:
            return np.matmul(array, v, out=empty(v.shape[::-1], v.dtype).T)
        out = empty(rows.shape[::-1], v.dtype).T
        return np.matrix_transpose(np.matmul(rows, array, out=out))

    def relative_norm(error: Any, scale: Any, /, *, xp: Any) -> Any:
        """Return ``|error| / |scale|`` by NRM2, which neither over- nor underflows."""
        if error.ndim != 2 or error.shape[1] != 1 or error.dtype not in _FLOATS:
            return NotImplemented
        nrm2, dtype = _NRM2[error.dtype], error.dtype
        top, bottom = nrm2(error[:, 0]), nrm2(scale[:, 0])
        ratio = top / (bottom or 1.0)
        return np.asarray(ratio if math.isfinite(ratio) else math.inf, dtype)
