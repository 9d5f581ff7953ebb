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
    found = jax.devices(platform)
    if not (number or "0").isdecimal() or int(number or 0) >= len(found):
        raise ValueError(f"jax has no device {spec!r}; it has {', '.join(devices())}")
    return found[int(number or 0)]


def array_problem(x: Any, /) -> str | None:
    """Return why an array cannot be computed with, or None."""
    if isinstance(x, jax.core.Tracer) or not x.is_deleted():
        return None
    return "an array that was deleted, as by donating it to a compiled function"


def asarray(values: np.ndarray[Any, Any], /, *, device: Any) -> Any:
    """Return a copy on the device; 64 bits only where JAX has them switched on."""
    if values.dtype in (np.float64, np.int64) and not jax.config.jax_enable_x64:
        raise DtypeError(
            f"JAX would make 32 bits of {values.dtype} in silence. Set JAX_ENABLE_X64=1 "
            "or call kfac_core.enable_float64 before anything is computed, or give "
            f"{np.dtype(values.dtype.kind + '4')} values."
        )
    return jax.device_put(jnp.array(values), device)


def to_numpy(x: Any, /) -> np.ndarray[Any, Any]:
    """Return a copy on the host."""
    return np.array(x)


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


_PANELS_FROM = 512
"""From this size on, products of panels are faster than one product of all."""


def _panels(n: int) -> list[tuple[int, int]]:
    """Return the bounds of about eight panels, so that programs stay short."""
    width = max(128, -(-n // 128) * 16)
    return [(start, min(start + width, n)) for start in range(0, n, width)]


def _stacked_up(panels: list[Any]) -> Any:
    """Return a lower triangle of rows of panels that end at the diagonal."""
    n = panels[-1].shape[1]
    return jnp.concatenate(
        [jnp.pad(panel, ((0, 0), (0, n - panel.shape[1]))) for panel in panels]
    )


def _gram_by_panels(rows: Any) -> Any:
    """Return ``rows^T rows``, lower triangle."""
    panels = [rows[:, a:b].T @ rows[:, :b] for a, b in _panels(rows.shape[1])]
    return _stacked_up(panels)


_compiled_gram: Any = jax.jit(_gram_by_panels)


def gram_update(
    total: Any, rows: Any, /, *, tail: Any, decay: Any, scale: Any, xp: Any
) -> Any:
    """Return ``decay total + scale rows^T rows``, lower triangle.

    Without what mirroring takes; of large ones in half of the flops of a product.
    """
    if tail is not None:
        rows = jnp.concatenate([rows, tail[..., None]], axis=-1)
    by_panels = rows.ndim == 2 and rows.shape[1] >= _PANELS_FROM
    product = _compiled_gram(rows) if by_panels else rows.mT @ rows
    updated = product * scale
    return updated if total is None else updated + total.array * decay, False


def matrix_diagonal(x: Any, /, *, xp: Any) -> Any:
    """Return the diagonal as a slice, which is compiled faster than a gather."""
    n = x.shape[-1]
    flat = x.reshape(*x.shape[:-2], n * n)
    return jax.lax.slice_in_dim(flat, 0, n * n, n + 1, axis=flat.ndim - 1)


def matrix_trace(x: Any, /, *, xp: Any) -> Any:
    """Return the sum of the diagonal."""
    return matrix_diagonal(x, xp=xp).sum(-1)


def relative_norm(error: Any, scale: Any, /, *, xp: Any) -> Any:
    """Return ``|error| / |scale|``, in few operations."""
    largest = jnp.max(jnp.abs(scale), axis=(-2, -1), keepdims=True)
    unit = jnp.where(largest > 0, largest, 1.0)
    top, bottom = _squares(error / unit), _squares(scale / unit)
    ratio = jnp.sqrt(top / jnp.where(bottom == 0, 1.0, bottom))
    return jnp.where(jnp.isfinite(ratio), ratio, jnp.inf)


def _squares(column: Any) -> Any:
    return (column.mT @ column)[..., 0, 0]


def damped_cholesky(matrix: Any, shift: Any, /, *, factor: Any = 1.0, xp: Any) -> Any:
    """Return the lower factor of ``c B + shift I``, NaN where it fails."""
    array = matrix.array
    eye = jnp.eye(array.shape[-1], dtype=array.dtype)
    shift, factor = (
        jnp.asarray(x, array.dtype)[..., None, None] for x in (shift, factor)
    )
    damped = factor * array + shift * eye
    return jax.lax.linalg.cholesky(damped, symmetrize_input=False)


def cholesky_inverse(lower: Any, /, *, overwrite: bool = False, xp: Any) -> Any:
    """Return ``(L L^T)^-1``; there is no POTRI, and for small ones two solves serve."""
    if lower.ndim == 2 and lower.shape[0] >= _PANELS_FROM:
        return _compiled_inverse(lower), True
    eye = jnp.broadcast_to(jnp.eye(lower.shape[-1], dtype=lower.dtype), lower.shape)
    half = jax_solve_triangular(lower, eye, lower=True)
    inverse = jax_solve_triangular(lower, half, lower=True, trans="T")
    return 0.5 * (inverse + inverse.mT), True


def _inverse_by_panels(lower: Any) -> Any:
    """Return ``L^-T L^-1`` by panels of the triangular inverse."""
    root = _triangular_inverse(lower, max(256, lower.shape[0] // 4))
    panels = [root[a:, a:b].T @ root[a:, :b] for a, b in _panels(lower.shape[0])]
    inverse = _stacked_up(panels)
    return jnp.tril(inverse) + jnp.tril(inverse, -1).T


_compiled_inverse: Any = jax.jit(_inverse_by_panels)


def _triangular_inverse(lower: Any, leaf: int) -> Any:
    """Return ``L^-1`` by halves, as `kfac_core.linalg.triangular` has it."""
    n = lower.shape[0]
    if n <= leaf:
        eye = jnp.eye(n, dtype=lower.dtype)
        return jax_solve_triangular(lower, eye, lower=True)
    h = n // 2
    first = _triangular_inverse(lower[:h, :h], leaf)
    second = _triangular_inverse(lower[h:, h:], leaf)
    zeros = jnp.zeros((h, n - h), lower.dtype)
    coupling = -(second @ lower[h:, :h]) @ first
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
    return _sums([p.astype(dtype) for p in products])


def _summed(arrays: Any) -> Any:
    """Return the sum of each of some arrays of one shape, rows first."""
    if arrays[0].ndim > 1:
        zeros = (jnp.zeros((), arrays[0].dtype),) * len(arrays)
        arrays = jax.lax.reduce(tuple(arrays), zeros, _added, (0,))
    return jnp.stack([x.reshape(-1) for x in arrays]).sum(-1)


def _sums_jvp(primals: Any, tangents: Any) -> Any:
    return _sums(*primals), jnp.stack([jnp.sum(t) for t in tangents[0]])


# JAX does not differentiate reductions of several arrays at once.
_sums: Any = jax.custom_jvp(_summed)
_sums.defjvp(_sums_jvp)


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
    return jnp.asarray(_made(make, n, np.dtype(dtype).name), device=device)


@functools.cache
def _made(make: Any, n: int, dtype: str) -> np.ndarray[Any, Any]:
    made: np.ndarray[Any, Any] = make(n, dtype=dtype, device="cpu", xp=np)
    return made


def eigh(matrix: Any, /, *, xp: Any) -> Any:
    """Return eigenvalues and eigenvectors from the lower triangle."""
    return jnp.linalg.eigh(matrix.array, UPLO="L", symmetrize_input=False)
