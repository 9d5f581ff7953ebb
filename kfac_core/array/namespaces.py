"""Validation of array arguments: namespaces, devices and dtypes.

Conventions.  Arrays decide the library; two arrays given together must be of one
library and on one device.  Real floating dtypes only: integers are refused, since an
average of integers is rarely intended, and half precision is widened to
float32 before anything is computed with it.  A scalar (a damping, a decay) is a Python
number or a 0-d array, possibly a traced one.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import array_api_compat
import numpy as np

from kfac_core import constraints, errors
from kfac_core.array.backend import backend_of
from kfac_core.array.generic_backend import GenericBackend
from kfac_core.array.status import Status
from kfac_core.array.types import Array, Device, DType, Namespace, Scalar

_FLAGS = tuple(int(flag) for flag in Status)

ARRAY_API_VERSION = "2024.12"
"""The oldest version of the Array API standard that is enough."""

_namespaces: dict[type[Any], Namespace] = {}
"""A cache: the namespace of each type of array."""

_problem_of: dict[type[Any], Callable[[Array], str | None]] = {}
"""The backend's check of arrays of a type; None for most types."""

_real_floating: dict[tuple[str, Any], bool] = {}
"""Whether a dtype of a namespace is a real floating one."""

_limits: dict[tuple[str, Any], tuple[float, float]] = {}
"""The roundoff and the smallest normal number of a dtype of a namespace."""

_standard_devices: dict[type[Any], bool] = {}
"""Whether the arrays of a type have the standard's attribute ``device``."""

_without_device: set[type[Any]] = set()
"""Types of tracers, whose error for a missing attribute searches the whole program."""

NUMBER = (float, int, numbers.Real)
"""For `isinstance`: Python's own numbers first, for which no abstract class is asked."""

_OF_NUMPY = (np.ndarray, np.generic)


def namespace_of(
    *, optional: Mapping[str, Array | None] | None = None, **arrays: Array
) -> Namespace:
    """Return the one namespace of the arrays, which are named by the keywords.

    Parameters
    ----------
    optional : mapping of str to array or None
        Arguments that may be left out: None is passed over.
    **arrays : array
        The other arguments, by the names that an error message should use.

    Returns
    -------
    namespace
        With the functions of the Array API standard.

    Raises
    ------
    DtypeError
        If an argument is not an array.
    ArgumentError
        If an array cannot be computed with: one of a subclass of NumPy's, or a sparse,
        quantized or deleted one.
    MixedArraysError
        If two of them are of different libraries, or on different devices.
    BackendUnavailableError
        If the library follows too old a version of the standard.
    """
    named = arrays
    for name, x in optional.items() if optional is not None else ():
        if x is not None:
            named[name] = x
    xp = None
    for x in named.values():
        known = _namespaces.get(type(x))
        # New types, and mixed ones, take the slow path with all checks and messages.
        if known is None or (xp is not None and known is not xp):
            xp = _met_namespace(named)
            break
        xp = known
    first = where = None
    for name, x in named.items():
        kind = type(x)
        if kind in _problem_of:
            _require_usable(x, name)
        place = x.device if _standard_devices.get(kind) else device_of(x)
        if where is None:
            first, where = name, place
        elif place != where and place is not None:
            raise _places_differ(str(first), where, name, place)
    return xp


def _met_namespace(named: dict[str, Array]) -> Namespace:
    """Return the namespace of arrays of which some were not met before, or raise."""
    try:
        # None and Python numbers have no namespace and are passed over.
        xp = array_api_compat.array_namespace(*named.values())
        complete = all(hasattr(x, "dtype") for x in named.values())
    except TypeError as error:
        raise _explain(named) from error
    if not complete:
        raise _explain(named)
    _require_version(xp)
    for name, x in named.items():
        _meet(x, xp, name)
    return xp


def own_namespace(x: Array, /) -> Namespace:
    """Return the namespace of a known array."""
    xp = _namespaces.get(type(x))
    if xp is None:
        xp = array_api_compat.array_namespace(x)
        _require_version(xp)
        _meet(x, xp, "array")
    return xp


def _meet(x: Array, xp: Namespace, name: str) -> None:
    """Remember the namespace of an array's type, or raise for one that is refused."""
    cls = type(x)
    if cls in _namespaces:
        return
    if isinstance(x, np.ndarray) and cls not in (np.ndarray, np.memmap):
        raise errors.ArgumentError(
            f"Expected `{name}` to be a plain array, got "
            f"{cls.__module__}.{cls.__name__}. Subclasses change what operations mean "
            "(a mask hides numbers). Fill masked numbers, and pass `numpy.asarray(x)`."
        )
    if array_api_compat.is_pydata_sparse_array(x):
        raise _not_dense(name, f"{cls.__module__}.{cls.__name__}; make it dense")
    # Most libraries have no unusable arrays; for those nothing is asked at each call.
    problem_of = backend_of(xp).array_problem
    if getattr(problem_of, "__func__", None) is not GenericBackend.array_problem:
        _problem_of[cls] = problem_of
    # By class: the compatibility layer asks many questions of each array.
    _namespaces[cls] = xp


def is_usable(x: Array, /) -> bool:
    """Whether something is an array that `namespace_of` accepts, in native byte order."""
    cls = type(x)
    if cls not in _namespaces:
        try:
            own_namespace(x)
        except (TypeError, errors.KFACError):
            return False
    # Only NumPy reads the other byte order.
    if not getattr(x.dtype, "isnative", True):
        return False
    return cls not in _problem_of or _problem_of[cls](x) is None


def _require_usable(x: Array, name: str) -> None:
    """Raise for an array that its backend cannot compute with."""
    problem = _problem_of[type(x)](x)
    if problem is not None:
        raise _not_dense(name, problem)


def _not_dense(name: str, problem: str) -> errors.ArgumentError:
    return errors.ArgumentError(
        f"Expected `{name}` to be a dense array, got {problem}."
    )


def same_place(**arrays: Array | None) -> None:
    """Raise where arrays of one library lie on different devices.

    Parameters
    ----------
    **arrays : array or None
        See `namespace_of`.

    Raises
    ------
    MixedArraysError
        Naming the first two that differ.
    """
    first: tuple[str, Any] | None = None
    for name, x in arrays.items():
        if x is None:
            continue
        place = device_of(x)
        # A tracer has no device until its program runs.
        if place is None:
            continue
        if first is None:
            first = (name, place)
        elif place != first[1]:
            raise _places_differ(*first, name, place)


def _places_differ(
    first: str, place: object, second: str, other: object
) -> errors.MixedArraysError:
    """Return a message that names two arguments on different devices."""
    return errors.MixedArraysError(
        f"`{first}` is on {place} and `{second}` is on {other}: arrays passed together "
        "must be on one device. Move one of them yourself; no array is moved silently."
    )


def device_of(x: Array, /) -> Device:
    """Return the device of an array; None where a tracer does not know it."""
    standard = _standard_devices.get(type(x))
    if standard is None:
        standard = _standard_devices[type(x)] = _has_standard_device(x)
    if standard:
        return x.device
    if type(x) in _without_device:
        return None
    try:
        device = array_api_compat.device(x)
    except AttributeError:
        device = None
    if device is None:
        _without_device.add(type(x))
    return device


def common_namespace(x: Array, y: Array, /) -> Namespace | None:
    """Return the namespace of two arrays of one class on one device; None for others."""
    kind = type(x)
    if kind is not type(y):
        return None
    standard = _standard_devices.get(kind)
    first, second = (x.device, y.device) if standard else (device_of(x), device_of(y))
    if first != second:
        return None
    return _namespaces.get(kind) or own_namespace(x)


def is_row_major(x: Array, /) -> bool:
    """Return whether the last axis of an array is contiguous in memory, if that is known.

    The standard has no strides.  NumPy's and CuPy's arrays have an attribute, PyTorch's a
    method; True for libraries that have neither.
    """
    strides = getattr(x, "strides", None)
    if strides is None and hasattr(x, "stride"):
        strides = x.stride()
    # Libraries without strides have one order.
    return strides is None or len(strides) < 2 or strides[-1] <= strides[-2]


def require_floating(xp: Namespace, x: Array, name: str, /) -> None:
    """Raise `DtypeError` unless the dtype is a real floating one.

    Parameters
    ----------
    xp : namespace
        Array API namespace of the arrays.
    x : array
        Array of any shape.
    name : str
        Name used in error messages.

    Raises
    ------
    DtypeError
        For integers, booleans and complex numbers, for more than 64 bits, and for numbers
        in another byte order than the machine's.
    """
    known = _real_floating.get((xp.__name__, x.dtype))
    if not (known or _is_real_floating(xp, x.dtype)):
        raise errors.DtypeError(
            f"Expected `{name}` to have a real floating dtype of 16, 32 or 64 bits, in the "
            f"machine's byte order, got {x.dtype}. Convert it first, for example with "
            "`astype(x, float32)`."
        )


def require_matrix(x: Array, shape: tuple[int, ...], name: str, /) -> None:
    """Raise `ShapeError` unless the array has exactly that shape."""
    if tuple(x.shape) != shape:
        raise errors.ShapeError(
            f"Expected `{name}` to have shape {shape}, got {tuple(x.shape)}."
        )


def wide_dtype(xp: Namespace, dtype: object, /) -> DType:
    """Return the dtype itself, or float32 where that is narrower than 32 bits."""
    # Sums of many small terms stand still in half precision: 2048 + 1 is 2048 in
    # float16.
    return xp.float32 if roundoff_of(dtype, xp=xp) > 2.0**-23 else dtype


def roundoff_of(dtype: object, /, *, xp: Namespace) -> float:
    """Return the distance from 1 to the next number of a real floating dtype."""
    return (_limits.get((xp.__name__, dtype)) or _limits_of(dtype, xp))[0]


def smallest_normal_of(dtype: object, /, *, xp: Namespace) -> float:
    """Return the smallest positive number that a dtype has with all its digits."""
    return (_limits.get((xp.__name__, dtype)) or _limits_of(dtype, xp))[1]


def transposed(x: Array, /, *, xp: Namespace) -> Array:
    """Return matrices transposed, by the attribute where arrays have the standard's."""
    view = getattr(x, "mT", None)
    return xp.matrix_transpose(x) if view is None else view


def cast(xp: Namespace, x: Array, dtype: object, /) -> Array:
    """Return the array in a dtype, itself where it has that already."""
    if x.dtype == dtype:
        return x
    return x.astype(dtype) if hasattr(x, "astype") else xp.astype(x, dtype)


def as_scalar(xp: Namespace, value: Scalar, dtype: object, name: str, /) -> Scalar:
    """Bring a scalar argument into a form that never changes a result's dtype.

    Parameters
    ----------
    xp : namespace
        Array API namespace of the arrays.
    value : float or 0-d array
        NumPy scalars and other real numbers become Python floats.
    dtype : dtype
        What a 0-d array is cast to.
    name : str
        Name used in error messages.

    Returns
    -------
    float or 0-d array
        The scalar.

    Raises
    ------
    ShapeError
        If an array is not 0-d.
    DtypeError, MixedArraysError
        If it is neither a number nor an array of this library.
    """
    if isinstance(value, NUMBER):
        return float(value)
    try:
        namespace = array_api_compat.array_namespace(value)
    except TypeError as error:
        raise errors.DtypeError(
            f"Expected `{name}` to be a number or a 0-d array, got {value!r}."
        ) from error
    constraints.require_shape(name, value, ())
    if namespace is not xp:
        library, expected = _short(namespace.__name__), _short(xp.__name__)
        raise errors.MixedArraysError(
            f"`{name}` is a 0-d array of {library}, and the other arrays are of "
            f"{expected}. Give a Python number, or an array of that library."
        )
    return cast(xp, value, dtype)


def moved_axis(x: Array, source: int, destination: int, /, *, xp: Namespace) -> Array:
    """Return the array with one axis moved, and the others in order.

    As ``moveaxis`` of the standard, which PyTorch cannot do under ``torch.func.vmap``.
    """
    axes = list(range(x.ndim))
    axis = axes.pop(source)
    axes.insert(destination % x.ndim, axis)
    return xp.permute_dims(x, tuple(axes))


def as_array(x: Array, /) -> Array:
    """Return an array in place of a NumPy scalar, which NumPy returns for 0-d results."""
    return np.asarray(x) if isinstance(x, np.generic) else x


def as_number(x: Scalar, /) -> Scalar:
    """Return NumPy's scalar for a 0-d array of NumPy, whatever else is unchanged.

    Arithmetic of NumPy's scalars takes a tenth of the time of that of its 0-d arrays.
    What is kept is an array again, by `as_array`.
    """
    return x[()] if type(x) is np.ndarray and x.ndim == 0 else x


def reshaped(x: Array, shape: tuple[int, ...], /, *, xp: Namespace) -> Array:
    """Return the array in another shape, by its method where it has one.

    The standard has a function alone, which takes NumPy five times as long.
    """
    return x.reshape(shape) if hasattr(x, "reshape") else xp.reshape(x, shape)


def summed(x: Array, /, *, xp: Namespace) -> Array:
    """Return the sum of a floating array, by its method where it has one."""
    return x.sum() if hasattr(x, "sum") else xp.sum(x)


def where(condition: Array, x: Scalar, y: Scalar, /, *, xp: Namespace) -> Scalar:
    """Return x where a condition holds, else y; without a call for a scalar of NumPy."""
    if isinstance(condition, np.bool_):
        return x if condition else y
    return xp.where(condition, x, y)


def ones(
    shape: tuple[int, ...], dtype: object, /, *, like: Array, xp: Namespace
) -> Array:
    """Return ones on the device of another array."""
    # Past the compatibility layer, which takes as long again.
    if type(like) is np.ndarray:
        return np.ones(shape, dtype)
    return xp.ones(shape, dtype=dtype, device=device_of(like))


def full_of(xp: Namespace, value: Scalar, like: Array, /) -> Array:
    """Return a scalar as a 0-d array of the dtype and on the device of another array."""
    if isinstance(like, _OF_NUMPY) and isinstance(value, (*NUMBER, np.generic)):
        return np.asarray(value, dtype=like.dtype)
    if isinstance(value, NUMBER):
        return xp.full((), float(value), dtype=like.dtype, device=device_of(like))
    return cast(xp, value, like.dtype)


def status_unless(xp: Namespace, condition: Array, flag: int, /) -> Array:
    """Return 0 where the condition (an array of booleans) holds, else `flag`.

    A comparison with NaN is false, so that conditions state what is wanted.
    """
    return xp.astype(xp.logical_not(condition), xp.int32) * int(flag)


def any_status(status: Array, /, *, xp: Namespace) -> Array:
    """Return the flags of a whole stack, 0-d: those that stand anywhere in it."""
    if status.ndim == 0:
        return status
    # The standard has no reduction by bitwise or, so add each flag at most once.
    total = xp.zeros((), dtype=xp.int32, device=device_of(status))
    for flag in _FLAGS:
        total = total + xp.astype(xp.any((status & flag) != 0), xp.int32) * flag
    return total


def is_finite_number(value: object, /) -> bool:
    """Whether a value is a Python number that is neither NaN nor infinite."""
    if not isinstance(value, NUMBER):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:  # a Python integer beyond the range of floats
        return False


def _require_version(xp: Namespace) -> None:
    """Raise for a library with too old a version of the standard."""
    version = getattr(xp, "__array_api_version__", None)
    if version is None:
        problem = "does not say which version of the Array API standard it follows"
    elif version < ARRAY_API_VERSION:
        problem = f"follows version {version} of the Array API standard"
    else:
        return
    raise errors.BackendUnavailableError(
        f"{_short(xp.__name__)} {problem}; kfac_core needs {ARRAY_API_VERSION} or newer. "
        "Install a newer version of the library."
    )


def _has_standard_device(x: Array) -> bool:
    return hasattr(type(x), "device") and not (
        array_api_compat.is_jax_array(x)
        or array_api_compat.is_dask_array(x)
        or array_api_compat.is_pydata_sparse_array(x)
    )


def _limits_of(dtype: object, xp: Namespace) -> tuple[float, float]:
    info = xp.finfo(dtype)
    limits = float(info.eps), float(info.smallest_normal)
    _limits[xp.__name__, dtype] = limits
    return limits


def _is_real_floating(xp: Namespace, dtype: object) -> bool:
    try:
        known = (
            bool(xp.isdtype(dtype, "real floating"))
            and xp.finfo(dtype).bits in (16, 32, 64)
            and getattr(dtype, "isnative", True)
        )
    except TypeError:
        # NumPy raises for extension dtypes (bfloat16).
        known = False
    _real_floating[xp.__name__, dtype] = known
    return known


def _explain(named: dict[str, Any]) -> Exception:
    """Return a message that names a non-array, or two libraries that were mixed."""
    libraries: dict[str, str] = {}
    for name, x in named.items():
        try:
            libraries[name] = array_api_compat.array_namespace(x).__name__
            problem = not hasattr(x, "dtype")
        except TypeError:
            problem = True
        if problem:
            return errors.DtypeError(
                f"Expected `{name}` to be an array, got {type(x).__name__}. Make it one "
                "with the library that you use, or with kfac_core.asarray."
            )
    (first, library), *others = libraries.items()
    second = next((name for name, other in others if other != library), first)
    return errors.MixedArraysError(
        f"`{first}` is an array of {_short(library)} and `{second}` of "
        f"{_short(libraries[second])}: arrays passed together must be of one library. "
        "Convert one of them yourself; no array is converted silently."
    )


def _short(library: str) -> str:
    return library.removeprefix("array_api_compat.")
