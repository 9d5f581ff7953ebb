"""``F = sum_k D_k D_k^T`` of K gradients, by their ``K x K`` Gram matrix.

Conventions.  The k-th gradient is ``D_k = sum_s x_ks g_ks^T``, of shape ``(n, m)`` and
given by its rows: x of shape ``(K, S, n)`` and g of shape ``(K, S, m)``.  Flattened, the
D_k are the rows of Y, F is ``Y^T Y``, and the Gram matrix is ``H = Y Y^T``.  Where S is 1,
``H = (X X^T) * (G G^T)``, and no D_k is ever formed.
"""

from __future__ import annotations

from kfac_core.array.backend import Array, Namespace
from kfac_core.linalg.gram import updated_gram
from kfac_core.linalg.symmetric import SymmetricMatrix

__all__ = [
    "combined_gradients",
    "divided_difference",
    "gradient_gram",
    "gradient_products",
    "squared_norms",
]


def gradient_gram(x: Array, g: Array, /, *, xp: Namespace) -> SymmetricMatrix:
    """Return ``H_kl = <D_k, D_l>``, shape (K, K).

    Parameters
    ----------
    x : array, shape (K, S, n)
        The inputs' rows.
    g : array, shape (K, S, m)
        The output gradients' rows, of the same dtype.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    SymmetricMatrix
        Positive semidefinite up to rounding.

    Notes
    -----
    ``K^2 (n + m)`` flops where S is 1.  Else either the Gram matrices of all rows,
    ``(K S)^2`` numbers each, or all D_k, ``K n m`` numbers, whichever are fewer.
    """
    K, S, n = x.shape
    m = g.shape[-1]
    if S > 1 and n * m < K * S * S:
        D = xp.matmul(xp.matrix_transpose(x), g)
        return _gram_of_columns(xp.reshape(D, (K, -1)), xp)
    flat_x, flat_g = xp.reshape(x, (-1, n)), xp.reshape(g, (-1, m))
    H = _gram_of_columns(flat_x, xp).full() * _gram_of_columns(flat_g, xp).full()
    if S > 1:
        H = xp.sum(xp.reshape(H, (K, S, K, S)), axis=(1, 3))
        H = 0.5 * (H + xp.matrix_transpose(H))
    return SymmetricMatrix(H, full_storage=True)


def gradient_products(x: Array, g: Array, v: Array, /, *, xp: Namespace) -> Array:
    """Return ``Y v``, the ``<D_k, V>``, shape (..., K); ``2 K S n m`` flops.

    Parameters
    ----------
    x, g : array, shapes (K, S, n) and (K, S, m)
        The rows.
    v : array, shape (..., n, m)
        Matrix V, or many.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, shape (..., K)
        The products.
    """
    products = xp.matmul(xp.reshape(x, (-1, x.shape[-1])), v)
    products = xp.reshape(products, (*v.shape[:-2], *g.shape))
    return xp.sum(products * g, axis=(-2, -1))


def combined_gradients(x: Array, g: Array, c: Array, /, *, xp: Namespace) -> Array:
    """Return ``Y^T c``, the matrix ``sum_k c_k D_k``, shape (..., n, m).

    Parameters
    ----------
    x, g : array, shapes (K, S, n) and (K, S, m)
        The rows.
    c : array, shape (..., K)
        The coefficients, of one combination or of many.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, shape (..., n, m)
        The combination, in ``2 K S n m`` flops.
    """
    weighted = g * c[..., :, None, None]
    weighted = xp.reshape(weighted, (*c.shape[:-1], -1, g.shape[-1]))
    flat = xp.reshape(x, (-1, x.shape[-1]))
    return xp.matmul(xp.matrix_transpose(flat), weighted)


def squared_norms(x: Array, g: Array, /, *, xp: Namespace) -> Array:
    """Return the ``|D_k|^2``, shape (K,); ``K S^2 (n + m)`` flops."""
    if x.shape[1] == 1:
        return xp.sum(x * x, axis=(1, 2)) * xp.sum(g * g, axis=(1, 2))
    products = xp.matmul(x, xp.matrix_transpose(x))
    norms = xp.sum(products * xp.matmul(g, xp.matrix_transpose(g)), axis=(1, 2))
    return xp.where(norms < 0, xp.zeros_like(norms), norms)


def divided_difference(
    h: Array, lam: Array, exponent: float, /, *, xp: Namespace
) -> tuple[Array, Array]:
    """Return ``((h + lam)^p - lam^p) / h`` as two factors, accurate for h small.

    Parameters
    ----------
    h : array, shape (K,)
        Eigenvalues, nonnegative.
    lam : array, 0-d
        Damping, positive.
    exponent : float
        p.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    quotient : array, shape (K,)
        Zero where both h and lam are below the rounding errors of the largest h: the
        direction is then not known, and the quotient could be anything.
    unit : array, 0-d
        ``lam^p`` for a negative p, where the product may underflow; else 1.
    """
    noise = float(h.shape[0] * xp.finfo(h.dtype).eps) * xp.max(h)
    known = (h > noise) | ((h > 0) & (lam > noise))
    safe = xp.where(known, h, xp.ones_like(h))
    one = xp.ones_like(lam)
    unit = lam**exponent if exponent < 0 else one
    ratio = xp.where(h < lam, h, lam) / lam
    near = xp.expm1(exponent * xp.log1p(ratio))
    if exponent < 0:
        far = (lam / (h + lam)) ** -exponent - 1.0
        limit = exponent / xp.where(lam > noise, lam, noise + lam)
    else:
        near = lam**exponent * near
        far = (h + lam) ** exponent - lam**exponent
        limit = exponent * xp.where(lam > noise, lam, noise + lam) ** (exponent - 1.0)
    at_zero = xp.where((h <= 0) & (lam > noise), limit, xp.zeros_like(h))
    return xp.where(known, xp.where(h < lam, near, far) / safe, at_zero), unit


def _gram_of_columns(rows: Array, xp: Namespace) -> SymmetricMatrix:
    """Return ``R R^T`` for rows R."""
    columns = xp.matrix_transpose(rows)
    return updated_gram(None, columns, tail=None, decay=0.0, scale=1.0, xp=xp)
