"""JAX, inside and outside of its transforms.

Conventions.  Failures are NaN and never exceptions, traced or not.  JAX makes float32
of float64 in silence unless it was told otherwise at start; `asarray` refuses instead.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular as jax_solve_triangular

from kfac_core.errors import DtypeError

name = "jax"


def versions() -> dict[str, str]:
    """Return JAX's version."""
    return {"jax": str(jax.__version__)}


def namespace() -> Any:
    """Return the Array API namespace of JAX."""
    return jnp


def devices() -> tuple[str, ...]:
    """Return the devices there are, as ``platform:number``."""
    return tuple(f"{d.platform}:{d.id}" for d in jax.devices())


def device(spec: str | None, /) -> Any:
    """Return a device, from ``cpu``, ``gpu`` or ``gpu:1``; None is JAX's default."""
    if spec is None:
        return None
    platform, _, number = spec.partition(":")
    known = jax.devices(platform)
    if not (number or "0").isdecimal() or int(number or 0) >= len(known):
        raise ValueError(f"jax has no device {spec!r}; it has {', '.join(devices())}")
    return known[int(number or 0)]


def array_problem(x: Any, /) -> str | None:
    """Return why an array cannot be computed with, or None."""
    if isinstance(x, jax.core.Tracer) or not x.is_deleted():
        return None
    return "an array that was deleted, as by donating it to a compiled function"


def asarray(values: np.ndarray[Any, Any], /, *, device: Any) -> Any:
    """Return a copy on the device; 64 bits only where JAX has them switched on."""
    if values.dtype in (np.float64, np.int64) and not jax.config.jax_enable_x64:
        raise DtypeError(
            f"JAX would silently round {values.dtype} to 32 bits. Set JAX_ENABLE_X64=1 "
            "or call kfac_core.enable_float64 before anything is computed, or pass "
            f"{np.dtype(values.dtype.kind + '4')} values."
        )
    return jax.device_put(jnp.array(values), device)


def to_numpy(x: Any, /) -> np.ndarray[Any, Any]:
    """Return a copy on the host."""
    return np.array(x)


def host_view(x: Any, /, *, xp: Any) -> np.ndarray[Any, Any] | None:
    """Return a view of an array of one CPU, of which `jax.device_get` makes a copy."""
    if isinstance(x, jax.core.Tracer) or x.dtype.kind not in "fiub":
        return None
    (device, *others) = x.devices()
    return None if others or device.platform != "cpu" else np.asarray(x)


def enable_float64() -> None:
    """Switch 64-bit floats on, for the whole process."""
    jax.config.update("jax_enable_x64", True)


def placeholder(function: Any, /, *, device: Any) -> Any:
    """Return zeros in the place of what a function returns, which is not computed.

    Outside of a program each of its operations would be compiled alone.
    """
    form = jax.eval_shape(function)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=device), form)


def register_structure(
    cls: type[Any], fields: tuple[str, ...], static: tuple[str, ...]
) -> None:
    """Let JAX's transforms look into a structure."""
    jax.tree_util.register_dataclass(cls, data_fields=fields, meta_fields=static)


_BLOCKS_FROM = 512
"""From this size on, products of parts of a matrix are faster than one product of all."""


def _gram_by_panels(rows: Any) -> Any:
    """Return ``rows^T rows``, lower triangle, of three panels: each costs a compilation."""
    n = rows.shape[1]
    # The kernels are slower where columns are no multiple of a vector of numbers.
    width = -(-n // 24) * 8
    panels, columns = [], rows.T
    for start in range(0, n, width):
        stop = min(start + width, n)
        if rows.dtype == jnp.float64:
            # On CPUs the other product takes twice as long in float64, and not in float32.
            panel = columns[start:stop] @ columns[:stop].T
        else:
            panel = rows[:, start:stop].T @ rows[:, :stop]
        panels.append(jnp.pad(panel, ((0, 0), (0, n - stop))))
    return jnp.concatenate(panels)


@functools.partial(jax.jit, donate_argnums=0)
def _added_in_place(total: Any, product: Any, decay: Any, scale: Any) -> Any:
    return total * decay + product * scale


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
    """Return ``decay total + scale rows^T rows``, lower triangle.

    Without what mirroring takes; of large ones in half of the flops of a product.
    """
    if tail is not None:
        rows = jnp.concatenate([rows, tail[..., None]], axis=-1)
    by_panels = rows.ndim == 2 and rows.shape[1] >= _BLOCKS_FROM
    product = _gram_by_panels(rows) if by_panels else rows.mT @ rows
    if overwrite and total is not None and not isinstance(product, jax.core.Tracer):
        return _added_in_place(total.array, product, decay, scale), False
    updated = product * scale
    return updated if total is None else updated + total.array * decay, False


def matrix_diagonal(x: Any, /, *, xp: Any) -> Any:
    """Return the diagonal as a slice, which is compiled faster than a gather."""
    n = x.shape[-1]
    flat = x.reshape(*x.shape[:-2], n * n)
    return jax.lax.slice_in_dim(flat, 0, n * n, n + 1, axis=flat.ndim - 1)


def matrix_trace(x: Any, /, *, xp: Any) -> Any:
    """Return the sum of the diagonal."""
    diagonal = matrix_diagonal(x, xp=xp)
    even, odd, last = _in_halves(diagonal)
    even, odd = _sums_over((even, odd), (-1,))
    return even + odd + last[..., 0] if last.shape[-1] else even + odd


def all_finite(x: Any, /, *, xp: Any) -> Any:
    """Return whether every number is finite."""
    first, second, last = _in_halves(jnp.isfinite(x).reshape(-1))
    first, second = _reduced((first, second), True, _both, (0,))
    return first & second & last[0] if last.shape[0] else first & second


def relative_norm(error: Any, scale: Any, /, *, xp: Any) -> Any:
    """Return ``|error| / |scale|``, in few operations."""
    largest = jnp.max(jnp.abs(scale), axis=(-2, -1), keepdims=True)
    unit = jnp.where(largest > 0, largest, 1.0)
    error, scale = jnp.broadcast_arrays(error / unit, scale / unit)
    top, bottom = _sums_over((error * error, scale * scale), (-2, -1))
    ratio = jnp.sqrt(top / jnp.where(bottom == 0, 1.0, bottom))
    return jnp.where(jnp.isfinite(ratio), ratio, jnp.inf)


def _in_halves(x: Any) -> tuple[Any, Any, Any]:
    """Return two halves of the last axis, and what is left over."""
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]


def _reduced(
    arrays: tuple[Any, ...], start: Any, join: Any, axes: tuple[int, ...]
) -> tuple[Any, ...]:
    """Reduce arrays of one shape, in one loop; of a single array several are made."""
    starts = tuple(jnp.asarray(start, x.dtype) for x in arrays)
    places = tuple(axis % arrays[0].ndim for axis in axes)
    results: tuple[Any, ...] = tuple(jax.lax.reduce(arrays, starts, join, places))
    return results


def _sums(arrays: tuple[Any, ...], axes: tuple[int, ...]) -> tuple[Any, ...]:
    return _reduced(arrays, 0.0, _added, axes)


def _changes_of_sums(axes: tuple[int, ...], arrays: Any, changes: Any) -> Any:
    along = tuple(jnp.sum(change, axes) for change in changes[0])
    return _sums_over(*arrays, axes), along


# JAX does not differentiate reductions of several arrays at once.
_sums_over: Any = jax.custom_jvp(_sums, nondiff_argnums=(1,))
_sums_over.defjvp(_changes_of_sums)


def _both(left: Any, right: Any) -> Any:
    return tuple(a & b for a, b in zip(left, right, strict=True))


def damped_cholesky(matrix: Any, shift: Any, /, *, factor: Any = 1.0, xp: Any) -> Any:
    """Return the lower factor of ``c B + shift I``, NaN where it fails."""
    array = matrix.array
    eye = jnp.eye(array.shape[-1], dtype=array.dtype)
    shift, factor = (
        jnp.asarray(x, array.dtype)[..., None, None] for x in (shift, factor)
    )
    damped = factor * array + shift * eye
    return jax.lax.linalg.cholesky(damped, symmetrize_input=False)


def set_block(array: Any, block: Any, /, *, row: int, column: int, xp: Any) -> Any:
    """Return a matrix with a block of it replaced."""
    return jax.lax.dynamic_update_slice(array, block, (row, column))


def cholesky_inverse(lower: Any, /, *, overwrite: bool = False, xp: Any) -> Any:
    """Return ``(L L^T)^-1``; there is no POTRI, and for small ones two solves serve."""
    if lower.ndim == 2 and lower.shape[0] >= _BLOCKS_FROM:
        return _inverse_by_blocks(lower), True
    eye = jnp.broadcast_to(jnp.eye(lower.shape[-1], dtype=lower.dtype), lower.shape)
    root = jax_solve_triangular(lower, eye, lower=True)
    return _squared(root), True


def _squared(root: Any) -> Any:
    """Return ``R^T R``, symmetric to the bit whatever order a product adds in."""
    product = root.mT @ root
    return 0.5 * (product + product.mT)


def _inverse_by_blocks(lower: Any) -> Any:
    """Return ``L^-T L^-1`` from the four blocks of ``L^-1``, one of which is zero."""
    first, coupling, second = _triangular_inverse(lower)
    cross = second.T @ coupling
    top = _squared(first) + _squared(coupling)
    return jnp.block([[top, cross.T], [cross, _squared(second)]])


def _triangular_inverse(lower: Any) -> tuple[Any, Any, Any]:
    """Return the blocks of ``L^-1``: above left, below left and below right."""
    h = lower.shape[0] // 2
    first, second = (_own_inverse(part) for part in (lower[:h, :h], lower[h:, h:]))
    return first, -(second @ lower[h:, :h]) @ first, second


def _own_inverse(lower: Any) -> Any:
    """Return ``L^-1``, by halves where it is large."""
    n = lower.shape[0]
    if n < _BLOCKS_FROM:
        return jax_solve_triangular(lower, jnp.eye(n, dtype=lower.dtype), lower=True)
    first, coupling, second = _triangular_inverse(lower)
    zeros = jnp.zeros((first.shape[0], second.shape[0]), lower.dtype)
    return jnp.block([[first, zeros], [coupling, second]])


def solve_triangular(
    lower: Any, b: Any, /, *, transpose: bool, overwrite: bool = False, xp: Any
) -> Any:
    """Solve with L or its transpose."""
    return jax_solve_triangular(lower, b, lower=True, trans="T" if transpose else "N")


def sums_of_products(pairs: Any, /, *, xp: Any) -> Any:
    """Return all sums from one pass over the arrays."""
    products = [_wide(x) * _wide(y) for x, y in pairs]
    dtype = jnp.result_type(*products)
    arrays = tuple(p.astype(dtype) for p in products)
    # Rows first.
    if arrays[0].ndim > 1:
        rows = tuple(x.reshape(-1, x.shape[-1]) for x in arrays)
        arrays = _sums_over(rows, (0,))
    if arrays[0].ndim:
        arrays = _sums_over(arrays, (0,))
    return jnp.stack(arrays)


def _wide(x: Any) -> Any:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _added(left: Any, right: Any) -> Any:
    return tuple(a + b for a, b in zip(left, right, strict=True))


def choose(condition: Any, new: Any, old: Any, /, *, xp: Any) -> Any:
    """Return one of two structures, in a program by a branch.

    The compiler would repeat what a condition is made of in each selection.
    """
    if not isinstance(condition, jax.core.Tracer):
        return NotImplemented
    return jax.lax.cond(condition, _first, _second, new, old)


def _first(new: Any, old: Any) -> Any:
    return new


def _second(new: Any, old: Any) -> Any:
    return old


def count_indices(indices: Any, weights: Any, /, *, size: int, xp: Any) -> Any:
    """Sum the weights of equal indices."""
    return jnp.zeros(size, weights.dtype).at[indices].add(weights)


def sum_rows_at(rows: Any, indices: Any, /, *, size: int, xp: Any) -> Any:
    """Sum the rows of equal indices."""
    return jnp.zeros((size, rows.shape[1]), rows.dtype).at[indices].add(rows)


def constant(make: Any, n: int, /, *, dtype: Any, device: Any, xp: Any) -> Any:
    """Return a constant of a program that is compiled, made by NumPy."""
    return jnp.asarray(_constant_of(make, n, np.dtype(dtype).name), device=device)


@functools.cache
def _constant_of(make: Any, n: int, dtype: str) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = make(n, dtype=dtype, device="cpu", xp=np)
    return array


def eigh(matrix: Any, /, *, xp: Any) -> Any:
    """Return eigenvalues and eigenvectors from the lower triangle."""
    return jnp.linalg.eigh(matrix.array, UPLO="L", symmetrize_input=False)
