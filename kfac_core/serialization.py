"""A network's state as plain dicts and arrays, written and checked here.

Conventions.  A state holds its format and version, the ``conventions`` and ``settings``
of its estimator, and for each block its layer, its approximation, and its
``values``: arrays and numbers by their path, such as ``"statistics.averages.input.sum"``.
Fields that are None have no path.  A symmetric matrix is one triangle, as
`kfac_core.linalg.packing` packs it, whatever a library keeps of it.  Counts and dampings
are Python's numbers, also where the state is one of arrays alone.

No class is named there.  The network that reads supplies a template: empty statistics and
the operator made of them, without factorizations.  Parts that the template lacks, such as
an inverse, are read by their annotation.

Everything is checked before anything is returned: the description, paths, shapes, dtypes,
that no number is NaN or infinite, and that an operator's products are defined.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator as operators
from collections.abc import Callable, Collection, Mapping
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import array_api_compat
import numpy as np

from kfac_core import constraints, errors
from kfac_core.approximations.options import DampingScaling, RefreshOptions
from kfac_core.array import Array, Scalar, Status, replaced
from kfac_core.array import namespaces as ns
from kfac_core.array.precision import Precision
from kfac_core.array.structure import fields_of, leaves
from kfac_core.array.types import Tree
from kfac_core.block import Block
from kfac_core.constraints import shown
from kfac_core.damping import DampingRule, require_damping
from kfac_core.factors.average import require_decay
from kfac_core.factors.statistics import Statistics
from kfac_core.linalg import packing
from kfac_core.linalg.fallback import Fallback
from kfac_core.linalg.symmetric import SymmetricMatrix
from kfac_core.network import Network
from kfac_core.operators.operator import FACTORIZATION_OF, CurvatureOperator
from kfac_core.stages import operator_of
from kfac_core.state import BlockState, NetworkState

FORMAT = "kfac_core.estimator"
VERSION = 2

_COUNTS = [
    name
    for name, _ in fields_of(BlockState)
    if type(getattr(BlockState, name, None)) is int
]
"""The counts of a block, which are zero or -1 in an empty state."""

_NUMBERS = (bool, int, float, str)
_STATE = {"format", "version", "conventions", "settings", "blocks"}
_BLOCK = {"layer", "approximation", "values"}
_LARGEST_COUNT = 2**31 - 1
_LARGEST_ROUNDOFF = 2.0**-10
"""Relative roundoff of the widest errors that statistics are stored with."""
_ALL_FLAGS = functools.reduce(operators.or_, Status).value
_NOT_NEGATIVE = (
    *("change", "clipped", "damping", "doublings", "error", "factor", "norm", "rank"),
    *("residual", "rows", "scale", "shift"),
)
_LARGEST = dict.fromkeys(_NOT_NEGATIVE, math.inf) | {
    "fallback": max(Fallback).value,
    "flags": _ALL_FLAGS,
    "roundoff": _LARGEST_ROUNDOFF,
    "status": _ALL_FLAGS,
}
"""Values by the last word of their path that are at least 0, and how large they may be."""
_LARGEST_UNKNOWN = 2**28
"""How many numbers an array may hold that no statistic is as large as."""


@dataclasses.dataclass(frozen=True)
class DeferredArray:
    """An array in a state that is read only when its shape is known to be right.

    Attributes
    ----------
    dtype : str
        Name of its dtype, such as ``"float64"``.
    shape : tuple of int
        Shape.
    read : callable
        Returns the array.
    like : callable
        Returns a 0-d array of its library, device and dtype.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Any] = dataclasses.field(repr=False)
    like: Callable[[], Any] = dataclasses.field(repr=False)


def dump_state(
    network: Network,
    state: NetworkState,
    promises: Mapping[str, Any],
    *,
    damping: Scalar | Mapping[str, Scalar],
    decay: float,
    deferred: bool = False,
) -> dict[str, Any]:
    """Return a state as plain dicts and copies of its arrays.

    Parameters
    ----------
    network : Network
        The description.
    state : NetworkState
        Everything that changes; this synchronizes with the device.
    promises : mapping of str to object
        Conventions that must be equal where the state is loaded.
    damping, decay
        Damping of the next refresh and decay of the next update, restored when the state is
        loaded.
    deferred : bool
        Whether arrays are not copied, and triangles are functions that pack them.

    Returns
    -------
    dict
        State in the documented form.
    """
    settings = {
        "damping": {name: _damping(value) for name, value in damping.items()}
        if isinstance(damping, Mapping)
        else _damping(damping),
        "damping_rule": network.damping_rule,
        "damping_scaling": network.refreshing.damping_scaling,
        "decay": float(decay),
        "weight": float(network.averaging.weight),
        "burn_in": int(network.averaging.burn_in),
    }
    return {
        "format": FORMAT,
        "version": VERSION,
        "conventions": dict(promises),
        "settings": settings,
        "blocks": {
            name: {
                **_description(network.blocks[name]),
                "values": _values(block_state, deferred),
            }
            for name, block_state in state.blocks.items()
        },
    }


def parse_state(
    state: object,
    network: Network,
    promises: Mapping[str, Any],
    names: Collection[str] | None = None,
) -> tuple[Network, NetworkState, dict[str, Any]]:
    """Check a state against a network, and return it as structures.

    Parameters
    ----------
    state : mapping
        State made by `dump_state`.
    network : Network
        Network of the estimator that loads it.
    promises : mapping of str to object
        The conventions of that estimator.
    names : collection of str, optional
        Blocks that it has; all by default.

    Returns
    -------
    network : Network
        With the settings of the state.
    state : NetworkState
        With Python's numbers for counts and dampings.
    settings : dict of str to object
        The damping and the decay.

    Raises
    ------
    StateError
        With the path, the value there and the expectation.
    """
    if not isinstance(state, Mapping) or _text(state.get("format")) != _text(FORMAT):
        raise errors.StateError(f"Expected a state of format {FORMAT!r}.")
    # Compare as JSON text, since True == 1.
    version = state.get("version")
    expected = f"{VERSION}, of this release of kfac_core"
    _require(_text(version) == _text(VERSION), "version", expected, shown(version))
    _require_known(state, _STATE, "the state")
    _require_equal(state.get("conventions"), promises, "conventions")
    parts = _mapping(state, "blocks")
    hint = "`load_checkpoint` takes other `names`."
    names = network.blocks if names is None else names
    constraints.require_names("blocks", parts, names, hint, error=errors.StateError)
    try:
        network, settings = _with_settings(network, _mapping(state, "settings"))
    except errors.KFACError as error:
        raise errors.StateError(f"settings: {error}") from error
    blocks: dict[str, BlockState] = {}
    for name in names:
        try:
            blocks[name] = _block(_mapping(parts, name), network, name)
        except errors.KFACError as error:
            raise errors.StateError(f"block {name!r}: {error}") from error
    return network, NetworkState(blocks), settings


def _damping(value: Scalar) -> float:
    """Return a damping as a number; the value of an array is checked only here."""
    number = float(value)
    try:
        require_damping(number)
    except errors.DampingError as error:
        raise errors.StateError(str(error)) from None
    return number


def _description(block: Block) -> dict[str, Any]:
    """Return the description of a block in the form of parsed JSON."""
    layer: Any = block.layer
    approximation: Any = block.approximation
    described = {
        "layer": {"kind": layer.kind, **dataclasses.asdict(layer)},
        "approximation": {
            "name": approximation.name,
            **dataclasses.asdict(approximation),
        },
    }
    # Through JSON, so that tuples are lists, as they are after reading a file.
    return json.loads(json.dumps(described, default=operators.index))  # type: ignore[no-any-return]


def _values(state: BlockState, deferred: bool) -> dict[str, Any]:
    """Return the arrays and numbers of a block by their paths."""
    if state.operator is not None and bool(state.operator.status() != 0):
        # A first refresh by status failed on a device: an operator of NaN is of no use.
        state = replaced(state, operator=None, damping=None)
    damping = None if state.damping is None else float(state.damping)
    counts = {name: int(getattr(state, name)) for name in _COUNTS}
    values: dict[str, Any] = {}
    _collect(replaced(state, damping=damping, **counts), "", values)
    return values if deferred else {k: _copied(x) for k, x in values.items()}


def _copied(value: Array) -> Array:
    """Return a packed triangle, the copy of an array, or a number as it is."""
    if callable(value):
        return value()
    if type(value) in _NUMBERS:
        return value
    return ns.own_namespace(value).asarray(value, copy=True)


def _collect(value: Tree, path: str, values: dict[str, Any]) -> None:
    """Collect the fields of a structure by path."""
    cls = type(value)
    if cls is SymmetricMatrix:
        values[path] = packing.Triangle(value.array)
        # The roundoff of a factorization depends on both, and resuming is bit for bit.
        values[_below(path, "row_major")] = ns.is_row_major(value.array)
        values[_below(path, "full_storage")] = value.full_storage
    elif fields_of(cls):
        for name, static in fields_of(cls):
            if not static or _choices(cls, name) or _is_number(cls, name):
                _collect(getattr(value, name), _below(path, name), values)
    elif cls is dict:
        for name, part in value.items():
            _collect(part, _below(path, name), values)
    elif value is not None:
        values[path] = value


def _block(part: Mapping[str, Any], network: Network, name: str) -> BlockState:
    """Return the state of one block; messages are to be headed by its name."""
    block = network.blocks[name]
    for key, expected in _description(block).items():
        _require_equal(part.get(key), expected, key)
    _require_known(part, _BLOCK, "the block")
    values = _Values(_mapping(part, "values"))
    template = _template(values, network, name)
    # No array of a block is larger than its statistics or its dense matrix.
    dense = math.prod(network.blocks[name].layer.matrix_shape) ** 2
    sizes = [math.prod(x.shape) for x in _arrays(template)]
    values.largest = max([*sizes, min(dense, _LARGEST_UNKNOWN)])
    state: BlockState = values.read("", BlockState, template)
    values.require_empty()
    if state.statistics is not None:
        # A sum of weights grows by at most one weight an update; a larger one is
        # damaged and would shrink the factors.
        most = max(1.0, network.averaging.weight) * max(state.updates, 1)
        _check_statistics(state.statistics, network.precision, most)
        _check_flags(state.statistics, block)
        _check_factors(state.statistics, network.shared_factors.taken_by(name))
    if state.operator is not None:
        _check_operator(state.operator, block)
    return state


def _template(values: _Values, network: Network, name: str) -> BlockState:
    """Return an empty state, with statistics and an operator if values exist for them."""
    present = [part for part in ("statistics", "operator") if values.holds(part)]
    stray = "operator" not in present and values.holds("damping")
    _require(not stray, "damping", "that of an operator", "none of these")
    if not present:
        return BlockState()
    block, like = network.blocks[name], values.like(present[0])
    empty = block.initial(like, precision=network.precision)
    statistics = empty if "statistics" in present else None
    if "operator" not in present:
        return BlockState(statistics)
    # An operator of empty statistics shows the classes and shapes that a file may hold;
    # values replace its zeros.
    options = RefreshOptions(
        damping=1.0,
        rule=network.damping_rule,
        factorizations=(),
        keep_matrices=not values.is_of_factorizations(),
        precision=network.precision,
    )
    operator = operator_of(block, empty, options, name=name)
    return BlockState(statistics, operator, damping=1.0)


class _Values:
    """The arrays and numbers of one block, each of which is read once.

    Parameters
    ----------
    values : mapping of str to object
        Values by path.

    Attributes
    ----------
    largest : int
        Most numbers of an array whose shape the template does not determine.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.left = {str(path): value for path, value in values.items()}
        self._parts: set[str] = set()
        for path in self.left:
            # Every prefix of a path is a structure that the state holds.
            while path and path not in self._parts:
                self._parts.add(path)
                path = path.rpartition(".")[0]
        self.largest = 0
        self._like: Any = None

    def holds(self, path: str) -> bool:
        """Whether there is a value at a path or below it."""
        return path in self._parts

    def is_of_factorizations(self) -> bool:
        """Whether the operator was written without its matrices."""
        norms = (p for p in self.left if p.startswith("operator."))
        return any(p.endswith(".kept_norm") for p in norms)

    def like(self, part: str) -> Array:
        """Return an array of a part, of whose library and device all must be."""
        below = [x for path, x in self.left.items() if path.startswith(f"{part}.")]
        self._like = next(filter(_is_real, below), None)
        _require(self._like is not None, part, "of arrays of real numbers", "none")
        if type(self._like) is DeferredArray:
            self._like = self._like.like()
        return self._like

    def read(self, path: str, hint: object, like: Tree) -> Tree:
        """Read the values at a path and below, in the form of a template or annotation."""
        if isinstance(like, dict):
            parts = like.items()
            return {n: self.read(_below(path, n), Any, part) for n, part in parts}
        if type(like) in (int, float):
            return self.number(path, like)
        cls: Any = _structure_in(hint) if like is None else type(like)
        if like is None and NoneType in get_args(hint) and not self.holds(path):
            return None
        if cls is SymmetricMatrix:
            return self._symmetric(path, like)
        if not fields_of(cls):
            return self._array(path, like, None if like is None else tuple(like.shape))
        fields: dict[str, Any] = {}
        for name, static in fields_of(cls):
            inner, default = _below(path, name), getattr(like, name, None)
            choices = _choices(cls, name) if static else ()
            if like is not None and default is None and not self.holds(inner):
                fields[name] = None
            elif choices:
                fields[name] = self.choice(inner, choices)
            elif static and _is_number(cls, name):
                fields[name] = self.number(inner, 0.0)
            else:
                fields[name] = (
                    default if static else self.read(inner, _hints(cls)[name], default)
                )
        return cls(**fields)

    def pop(self, path: str) -> Array:
        """Remove and return the value at a path."""
        _require(path in self.left, path, "in the state", "nothing")
        return self.left.pop(path)

    def require_empty(self) -> None:
        """Raise where anything is left."""
        _require(
            not self.left, "all", "values of the block", f"also {shown([*self.left])}"
        )

    def number(self, path: str, like: float) -> Any:
        """Read a count, at least the one of an empty state, or another number."""
        value, least = self.pop(path), min(like, 0)
        most = _LARGEST_COUNT if type(like) is int else math.inf
        most = _LARGEST.get(_field(path), most)
        good = type(value) is type(like) and ns.is_finite_number(value)
        expected = f"a finite {type(like).__name__} of at least {least}"
        expected += f" and at most {most:g}" if most < _LARGEST_COUNT else ""
        _require(good and least <= value <= most, path, expected, shown(value))
        return value

    def choice(self, path: str, choices: tuple[Any, ...]) -> Any:
        """Read one of a few values."""
        value = self.pop(path)
        good = type(value) is type(choices[0]) and value in choices
        _require(good, path, f"one of {choices}", shown(value))
        return value

    def _symmetric(self, path: str, like: SymmetricMatrix | None) -> SymmetricMatrix:
        """Read the triangle of a symmetric matrix."""
        shape = None
        if like is not None:
            shape = (*like.array.shape[:-2], *packing.packed_shape(like.size))
        packed = self._array(path, None if like is None else like.array, shape)
        n: Any = packing.packed_rows(tuple(packed.shape[-2:]))
        _require(n is not None, path, "a packed triangle", f"shape {packed.shape}")
        row_major = self.choice(_below(path, "row_major"), (True, False))
        both_triangles = self.choice(_below(path, "full_storage"), (True, False))
        return packing.PackedMatrix(packed, n, both_triangles, row_major).unpacked()

    def _array(self, path: str, like: Array, shape: tuple[int, ...] | None) -> Array:
        """Read a copy of an array with the shape and the kind of another."""
        x = self.pop(path)
        shape_of_x = tuple(getattr(x, "shape", shape or ()))
        _require(shape in (None, shape_of_x), path, f"of shape {shape}", shape_of_x)
        if type(x) is DeferredArray:
            good = shape is not None or math.prod(x.shape) <= self.largest
            _require(
                good, path, f"of at most {self.largest} numbers", f"shape {x.shape}"
            )
            x = x.read()
        xp = ns.namespace_of(**{path: x, "the others": self._like})
        real = _is_real(x)
        known = real or x.dtype == xp.int32
        _require(known, path, "of float32, float64 or int32", x.dtype)
        if like is not None:
            alike = real == _is_real(like)
            _require(alike, path, f"of a dtype as {like.dtype}", x.dtype)
        bad = real and not bool(xp.all(xp.isfinite(x)))
        _require(not bad, path, "finite", "NaN or infinity")
        most = _LARGEST.get(_field(path))
        good = most is None or bool(xp.all(x >= 0))
        if most is not None and most < math.inf:
            good = good and bool(xp.all(x <= most))
        _require(good, path, f"in [0, {most}]", "others")
        # The caller may go on to change the arrays of the state that was loaded.
        return xp.asarray(x, copy=True)


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _field(path: str) -> str:
    return path.rpartition(".")[2]


def _structure_in(hint: object) -> type[Any] | None:
    """Return the class of structures that an annotation allows, if any."""
    return next(filter(fields_of, get_args(hint) or (hint,)), None)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _choices(cls: type, name: str) -> tuple[Any, ...]:
    """Return the values of a static field that may differ between equal networks.

    Such as whether a block has been checked to be definite; others are the template's.
    """
    hint = _hints(cls)[name]
    return (
        (False, True)
        if hint is bool
        else get_args(hint) * (get_origin(hint) is Literal)
    )


def _is_number(cls: type, name: str) -> bool:
    """Whether a static field is a number, which differs between equal networks."""
    return _hints(cls)[name] is float


def _arrays(value: Tree) -> list[Any]:
    """Return the arrays of a structure."""
    return [x for _, x in leaves(value) if array_api_compat.is_array_api_obj(x)]


def _is_real(x: Array) -> bool:
    """Whether something is an array of float32 or float64."""
    if type(x) is DeferredArray:
        return x.dtype in ("float32", "float64")
    if not array_api_compat.is_array_api_obj(x):
        return False
    xp = ns.own_namespace(x)
    return x.dtype in (xp.float32, xp.float64)


def _check_statistics(
    statistics: Statistics, precision: Precision, most: float
) -> None:
    """Check dtypes, and weights against the number of updates."""
    xp = statistics.namespace
    dtype = precision.dtype(precision.storage, statistics.dtype, xp=xp)
    for path, x in leaves(statistics):
        good = not _is_real(x) or x.dtype == dtype
        expected = f"of dtype {dtype}, as Precision(storage=...) says"
        _require(good, f"statistics.{path}", expected, x.dtype)
    for name, average in statistics.averages.items():
        weight = float(average.weight)
        expected = f"in [0, {most:.6g}], after so many updates"
        _require(
            0 <= weight <= most * 1.001, f"the weight of {name!r}", expected, weight
        )


def _check_flags(statistics: Statistics, block: Block) -> None:
    """Check that flags are some that an update sets."""
    known = (
        Status.INPUTS_NOT_FINITE
        | Status.OUTPUT_GRADS_NOT_FINITE
        | Status.BAD_DECAY
        | Status.IDS_OUT_OF_RANGE
        | Status.OVERFLOWED
    )
    if block.approximation.has_bases:  # a rebase sets flags of its eigendecompositions
        known |= Status.MATRIX_NOT_FINITE | Status.NOT_POSITIVE | Status.INACCURATE
    flags = int(statistics.status)
    good = flags >= 0 and not flags & ~int(known)
    _require(good, "statistics.status", "of flags that an update sets", flags)


def _check_factors(statistics: Statistics, taken: frozenset[str]) -> None:
    """Check that both factors have statistics, unless one is another block's."""
    weights = {
        side: float(statistics.averages[side].weight)
        for side in ("input", "output")
        if side in statistics.averages and side not in taken
    }
    for side, weight in weights.items():
        if not weight and any(weights.values()):
            raise errors.StateError(
                f"the factor {side!r} has no statistics, but the other one does. "
                "Create the estimator with the same Coupling(factors=...)."
            )


def _check_operator(operator: CurvatureOperator, block: Block) -> None:
    """Check that no factorization had failed, and that products give vectors."""
    shape, prepared = block.layer.matrix_shape, operator.factorizations
    products = ["multiply"]
    products += [p for p, needed in FACTORIZATION_OF.items() if needed in prepared]
    try:
        with np.errstate(all="ignore"):
            status = operator.status()
            xp = ns.own_namespace(status)
            good = status.shape == () and not bool(status != 0)
            # Products of zeros run every shape check of the operator, and are zero for
            # any numbers that are finite.
            vector = xp.zeros(shape, dtype=xp.float32, device=ns.device_of(status))
            for product in products:
                if product in operator.unsupported_products:
                    continue
                result = getattr(operator, product)(vector)
                good = good and result.shape == shape and bool(xp.all(result == 0))
    except MemoryError:
        raise
    except Exception as error:
        # Any exception of a damaged operator is an error of the state.
        raise errors.StateError(f"the operator is damaged: {error}") from error
    _require(good, "the operator", "whole", "one damaged, or of a failed factorization")


def _with_settings(
    network: Network, part: Mapping[str, Any]
) -> tuple[Network, dict[str, Any]]:
    """Return a network with the settings of a state, and those that are not its own."""
    values = _Values(part)
    rule = values.choice("damping_rule", get_args(DampingRule))
    scaling = values.choice("damping_scaling", get_args(DampingScaling))
    decay, weight = (values.number(name, 1.0) for name in ("decay", "weight"))
    burn_in = values.number("burn_in", 0)
    damping: Any
    if isinstance(part.get("damping"), Mapping):
        of_each = _Values(values.pop("damping"))
        damping = {name: of_each.number(name, 1.0) for name in network.blocks}
        of_each.require_empty()
    else:
        damping = values.number("damping", 1.0)
    values.require_empty()
    require_decay(decay)
    averaging = dataclasses.replace(network.averaging, weight=weight, burn_in=burn_in)
    refreshing = dataclasses.replace(network.refreshing, damping_scaling=scaling)
    network = network.with_options(
        damping_rule=rule, averaging=averaging, refreshing=refreshing
    )
    return network, {"damping": damping, "decay": decay}


def _require_known(part: Mapping[str, Any], known: set[str], where: str) -> None:
    """Raise where a mapping has other keys."""
    unknown = [key for key in part if key not in known]
    _require(not unknown, where, f"of {sorted(known)}", f"also {shown(unknown)}")


def _mapping(part: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value: Any = part.get(name)
    _require(isinstance(value, Mapping), name, "a mapping", type(value).__name__)
    mapping: Mapping[str, Any] = value
    return mapping


def _text(value: object) -> str | None:
    """Return a description as JSON; None if it is not one, such as with arrays in it."""
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return None


def _require_equal(actual: Any, expected: Mapping[str, Any], where: str) -> None:
    """Compare a description entry by entry, and name those that differ."""
    _require(isinstance(actual, Mapping), where, "a mapping", type(actual).__name__)
    keys = {**expected, **actual}
    others = [k for k in keys if _text(actual.get(k)) != _text(expected.get(k))]
    if not others:
        return
    wanted, others_came = (
        {k: part.get(k) for k in others} for part in (expected, actual)
    )
    hint = ""
    if all(str(key).endswith("_layout") for key in others):
        hint = " The layouts alone differ: load a file with layouts='any'."
    raise errors.StateError(
        f"expected {where} {shown(wanted)}, got {shown(others_came)}.{hint}"
    )


def _require(good: bool, path: str, expected: str, came: object) -> None:
    """Raise unless the value at a path is as expected."""
    if not good:
        raise errors.StateError(f"expected {path} to be {expected}, got {came}.")
