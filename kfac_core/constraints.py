"""Constraints on options: what each may be, in one table, checked in one place.

Conventions.  What kind of value an option takes is said by its annotation: a ``bool``, one
of a ``Literal``, an ``int``, an instance of a class, a mapping of these.  Which numbers are
allowed is said by `RANGES`, by the name of the option; a name with a class goes before the
name alone.  A boolean is no number.  An option that is a Python number or a 0-d array has
its number checked here; the value of an array is not read, since it may be traced or on a
device.

Every public constructor, setter and call has its options checked by this table: a class of
options by `checked`, a function or method by `validated`, and what runs in every step by
`require`.  What they raise names the option, shows what came, and says what is expected.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np

from kfac_core.array.namespaces import namespace_of, require_floating
from kfac_core.errors import (
    ArgumentError,
    ConventionError,
    DampingError,
    DecayError,
    KFACError,
    ShapeError,
    UnknownBlockError,
)

__all__ = [
    "NAMES",
    "RANGES",
    "Constraint",
    "checked",
    "constraints_of",
    "require",
    "require_check",
    "require_flag",
    "require_kind",
    "require_one_of",
    "require_options",
    "require_range",
    "shown",
    "unknown_block",
    "validated",
]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_shortened = reprlib.Repr()
_shortened.maxlevel, _shortened.maxdict, _shortened.maxlist = 3, 8, 8
_shortened.maxstring = _shortened.maxother = 80
shown = _shortened.repr
"""Shows what came, in one line however long or deep it is."""


def unknown_block(
    name: object, blocks: Iterable[str], /, *, option: str | None = None
) -> UnknownBlockError:
    """Return the error of a name that stands for no block, with those that there are."""
    found = f"nknown block {shown(name)}; the blocks are {shown(list(blocks))[1:-1]}."
    return UnknownBlockError(f"U{found}" if option is None else f"`{option}`: u{found}")


@dataclasses.dataclass(frozen=True)
class Constraint:
    """What an option may be.

    Attributes
    ----------
    expected : str
        As it stands in a message after "to be".
    accepts : callable
        Whether a value is allowed; never raises.
    error : type
        What is raised for another value.
    """

    expected: str
    accepts: Callable[[Any], bool]
    error: type[KFACError] = ConventionError


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_scalar_array(value: Any) -> bool:
    """Whether a value is a 0-d array of real numbers, perhaps a traced one."""
    try:
        xp = namespace_of(value=value)
        if not xp.isdtype(value.dtype, "integral"):
            require_floating(xp, value, "value")
    except (TypeError, AttributeError, KFACError):
        return False
    return bool(value.ndim == 0)


def _number(
    expected: str,
    holds: Callable[[float], bool],
    error: type[KFACError] = ConventionError,
    *,
    arrays: bool = False,
) -> Constraint:
    """Return the constraint of a finite number, or also of a 0-d array."""

    def accepts(value: Any) -> bool:
        if not _is_number(value):
            return arrays and _is_scalar_array(value)
        try:
            return holds(float(value))
        except OverflowError:  # an integer beyond the range of floats
            return False

    return Constraint(expected + " or a 0-d array" * arrays, accepts, error)


def _integer(least: int, error: type[KFACError] = ConventionError) -> Constraint:
    """Return the constraint of a whole number."""

    def accepts(value: Any) -> bool:
        if isinstance(value, (bool, np.bool_, np.ndarray)):
            return False
        try:
            return operator.index(value) >= least
        except (TypeError, ValueError):  # also of arrays of other libraries
            return False

    return Constraint(f"an integer >= {least}", accepts, error)


def _is_in_unit_interval(x: float) -> bool:
    return 0.0 <= x <= 1.0


def _is_not_negative(x: float) -> bool:
    return 0.0 <= x < math.inf


def _is_positive(x: float) -> bool:
    return 0.0 < x < math.inf


def _is_weight(x: float) -> bool:
    """Whether sums with this weight neither overflow nor vanish in float32."""
    return 1e-20 <= x <= 1e20


def _is_between(x: float) -> bool:
    return 0.0 < x < 1.0


def _is_factor_down(x: float) -> bool:
    return 0.0 < x <= 1.0


def _is_momentum(x: float) -> bool:
    return 0.0 <= x < 1.0


def _is_positive_or_infinite(x: float) -> bool:
    return x > 0.0


_WEIGHTS = "a finite number > 0, in [1e-20, 1e20]"
_DAMPING = _number("a finite number >= 0", _is_not_negative, DampingError, arrays=True)
_DECAY = _number("a number in [0, 1]", _is_in_unit_interval, DecayError, arrays=True)
_NUMBER_OF_DECAY = _number("a number in [0, 1]", _is_in_unit_interval, DecayError)
_WEIGHT = _number(_WEIGHTS, _is_weight, DecayError, arrays=True)
_NOT_NEGATIVE = _number("a finite number >= 0", _is_not_negative)
_POSITIVE = _number("a finite number > 0", _is_positive)
_NOT_NEGATIVE_SCALAR = _number("a finite number >= 0", _is_not_negative, arrays=True)
_POSITIVE_SCALAR = _number("a finite number > 0", _is_positive, arrays=True)
_LIMIT = _number("a number > 0", _is_positive_or_infinite)
_LIMIT_SCALAR = _number("a number > 0", _is_positive_or_infinite, arrays=True)
_NUMBER_OR_ARRAY = Constraint(
    "a finite number >= 0 or an array",
    lambda value: _NOT_NEGATIVE.accepts(value) or hasattr(value, "dtype"),
)
# Numbers that are looked at where the matrix has a name, for one matrix or many.
_OF_A_STACK = Constraint(
    "a number or an array",
    lambda value: _is_number(value) or hasattr(value, "dtype"),
    DampingError,
)
# Losses may overflow, and a step is refused then.
_ANY_NUMBER = _number("a number", lambda _: True)
_FRACTION = _number("a number in (0, 1)", _is_between)
_FINITE_SCALAR = _number("a finite number", math.isfinite, arrays=True)
# Options of the search for gamma, which is the root of a damping.
_OF_GAMMA = {
    f"{name}.{option}": constraint
    for name in ("gamma_candidates", "search_gamma")
    for option, constraint in (
        ("gamma", _number("a number > 0", _is_positive, DampingError, arrays=True)),
        ("factor", _number("a number in (0, 1)", _is_between, DampingError)),
        ("minimum", _number("a number >= 0", _is_not_negative, DampingError)),
        ("maximum", _number("a number > 0", _is_positive_or_infinite, DampingError)),
    )
}
_OF_MARQUARDT = {
    f"levenberg_marquardt.{option}": constraint
    for option, constraint in (
        ("decay", _number("a number in (0, 1]", _is_factor_down, DampingError)),
        ("minimum", _number("a number >= 0", _is_not_negative, DampingError)),
        ("maximum", _number("a number > 0", _is_positive_or_infinite, DampingError)),
    )
}
_OF_MARQUARDT["levenberg_marquardt.reduction_ratio"] = _number(
    "a number", lambda _: True, DampingError, arrays=True
)
_COUNT = _integer(1)
_WHOLE = _integer(0)
_SIZE = _integer(1, ShapeError)

RANGES: Mapping[str, Constraint] = {
    "damping": _DAMPING,
    "decay": _DECAY,
    "Estimator.decay": _NUMBER_OF_DECAY,
    "moment_decay": _NUMBER_OF_DECAY,
    "weight": _WEIGHT,
    "Averaging.weight": _number(_WEIGHTS, _is_weight, DecayError),
    "vectors.weight": _NUMBER_OR_ARRAY,
    "burn_in": _integer(0),
    "failure_budget": _integer(0),
    "least_shift": _NOT_NEGATIVE,
    "Distributed.interval": _COUNT,
    "workers": _COUNT,
    "max_patch_elements": _COUNT,
    "iterations": _COUNT,
    "steps": _COUNT,
    "in_features": _SIZE,
    "out_features": _SIZE,
    "in_channels": _SIZE,
    "out_channels": _SIZE,
    "num_embeddings": _SIZE,
    "features": _SIZE,
    "groups": _SIZE,
    "ExampleGram.gradients": _SIZE,
    "ExampleGram.positions": _SIZE,
    "kernel_size": _SIZE,
    "strides": _SIZE,
    "dilation": _SIZE,
    "padding": _integer(0, ShapeError),
    "shapes": _SIZE,
    "shape": _SIZE,
    "scale_shape": _SIZE,
    "shift_shape": _SIZE,
    "scale": _POSITIVE_SCALAR,
    "SquaredError.scale": _POSITIVE,
    "ScaledIdentity.scale": _NOT_NEGATIVE,
    "variance": _POSITIVE,
    # Steps.
    "learning_rate": _NOT_NEGATIVE_SCALAR,
    "NaturalGradient.learning_rate": _POSITIVE_SCALAR,
    "momentum": _number("a number in [0, 1)", _is_momentum, arrays=True),
    "weight_decay": _FINITE_SCALAR,
    "bound": _POSITIVE_SCALAR,
    "trust_region_rate.maximum": _LIMIT_SCALAR,
    **_OF_GAMMA,
    **_OF_MARQUARDT,
    "KFAC.adapt_damping.factor": _FRACTION,
    "minimum": _NOT_NEGATIVE,
    "maximum": _LIMIT,
    "lower": _NOT_NEGATIVE,
    "upper": _NOT_NEGATIVE,
    "KFAC.adapt_damping.loss_before": _ANY_NUMBER,
    "KFAC.adapt_damping.loss_after": _ANY_NUMBER,
    "examples": _number(
        "a finite number >= 0", _is_not_negative, DampingError, arrays=True
    ),
    "damping_fraction": _number(
        "a finite number >= 0", _is_not_negative, DampingError, arrays=True
    ),
    "curvature_of_outputs.examples": _number(
        "a finite number > 0", _is_positive, ShapeError, arrays=True
    ),
    "prior_precision": _number(
        "a finite number > 0", _is_positive, DampingError, arrays=True
    ),
    "inverse_root.damping": _OF_A_STACK,
    "OrderedBasis.multiply_matpower.damping": _OF_A_STACK,
    "degree": _COUNT,
    "samples": _SIZE,
    **dict.fromkeys(("place.size", "run_ranks.size"), _COUNT),
    "max_elements": _COUNT,
    # Options of integrations.
    "seed": _WHOLE,
    "grad_scale": _POSITIVE,
    "kernel_shape": _SIZE,
    "fewest": _COUNT,
    "target_size": _SIZE,
    "RowLoss.weight.outputs": _COUNT,
    **dict.fromkeys(("KFAC.observe.rows", "KFAC.step.rows"), _COUNT),
    "lr": _NOT_NEGATIVE,
    "KFACOptimizer.damping": _NOT_NEGATIVE,
    "l2": _NOT_NEGATIVE,
    "adapt_factor": _FRACTION,
    "min_damping": _NOT_NEGATIVE,
    "max_damping": _LIMIT,
    "kl_clip": _POSITIVE_SCALAR,
    **dict.fromkeys(
        ("update_every", "refresh_every", "bases_every", "adapt_every"), _COUNT
    ),
    # Processes.
    "rank": _WHOLE,
    "source": _WHOLE,
    "timeout": _POSITIVE,
    "holders": _COUNT,
    "bucket_bytes": _COUNT,
    "memory": _COUNT,
    **dict.fromkeys(("syrk", "potrf", "potri", "symm", "trsm", "eigh"), _POSITIVE),
}
"""The numbers that an option may be, by its name."""

_BOOLEAN = Constraint("True or False", lambda value: type(value) is bool)
_TEXT = Constraint("a string", lambda value: isinstance(value, str))


def _can_be_iterated(value: Any) -> bool:
    try:
        iter(value)
    except TypeError:
        return False
    return True


_of_class: dict[type[Any], Mapping[str, Constraint]] = {}
"""The constraints of the fields of each class that was `checked`."""

NAMES = Constraint(
    "an iterable of names, and no string",
    lambda value: not isinstance(value, (str, bytes)) and _can_be_iterated(value),
)
_FUNCTION = Constraint("a function", callable)
_NONE = Constraint("None", lambda value: value is None)


def require(owner: Callable[..., Any], /, **values: Any) -> None:
    """Raise unless each value is one that its option may have.

    Parameters
    ----------
    owner : callable
        The class or function whose parameters they are.
    **values
        Values by the names of the parameters.

    Raises
    ------
    ConventionError, DampingError, DecayError, ShapeError, ArgumentError
        Naming the option, what came and what is expected.
    """
    constraints = constraints_of(owner)
    for name, value in values.items():
        require_range(name, value, constraints[name])


def require_options(options: Any, /) -> None:
    """Raise unless every field of a dataclass is one that its option may have.

    Parameters
    ----------
    options : dataclass
        Instance, as in its ``__post_init__``.

    Raises
    ------
    ConventionError, DampingError, DecayError, ShapeError, ArgumentError
        See `require`.
    """
    for name, constraint in _of_class[type(options)].items():
        require_range(name, getattr(options, name), constraint)


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
    """
    if not constraint.accepts(value):
        raise constraint.error(
            f"Expected `{name}` to be {constraint.expected}, got {shown(value)}."
        )


def require_check(check: object, /) -> None:
    """Raise `ConventionError` unless it is ``"raise"`` or ``"status"``."""
    if type(check) is not str or check not in ("raise", "status"):
        require_one_of("check", check, ("raise", "status"))


def require_flag(name: str, value: object, /) -> None:
    """Raise `ConventionError` unless a value is True or False."""
    if type(value) is not bool:
        require_range(name, value, _BOOLEAN)


def require_one_of(name: str, value: object, known: tuple[str, ...], /) -> None:
    """Raise `ConventionError` unless a value is one of some strings.

    Parameters
    ----------
    name : str
        Name used in the error message.
    value : object
        What came.
    known : tuple of str
        What is expected.
    """
    if type(value) is not str or value not in known:
        raise ConventionError(
            f"Expected `{name}` to be one of {', '.join(map(repr, known))}, got "
            f"{shown(value)}."
        )


def checked(cls: type[T], /) -> type[T]:
    """Find the constraints of a dataclass, for `require_options`.

    A class decorator: a function compiler that follows ``__post_init__`` later could not
    read annotations.

    Parameters
    ----------
    cls : type
        Dataclass.

    Returns
    -------
    type
        The same class.
    """
    owner: Any = cls
    _of_class[cls] = constraints_of(owner)
    return cls


def require_kind(name: str, value: Any, kind: type[Any], expected: str, /) -> None:
    """Raise `ArgumentError` unless a value is an instance of a class.

    Parameters
    ----------
    name : str
        Name used in the error message.
    value : object
        What came.
    kind : type
        Class, perhaps an abstract one.
    expected : str
        The class in words.
    """
    if not isinstance(value, kind):
        raise ArgumentError(
            f"Expected `{name}` to be {expected}, got {type(value).__name__}: "
            f"{shown(value)}."
        )


def validated(function: F, /) -> F:
    """Check the options of a function or method by the table, whenever it is called.

    Defaults are not checked, and arguments that are missing or unknown are left to Python.

    Parameters
    ----------
    function : callable
        Function, method or ``__init__``.

    Returns
    -------
    callable
        The same with the check before it.
    """
    kinds = inspect.Parameter
    parameters = inspect.signature(function).parameters
    positional = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    rest = [
        name
        for name, parameter in parameters.items()
        if parameter.kind is kinds.VAR_POSITIONAL
    ]
    constraints = constraints_of(function)
    if not constraints:
        return function
    key = f"{function.__module__}.{function.__qualname__}"
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    _calls[key] = _Call(positional, rest, constraints, defaults)

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        # By its name, since compilers follow what is global, and not what is enclosed.
        known = _calls[key]
        names = [
            *known.positional,
            *known.rest * (len(arguments) - len(known.positional)),
        ]
        for name, value in (*zip(names, arguments, strict=False), *options.items()):
            constraint = known.constraints.get(name)
            if constraint is not None and value is not known.defaults[name]:
                require_range(name, value, constraint)
        return function(*arguments, **options)

    made: Any = call
    return made  # type: ignore[no-any-return]


class _Call(NamedTuple):
    """What is known of the parameters of a validated function."""

    positional: list[str]
    rest: list[str]
    constraints: Mapping[str, Constraint]
    defaults: Mapping[str, Any]


_calls: dict[str, _Call] = {}


def constraints_of(owner: Callable[..., Any], /) -> Mapping[str, Constraint]:
    """Return the constraint of each parameter of a class or function that has one.

    Parameters
    ----------
    owner : callable
        Dataclass, class or function.

    Returns
    -------
    mapping of str to Constraint
        Parameters that take arrays have none.
    """
    if dataclasses.is_dataclass(owner):
        names = [field.name for field in dataclasses.fields(owner) if field.init]
        hints = get_type_hints(owner)
    else:
        names = [*inspect.signature(owner).parameters]
        function: Any = vars(owner)["__init__"] if isinstance(owner, type) else owner
        hints = _hints_of_parameters(function)
    label = owner.__qualname__.removesuffix(".__init__")
    found: dict[str, Constraint] = {}
    for name in names:
        numbers_allowed = RANGES.get(f"{label}.{name}", RANGES.get(name))
        constraint = _constraint(hints.get(name, Any), numbers_allowed)
        if constraint is not None:
            found[name] = constraint
    return found


def _hints_of_parameters(function: Any) -> dict[str, Any]:
    """Return the annotations of parameters; what is returned may not be defined yet."""

    def parameters() -> None: ...

    parameters.__annotations__ = {
        name: hint
        for name, hint in function.__annotations__.items()
        if name != "return"
    }
    own = inspect.unwrap(function)
    return get_type_hints(parameters, globalns=own.__globals__)


def _constraint(hint: Any, allowed: Constraint | None) -> Constraint | None:
    """Return the constraint that an annotation says, with the numbers allowed."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return allowed
    if hint is bool:
        return _BOOLEAN
    if hint is str:
        return _TEXT
    if hint in (NoneType, None):
        return _NONE
    if hint in (int, float):
        return allowed
    if origin is Literal:
        return _one_of(inner)
    if origin in (Union, UnionType):
        return _any_of([_constraint(part, allowed) for part in inner])
    if origin is tuple and inner[-1:] == (...,):
        return _several(_constraint(inner[0], allowed), tuple, "a tuple")
    if origin is tuple:
        return _tuple_of([_constraint(part, allowed) for part in inner])
    if origin is Sequence:
        return _several(_constraint(inner[0], allowed), Sequence, "a sequence")
    if origin is Iterable:
        return NAMES
    if origin is Callable or hint is Callable:
        return _FUNCTION
    if origin is not None and issubclass(origin, Mapping):
        keys, values = (_constraint(part, allowed) for part in inner)
        return _mapping_of(keys, values)
    return _instance_of(hint) if isinstance(hint, type) else None


def _one_of(choices: tuple[Any, ...]) -> Constraint:
    kinds = tuple({type(choice) for choice in choices})
    return Constraint(
        f"one of {', '.join(map(repr, choices))}",
        lambda value: type(value) in kinds and value in choices,
    )


def _any_of(parts: list[Constraint | None]) -> Constraint | None:
    if None in parts:
        return None
    known = [part for part in parts if part is not None]
    errors = [part.error for part in known if part.error is not ConventionError]
    return Constraint(
        " or ".join(part.expected for part in known),
        lambda value: any(part.accepts(value) for part in known),
        errors[0] if errors else ConventionError,
    )


def _several(part: Constraint | None, kind: type[Any], name: str) -> Constraint | None:
    """Return the constraint of a sequence; a string is none."""
    if part is None:
        return None
    return Constraint(
        f"{name} of items that are each {part.expected}",
        lambda value: (
            isinstance(value, kind)
            and not isinstance(value, (str, bytes))
            and all(map(part.accepts, value))
        ),
        part.error,
    )


def _tuple_of(parts: list[Constraint | None]) -> Constraint | None:
    if None in parts:
        return None
    known = [part for part in parts if part is not None]
    return Constraint(
        f"({', '.join(part.expected for part in known)})",
        lambda value: (
            isinstance(value, (tuple, list))
            and len(value) == len(known)
            and all(p.accepts(v) for p, v in zip(known, value, strict=True))
        ),
        next(
            (p.error for p in known if p.error is not ConventionError), known[0].error
        ),
    )


def _mapping_of(key: Constraint | None, part: Constraint | None) -> Constraint:
    return Constraint(
        "a mapping" + (f" to {part.expected}" if part is not None else ""),
        lambda value: (
            isinstance(value, Mapping)
            and (key is None or all(map(key.accepts, value)))
            and (part is None or all(map(part.accepts, value.values())))
        ),
        part.error if part is not None else ArgumentError,
    )


def _instance_of(cls: type[Any]) -> Constraint:
    if getattr(cls, "_is_protocol", False):
        # A protocol is met by anything that has its members.
        members = _members(cls)
        return Constraint(
            f"{_article(cls.__name__)} {cls.__name__}",
            lambda value: all(_has(value, name) for name in members),
            ArgumentError,
        )
    return Constraint(
        f"{_article(cls.__name__)} {cls.__name__}",
        lambda value: isinstance(value, cls),
        ArgumentError,
    )


def _members(protocol: type[Any]) -> frozenset[str]:
    """Return the methods of a protocol, which everything that meets it has."""
    return frozenset(
        name
        for name, value in vars(protocol).items()
        if callable(value) and (not name.startswith("_") or name == "__call__")
    )


def _has(value: Any, member: str) -> bool:
    if member == "__call__":
        return callable(value)
    return hasattr(type(value), member)


def _article(word: str) -> str:
    return "an" if word[0] in "AEIO" else "a"
