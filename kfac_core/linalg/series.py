"""The sum over all lags of a linear chain, as a function of its correlation.

Conventions.  In a chain of T steps with correlation x between neighbors, lag d has
correlation ``x^|d|`` and occurs ``T - |d|`` times among the T^2 pairs of steps.  The sum
over all pairs and its reciprocal are

    W(x) = sum_{|d|<T} (T - |d|) x^|d|,        gamma(x) = 1 / W(x),

with ``W(0) = T``, ``W(1) = T^2``; x lies in ``[-1, 1]`` and keeps its sign.  With random
lengths, of which a share ``p_k`` has k steps, W is averaged, and not gamma or T.  The
closed form of gamma divides by ``(1 - x)^2``, loses all digits near x = 1 and is 0/0
there; it is used for negative x only, where the divisor is at least 1.

References
----------
Martens, Ba and Johnson (2018), "Kronecker-factored Curvature Approximations for
Recurrent Neural Networks", ICLR.
"""

from __future__ import annotations

from kfac_core import constraints
from kfac_core.array import Array, Namespace
from kfac_core.array import namespaces as ns


def series_gamma(
    correlation: Array, /, *, steps: int, lengths: Array | None = None
) -> Array:
    """Return the reciprocal of the sum over all lags, ``1 / W(x)``.

    Parameters
    ----------
    correlation : array, any shape
        x, in [-1, 1].
    steps : int
        T, or the largest of the lengths.
    lengths : array of int, shape (N,), optional
        The lengths of N sequences, each from 0 to T; W is averaged over them.  T for
        all of them by default.

    Returns
    -------
    array, of the shape and dtype of `correlation`
        gamma; infinite only where W is zero, at x = -1 for even lengths.

    Raises
    ------
    ConventionError
        For fewer steps than one.
    ShapeError, DtypeError, MixedArraysError
        For arrays of incompatible shape, dtype, library or device.

    Notes
    -----
    T multiplications an entry; see `series_sum`.
    """
    xp = ns.namespace_of(correlation=correlation, optional={"lengths": lengths})
    ns.require_floating(xp, correlation, "correlation")
    constraints.require_range("steps", steps, constraints.COUNT)
    if lengths is None:
        k = xp.arange(1, steps + 1, device=ns.device_of(correlation))
        shares = xp.astype(k == steps, correlation.dtype)
    else:
        shares = shares_of_lengths(lengths, steps=steps, dtype=correlation.dtype)
    return 1.0 / series_sum(correlation, shares, xp=xp)


def shares_of_lengths(lengths: Array, /, *, steps: int, dtype: object) -> Array:
    """Return which share of the sequences has 1, 2, ..., T steps.

    Parameters
    ----------
    lengths : array, shape (N,)
        Whole numbers from 0 to T, N at least 1.
    steps : int
        Number of time steps ``T``.
    dtype : dtype
        Dtype of the result.

    Returns
    -------
    array, shape (T,)
        The shares; lengths of zero count in N.

    Raises
    ------
    ShapeError
        For anything but a vector with an entry.
    """
    xp = ns.namespace_of(lengths=lengths)
    constraints.require_shape("lengths", lengths, ("N",))
    k = xp.arange(1, steps + 1, dtype=lengths.dtype, device=ns.device_of(lengths))
    return xp.mean(xp.astype(lengths[:, None] == k[None, :], dtype), axis=0)


def series_sum(correlation: Array, shares: Array, /, *, xp: Namespace) -> Array:
    """Return the mean over all lengths of the sum over all lags, ``sum_k p_k W_k(x)``.

    With the mean numbers of pairs ``c_d = sum_k p_k max(k - d, 0)`` and ``y = |x|`` it is

        c_0 + 2 sum_{d>=1} c_d x^d                                         for x >= 0,
        [ c_0 (1 - x^2) + 2 y sum_k p_k (1 - x^k) ] / (1 + y)^2            for x < 0,

    with ``1 - x^k = 1 + y^k`` for odd k, ``(1 + x) (1 + y + ... + y^(k-1))`` for even k,
    each polynomial summed by Horner's rule.

    Parameters
    ----------
    correlation : array, any shape
        x, in [-1, 1].
    shares : array, shape (T,)
        ``p_1, ..., p_T``, of the dtype of x.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, of the shape of `correlation`
        The sum, positive for x in (-1, 1].

    Notes
    -----
    All terms of both forms are nonnegative (for shares that are), so that no digits
    cancel and the relative error is a few units of roundoff, near x = -1 too, where the
    sum goes to zero for even lengths.  The first form alone is wrong there by
    1e-2 in float32 (T = 20, x = -0.99999).  ``6 T`` flops an entry.
    """
    T, zeros = shares.shape[0], xp.zeros_like(shares)
    k = xp.arange(1, T + 1, dtype=shares.dtype, device=ns.device_of(shares))
    is_odd = xp.remainder(k, 2.0) == 1.0
    odd, even = xp.where(is_odd, shares, zeros), xp.where(is_odd, zeros, shares)
    # Row i counts the pairs of lag i in a sequence of each length.
    above = k[None, :] - (k[:, None] - 1.0)
    above = xp.where(above > 0, above, xp.zeros_like(above))
    pairs = xp.matmul(above, shares)
    longer = xp.matmul(xp.astype(above > 0, shares.dtype), even)
    zero = xp.zeros_like(correlation)
    x = xp.where(correlation <= 0, zero, correlation)
    y = xp.where(correlation < 0, -correlation, zero)
    lags = evens = odds = zero
    # Horner's rule for three polynomials at once.
    for i in range(T - 1, -1, -1):
        lags = lags * x + (pairs[i] if i > 0 else 0.0)
        evens = evens * y + longer[i]
        odds = (odds + odd[i]) * y
    # Two forms, since the first cancels for x < 0 and the second divides by 1 + y > 0.
    positive = pairs[0] + 2.0 * lags
    ends = (1.0 - y) * evens + (xp.sum(odd) + odds)
    both = pairs[0] * (1.0 - y) * (1.0 + y) + 2.0 * y * ends
    negative = both / ((1.0 + y) * (1.0 + y))
    return xp.where(correlation < 0, negative, positive)
