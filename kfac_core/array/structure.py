"""Frozen dataclasses of arrays, which function compilers treat as pytrees.

Statistics, symmetric matrices, factorizations and curvature operators are all of
this kind: an immutable record of arrays (or of further structures), and a few
static fields (strings, booleans, small integers) which decide what code runs.  A
function compiler treats the arrays as its inputs and outputs and the static fields
as part of the program.  How a library is told so is its backend's business
(`register_structures_with`); nothing here names one.

Conventions: a field that is None holds nothing (a factorization that was not requested
for); a field may be a dict of structures; a path is the names joined by dots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar, dataclass_transform

import numpy as np

from kfac_core.array.types import Array, Namespace, Tree

T = TypeVar("T")


Registrar = Callable[[type[Any], tuple[str, ...], tuple[str, ...]], None]
"""Called with a class, the names of its array fields and of its static fields."""

_static: dict[type[Any], tuple[str, ...]] = {}
_arrays: dict[type[Any], tuple[str, ...]] = {}
_fields: dict[type[Any], tuple[tuple[str, bool], ...]] = {}
"""The fields of each class in order, and whether they are static."""
_names: dict[str, type[Any]] = {}
_meet: dict[type[Any], Callable[..., Any] | None] = {}
_registrars: dict[str, Registrar] = {}
_COMPUTE = " compute"
"""Where a `deferred` structure holds its function, among its fields."""
_PLAIN = frozenset({type(None), bool, int, float, str, frozenset})
_WITHOUT_SCALARS = _PLAIN | {np.ndarray}


@dataclass_transform(frozen_default=True)
def structure(
    *,
    static: tuple[str, ...] = (),
    meet: Callable[..., Any] | None = None,
    deferrable: bool = False,
) -> Callable[[type[T]], type[T]]:
    """Make a class a frozen dataclass of arrays.

    Parameters
    ----------
    static : tuple of str
        The fields that are not arrays: hashable, and part of the program.
    meet : callable, optional
        Given the values of the static fields of several instances, as dicts, returns
        those of what `map_structure` makes of them; without it they must be equal.
    deferrable : bool
        Whether instances may be `deferred`, which makes reading any attribute slower.

    Returns
    -------
    callable
        The class decorator.

    Examples
    --------
    >>> import numpy as np
    >>> import kfac_core as kc
    >>> from kfac_core.array import map_structure
    >>> @kc.structure(static=("name",))
    ... class Pair:
    ...     left: object
    ...     right: object
    ...     name: str
    >>> doubled = map_structure(lambda x: 2 * x, Pair(np.ones(2), np.zeros(2), "pair"))
    >>> doubled.left.tolist(), doubled.name
    ([2.0, 2.0], 'pair')
    """

    def decorate(cls: type[T]) -> type[T]:
        # No `==`: comparing arrays gives arrays, and identity is what hashing needs.
        cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
        names = tuple(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]
        if deferrable:
            cls.__getattr__ = _computed_field  # type: ignore[attr-defined]
            cls.__getstate__ = contents  # type: ignore[method-assign,assignment]
        _names[f"{cls.__module__}:{cls.__qualname__}"] = cls
        _static[cls] = static
        _meet[cls] = meet
        _arrays[cls] = tuple(name for name in names if name not in static)
        _fields[cls] = tuple((name, name in static) for name in names)
        for registrar in _registrars.values():
            registrar(cls, _arrays[cls], static)
        return cls

    return decorate


def register_structures_with(registrar: Registrar, /) -> None:
    """Register all present and future structures with a library.

    Parameters
    ----------
    registrar : callable
        A named function, called once for each class; see `Registrar`.  A second function of
        the same name is ignored.
    """
    name = f"{registrar.__module__}.{registrar.__qualname__}"
    if name in _registrars:
        return
    _registrars[name] = registrar
    # Classes that were defined before the library was imported.
    for cls, static in _static.items():
        registrar(cls, _arrays[cls], static)


def is_plain(value: object, /) -> bool:
    """Whether a value is a Python number, string, set of strings or None.

    NumPy's scalars are not, which are its 0-d arrays in places.
    """
    return type(value) in _PLAIN


def is_structure(value: object, /) -> bool:
    """Whether a value is an instance of a class made by `structure`."""
    return type(value) in _static


def structure_of_name(name: str, /) -> type[Any] | None:
    """Return the structure's class with a name ``"module:class"``, if it was defined."""
    return _names.get(name)


def fields_of(cls: type[Any], /) -> tuple[tuple[str, bool], ...]:
    """Return the fields of a structure's class in order, and whether each is static.

    Parameters
    ----------
    cls : type
        Any class.

    Returns
    -------
    tuple of tuple of str and bool
        Empty for a class that is no structure's.
    """
    return _fields.get(cls, ())


def deferred(cls: type[T], known: dict[str, Any], compute: Callable[[], T], /) -> T:
    """Return a structure most of whose fields are computed when one is first read.

    Parameters
    ----------
    cls : type
        Class of the structure, which is ``deferrable``.
    known : dict of str to object
        Fields that are known already.
    compute : callable
        Returns the whole structure.  It may be called by several threads.

    Returns
    -------
    structure
        Equal to ``compute()``.
    """
    new = object.__new__(cls)
    new.__dict__.update(known, **{_COMPUTE: compute})
    return new


def contents(value: object, /) -> dict[str, Any]:
    """Return the fields of a structure by name; of a `deferred` one they are computed."""
    fields: dict[str, Any] = value.__dict__
    compute = fields.get(_COMPUTE)
    if compute is not None:
        # Known fields stay the objects that they are.
        fields.update(contents(compute()) | fields)
        fields.pop(_COMPUTE, None)
    return fields


def _computed_field(value: object, name: str) -> Any:
    """Return a field that no attribute holds yet, as of a `deferred` structure."""
    if _COMPUTE in value.__dict__ and name in dict(_fields[type(value)]):
        return contents(value)[name]
    raise AttributeError(f"{type(value).__name__!r} object has no attribute {name!r}")


def rebuilt(value: T, function: Callable[[Any], Any], /) -> T:
    """Return a structure whose parts are a function's results for the old parts.

    Unlike `map_structure` this does not recurse: the function is given whole parts.

    Parameters
    ----------
    value : structure
        Structure; not modified.
    function : callable
        Function of a field that is neither static nor `is_plain`.

    Returns
    -------
    structure
        Structure of the same class.
    """
    # A frozen class's constructor is slow, and this runs hundreds of times a step.
    new = object.__new__(type(value))
    before, fields = value.__dict__, new.__dict__
    fields |= contents(value) if _COMPUTE in before else before
    for name in _arrays[type(value)]:
        part = fields[name]
        if type(part) not in _PLAIN:
            fields[name] = function(part)
    return new


Known = dict[int, tuple[Any, Any]]
"""Objects by their id, which they keep from being reused, and their replacements."""


class Mapped:
    """A function of arrays, applied to all arrays of structures, dicts and tuples.

    What stands in several places is mapped once, and does so afterwards.

    Parameters
    ----------
    function : callable
        Function of one array.
    known : dict, optional
        Objects whose replacements are known.
    passed : tuple of class
        Classes of objects without arrays, besides numbers, strings and None.
    """

    _arrays: ClassVar[set[type[Any]]] = set()
    """The classes of all arrays so far."""

    def __init__(
        self,
        function: Callable[[Any], Any],
        known: Known | None = None,
        *,
        passed: tuple[type[Any], ...] = (),
    ) -> None:
        self._function, self._known = function, {} if known is None else known
        self._passed = passed

    def __call__(self, value: Tree) -> Tree:
        """Return the value with the function of each array in its place."""
        # Blocks share their options, and factorizations their zeros.
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        cls = type(value)
        if cls in self._arrays:
            mapped = self._function(value)
        elif is_structure(value):
            mapped = rebuilt(value, self)
        elif isinstance(value, dict):
            return {name: self(part) for name, part in value.items()}
        elif is_plain(value) or isinstance(value, self._passed):
            return value
        elif isinstance(value, (tuple, list)):
            return tuple(map(self, value))
        else:
            mapped = self._function(value)
            self._arrays.add(cls)
        self._known[id(value)] = value, mapped
        return mapped


def static_fields(value: object, /) -> dict[str, Any]:
    """Return the static fields of a structure, by name (not those of its parts)."""
    return {name: getattr(value, name) for name in _static[type(value)]}


def array_fields(value: object, /) -> list[tuple[str, Any]]:
    """Return the fields of a structure that are not static, with their names."""
    return [(name, getattr(value, name)) for name in _arrays[type(value)]]


def leaves(value: Tree, /, *, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Walk over the arrays of a structure with their paths, in the fields' order.

    Parameters
    ----------
    value : structure, tuple, array or None
        Value to walk over; None has no leaves.
    prefix : str
        What each path begins with.

    Yields
    ------
    tuple of str and array
        A path such as ``"input.sum.array"``, and the array there.
    """
    if value is None:
        return
    if is_structure(value):
        for name in _arrays[type(value)]:
            part = getattr(value, name)
            if is_structure(part) or isinstance(part, dict):
                yield from leaves(part, prefix=f"{prefix}{name}.")
            elif part is not None:
                yield prefix + name, part
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from leaves(part, prefix=f"{prefix}{name}.")
    else:
        yield prefix.removesuffix("."), value


def map_structure(function: Callable[..., Any], first: T, /, *others: T) -> T:
    """Apply a function to the corresponding arrays of structures of one form.

    Parameters
    ----------
    function : callable
        Takes one array of each structure and returns an array.
    first, *others : structure
        Structures of the same classes, with None in the same places.

    Returns
    -------
    structure
        Structure of the class of `first`.

    Raises
    ------
    ValueError
        For structures whose static fields cannot go together.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.array import map_structure
    >>> from kfac_core.factors import Average
    >>> average = Average(np.asarray([2.0, 4.0]), np.asarray(2.0))
    >>> float(map_structure(lambda x: x / 2, average).weight)
    1.0
    """
    if first is None:
        return first
    cls = type(first)
    fields = _fields.get(cls)
    if fields is None:
        if not isinstance(first, dict):
            mapped: T = function(first, *others)
            return mapped
        others_at: Any = others
        parts: Any = {
            name: map_structure(function, part, *(other[name] for other in others_at))
            for name, part in first.items()
        }
        return parts  # type: ignore[no-any-return]
    met = _met(first, others) if others else None
    values: list[Any] = []
    for name, static in fields:
        value = getattr(first, name)
        if not static:
            other_values = (getattr(other, name) for other in others)
            values.append(map_structure(function, value, *other_values))
        else:
            values.append(value if met is None else met[name])
    return cls(*values)


def in_dtype(value: T, dtype: object, xp: Namespace, /) -> T:
    """Return a structure with its floating-point arrays in a dtype.

    Parameters
    ----------
    value : structure, dict, array or None
        Value of any kind; not modified.
    dtype : dtype
        Real floating dtype.
    xp : namespace
        Array API namespace of the arrays.

    Returns
    -------
    structure
        Structure of the same class, with the same arrays where they have that dtype.
    """

    def cast(x: Array) -> Array:
        floating = x.dtype != dtype and xp.isdtype(x.dtype, "real floating")
        return xp.astype(x, dtype) if floating else x

    return map_structure(cast, value)


def without_scalars(value: T, /) -> T:
    """Return a structure with 0-d arrays in place of NumPy's scalars.

    NumPy's operations return scalars for 0-d results, and round powers of scalars and of
    arrays differently.  A kept value holds arrays only, as it does when it is loaded.

    Parameters
    ----------
    value : structure, dict or array
        Value of any kind; not modified.

    Returns
    -------
    structure
        With the same parts where these hold no scalar.
    """
    return _with_arrays(value) if _holds_scalars(value) else value


def _holds_scalars(value: object) -> bool:
    parts = [value]
    for part in parts:
        if type(part) in _arrays:
            # What a `deferred` one will compute are another library's arrays.
            inner = part.__dict__.values()
        elif isinstance(part, dict):
            inner = part.values()
        elif isinstance(part, np.generic):
            return True
        else:
            continue
        for x in inner:
            # Most are arrays, or None.
            if type(x) not in _WITHOUT_SCALARS:
                parts.append(x)
    return False


def _with_arrays(value: Tree) -> Tree:
    """Return a value with arrays for scalars; parts without any are the same objects."""
    if isinstance(value, np.generic):
        return np.asarray(value)
    if isinstance(value, dict):
        return {name: without_scalars(part) for name, part in value.items()}
    names = _arrays.get(type(value), ())
    changes = {name: without_scalars(getattr(value, name)) for name in names}
    return replaced(value, **changes)


def _met(first: object, others: tuple[Any, ...]) -> dict[str, Any]:
    """Return the static fields of a combination of several structures."""
    fields = [static_fields(value) for value in (first, *others)]
    meet = _meet[type(first)]
    if meet is not None:
        met: dict[str, Any] = meet(*fields)
        return met
    if any(other != fields[0] for other in fields[1:]):
        raise ValueError(f"structures of different forms: {fields}")
    return fields[0]


def form_of(value: Tree, leaf: Callable[[Array], object], /) -> object:
    """Return a key that is equal for values whose arrays can be combined.

    Parameters
    ----------
    value : structure, dict, array, number or None
        Value of any kind.
    leaf : callable
        What is to agree of an array, as something hashable.

    Returns
    -------
    object
        Hashable: classes, names, static fields, and `leaf` of each array.
    """
    fields = _fields.get(type(value))
    if fields is not None:
        parts: list[object] = [type(value)]
        for name, static in fields:
            part = getattr(value, name)
            parts.append(part if static or part is None else form_of(part, leaf))
        return tuple(parts)
    if isinstance(value, dict):
        return tuple([(name, form_of(part, leaf)) for name, part in value.items()])
    return value if is_plain(value) else leaf(value)


def split_structure(
    value: T, split: Callable[[Any], list[Any]], length: int, /
) -> list[T]:
    """Return several structures of one class, whose fields are parts of another's.

    Parameters
    ----------
    value : structure
        Structure; not modified.
    split : callable
        Returns the parts of a field that is not static: a list of `length`.
    length : int
        The number of structures.

    Returns
    -------
    list of structure
        With the static fields of `value`.
    """
    cls = type(value)
    parts: list[T] = [object.__new__(cls) for _ in range(length)]
    # A frozen class's constructor is slow, and this runs hundreds of times a step.
    fields = [one.__dict__ for one in parts]
    for name, static in _fields[cls]:
        whole = getattr(value, name)
        if static or whole is None:
            for part_fields in fields:
                part_fields[name] = whole
        else:
            for part_fields, part in zip(fields, split(whole), strict=True):
                part_fields[name] = part
    return parts


def replaced(value: T, /, **changes: object) -> T:
    """Return a structure with some fields changed.

    As ``dataclasses.replace``, which not every tracer can follow.

    Parameters
    ----------
    value : structure
        Structure; not modified.
    **changes
        The new fields.

    Returns
    -------
    structure
        Structure of the same class.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core.array import replaced
    >>> from kfac_core.factors import Average
    >>> average = Average(np.asarray([2.0, 4.0]), np.asarray(2.0))
    >>> float(replaced(average, weight=np.asarray(4.0)).weight)
    4.0
    """
    # A frozen class's constructor is slow.
    new = object.__new__(type(value))
    before, fields = value.__dict__, new.__dict__
    if _COMPUTE in before:
        before = contents(value)
    fields |= before
    fields |= changes
    # An unknown name would be a new attribute; the count shows it.
    if len(fields) != len(before):
        unknown = ", ".join(sorted(changes.keys() - before.keys()))
        raise TypeError(f"{type(value).__name__} has no field {unknown}")
    return new


def combinable(first: object, second: object, /) -> bool:
    """Whether `map_structure` accepts two structures together, for any shapes.

    Parameters
    ----------
    first, second : structure, dict, array or None
        Values of any kind.

    Returns
    -------
    bool
        True for the same classes with None in the same places, whose static fields go
        together.
    """
    if isinstance(first, dict):
        return (
            isinstance(second, dict)
            and first.keys() == second.keys()
            and all(combinable(part, second[name]) for name, part in first.items())
        )
    if first is None or second is None:
        return first is second
    if not is_structure(first):
        return not is_structure(second) and not isinstance(second, dict)
    if type(first) is not type(second):
        return False
    try:
        _met(first, (second,))
    except ValueError:
        return False
    parts = _arrays[type(first)]
    return all(combinable(getattr(first, p), getattr(second, p)) for p in parts)
