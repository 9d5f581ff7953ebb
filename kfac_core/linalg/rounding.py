"""Rounding a weight to few bits, so that what Kronecker factors say of it changes least.

Conventions.  A weight W has shape ``(in, out)``; A and G are its factors.  Rounding to W'
changes the loss by about ``tr(D^T A D G) / 2`` with ``D = W - W'``.  With
``A = L_A D_A L_A^T`` and the same of G, that is a weighted sum of squares of the entries
of ``L_A^T D L_G``, and entry (i, j) of it depends on the entries of D below and right of
(i, j) alone.  So entries are rounded from the last to the first, each with what is left to
correct of those before; all of one antidiagonal at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kfac_core import constraints, errors
from kfac_core.array import Array
from kfac_core.array import namespaces as ns
from kfac_core.array.backend import Backend, backend_of


def rounded_weight(
    weight: Array,
    /,
    *,
    input_factor: Array | None = None,
    output_factor: Array | None = None,
    bits: int,
    damping_fraction: float = 1e-2,
) -> Array:
    r"""Return a weight on a grid of ``2^bits`` values for each output.

    It is chosen to keep small

    .. math:: \operatorname{tr}(D^T A \, D \, G), \qquad D = W - W' ,

    with both factors as YAQA does, with the input factor alone as GPTQ and LDLQ do, and
    without either by the nearest value.

    Parameters
    ----------
    weight : array, shape (in, out)
        W.
    input_factor : array, shape (in, in), optional
        A, positive semidefinite.
    output_factor : array, shape (out, out), optional
        G, likewise.
    bits : int
        Bits of an entry, at least 1.
    damping_fraction : float
        Fraction of its mean diagonal that is added to each factor's diagonal.

    Returns
    -------
    array, shape (in, out)
        In the dtype and on the device of `weight`.  Each column has at most ``2^bits``
        values, evenly spaced from its least to its largest entry.

    Raises
    ------
    ShapeError
        For factors that do not fit.
    FactorizationError
        For a factor that is not positive semidefinite.

    Notes
    -----
    ``2 n m (n + m)`` flops, in float64 on the host, in ``n + m`` steps.

    References
    ----------
    Tseng et al. (2025), "Model-Preserving Adaptive Rounding" (YAQA), arXiv:2505.22988;
    Frantar et al. (2022), arXiv:2210.17323; Chee et al. (2023), arXiv:2307.13304.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.linalg import rounded_weight
    >>> W = np.array([[0.0], [0.4], [1.0]])
    >>> rounded_weight(W, input_factor=np.eye(3), bits=1).tolist()
    [[0.0], [0.0], [1.0]]
    """
    xp = ns.namespace_of(
        weight=weight,
        optional={"input_factor": input_factor, "output_factor": output_factor},
    )
    constraints.require_range("bits", bits, constraints.COUNT)
    constraints.require_range("damping_fraction", damping_fraction, constraints.DAMPING)
    backend = backend_of(xp)
    W = np.asarray(backend.to_numpy(weight), np.float64)
    n, m = W.shape
    L_A, L_G = (
        _unit_lower(name, factor, size, damping_fraction, backend)
        for name, factor, size in (
            ("input_factor", input_factor, n),
            ("output_factor", output_factor, m),
        )
    )
    least, largest = W.min(axis=0), W.max(axis=0)
    levels = 2**bits - 1
    step = (largest - least) / levels
    divisor = np.where(step > 0, step, 1.0)
    rounded = np.empty_like(W)
    D = np.zeros_like(W)  # W - W' of the entries that are rounded already
    S = np.zeros_like(W)  # L_A^T D
    # Entries of one antidiagonal do not depend on each other, so that n + m steps
    # replace n m.
    for diagonal in range(n + m - 2, -1, -1):
        i = np.arange(max(0, diagonal - m + 1), min(n, diagonal + 1))
        j = diagonal - i
        S[i, j] = np.sum(L_A[:, i] * D[:, j], axis=0)
        wanted = W[i, j] + np.sum(S[i] * L_G[:, j].T, axis=1)
        k = np.clip(np.rint((wanted - least[j]) / divisor[j]), 0, levels)
        rounded[i, j] = np.where(k == levels, largest[j], least[j] + k * step[j])
        D[i, j] = W[i, j] - rounded[i, j]
        S[i, j] += D[i, j]
    return xp.asarray(rounded, dtype=weight.dtype, device=ns.device_of(weight))


def _unit_lower(
    name: str, factor: Array | None, size: int, fraction: float, backend: Backend
) -> np.ndarray[Any, Any]:
    """Return L of ``L D L^T``, unit lower triangular."""
    if factor is None:
        return np.eye(size)
    constraints.require_shape(name, factor, (size, size))
    F = np.asarray(backend.to_numpy(factor), np.float64)
    mean = np.trace(F) / size
    try:
        C = np.linalg.cholesky(
            F + (fraction * mean if mean > 0 else 1.0) * np.eye(size)
        )
    except np.linalg.LinAlgError:
        raise errors.FactorizationError(
            "it is not positive semidefinite. Increase `damping_fraction`.", factor=name
        ) from None
    return C / np.diagonal(C)
