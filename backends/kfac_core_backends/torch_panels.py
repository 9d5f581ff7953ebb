"""Symmetric and triangular matrices of PyTorch on the CPU, panel by panel.

PyTorch has no SYRK, SYMM, TRMM or TRTRI, and its LAPACK calls are slow for what they
do.  Products of panels up to the diagonal take half of the flops of whole products, and
a left-looking factorization is nearly all products.

Conventions.  All matrices are plain tensors on the CPU, of one dtype.  Of a symmetric
one the lower triangle is read.  Nothing that is given is written to.
"""

from __future__ import annotations

from typing import Any

import torch


def _panels(n: int, width: int) -> list[tuple[int, int]]:
    """Return the bounds of panels of n rows or columns."""
    return [(start, min(start + width, n)) for start in range(0, n, width)]


def _gram_width(n: int) -> int:
    """Return how wide a panel of a Gram matrix is: measured best at 64 to 256."""
    return min(max(64, -(-n // 256) * 16), 256)


def gram(
    total: Any,
    rows: Any,
    tail: Any,
    decay: float,
    scale: float,
    /,
    *,
    overwrite: bool = False,
) -> Any:
    """Return ``decay total + scale [rows, tail]^T [rows, tail]``, lower triangle."""
    d = rows.shape[1]
    n = d if tail is None else d + 1
    if overwrite and total is not None:
        new = total.array
    else:
        new = torch.zeros((n, n), dtype=rows.dtype)
    old = new if total is None else total.array
    factors: dict[str, float] = {"beta": decay, "alpha": scale}
    for start, stop in _panels(d, _gram_width(d)):
        panel = slice(start, stop), slice(0, stop)
        left, right = rows[:, start:stop].mT, rows[:, :stop]
        torch.addmm(old[panel], left, right, **factors, out=new[panel])
    if tail is not None:
        torch.addmv(old[d, :d], rows.mT, tail, **factors, out=new[d, :d])
        new[d, d] = decay * old[d, d] + scale * torch.dot(tail, tail)
    return new


def cholesky(
    array: Any, shift: Any, factor: float = 1.0, *, in_place: bool = False
) -> Any:
    """Return the lower factor of ``factor A + shift I`` by columns of panels.

    It is left-looking.  In place what stands above the diagonal stays there.
    """
    n, width = array.shape[0], 64 if array.shape[0] < 2560 else 128
    lower = array if in_place else torch.empty((n, n), dtype=array.dtype)
    for start, stop in _panels(n, width):
        panel, below = slice(start, stop), slice(stop, n)
        done = lower[:, :start]
        factors: dict[str, float] = {"beta": factor, "alpha": -1.0}
        column = torch.addmm(
            array[start:, panel], done[start:], done[panel].mT, **factors
        )
        column.diagonal().add_(shift)
        corner, info = torch.linalg.cholesky_ex(column[: stop - start])
        if int(info) != 0:
            (lower.diagonal() if in_place else lower).fill_(torch.nan)
            return lower
        if in_place:
            lower[panel, panel].triu_(1).add_(corner)
        else:
            lower[panel, panel] = corner
            lower[panel, below] = 0.0
        # The inverse of so small a corner is as good as solving with it.
        solver = _corner_inverse(corner).mT
        torch.mm(column[stop - start :], solver, out=lower[below, panel])
    return lower


def mirror(array: Any) -> None:
    """Copy the lower triangle to the upper one, in place."""
    n = array.shape[0]
    for start, stop in _panels(n, 128):
        panel, below = slice(start, stop), slice(stop, n)
        array[panel, below] = array[below, panel].mT
        corner = array[panel, panel]
        corner.copy_(corner.tril() + corner.tril(-1).mT)


def multiply_triangular(lower: Any, v: Any, *, transpose: bool) -> Any:
    """Return ``L v`` or ``L^T v``, without reading above the diagonal."""
    product = torch.empty_like(v)
    for start, stop in _panels(lower.shape[0], 512):
        panel = slice(start, stop)
        corner = lower[panel, panel].tril()
        if transpose:
            part = corner.mT @ v[panel]
            product[panel] = part.addmm_(lower[stop:, panel].mT, v[stop:])
        else:
            part = corner @ v[panel]
            product[panel] = part.addmm_(lower[panel, :start], v[:start])
    return product


def _corner_inverse(lower: Any) -> Any:
    """Return the inverse of a small lower triangular matrix."""
    n = lower.shape[0]
    if n <= 64:
        # ``X L = I``; from the left it takes twice as long.
        eye = torch.eye(n, dtype=lower.dtype)
        return torch.linalg.solve_triangular(lower, eye, upper=False, left=False)
    h = n // 2
    inverse = torch.zeros_like(lower)
    inverse[:h, :h] = first = _corner_inverse(lower[:h, :h])
    inverse[h:, h:] = second = _corner_inverse(lower[h:, h:])
    torch.mm(second, lower[h:, :h] @ first.neg(), out=inverse[h:, :h])
    return inverse


def cholesky_inverse(lower: Any) -> Any:
    """Return ``(L L^T)^-1``, both triangles."""
    return _product_with_transpose(_inverse(lower))


def _inverse(lower: Any) -> Any:
    """Return ``W = L^-1`` by rows of panels, ``W_i = -W_ii (L_i W)``."""
    n, width = lower.shape[0], 128 if lower.shape[0] < 2048 else 256
    # What stands right of the panels' corners is never read.
    inverse = torch.empty((n, n), dtype=lower.dtype)
    for start, stop in _panels(n, width):
        corner = _corner_inverse(lower[start:stop, start:stop])
        inverse[start:stop, start:stop] = corner
        left = lower[start:stop]
        row = torch.empty((stop - start, start), dtype=lower.dtype)
        for first, last in _panels(start, width):
            # The columns of W are zero above their panel.
            torch.mm(
                left[:, first:start],
                inverse[first:start, first:last],
                out=row[:, first:last],
            )
        torch.mm(corner.neg_(), row, out=inverse[start:stop, :start])
    return inverse


def _product_with_transpose(inverse: Any) -> Any:
    """Return ``W^T W`` of a lower triangular W, by rows of panels and mirrored."""
    n = inverse.shape[0]
    product = torch.empty_like(inverse)
    for start, stop in _panels(n, 64 if n < 1536 else 128):
        below = inverse[start:]
        torch.mm(
            below[:, start:stop].mT, below[:, :stop], out=product[start:stop, :stop]
        )
    return _mirrored(product)


_MIRRORED = 128
"""The width of the panels that are mirrored."""


def _mirrored(lower: Any) -> Any:
    """Copy the lower triangle to the upper one, in place, and return the matrix."""
    for start, stop in _panels(lower.shape[0], _MIRRORED):
        corner = lower[start:stop, start:stop]
        corner.copy_(corner.tril().add_(corner.tril(-1).mT))
        lower[:start, start:stop] = lower[start:stop, :start].mT
    return lower


def multiply_symmetric(array: Any, v: Any) -> Any:
    """Return ``S v``."""
    product = torch.zeros(v.shape, dtype=v.dtype)
    for start, stop in _panels(array.shape[0], 256):
        left, v_panel = array[start:stop, :start], v[start:stop]
        corner = array[start:stop, start:stop].tril()
        product[start:stop] += corner @ v_panel + corner.tril(-1).mT @ v_panel
        if start > 0:
            product[start:stop].addmm_(left, v[:start])
            product[:start].addmm_(left.mT, v_panel)
    return product


def scaled_symmetric(array: Any, factor: Any) -> Any:
    """Return a symmetric matrix times a number, both triangles."""
    scaled = torch.empty(array.shape, dtype=array.dtype)
    for start, stop in _panels(array.shape[0], _MIRRORED):
        panel = slice(start, stop), slice(0, stop)
        torch.mul(array[panel], factor, out=scaled[panel])
    return _mirrored(scaled)
