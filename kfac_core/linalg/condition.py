"""The condition of a symmetric matrix that is known by its products alone.

Conventions.  ``kappa_1 = |M|_1 |M^-1|_1`` with the largest column sum as the norm; it lies
between the condition number of the 2-norm and n times that.  The norms are estimated from
a few products: an estimate is a lower bound, and rarely less than a third of the norm.

References
----------
Hager (1984), "Condition estimates", SIAM J. Sci. Stat. Comput. 5; Higham (1988), "FORTRAN
codes for estimating the one-norm of a real or complex matrix", ACM TOMS 14, algorithm 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kfac_core.array import Array, Namespace
from kfac_core.array import namespaces as ns
from kfac_core.linalg.certificate import relative_norm

_MOST_STEPS = 5
"""The estimate stops to grow after two or three, nearly always."""

Product = Callable[[Array], Array]


def estimated_norm(
    product: Product, like: Array, /, *, shape: tuple[int, ...], xp: Namespace
) -> float:
    """Estimate ``|M|_1`` of a symmetric matrix from products with it.

    Parameters
    ----------
    product : callable
        Takes and returns arrays of `shape`, whose entries are the coordinates.
    like : array
        For the dtype and the device.
    shape : tuple of int
        Shape of a vector.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    float
        A lower bound; NaN or infinite where a product is.

    Notes
    -----
    At most eleven products, each of which synchronizes with the device.
    """
    size = math.prod(shape)
    place = {"dtype": like.dtype, "device": ns.device_of(like)}
    index = xp.reshape(xp.arange(size, device=ns.device_of(like)), shape)
    x = xp.full(shape, 1.0 / size, **place)
    # Hager's method: each step moves to the column of the largest gradient of |M x|_1.
    norm = 0.0
    for _ in range(_MOST_STEPS):
        y = product(x)
        new = float(xp.sum(xp.abs(y)))
        # Not `<=`, which NaN would pass.
        if not new > norm:
            norm = new if math.isnan(new) else norm
            break
        norm = new
        signs = xp.where(y >= 0, xp.ones_like(y), -xp.ones_like(y))
        z = xp.abs(product(signs))
        largest = int(xp.argmax(xp.reshape(z, (-1,))))
        x = xp.astype(index == largest, like.dtype)
    # Higham's extra test vector, against matrices that defeat the steps above.
    i = xp.astype(index, like.dtype)
    sign = 1.0 - 2.0 * xp.astype(index % 2, like.dtype)
    other = float(xp.sum(xp.abs(product(sign * (1.0 + i / max(size - 1, 1))))))
    return norm if math.isnan(norm) else max(norm, 2.0 * other / (3.0 * size))


def measured_residual(
    product: Product, inverse: Product, probe: Array, /, *, xp: Namespace
) -> float:
    """Return ``|M M^-1 z - z| / |z|`` for a probe z, read from the device."""
    error = product(inverse(probe)) - probe
    return float(relative_norm(error, probe, xp=xp))
