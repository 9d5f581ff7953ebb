"""A stand-in for CuPy that computes with NumPy, where there is no GPU.

It proves which functions of CuPy are called, with arguments of which form, and that
nothing synchronizes with the device in secret.  It proves nothing about CuPy's numbers, its
speed or any hardware: no GPU code runs.

Like CuPy, and unlike NumPy: arrays are of a class of their own, which NumPy refuses to
convert and which refuse to meet NumPy arrays; reductions give 0-d arrays; a failed
factorization is silent and leaves finite garbage unless ``errstate(linalg="raise")``;
``cupy.linalg`` lacks what CuPy's lacks and refuses half precision; arrays are made on
the current device, and arrays of another one are refused.  Whatever waits for the
device on real hardware is written down in `SYNCHRONIZATIONS`, and every function that is
called by name in `CALLS`.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

SYNCHRONIZATIONS: list[str] = []
CALLS: list[str] = []

_current = [0]
_linalg_mode = ["ignore"]


class Device:
    """A CUDA device; a context manager that makes it the current one."""

    def __init__(self, device: Any = None) -> None:
        self.id = _current[0] if device is None else int(getattr(device, "id", device))

    def __enter__(self) -> Device:
        self._outer, _current[0] = _current[0], self.id
        return self

    def __exit__(self, *_: object) -> None:
        _current[0] = self._outer

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"


class ndarray:  # noqa: N801 (CuPy's name)
    """An array of the stand-in: it holds a NumPy array and shows it to nobody."""

    __array_ufunc__ = None

    def __init__(self, values: np.ndarray) -> None:
        self._values = values
        self.device = Device()

    dtype = property(lambda self: self._values.dtype)
    shape = property(lambda self: self._values.shape)
    ndim = property(lambda self: self._values.ndim)
    size = property(lambda self: self._values.size)
    T = property(lambda self: ndarray(self._values.T))

    def __array__(self, *_: object, **__: object) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def get(self) -> np.ndarray:
        return _synchronized("get", self._values.copy())

    def item(self) -> Any:
        return _synchronized("item", self._values.item())

    def tolist(self) -> Any:
        return _synchronized("tolist", self._values.tolist())

    def __bool__(self) -> bool:
        return _synchronized("__bool__", bool(self._values))

    def __float__(self) -> float:
        return _synchronized("__float__", float(self._values))

    def __int__(self) -> int:
        return _synchronized("__int__", int(self._values))

    def __index__(self) -> int:
        return _synchronized("__index__", self._values.__index__())

    def __getitem__(self, key: Any) -> ndarray:
        return ndarray(np.asarray(self._values[_index(key)]))

    def __setitem__(self, key: Any, value: Any) -> None:
        self._values[_index(key)] = _value(value)

    def astype(self, dtype: Any, copy: bool = True) -> ndarray:
        return ndarray(_value(self).astype(dtype, copy=copy))

    def copy(self) -> ndarray:
        return ndarray(self._values.copy())


def _operator(name: str) -> Callable[..., Any]:
    def method(self: ndarray, *others: Any) -> Any:
        values = [_value(x) for x in (self, *others)]
        with np.errstate(all="ignore"):
            return ndarray(np.asarray(getattr(np.ndarray, name)(*values)))

    return method


_SIDED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_SIDED += ("and", "or", "xor")
_PLAIN = ("lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs", "invert")
_METHODS = ("reshape", "transpose", "ravel", "sum", "mean", "max", "min", "any", "all")
for _name in (*_PLAIN, *_SIDED, *(f"r{_name}" for _name in _SIDED)):
    setattr(ndarray, f"__{_name}__", _operator(f"__{_name}__"))


def _method(name: str) -> Callable[..., Any]:
    def method(self: ndarray, *args: Any, **kwargs: Any) -> Any:
        return ndarray(np.asarray(getattr(_value(self), name)(*args, **kwargs)))

    return method


for _name in _METHODS:
    setattr(ndarray, _name, _method(_name))
ndarray.__hash__ = None  # type: ignore[assignment]


def _synchronized(name: str, value: Any) -> Any:
    SYNCHRONIZATIONS.append(name)
    return value


def _value(x: Any) -> Any:
    """Return what NumPy can compute with, refusing what CuPy refuses."""
    if isinstance(x, ndarray):
        if x.device.id != _current[0]:
            raise ValueError(
                "Array device must be same as the current device: array device = "
                f"{x.device.id} while current = {_current[0]}"
            )
        return x._values
    if isinstance(x, np.ndarray):
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    if isinstance(x, list | tuple):
        return type(x)(_value(part) for part in x)
    return x


def _index(key: Any) -> Any:
    for part in key if isinstance(key, tuple) else (key,):
        if isinstance(part, ndarray) and part.dtype == bool:
            SYNCHRONIZATIONS.append("boolean index")
    return _value(key)


def _wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        CALLS.append(name)
        if function in (np.nonzero, np.argwhere, np.flatnonzero, np.unique):
            SYNCHRONIZATIONS.append(name)
        with np.errstate(all="ignore"):
            result = function(
                *map(_value, args), **{key: _value(x) for key, x in kwargs.items()}
            )
        if isinstance(result, tuple):
            return tuple(ndarray(np.asarray(part)) for part in result)
        known = isinstance(result, np.ndarray | np.generic)
        return ndarray(np.asarray(result)) if known else result

    call.__name__ = name.rpartition(".")[2]
    return call


def _array(obj: Any, dtype: Any = None, copy: bool | None = True) -> ndarray:
    values = obj if isinstance(obj, np.ndarray) else _value(obj)
    return ndarray(np.array(values, dtype=dtype, copy=copy))


def _asarray(a: Any, dtype: Any = None) -> ndarray:
    same = isinstance(a, ndarray) and (dtype is None or a.dtype == dtype)
    return a if same else _array(a, dtype)


def _cholesky(a: Any) -> np.ndarray:
    """Factorize as LAPACK does, which stops at a pivot that is not positive."""
    lower = np.tril(a)
    for L in lower.reshape(-1, *a.shape[-2:]):
        for j in range(L.shape[0]):
            L[j, j] -= L[j, :j] @ L[j, :j]
            if not L[j, j] > 0:
                if _linalg_mode[0] == "raise":
                    raise np.linalg.LinAlgError("not positive definite")
                break
            L[j, j] = np.sqrt(L[j, j])
            L[j + 1 :, j] = (L[j + 1 :, j] - L[j + 1 :, :j] @ L[j, :j]) / L[j, j]
    return lower


def _silent(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function of ``numpy.linalg`` fail without a word, and refuse float16."""

    def call(a: np.ndarray, *args: Any, **kwargs: Any) -> Any:
        if a.dtype == np.float16:
            raise TypeError("Array data type float16 is unsupported in linalg")
        try:
            return function(a, *args, **kwargs)
        except np.linalg.LinAlgError:
            if _linalg_mode[0] == "raise":
                raise
            return np.full_like(a, np.inf)

    return call


def _solve_triangular(
    a: np.ndarray,
    b: np.ndarray,
    trans: Any = 0,
    lower: bool = False,
    unit_diagonal: bool = False,
    overwrite_b: bool = False,
    check_finite: bool = False,
) -> np.ndarray:
    if check_finite:
        SYNCHRONIZATIONS.append("solve_triangular(check_finite=True)")
    half = np.tril(a) if lower else np.triu(a)
    return np.linalg.solve(half if trans in (0, "N") else half.T, b)


def _scatter_add(a: ndarray, slices: Any, value: Any) -> None:
    CALLS.append("cupyx.scatter_add")
    np.add.at(_value(a), _value(slices), _value(value))


@contextlib.contextmanager
def _errstate(*, linalg: str | None = None) -> Iterator[None]:
    outer, _linalg_mode[0] = _linalg_mode[0], linalg or _linalg_mode[0]
    try:
        yield
    finally:
        _linalg_mode[0] = outer


def modules() -> dict[str, types.ModuleType]:
    """Return the modules of the stand-in, by the names that CuPy gives them."""
    made = {
        name: types.ModuleType(name)
        for name in (
            *("cupy", "cupy.linalg", "cupy.fft", "cupy.cuda", "cupy.cuda.device"),
            *("cupyx", "cupyx.scipy", "cupyx.scipy.linalg"),
        )
    }
    lacking = {"vecdot", "unstack", "matrix_norm", "vector_norm", "diagonal", "trace"}
    lacking |= {"outer", "svdvals", "tensordot"}
    for prefix, source in (
        ("cupy", np),
        ("cupy.linalg", np.linalg),
        ("cupy.fft", np.fft),
    ):
        for name in source.__all__:
            member = getattr(source, name)
            if prefix == "cupy.linalg" and name in lacking:
                continue
            if prefix == "cupy" and name in ("vecdot", "unstack"):
                continue
            if isinstance(member, types.ModuleType):
                continue
            if callable(member) and not isinstance(member, type):
                quiet = _silent(member) if prefix == "cupy.linalg" else member
                member = _wrapped(f"{prefix}.{name}", quiet)
            setattr(made[prefix], name, member)
    cupy, cuda = made["cupy"], made["cupy.cuda"]
    made["cupy.linalg"].cholesky = _wrapped("cupy.linalg.cholesky", _silent(_cholesky))
    made["cupy.cuda.device"].Device = cuda.Device = Device
    cuda.runtime = types.SimpleNamespace(getDeviceCount=lambda: 2)
    cupy.ndarray, cupy.array, cupy.asarray = ndarray, _array, _asarray
    cupy.asnumpy = lambda a: _synchronized("asnumpy", np.array(a._values))
    cupy.is_available = lambda: True
    cupy.__version__ = "0 (a stand-in on NumPy)"
    made["cupyx"].errstate = _errstate
    made["cupyx"].scatter_add = _scatter_add
    solve = _wrapped("cupyx.scipy.linalg.solve_triangular", _solve_triangular)
    made["cupyx.scipy.linalg"].solve_triangular = solve
    for name, module in made.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(made[parent], child, module)
    return made


@contextlib.contextmanager
def installed() -> Iterator[types.ModuleType]:
    """Put the stand-in in the place of CuPy, and everything back afterwards.

    What imported CuPy before is imported anew, and forgotten with the stand-in.
    """
    import array_api_compat

    import kfac_core_backends
    from kfac_core.array import backend

    # Where CuPy, what is made from it, and what the library knows of it are kept.
    tables = [
        vars(array_api_compat),
        vars(kfac_core_backends),
        *(backend._loaded, backend._operations, backend._problems),
    ]
    before = [table.pop("cupy", None) for table in tables]
    modules_before = _pop_modules()
    made = modules()
    sys.modules.update(made)
    SYNCHRONIZATIONS.clear()
    CALLS.clear()
    try:
        yield made["cupy"]
    finally:
        _pop_modules()
        sys.modules.update(modules_before)
        for table, value in zip(tables, before, strict=True):
            table.pop("cupy", None)
            if value is not None:
                table["cupy"] = value


def _pop_modules() -> dict[str, types.ModuleType]:
    """Take CuPy, and the modules that stand on it, out of those imported."""
    names = [
        name
        for name in sys.modules
        if name.split(".")[0] in ("cupy", "cupyx")
        or name.startswith(("array_api_compat.cupy", "kfac_core_backends.cupy"))
    ]
    return {name: sys.modules.pop(name) for name in names}
