"""JAX, inside and outside of its transforms.

Conventions.  Failures are NaN and never exceptions, traced or not.  JAX makes float32
of float64 in silence unless it was told otherwise at start; `asarray` refuses instead.
"""

from __future__ import annotations

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


def detach(x: Any, /) -> Any:
    """Return the array as a constant of differentiation."""
    return jax.lax.stop_gradient(x)


def enable_float64() -> None:
    """Switch 64-bit floats on, for the whole process."""
    jax.config.update("jax_enable_x64", True)


def compiled(function: Any, /, *, donate: tuple[int, ...]) -> Any:
    """Return the function as a program for each form of its arguments."""
    return jax.jit(function, donate_argnums=donate)


def register_structure(
    cls: type[Any], fields: tuple[str, ...], static: tuple[str, ...]
) -> None:
    """Let JAX's transforms look into a structure."""
    jax.tree_util.register_dataclass(cls, data_fields=fields, meta_fields=static)


def damped_cholesky(matrix: Any, shift: Any, /, *, xp: Any) -> Any:
    """Return the lower factor of ``A + shift I``, NaN where it fails."""
    array = matrix.array
    eye = jnp.eye(array.shape[-1], dtype=array.dtype)
    damped = array + jnp.asarray(shift, array.dtype)[..., None, None] * eye
    return jax.lax.linalg.cholesky(damped, symmetrize_input=False)


def cholesky_inverse(lower: Any, /, *, overwrite: bool = False, xp: Any) -> Any:
    """Return ``(L L^T)^-1`` by two triangular solves; there is no POTRI."""
    eye = jnp.broadcast_to(jnp.eye(lower.shape[-1], dtype=lower.dtype), lower.shape)
    half = jax_solve_triangular(lower, eye, lower=True)
    inverse = jax_solve_triangular(lower, half, lower=True, trans="T")
    return 0.5 * (inverse + inverse.mT), True


def solve_triangular(lower: Any, b: Any, /, *, transpose: bool, xp: Any) -> Any:
    """Solve with L or its transpose."""
    return jax_solve_triangular(lower, b, lower=True, trans="T" if transpose else "N")


def count_indices(indices: Any, weights: Any, /, *, size: int, xp: Any) -> Any:
    """Sum the weights of equal indices."""
    return jnp.zeros(size, weights.dtype).at[indices].add(weights)


def sum_rows_at(rows: Any, indices: Any, /, *, size: int, xp: Any) -> Any:
    """Sum the rows of equal indices."""
    return jnp.zeros((size, rows.shape[1]), rows.dtype).at[indices].add(rows)


def eigh(matrix: Any, /, *, xp: Any) -> Any:
    """Return eigenvalues and eigenvectors from the lower triangle."""
    return jnp.linalg.eigh(matrix.array, UPLO="L", symmetrize_input=False)
