"""The fallback chain: working precision, float64, then clipped eigenvalues.

Conventions.  A *problem* is a structure of arrays, and an *attempt* is one formula that
computes a factorization of it and flags of its failures, without reading a value.  With
``check="status"`` that is all.  With ``check="raise"`` the flags are read, once, and
where one is set the chain continues:

1. the attempt in the requested dtype;
2. the same attempt in float64, if the device has it, cast back;
3. the last step of the factorization, such as an eigendecomposition with negative
   eigenvalues set to zero, or an error that says what to do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeVar

from kfac_core import errors
from kfac_core.array import Array, Check, Namespace, Status, finite, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.status import raise_flagged
from kfac_core.array.structure import in_dtype, leaves
from kfac_core.linalg.certificate import RESIDUAL_LIMIT

P = TypeVar("P")
M = TypeVar("M")


class Fallback(IntEnum):
    """The step of the fallback chain that produced a factorization."""

    WORKING = 0
    """The requested dtype: no fallback was needed."""
    FLOAT64 = 1
    """In float64, cast back."""
    EIGENDECOMPOSITION = 2
    """In the widest dtype, with negative eigenvalues set to zero."""


def fallback_of(factorization: Any, /) -> Fallback:
    """Return the fallback of a factorization, for reports; synchronizes with the device.

    Parameters
    ----------
    factorization : structure with a ``fallback``
        Factorization; of a stack, the last that any matrix of it needed.

    Returns
    -------
    Fallback
        Fallback; reports show its name in lower case.
    """
    xp = ns.own_namespace(factorization.fallback)
    return Fallback(int(xp.max(factorization.fallback)))


def with_fallbacks(
    attempt: Callable[[P, Namespace], M],
    problem: P,
    last: Callable[[P, M, str, Namespace], M],
    /,
    *,
    check: Check,
    name: str,
    first: M | None = None,
    wide: bool = False,
    xp: Namespace,
) -> M:
    """Return a factorization from the first step of the fallback chain that succeeds.

    Parameters
    ----------
    attempt : callable
        Takes a problem and a namespace; returns a structure with the fields ``status`` and
        ``fallback``, arrays of int32 of the shape of the stack.
    problem : structure
        Problem to factorize; all floating-point arrays have one dtype.
    last : callable
        Last step: takes the problem in the widest dtype, the failed attempt, the name and
        the namespace; raises if it fails.
    check : {"raise", "status"}
        Whether to use fallbacks and raise, or to return the first attempt with its flags.
    name : str
        Name of the matrix in error messages.
    first : structure, optional
        First attempt, if already computed.
    wide : bool
        Whether to begin with float64 (``check="raise"``).
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    structure
        Factorization in the dtype of the problem.

    Raises
    ------
    NotFiniteError, DampingError
        For a problem that no precision makes valid (``check="raise"``).
    KFACError
        As `last` (``check="raise"``).
    """
    widest = widened(problem, xp=xp) if wide and check == "raise" else None
    if widest is None:
        result: Any = attempt(problem, xp) if first is None else first
        if check == "status":
            return result  # type: ignore[no-any-return]
        flags = _flags(result.status, xp)
        if not flags:
            return result  # type: ignore[no-any-return]
        widest = widened(problem, xp=xp)
    if widest is not None:
        result = attempt(widest, xp)
        flags = _flags(result.status, xp)
        if not flags:
            fallback = xp.full_like(result.fallback, int(Fallback.FLOAT64))
            repeated: M = replaced(result, fallback=fallback)
            return _narrowed(repeated, problem, name, xp)
    # No precision makes an invalid problem valid.
    raise_invalid(Status(flags), name)
    widest = problem if widest is None else widest
    return _narrowed(last(widest, result, name, xp), problem, name, xp)


def in_wider_dtype(
    make: Callable[[Any], M],
    dtype: object,
    /,
    *,
    like: Array,
    check: Check,
    xp: Namespace,
) -> tuple[M, Status]:
    """Return a function's result in a dtype, or in float64 if that fails.

    For results of several factorizations, each of which has its own fallbacks.

    Parameters
    ----------
    make : callable
        Takes a dtype; returns a structure with a method ``status`` and the field
        ``fallback``, or raises `FactorizationError`.
    dtype : dtype
        Dtype of the first attempt.
    like : array
        Array of the library and device.
    check : {"raise", "status"}
        With ``"status"`` there is one attempt, and its flags are not read.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    result, flags
        Result of the last attempt, and its flags.

    Raises
    ------
    FactorizationError
        As `make` in the widest dtype (``check="raise"``).
    """
    if check == "status":
        return make(dtype), Status.OK
    known = xp.__array_namespace_info__().dtypes(
        device=ns.device_of(like), kind="real floating"
    )
    widest = dtype == xp.float64 or "float64" not in known
    try:
        result = make(dtype)
        flags = Status(int(result.status()))  # type: ignore[attr-defined]
        if not flags or widest:
            return result, flags
    except errors.FactorizationError:
        if widest:
            raise
    wide: Any = make(xp.float64)
    fallback = xp.full_like(wide.fallback, int(Fallback.FLOAT64))
    return replaced(wide, fallback=fallback), Status(int(wide.status()))


def raise_invalid(flags: Status, name: str, /) -> None:
    """Raise for a problem that is not finite or has an invalid shift.

    Parameters
    ----------
    flags : Status
        Flags of the problem.
    name : str
        Name used in error messages.

    Raises
    ------
    NotFiniteError, DampingError
        As the flags say.
    """
    reason = (
        "the matrix holds NaN or infinity. Its statistics were not finite, or their sums "
        "overflowed; reset them, or keep them in float64."
    )
    raise_flagged(flags, name, {Status.MATRIX_NOT_FINITE: reason})


def guarded(valid: Array, array: Array, fill: float, /, *, xp: Namespace) -> Array:
    """Return matrices, with multiples of the identity in the place of invalid ones.

    Some libraries hang on NaN, so it must not reach them.

    Parameters
    ----------
    valid : array of bool, shape (...)
        Whether each matrix of the stack is valid.
    array : array, shape (..., n, n)
        The matrices.
    fill : float
        Factor on the identity.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array, shape (..., n, n)
        The array itself where the host knows that all of it is valid.
    """
    if finite.known_true(valid, xp=xp):
        return array
    eye = xp.eye(array.shape[-1], dtype=array.dtype, device=ns.device_of(array))
    return xp.where(valid[..., None, None], array, fill * eye)


def first_flag(
    *conditions: tuple[Any, Status], none: Array | None = None, xp: Namespace
) -> Array:
    """Return the flag of the first condition that does not hold, for each of a stack.

    Parameters
    ----------
    *conditions : tuple of array of bool, or bool, and Status
        Arrays of the shape of the stack; a bool where the host read it of one matrix.
    none : array of int32, optional
        Zeros of that shape, which are returned where the host knows that all hold.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    array of int32
        Zero where all of them hold.
    """
    first = conditions[0][0]
    for condition, _ in conditions[1:]:
        first = first & condition
    if none is not None and finite.known_true(first, xp=xp):
        return none
    if none is None:
        none = xp.zeros(first.shape, dtype=xp.int32, device=ns.device_of(first))
    status = none
    # Backwards, so that the first failed condition has the last word.
    for condition, flag in reversed(conditions):
        flagged = xp.full_like(status, int(flag))
        if isinstance(condition, bool):
            status = status if condition else flagged
        else:
            status = xp.where(condition, status, flagged)
    return status


def no_fallback(residual: Array, plain: bool, xp: Namespace, /) -> tuple[Array, Array]:
    """Return the clipped mass and the fallback of a first attempt: zeros.

    Parameters
    ----------
    residual : array, shape (...)
        Residual of the attempt.
    plain : bool
        Whether the zeros may be cached; see `kfac_core.array.finite.is_plain`.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    clipped : array
        Zeros of its shape and dtype; not to be written to.
    fallback : array of int32
        `Fallback` of each matrix.
    """
    make = _same_zeros if plain else _zeros
    return make(tuple(residual.shape), residual.dtype, ns.device_of(residual), xp)


def widened(problem: P, /, *, xp: Namespace) -> P | None:
    """Return a problem in float64; None if it is, or if the device has no float64.

    Parameters
    ----------
    problem : structure
        Structure of floating-point arrays.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    structure or None
        Copy of the problem.
    """
    first = _like(problem)
    if first.dtype == xp.float64:
        return None
    info = xp.__array_namespace_info__()
    if "float64" not in info.dtypes(device=ns.device_of(first), kind="real floating"):
        return None
    return in_dtype(problem, xp.float64, xp)


def _narrowed(factorization: M, problem: object, name: str, xp: Namespace) -> M:
    """Return a factorization in the dtype of the problem."""
    return in_narrow_dtype(
        factorization, _like(problem).dtype, check="raise", name=name, xp=xp
    )


def in_narrow_dtype(
    factorization: M, dtype: object, /, *, check: Check, name: str, xp: Namespace
) -> M:
    """Return a factorization in another dtype.

    Parameters
    ----------
    factorization : structure with a ``status``
        If it has a method ``rounding_error``, that is the relative error
        that rounding its numbers makes, and has the limit of residuals.
    dtype : dtype
        Dtype of the result.
    check : {"raise", "status"}
        Whether numbers beyond the range or the precision of the dtype raise, or set a
        flag.
    name : str
        Name used in error messages.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    structure
        Itself, if it has that dtype.

    Raises
    ------
    FactorizationError
        If a number is beyond the range of the dtype, or rounding changes the result too
        much (``check="raise"``).
    """
    if next(x for _, x in leaves(factorization) if _is_floating(x, xp)).dtype == dtype:
        return factorization
    narrow: Any = in_dtype(factorization, dtype, xp)
    good = xp.asarray(True, device=ns.device_of(narrow.status))
    for path, x in leaves(narrow):
        if _is_floating(x, xp) and path not in ("residual", "clipped"):
            good = good & xp.all(xp.isfinite(x))
    # Rounding a Cholesky factor costs condition number times roundoff in its solves; an
    # inverse and a basis only lose digits of their entries.
    rounding_error = getattr(narrow, "rounding_error", None)
    if rounding_error is not None:
        good = good & xp.all(rounding_error() <= RESIDUAL_LIMIT)
    if check == "raise":
        if not bool(good):
            raise errors.FactorizationError(
                f"a factorization is beyond the range or the precision of {dtype}. "
                'Increase `damping`, or take Precision(apply="float64").',
                factor=name,
            )
        return narrow  # type: ignore[no-any-return]
    flag = ns.status_unless(xp, good, Status.INACCURATE)
    return replaced(narrow, status=narrow.status | flag)  # type: ignore[no-any-return]


def _is_floating(x: Array, xp: Namespace) -> bool:
    return bool(xp.isdtype(x.dtype, "real floating"))


def _like(problem: object) -> Array:
    return next(iter(leaves(problem)))[1]


def _flags(status: Array, xp: Namespace) -> int:
    """Return the flags of a whole stack; synchronizes with the device."""
    if status.ndim == 0:
        return int(status)
    return int(ns.any_status(status, xp=xp)) if bool(xp.any(status != 0)) else 0


def _zeros(
    shape: tuple[int, ...], dtype: object, device: object, xp: Namespace
) -> tuple[Array, Array]:
    """Return zeros of a dtype and of int32."""
    floating = xp.zeros(shape, dtype=dtype, device=device)
    return floating, xp.zeros(shape, dtype=xp.int32, device=device)


_same_zeros = functools.lru_cache(maxsize=256)(_zeros)
