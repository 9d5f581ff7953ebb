"""Large float32 products of PyTorch on the CPU by oneDNN.

Conventions.  PyTorch gives products of float32 matrices to MKL, which on processors of
other makers than Intel takes twice the time that the same product takes in oneDNN: on
AMD's Zen 5, 97 and 215 Gflop/s.  PyTorch has oneDNN for linear layers that a compiler has
frozen, as an operation of its own.  It computes in float32 throughout, unless the program
has asked for less; then nothing is done here.
"""

from __future__ import annotations

from typing import Any

import torch

_FROM = 1 << 22
"""Below so many multiplications a call takes longer than the product."""


def _operation() -> Any:
    """Return ``(x, w, bias, activation, ...) -> x w^T``, or None."""
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        return torch.ops.mkldnn._linear_pointwise.default
    except (AttributeError, RuntimeError):
        return None


_linear = _operation()


def is_available() -> bool:
    """Whether oneDNN is there, and computes in float32 throughout."""
    if _linear is None or not torch._C._get_mkldnn_enabled():
        return False
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    precision = getattr(matmul, "fp32_precision", "none")
    exact = torch.get_float32_matmul_precision() == "highest"
    return exact and precision in ("none", "ieee")


def product(a: Any, b: Any, /) -> Any:
    """Return ``a b``, or None where oneDNN does not apply.

    The order in memory is that of b, or that of a if b alone is square: rows that a basis
    multiplies stay in their order.

    Parameters
    ----------
    a, b : torch.Tensor, shapes (m, k) and (k, n)
        Plain tensors on the CPU.

    Returns
    -------
    torch.Tensor, shape (m, n), or None
        None for other dtypes than float32, for few numbers, and without oneDNN.
    """
    if a.dtype != torch.float32 or b.dtype != torch.float32:
        return None
    if a.shape[0] * a.shape[1] * b.shape[1] < _FROM or not is_available():
        return None
    basis_last = b.shape[0] == b.shape[1] and a.shape[0] != a.shape[1]
    with torch.no_grad():
        if (a if basis_last else b).is_contiguous():
            return _linear(a, b.mT, None, "none", [], "")
        # What is transposed is read in the order in which it lies in memory.
        return _linear(b.mT, a, None, "none", [], "").mT
