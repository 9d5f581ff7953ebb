"""PyTorch, on whatever device its tensors are.

Conventions.  A running Gram matrix keeps its lower triangle (``addmm`` fuses the moving
average, but its result is symmetric only up to rounding); inverses have both.  On the
CPU, where PyTorch has no SYRK and its LAPACK calls are slow, matrices are worked through
in panels, by products; on one thread by SciPy's routines, see `torch_lapack`.  Nothing
here synchronizes with a GPU, except ``eigh``, which does so in PyTorch itself on CUDA.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import array_api_compat.torch as namespace_module
import numpy as np
import torch

from kfac_core_backends import blas_threads
from kfac_core_backends import torch_lapack as lapack
from kfac_core_backends import torch_onednn as onednn
from kfac_core_backends import torch_panels as panels

name = "torch"

_is_compiling = torch.compiler.is_compiling

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a function transform looks on at a tensor."""


_NO_DISPATCH = torch.Tensor.__torch_dispatch__


def versions() -> dict[str, str]:
    """Return PyTorch's version."""
    return {"torch": str(torch.__version__)}


def namespace() -> Any:
    """Return the Array API namespace of PyTorch."""
    return namespace_module


def devices() -> tuple[str, ...]:
    """Return the devices there are."""
    gpus = tuple(f"cuda:{i}" for i in range(torch.cuda.device_count()))
    mps = ("mps",) if torch.backends.mps.is_available() else ()
    return ("cpu", *gpus, *mps)


def device(spec: str | None, /) -> Any:
    """Return a device; None is PyTorch's default device."""
    chosen = torch.get_default_device() if spec is None else torch.device(spec)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"torch has no device {spec!r}; it has {', '.join(devices())}")
    return chosen


def asarray(values: np.ndarray[Any, Any], /, *, device: Any) -> Any:
    """Return a copy on the device."""
    return torch.tensor(np.ascontiguousarray(values), device=device).reshape(
        values.shape
    )


def to_numpy(x: Any, /) -> np.ndarray[Any, Any]:
    """Return a copy on the host; bfloat16, which NumPy lacks, becomes float32."""
    host = x.detach().cpu()
    if host.dtype == torch.bfloat16:
        host = host.float()
    return np.array(host.numpy())


def detach(x: Any, /) -> Any:
    """Return the numbers as a plain tensor without a gradient graph.

    Subclasses that only add methods would otherwise stay in states, which then cannot be
    copied.
    """
    if x.requires_grad:
        x = x.detach()
    kind = type(x)
    if kind is torch.Tensor or kind.__torch_dispatch__ is not _NO_DISPATCH:
        return x
    return x.as_subclass(torch.Tensor)


def array_problem(x: Any, /) -> str | None:
    """Return why a tensor cannot be computed with, or None."""
    if x.is_nested:
        return "a nested tensor; pad it, and give a mask"
    if x.layout is not torch.strided:
        return f"a tensor of layout {x.layout}; call its `to_dense()`"
    if x.is_quantized:
        return f"a quantized tensor ({x.dtype}); call its `dequantize()`"
    if x.is_meta:
        return "a tensor on the device meta, which has no numbers"
    if type(x) is not torch.Tensor and type(x).__module__.startswith("torch.masked"):
        return "a masked tensor; fill it, and give a mask"
    return None


def threads() -> int:
    """Return how many threads a call computes on."""
    return int(torch.get_num_threads())


def hold_threads(number: int, /) -> Callable[[], None]:
    """Let calls compute on so many threads, those of SciPy's BLAS too.

    OpenMP and MKL keep the number for each thread, so that each has to say it.
    """
    before = torch.get_num_threads()
    release = blas_threads.hold_threads(number)
    torch.set_num_threads(number)

    def undo() -> None:
        release()
        # Last: a BLAS may share its threads with PyTorch.
        torch.set_num_threads(before)

    return undo


@functools.cache
def _background_stream(device: Any) -> Any:
    # One, since memory that is freed on a stream is used again on that stream alone.
    return torch.cuda.Stream(device)


def in_background(function: Callable[[], Any], /) -> Callable[[], Any]:
    """Return a function for another thread, on a stream of its own of the current GPU."""
    if not torch.cuda.is_initialized():
        return function
    here = torch.cuda.current_stream()
    # The arrays that the function reads may still be queued here.
    ready = here.record_event()

    def beside() -> Any:
        stream = _background_stream(here.device)
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            result = function()
        stream.synchronize()
        for x in torch.utils._pytree.tree_leaves(result):
            if torch.is_tensor(x) and x.is_cuda:
                # Memory that is freed here is used again when this stream has read it.
                x.record_stream(here)
        return result

    return beside


def register_structure(
    cls: type[Any], fields: tuple[str, ...], static: tuple[str, ...]
) -> None:
    """Let PyTorch's function transforms look into a structure."""

    def flatten(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
        context = tuple(getattr(value, name) for name in static)
        return [getattr(value, name) for name in fields], context

    def unflatten(leaves: Any, context: tuple[Any, ...]) -> Any:
        parts = dict(zip(fields, leaves, strict=True))
        return cls(**parts, **dict(zip(static, context, strict=True)))

    torch.utils._pytree.register_pytree_node(cls, flatten, unflatten)


def _plain(*tensors: Any) -> bool:
    """Whether tensors may be computed with in place, panel by panel, on the CPU.

    Not where something looks on: autograd, a function transform, a compiler, or a
    subclass of tensors; nor where signs are yet to be changed, as by ``conj``.  A GPU has
    its own kernels for what is done by panels here.
    """
    if _is_compiling():
        return False
    # A loop, since this is asked a hundred times in a refresh.
    for x in tensors:
        if (
            type(x) is not torch.Tensor
            or not x.is_cpu
            or x.requires_grad
            or x.is_neg()
            or _is_wrapped(x)
        ):
            return False
    return True


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
    """Return ``decay total + scale rows^T rows``, lower triangle, by ADDMM.

    There is no SYRK: on the CPU the products of panels up to the diagonal take half of
    the flops of one whole product.  Those of a stack are whole.
    """
    if rows.ndim not in (2, 3) or torch.is_tensor(decay) or torch.is_tensor(scale):
        return NotImplemented
    known = [
        x for x in (rows, tail, None if total is None else total.array) if x is not None
    ]
    if scale == 0.0:
        return NotImplemented  # BLAS would not look at the rows, NaN or not
    if rows.ndim == 3:
        return _stacked_gram(total, rows, tail, decay, scale, overwrite)
    if _plain(*known):
        arguments = total, rows, tail, decay, scale
        updated = lapack.gram_update(*arguments, overwrite=overwrite)
        if updated is not None:
            return updated
        return panels.gram(*arguments, overwrite=overwrite), False
    if tail is not None:
        rows = torch.cat([rows, tail[:, None]], dim=1)
    if total is None:
        return torch.matmul(rows.mT, rows) * scale, False
    factors = {"beta": decay, "alpha": scale}
    out = total.array if overwrite else None
    return torch.addmm(total.array, rows.mT, rows, **factors, out=out), False


_SYRK_FROM = 112
"""From this width on, half of the flops are worth a call for each matrix of a stack."""


def _stacked_gram(
    total: Any, rows: Any, tail: Any, decay: Any, scale: Any, overwrite: bool
) -> Any:
    """Return `gram_update` of a stack, with the average in ``beta``."""
    if total is None or total.array.ndim != 3:
        return NotImplemented
    if tail is not None:
        rows = torch.cat([rows, tail[..., None]], dim=-1)
    if rows.shape[-1] >= _SYRK_FROM and _plain(rows, total.array):
        updated = lapack.gram_update(total, rows, None, decay, scale)
        if updated is not None:
            return updated
    factors = {"beta": decay, "alpha": scale}
    out = total.array if overwrite else None
    return torch.baddbmm(total.array, rows.mT, rows, **factors, out=out), False


def _last(shift: Any) -> Any:
    """Return a number, or one a matrix with an axis for its diagonal."""
    return shift[..., None] if torch.is_tensor(shift) else shift


_CHOLESKY_FROM = 512
"""From this size on, panels are faster than LAPACK's factorization as PyTorch calls it."""

_INVERSE_FROM = 192
"""Likewise for the inverse."""


def damped_cholesky(matrix: Any, shift: Any, /, *, factor: Any = 1.0, xp: Any) -> Any:
    """Return the lower factor of ``c B + shift I``, NaN where it fails."""
    array = matrix.array
    if _plain(array, *(x for x in (shift, factor) if torch.is_tensor(x))):
        if (by_lapack := lapack.damped_cholesky(matrix, shift, factor)) is not None:
            return by_lapack
        if array.ndim == 2:
            if array.shape[0] >= _CHOLESKY_FROM:
                return panels.cholesky(array, shift, float(factor))
            damped = array * factor
            damped.diagonal().add_(shift)
            lower, info = torch.linalg.cholesky_ex(damped)
            return lower if int(info) == 0 else lower.fill_(torch.nan)
    scaled = array * (factor[..., None, None] if torch.is_tensor(factor) else factor)
    diagonal = torch.diagonal(scaled, dim1=-2, dim2=-1)
    damped = torch.diagonal_scatter(scaled, diagonal + _last(shift), dim1=-2, dim2=-1)
    lower, info = torch.linalg.cholesky_ex(damped)
    # The factor has finite garbage where `info` is not zero.
    return torch.where((info == 0)[..., None, None], lower, torch.nan)


def cholesky_in_place(matrix: Any, shift: Any, /, *, xp: Any) -> Any:
    """Put the lower factor of ``B + shift I`` below B, which is moved above it."""
    array = matrix.array
    if array.ndim != 2 or array.shape[0] < _CHOLESKY_FROM or not _plain(array):
        return NotImplemented
    if not matrix.full_storage:
        panels.mirror(array)
    return panels.cholesky(array, shift, in_place=True)


def restored_matrix(matrix: Any, diagonal: Any, /, *, xp: Any) -> Any:
    """Mirror what stands above the diagonal, and put the diagonal back."""
    array = matrix.array
    if array.ndim != 2 or array.shape[0] < _CHOLESKY_FROM or not _plain(array):
        return NotImplemented
    panels.mirror(array.mT)
    array.diagonal().copy_(diagonal)
    return matrix


def cholesky_inverse(lower: Any, /, *, overwrite: bool = False, xp: Any) -> Any:
    """Return ``(L L^T)^-1``, both triangles or the lower one."""
    if _plain(lower):
        inverse = lapack.cholesky_inverse(lower, overwrite=overwrite)
        if inverse is not None:
            return inverse
        if lower.ndim == 2 and lower.shape[0] >= _INVERSE_FROM:
            return panels.cholesky_inverse(lower), True
    if lower.ndim > 2 and lower.is_cuda:
        return _stacked_cholesky_inverse(lower), True
    return torch.cholesky_inverse(lower), True


def _stacked_cholesky_inverse(lower: Any) -> Any:
    """Return the inverses of a stack in a few kernels; PyTorch's own loops on a GPU."""
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    root = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False)
    return torch.matmul(root.mT, root)


def multiply_symmetric(matrix: Any, v: Any, /, *, xp: Any) -> Any:
    """Return ``S v`` from the lower triangle of S."""
    array = matrix.array
    if matrix.full_storage and (product := _large_product(array, v)) is not None:
        return product
    if matrix.full_storage and not v.is_contiguous():
        # In the order of v, so that what follows reads both in one order.
        return _rows_times(v, array)
    if matrix.full_storage and array.ndim > 2 and v.shape[-1] == 1:
        return _rows_times(v, array)
    if matrix.full_storage or array.ndim != 2 or v.ndim != 2 or not _plain(array, v):
        return NotImplemented
    product = lapack.multiply_symmetric(matrix, v)
    return panels.multiply_symmetric(array, v) if product is None else product


def multiply_matrices(a: Any, b: Any, /, *, xp: Any) -> Any:
    """Return ``a b``, of large matrices by oneDNN."""
    product = _large_product(a, b)
    return NotImplemented if product is None else product


def _large_product(a: Any, b: Any) -> Any:
    """Return ``a b`` of two matrices, or None where oneDNN does not apply."""
    if a.ndim != 2 or b.ndim != 2 or not _plain(a, b):
        return None
    return onednn.product(a, b)


def multiply_triangular(lower: Any, v: Any, /, *, transpose: bool, xp: Any) -> Any:
    """Return ``L v`` or ``L^T v``: of a large L, or for one column of each of a stack."""
    if lower.ndim == 2 and lower.shape[0] >= _CHOLESKY_FROM and _plain(lower, v):
        return panels.multiply_triangular(lower, v, transpose=transpose)
    if lower.ndim == 2 or v.shape[-1] != 1:
        return NotImplemented
    return _rows_times(v, lower if transpose else lower.mT)


def _rows_times(v: Any, matrices: Any) -> Any:
    """Return ``M^T v`` as ``v^T M``: on the CPU a column takes nine times as long."""
    return torch.matmul(v.mT, matrices).mT


def scale_symmetric(matrix: Any, factor: Any, /, *, xp: Any) -> Any:
    """Return the lower triangle times a number, mirrored or not."""
    array = matrix.array
    if matrix.full_storage or array.ndim != 2 or not _plain(array):
        return NotImplemented
    plain = not torch.is_tensor(factor) or _plain(factor)
    if plain and (scaled := lapack.scale_symmetric(matrix, factor)) is not None:
        return scaled
    return panels.scaled_symmetric(array, factor), True


def all_finite(x: Any, /, *, xp: Any) -> Any:
    """Return whether every number is finite."""
    if x.numel() == 0 or not _plain(x):
        return NotImplemented
    return torch.tensor(_is_finite(x))


def _is_finite(x: Any) -> bool:
    """Whether every number is finite: so where the sum of squares is; or by the extremes.

    No terms of that sum cancel.
    """
    flat = _flat(x)
    if flat is not None and math.isfinite(torch.dot(flat, flat)):
        return True
    # NaN is both.  (``isfinite`` of x takes twenty times as long; of two numbers on the
    # CPU it takes twice as long as reading them.)
    return all(map(math.isfinite, torch.aminmax(x)))


def _flat(x: Any) -> Any:
    """Return the numbers as one axis without a copy, in any order; None if it takes one."""
    if x.dtype not in (torch.float32, torch.float64):
        return None
    rows = x if x.is_contiguous() or x.ndim < 2 else x.mT
    return rows.reshape(-1) if rows.is_contiguous() else None


def known_finite(x: Any, /, *, xp: Any) -> bool:
    """Return the same as a bool, of a tensor that `is_plain`."""
    if not is_plain(x, xp=xp):
        return False
    return x.numel() == 0 or _is_finite(x)


def known_all(condition: Any, /, *, xp: Any) -> bool:
    """Whether all of a condition holds, if that needs no synchronization."""
    return _plain(condition) and bool(condition.all())


def is_plain(x: Any, /, *, xp: Any) -> bool:
    """Whether it is a tensor on the CPU that nothing looks on at."""
    # What is made in inference mode cannot take part in gradients later.
    return _plain(x) and not torch.is_inference_mode_enabled()


def truth_of(condition: Any, /, *, xp: Any) -> Any:
    """Return a condition as a bool; None where a compiler would break the graph for it."""
    return None if _is_compiling() else NotImplemented


_SEEN = {torch.float32, torch.float64, torch.bool, torch.int32, torch.int64}
"""The dtypes in which NumPy computes as fast as PyTorch."""


def host_computes(*, xp: Any, flops: int = 0, dtype: Any = None) -> bool:
    """Whether NumPy is to compute: where PyTorch has no threads to win by.

    Of large products those of oneDNN take less time.
    """
    if flops and dtype == torch.float32 and onednn.is_available():
        return False
    return lapack.on_one_thread()


def host_view(x: Any, /, *, xp: Any) -> Any:
    """Return a NumPy array on the memory of a plain tensor on the CPU."""
    if type(x) is not torch.Tensor or x.dtype not in _SEEN:
        return None
    if _is_wrapped(x) or _is_compiling():
        return None
    try:
        array: np.ndarray[Any, Any] = x.numpy()
    except (RuntimeError, TypeError):
        return None  # It is on a device, differentiated, sparse or to be negated.
    return array


def from_host(x: Any, /, *, xp: Any) -> Any:
    """Return a tensor on the memory of a NumPy array."""
    # Scalars have no memory to share, and PyTorch warns of what is read-only.
    if not isinstance(x, np.ndarray) or not x.flags.writeable:
        x = np.array(x)
    return torch.from_numpy(x)


def relative_norm(error: Any, scale: Any, /, *, xp: Any) -> Any:
    """Return ``|error| / |scale|``, of float32 by norms in float64."""
    if error.ndim != 2 or error.dtype != torch.float32 or not _plain(error, scale):
        return NotImplemented
    top, bottom = (
        torch.linalg.vector_norm(x, dtype=torch.float64) for x in (error, scale)
    )
    ratio = float(top) / (float(bottom) or 1.0)
    return torch.tensor(ratio if math.isfinite(ratio) else math.inf)


def solve_triangular(
    lower: Any, b: Any, /, *, transpose: bool, overwrite: bool = False, xp: Any
) -> Any:
    """Solve with L or its transpose."""
    if _plain(lower, b):
        solution = lapack.solve_triangular(
            lower, b, transpose=transpose, overwrite=overwrite
        )
        if solution is not None:
            return solution
    if transpose:
        return torch.linalg.solve_triangular(lower.mT, b, upper=True)
    return torch.linalg.solve_triangular(lower, b, upper=False)


def count_indices(indices: Any, weights: Any, /, *, size: int, xp: Any) -> Any:
    """Sum the weights of equal indices; does not synchronize, unlike ``bincount``."""
    return torch.zeros(size, dtype=weights.dtype, device=weights.device).index_add(
        0, indices, weights
    )


def sum_rows_at(rows: Any, indices: Any, /, *, size: int, xp: Any) -> Any:
    """Sum the rows of equal indices."""
    zeros = torch.zeros((size, rows.shape[1]), dtype=rows.dtype, device=rows.device)
    return zeros.index_add(0, indices, rows)


def eigh(matrix: Any, /, *, xp: Any) -> Any:
    """Return eigenvalues and eigenvectors from the lower triangle."""
    try:
        w, Q = torch.linalg.eigh(matrix.array)
    except torch.linalg.LinAlgError:
        array = matrix.array
        return torch.full_like(array[..., 0], torch.nan), torch.full_like(
            array, torch.nan
        )
    return w, Q


def eigh_in_place(matrix: Any, /, *, xp: Any) -> Any:
    """Return eigenvalues, descending, and eigenvectors with little memory.

    On the CPU by SciPy, on one thread or several: of large matrices it saves most of what
    PyTorch's own call takes.
    """
    result = lapack.eigh_in_place(matrix) if _plain(matrix.array) else None
    return NotImplemented if result is None else result
