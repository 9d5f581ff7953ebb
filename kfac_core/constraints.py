"""Constraints on options: allowed values, and the error for all others.

A `Constraint` is a predicate with the words for an error message.  The kinds of options
that several modules share (`FLAG`, `COUNT`, `DAMPING`, ...) are defined here once.  A class
of options checks its fields in ``__post_init__`` by `require_options`; a function checks
an option by `require_range`, `require_one_of` or `require_kind`, where it enters.  Errors
name the option, and show the value and the expectation.

A boolean is not a number.  The value of a 0-d array in place of a number is not read,
since it may be traced or on a device.
"""

from __future__ import annotations

import itertools
import math
import numbers
import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sized
from types import EllipsisType, UnionType
from typing import Any, NamedTuple, get_args

import array_api_compat
import numpy as np

from kfac_core import errors

__all__ = [
    "Constraint",
    "either",
    "implementation_of",
    "instance_of",
    "integer",
    "literal",
    "mapping_to",
    "number",
    "one_of",
    "optional",
    "require_any",
    "require_check",
    "require_flag",
    "require_kind",
    "require_names",
    "require_one_of",
    "require_options",
    "require_ordered",
    "require_range",
    "require_same",
    "require_shape",
    "shown",
    "tuple_of",
    "unknown_block",
]

_shortened = reprlib.Repr()
_shortened.maxlevel, _shortened.maxdict, _shortened.maxlist = 3, 8, 8
_shortened.maxstring = _shortened.maxother = 80


def shown(value: object, /) -> str:
    """Return the repr of a value, in one line however long or deep it is."""
    return _shortened.repr(value)


class Constraint(NamedTuple):
    """The allowed values of an option.

    Attributes
    ----------
    expected : str
        Text of a message after "to be".
    accepts : callable
        Whether a value is allowed; never raises.
    error : type
        What is raised for another value.
    """

    expected: str
    accepts: Callable[[Any], bool]
    error: type[errors.KFACError] = errors.ConventionError


def number(
    expected: str,
    holds: Callable[[float], bool],
    error: type[errors.KFACError] = errors.ConventionError,
    *,
    arrays: bool = False,
) -> Constraint:
    """Return the constraint of a real number, or also of a real 0-d array."""

    def accepts(value: object) -> bool:
        # A bool is an int in Python, and is not a number here.
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            return arrays and _is_real_scalar(value)
        try:
            return holds(float(value))
        except OverflowError:  # a Python integer beyond the range of floats
            return False

    return Constraint(expected + " or a 0-d array" * arrays, accepts, error)


def _is_real_scalar(value: Any) -> bool:
    """Whether a value is a 0-d array of real numbers, perhaps a traced one."""
    if getattr(value, "ndim", None) != 0:
        return False
    if isinstance(value, np.ndarray):
        dtype = value.dtype
        # Extended precision and foreign byte orders have no counterpart in other
        # libraries.
        common = dtype.kind in "iuf" and dtype.itemsize <= 8 and dtype.isnative
        return type(value) is np.ndarray and common
    try:
        xp = array_api_compat.array_namespace(value)
        return bool(xp.isdtype(value.dtype, ("integral", "real floating")))
    except (TypeError, AttributeError):
        return False


def integer(
    least: int, error: type[errors.KFACError] = errors.ConventionError
) -> Constraint:
    """Return the constraint of a whole number that is not less than `least`."""

    def accepts(value: Any) -> bool:
        # `operator.index` accepts these: True is 1, and a 0-d array of integers has an
        # index.
        if isinstance(value, (bool, np.bool_, np.ndarray)):
            return False
        try:
            return operator.index(value) >= least
        except (TypeError, ValueError):  # arrays of other libraries raise these too
            return False

    return Constraint(f"an integer >= {least}", accepts, error)


def one_of(*choices: str | None) -> Constraint:
    """Return the constraint of one of some strings, or None where that is one of them."""
    return Constraint(
        f"one of {', '.join(map(repr, choices))}",
        lambda value: (value is None or isinstance(value, str)) and value in choices,
    )


def literal(hint: object, /) -> Constraint:
    """Return the constraint of one of the strings of a ``Literal`` type."""
    return one_of(*get_args(hint))


def optional(constraint: Constraint, /) -> Constraint:
    """Return the constraint that also accepts None."""
    return either(constraint, Constraint("None", lambda value: value is None))


def either(first: Constraint, second: Constraint, /) -> Constraint:
    """Return the constraint of what one of two accepts, with the first one's error."""
    return Constraint(
        f"{first.expected} or {second.expected}",
        lambda value: first.accepts(value) or second.accepts(value),
        first.error,
    )


def tuple_of(item: Constraint, /) -> Constraint:
    """Return the constraint of a tuple of any length."""
    return Constraint(
        f"a tuple of items that are each {item.expected}",
        lambda value: isinstance(value, tuple) and all(map(item.accepts, value)),
        item.error,
    )


def mapping_to(item: Constraint, /) -> Constraint:
    """Return the constraint of a mapping from strings."""

    def accepts(value: object) -> bool:
        if not isinstance(value, Mapping):
            return False
        return all(map(TEXT.accepts, value)) and all(map(item.accepts, value.values()))

    return Constraint(f"a mapping of str to {item.expected}", accepts, item.error)


def instance_of(kind: type[Any], /) -> Constraint:
    """Return the constraint of an instance of a class."""
    article = "an" if kind.__name__[0] in "AEIO" else "a"
    return Constraint(
        f"{article} {kind.__name__}",
        lambda value: isinstance(value, kind),
        errors.ArgumentError,
    )


def implementation_of(protocol: type[Any], /) -> Constraint:
    """Return the constraint of an object whose class has the methods of a protocol."""
    methods = [
        name
        for name, value in vars(protocol).items()
        if callable(value) and not name.startswith("_")
    ]

    def accepts(value: object) -> bool:
        if "__call__" in vars(protocol) and not callable(value):
            return False
        # On the type, since an instance may answer any name by `__getattr__`; and not
        # `isinstance`, which evaluates properties of the value.
        return all(hasattr(type(value), method) for method in methods)

    return instance_of(protocol)._replace(accepts=accepts)


def _is_iterable_of_names(value: Any) -> bool:
    if isinstance(value, (str, bytes)):
        return False
    try:
        iter(value)  # 0-d arrays have `__iter__`, but raise
    except TypeError:
        return False
    return True


def _is_not_negative(x: float) -> bool:
    return 0.0 <= x < math.inf


def _is_positive(x: float) -> bool:
    return 0.0 < x < math.inf


# Sums with such a weight neither overflow nor vanish in float32.
def _is_weight(x: float) -> bool:
    return 1e-20 <= x <= 1e20


def _is_decay(x: float) -> bool:
    return 0.0 <= x <= 1.0


_NOT_NEGATIVE = "a finite number >= 0", _is_not_negative
_POSITIVE = "a finite number > 0", _is_positive
_WEIGHT = "a finite number > 0, in [1e-20, 1e20]", _is_weight

FLAG = Constraint("True or False", lambda value: type(value) is bool)
TEXT = Constraint("a string", lambda value: isinstance(value, str))
NAMES = Constraint("an iterable of names, and no string", _is_iterable_of_names)
FUNCTION = Constraint("a function", callable)
CHECK = one_of("raise", "status")
COUNT = integer(1)
WHOLE = integer(0)
SIZE = integer(1, errors.ShapeError)
NOT_NEGATIVE = number(*_NOT_NEGATIVE)
POSITIVE = number(*_POSITIVE)
LIMIT_SCALAR = number("a number > 0", lambda x: x > 0.0, arrays=True)
FINITE = number("a finite number", math.isfinite)
FINITE_SCALAR = number("a finite number", math.isfinite, arrays=True)
FRACTION = number("a number in (0, 1)", lambda x: 0.0 < x < 1.0, errors.DampingError)
NOT_NEGATIVE_SCALAR = number(*_NOT_NEGATIVE, arrays=True)
POSITIVE_SCALAR = number(*_POSITIVE, arrays=True)
DAMPING = number(*_NOT_NEGATIVE, errors.DampingError, arrays=True)
DECAY = number("a number in [0, 1]", _is_decay, errors.DecayError)
DECAY_SCALAR = number("a number in [0, 1]", _is_decay, errors.DecayError, arrays=True)
WEIGHT = number(*_WEIGHT, errors.DecayError)
WEIGHT_SCALAR = number(*_WEIGHT, errors.DecayError, arrays=True)


def require_range(name: str, value: object, constraint: Constraint, /) -> None:
    """Raise unless a constraint accepts a value.

    Parameters
    ----------
    name : str
        Name used in the error message.
    value : object
        What came.
    constraint : Constraint
        What is expected.

    Raises
    ------
    ConventionError, DampingError, DecayError, ShapeError, ArgumentError
        Naming the option, what came and what is expected.
    """
    if not constraint.accepts(value):
        raise constraint.error(
            f"Expected `{name}` to be {constraint.expected}, got {shown(value)}."
        )


def require_options(options: object, /, **constraints: Constraint) -> None:
    """Raise unless each field is one that its option may have; see `require_range`.

    Parameters
    ----------
    options : object
        Instance of a class of options, or a mapping of options.
    **constraints : Constraint
        The constraint of each field that has one.
    """
    values = options if isinstance(options, dict) else vars(options)
    for name, constraint in constraints.items():
        require_range(name, values[name], constraint)


def require_one_of(name: str, value: object, known: tuple[str, ...], /) -> None:
    """Raise `ConventionError` unless a value is one of some strings."""
    # The message is built on the failing path alone: this runs at every step.
    if not isinstance(value, str) or value not in known:
        require_range(name, value, one_of(*known))


def require_check(check: object, /) -> None:
    """Raise `ConventionError` unless it is ``"raise"`` or ``"status"``."""
    if type(check) is not str or check not in ("raise", "status"):
        require_range("check", check, CHECK)


def require_flag(name: str, value: object, /) -> None:
    """Raise `ConventionError` unless a value is True or False."""
    if type(value) is not bool:
        require_range(name, value, FLAG)


def require_kind(
    name: str, value: object, kind: type[Any] | UnionType, expected: str, /
) -> None:
    """Raise `ArgumentError` unless a value is an instance of a class.

    Parameters
    ----------
    name : str
        Name used in the error message.
    value : object
        What came.
    kind : type
        Class, perhaps an abstract one, or a union of classes.
    expected : str
        The class in words.
    """
    if not isinstance(value, kind):
        raise errors.ArgumentError(
            f"Expected `{name}` to be {expected}, got {type(value).__name__}: "
            f"{shown(value)}."
        )


def require_shape(
    name: str, x: Any, shape: tuple[int | str | EllipsisType, ...], hint: str = "", /
) -> None:
    """Raise `ShapeError` unless an array has a shape.

    Parameters
    ----------
    name : str
        Name used in the error message.
    x : array
        What came.
    shape : tuple
        Lengths of axes: a number; a letter for any length of at least 1, the same one
        wherever the letter stands; and, once at most, ``...`` for any number of axes.
    hint : str
        The next step.

    Raises
    ------
    ShapeError
        Naming the array, its shape and what is expected.

    Examples
    --------
    >>> import numpy as np
    >>> from kfac_core import errors
    >>> from kfac_core.constraints import require_shape
    >>> try:
    ...     require_shape("covariance", np.ones((4, 2, 3)), (..., "n", "n"))
    ... except errors.ShapeError as error:
    ...     print(error)
    Expected `covariance` to have shape (..., n, n), got (4, 2, 3).
    """
    axes = tuple(x.shape)
    if not _has_shape(axes, shape):
        parts = ["..." if length is ... else f"{length}" for length in shape]
        expected = ", ".join(parts) + "," * (len(parts) == 1)
        raise errors.ShapeError(
            f"Expected `{name}` to have shape ({expected}), got {axes}.{' ' * bool(hint)}"
            f"{hint}"
        )


def _has_shape(axes: tuple[int, ...], shape: tuple[Any, ...]) -> bool:
    if ... in shape:
        further = len(axes) - len(shape) + 1
        front = shape.index(...)
        if further < 0:
            return False
        # Cut the axes that `...` stands for, and compare the others one by one.
        axes = (*axes[:front], *axes[front + further :])
        shape = (*shape[:front], *shape[front + 1 :])
    if len(axes) != len(shape):
        return False
    # Equal letters stand for equal lengths, as in an einsum.
    lengths: dict[str, int] = {}
    for axis, length in zip(axes, shape, strict=True):
        if isinstance(length, str):
            if axis < 1:
                return False
            length = lengths.setdefault(length, axis)
        if axis != length:
            return False
    return True


def require_any(name: str, values: Sized, /) -> None:
    """Raise `ShapeError` where a sequence or mapping is empty."""
    if not values:
        raise errors.ShapeError(f"Expected at least one of `{name}`, got none.")


def require_names(
    name: str,
    values: Iterable[str],
    names: Iterable[str],
    hint: str = "",
    /,
    *,
    error: type[errors.KFACError] = errors.UnknownBlockError,
) -> None:
    """Raise unless the keys of a mapping are exactly those that are expected.

    Parameters
    ----------
    name : str
        Name used in the error message.
    values : iterable of str
        The mapping, or its keys.
    names : iterable of str
        The keys that are expected.
    hint : str
        The next step.
    error : type
        What is raised.
    """
    actual, expected = list(values), list(names)
    if set(actual) != set(expected):
        missing, unknown = (
            [n for n in some if n not in others]
            for some, others in ((expected, actual), (actual, expected))
        )
        raise error(
            f"Expected `{name}` of {shown(expected)[1:-1]}; missing {shown(missing)}, "
            f"unknown {shown(unknown)}.{' ' * bool(hint)}{hint}"
        )


def require_same(
    what: str,
    values: Mapping[str, Any],
    /,
    *,
    error: type[errors.KFACError] = errors.ShapeError,
) -> None:
    """Raise unless all values of a mapping are equal; `what` names them in the message."""
    if len(set(values.values())) > 1:
        raise error(f"Expected one and the same {what}, got {values}.")


def require_ordered(**numbers: float) -> None:
    """Raise `DampingError` unless numbers, in the order of the arguments, do not fall."""
    values = [*numbers.values()]
    if not all(a <= b for a, b in itertools.pairwise(values)):
        order = " <= ".join(f"`{name}`" for name in numbers)
        listed = " and ".join(map(str, values))
        raise errors.DampingError(f"Expected {order}, got {listed}.")


def unknown_block(
    name: object, blocks: Iterable[str], /, *, option: str | None = None
) -> errors.UnknownBlockError:
    """Return the error for an unknown block name, which lists the known ones."""
    where = "" if option is None else f" in `{option}`"
    return errors.UnknownBlockError(
        f"Unknown block {shown(name)}{where}; the blocks are {shown(list(blocks))[1:-1]}."
    )
