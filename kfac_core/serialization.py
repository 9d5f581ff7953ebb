"""A network's state as plain dicts and arrays, written and checked here.

Conventions.  A state says which format and version it is of, under which ``conventions``
and ``settings`` it was made, and of each block its layer, its approximation, and its
``values``: arrays and numbers by their path, such as ``"statistics.averages.input.sum"``.
What is None has no path.  A symmetric matrix is one triangle, as
`kfac_core.linalg.packing` packs it, whatever a library keeps of it.  Counts and dampings
are Python's numbers, also where the state is one of arrays alone.

No class stands there.  What the values are parts of is said by a template: statistics of
nothing and the operator made of them, with nothing prepared, by the network that reads.
What the template does not have, such as an inverse, is read as its annotation says.

Everything is checked before anything is returned: the description, paths, shapes, dtypes,
that no number is NaN or infinite, and that an operator's products are defined.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator as operators
import reprlib
from collections.abc import Mapping
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import array_api_compat
import numpy as np

from kfac_core.array.namespaces import device_of, is_finite_number
from kfac_core.array.structure import fields_of, leaves
from kfac_core.block import Block
from kfac_core.errors import KFACError, StateError
from kfac_core.factors.average import require_decay
from kfac_core.factors.statistics import Statistics
from kfac_core.linalg.packing import (
    pack_triangle,
    packed_rows,
    packed_shape,
    unpack_triangle,
)
from kfac_core.linalg.symmetric import SymmetricMatrix
from kfac_core.network import BlockState, Network, NetworkState
from kfac_core.operators.operator import FACTORIZATION_OF, CurvatureOperator

__all__ = ["FORMAT", "VERSION", "dump_state", "parse_state"]

FORMAT = "kfac_core.estimator"
VERSION = 2

_COUNTS = {n: c for n, c in vars(BlockState).items() if type(c) is int and n[0] != "_"}
"""The counts of a block, each with the least that it can be."""

_shortened = reprlib.Repr()
_shortened.maxlevel, _shortened.maxdict, _shortened.maxlist = 3, 8, 8
_shortened.maxstring = _shortened.maxother = 80
_short = _shortened.repr
"""Shows what came, in one line however long or deep it is."""


def dump_state(
    network: Network,
    state: NetworkState,
    promises: Mapping[str, Any],
    *,
    damping: Any,
    decay: float,
) -> dict[str, Any]:
    """Return a state as plain dicts and copies of its arrays.

    Parameters
    ----------
    network : Network
        The description.
    state : NetworkState
        Everything that changes; this waits for its device.
    promises : mapping of str to object
        What must be the same where the state is loaded.
    damping, decay
        Of the next refresh and update, which are taken over where the state is loaded.

    Returns
    -------
    dict
        As the module's conventions say.
    """
    settings = {
        "damping": {name: float(value) for name, value in damping.items()}
        if isinstance(damping, Mapping)
        else float(damping),
        "damping_rule": network.damping_rule,
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
            name: {**_description(network.blocks[name]), "values": _values(held)}
            for name, held in state.blocks.items()
        },
    }


def parse_state(
    state: Any, network: Network, promises: Mapping[str, Any]
) -> tuple[Network, NetworkState, dict[str, Any]]:
    """Check a state against a network and turn it back into structures.

    Parameters
    ----------
    state : mapping
        As `dump_state` made it.
    network : Network
        Of the estimator that wants it.
    promises : mapping of str to object
        The conventions of that estimator.

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
        Saying what came, what was expected and where.
    """
    if not isinstance(state, Mapping) or _text(state.get("format")) != _text(FORMAT):
        raise StateError(f"Expected a state of format {FORMAT!r}.")
    if _text(state.get("version")) != _text(VERSION):
        raise StateError(
            f"Expected version {VERSION} of {FORMAT!r}, got "
            f"{_short(state.get('version'))}. It was written by another release of "
            "kfac_core."
        )
    _require_equal(state.get("conventions"), promises, "conventions")
    network, settings = _with_settings(network, _mapping(state, "settings"))
    parts = _mapping(state, "blocks")
    if parts.keys() != network.blocks.keys():
        raise StateError(
            f"Expected the blocks {sorted(network.blocks)}, got {_short([*parts])}. Load "
            "it into an estimator with the same blocks; `load_checkpoint` takes other "
            "`names`."
        )
    blocks: dict[str, BlockState] = {}
    for name in network.blocks:
        try:
            blocks[name] = _block(_mapping(parts, name), network, name)
        except KFACError as error:
            raise StateError(f"block {name!r}: {error}") from error
    return network, NetworkState(blocks), settings


def _description(block: Block) -> dict[str, Any]:
    """Return what a block is, as it comes out of JSON."""
    layer: Any = block.layer
    approximation: Any = block.approximation
    found = {
        "layer": {"kind": layer.kind, **dataclasses.asdict(layer)},
        "approximation": {
            "name": approximation.name,
            **dataclasses.asdict(approximation),
        },
    }
    return json.loads(json.dumps(found, default=operators.index))  # type: ignore[no-any-return]


def _values(held: BlockState) -> dict[str, Any]:
    """Return the arrays and numbers of a block by their paths."""
    found: dict[str, Any] = {name: int(getattr(held, name)) for name in _COUNTS}
    if held.damping is not None:
        found["damping"] = float(held.damping)
    _collect(held.statistics, "statistics", found)
    _collect(held.operator, "operator", found)
    return found


def _collect(value: Any, path: str, found: dict[str, Any]) -> None:
    """Put what a structure holds under its paths."""
    if isinstance(value, SymmetricMatrix):
        xp = array_api_compat.array_namespace(value.array)
        found[path] = pack_triangle(value.array, xp=xp)
    elif fields_of(type(value)):
        for name, static in fields_of(type(value)):
            if not static or _choices(type(value), name):
                _collect(getattr(value, name), f"{path}.{name}", found)
    elif isinstance(value, dict):
        for name, part in value.items():
            _collect(part, f"{path}.{name}", found)
    elif isinstance(value, bool | str):
        found[path] = value
    elif value is not None:
        xp = array_api_compat.array_namespace(value)
        found[path] = xp.asarray(value, copy=True)


def _block(part: Mapping[str, Any], network: Network, name: str) -> BlockState:
    """Return the state of one block; messages are to be headed by its name."""
    block = network.blocks[name]
    for key, expected in _description(block).items():
        _require_equal(part.get(key), expected, key)
    values = _Values(_mapping(part, "values"))
    counts = {count: values.count(count, least) for count, least in _COUNTS.items()}
    damping = _damping(values.taken("damping")) if values.holds("damping") else None
    found: dict[str, Any] = {"statistics": None, "operator": None}
    held = [path for path in found if values.holds(path)]
    if held:
        statistics = block.initial(values.like(held[0]), precision=network.precision)
        template = {
            "statistics": statistics,
            "operator": block.operator(
                statistics,
                damping=1.0,
                rule=network.damping_rule,
                factorizations=(),
                precision=network.precision,
                name=name,
            ),
        }
        for path in held:
            found[path] = values.read(path, Any, template[path])
        if "statistics" in held:
            _check_statistics(found["statistics"], statistics.dtype)
        if "operator" in held:
            _check_operator(found["operator"], block)
    if values.left:
        raise StateError(f"{_short([*values.left])} belong to nothing.")
    if (damping is None) != (found["operator"] is None):
        raise StateError("expected an operator and its damping, or neither.")
    return BlockState(**counts, **found, damping=damping)


class _Values:
    """The arrays and numbers of one block, each of which is taken once.

    Parameters
    ----------
    values : mapping of str to object
        By path.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.left = {str(path): value for path, value in values.items()}
        self._like: Any = None

    def holds(self, path: str) -> bool:
        """Whether anything stands at a path or below it."""
        return path in self.left or bool(self._names(path))

    def like(self, path: str) -> Any:
        """Return an array below a path, of whose library and device all must be."""
        found = [x for other, x in self.left.items() if other.startswith(f"{path}.")]
        self._like = next(filter(_is_real, found), None)
        if self._like is None:
            raise StateError(f"expected {path} to hold arrays of real numbers.")
        return self._like

    def taken(self, path: str) -> Any:
        """Take what stands at a path."""
        if path not in self.left:
            raise StateError(f"{path} is missing.")
        return self.left.pop(path)

    def count(self, path: str, least: int) -> int:
        """Take a count."""
        value = self.taken(path)
        if type(value) is not int or value < least:
            raise _problem(path, f"a count of at least {least}", _short(value))
        return value

    def read(self, path: str, hint: Any, like: Any) -> Any:
        """Take what stands at a path and below, formed as a template or an annotation."""
        if isinstance(like, dict):
            return {n: self.read(f"{path}.{n}", Any, part) for n, part in like.items()}
        if like is None and NoneType in get_args(hint) and not self.holds(path):
            return None
        cls = self._class(path, hint) if like is None else type(like)
        if cls is SymmetricMatrix:
            return self._symmetric(path, like)
        if not fields_of(cls):
            return self._array(path, like, None if like is None else like.shape)
        parts: dict[str, Any] = {}
        for name, static in fields_of(cls):
            inner, own = f"{path}.{name}", None if like is None else getattr(like, name)
            choices = _choices(cls, name) if static else ()
            if choices:
                parts[name] = self._choice(inner, choices)
            elif static:
                parts[name] = own
            else:
                parts[name] = self.read(inner, _hints(cls)[name], own)
        return cls(**parts)

    def _names(self, path: str) -> set[str]:
        """Return the names of what stands directly below a path."""
        start = f"{path}."
        below = [other for other in self.left if other.startswith(start)]
        return {other.removeprefix(start).partition(".")[0] for other in below}

    def _class(self, path: str, hint: Any) -> Any:
        """Return the structure of an annotation that has what stands below a path."""
        for cls in get_args(hint) or (hint,):
            fields = {name for name, _ in fields_of(cls)}
            if fields and self._names(path) <= fields:
                return cls
        return None

    def _choice(self, path: str, choices: tuple[Any, ...]) -> Any:
        """Take one of a few values."""
        value = self.taken(path)
        if type(value) is not type(choices[0]) or value not in choices:
            raise _problem(path, f"one of {choices}", _short(value))
        return value

    def _symmetric(self, path: str, like: SymmetricMatrix | None) -> SymmetricMatrix:
        """Take the triangle of a symmetric matrix."""
        if like is None:
            packed = self._array(path, None, None)
        else:
            shape = (*like.array.shape[:-2], *packed_shape(like.size))
            packed = self._array(path, like.array, shape)
        n = packed_rows(tuple(packed.shape[-2:]))
        if n is None:
            raise _problem(path, "a packed triangle", f"shape {tuple(packed.shape)}")
        xp = array_api_compat.array_namespace(packed)
        full, whole = unpack_triangle(packed, n, xp=xp), like is None or like.whole
        # In the order in which LAPACK reads a lower triangle, as sums start.
        array = xp.matrix_transpose(full if whole else xp.triu(full))
        return SymmetricMatrix(array, whole)

    def _array(self, path: str, like: Any, shape: Any) -> Any:
        """Take an array of the shape and the kind of another, as a copy."""
        x = self.taken(path)
        if not array_api_compat.is_array_api_obj(x):
            raise _problem(path, "an array", type(x).__name__)
        xp = array_api_compat.array_namespace(self._like)
        if array_api_compat.array_namespace(x) is not xp:
            raise _problem(path, f"an array of {xp.__name__}", type(x).__name__)
        if device_of(x) != device_of(self._like):
            raise _problem(path, f"on {device_of(self._like)}", device_of(x))
        if shape is not None and tuple(x.shape) != tuple(shape):
            raise _problem(path, f"of shape {tuple(shape)}", tuple(x.shape))
        real = _is_real(x)
        if like is None:
            fits = real or x.dtype == xp.int32
        else:
            fits = real if _is_real(like) else x.dtype == like.dtype
        if not fits:
            kind = "real" if like is None or _is_real(like) else like.dtype
            raise _problem(path, f"of a dtype that is {kind}", x.dtype)
        if real and not bool(xp.all(xp.isfinite(x))):
            raise StateError(f"{path} holds NaN or infinity.")
        return xp.asarray(x, copy=True)


@functools.cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    return get_type_hints(cls)


def _choices(cls: type[Any], name: str) -> tuple[Any, ...]:
    """Return the values of a static field that may differ between equal networks.

    Such as whether a block was found definite; all others are the template's.
    """
    hint = _hints(cls)[name]
    return (False, True) if hint is bool else get_args(hint) * (get_origin(hint) is Literal)


def _is_real(x: Any) -> bool:
    """Whether something is an array of float32 or float64."""
    if not array_api_compat.is_array_api_obj(x):
        return False
    xp = array_api_compat.array_namespace(x)
    return x.dtype in (xp.float32, xp.float64)


def _check_statistics(statistics: Statistics, dtype: Any) -> None:
    for path, x in leaves(statistics):
        if _is_real(x) and x.dtype != dtype:
            raise _problem(f"statistics.{path}", f"of dtype {dtype}", x.dtype)
    for name, average in statistics.averages.items():
        if not bool(average.weight >= 0):
            raise StateError(f"the weight of {name!r} is negative.")


def _check_operator(operator: CurvatureOperator, block: Block) -> None:
    """Check that no factorization had failed, and that products give vectors."""
    shape, lacks = block.layer.matrix_shape, block.approximation.lacks
    prepared = operator.factorizations
    products = [p for p, f in FACTORIZATION_OF.items() if f in prepared and p not in lacks]
    try:
        with np.errstate(all="ignore"):
            status = operator.status()
            xp = array_api_compat.array_namespace(status)
            good = status.shape == () and not bool(status != 0)
            vector = xp.zeros(shape, dtype=xp.float32, device=device_of(status))
            for product in ("multiply", *products):
                result = getattr(operator, product)(vector)
                good = good and result.shape == shape and bool(xp.all(result == 0))
    except MemoryError:
        raise
    except Exception as error:
        # Whatever a damaged operator runs into, the state is what is wrong.
        raise StateError(f"the operator is damaged: {error}") from error
    if not good:
        raise StateError("the operator is damaged, or a factorization of it had failed.")


def _with_settings(
    network: Network, part: Mapping[str, Any]
) -> tuple[Network, dict[str, Any]]:
    """Return a network with the settings of a state, and those that are not its own."""
    kinds = {"damping_rule": str, "decay": float, "weight": float, "burn_in": int}
    if part.keys() != {"damping", *kinds}:
        raise StateError(
            f"Expected the settings {sorted({'damping', *kinds})}, got {_short([*part])}."
        )
    for name, kind in kinds.items():
        if type(part[name]) is not kind:
            raise StateError(
                f"Expected setting {name!r} to be {kind.__name__}, got "
                f"{_short(part[name])}."
            )
    damping = part["damping"]
    try:
        if isinstance(damping, Mapping):
            damping = {name: _damping(value) for name, value in damping.items()}
        else:
            damping = _damping(damping)
        network.require_damping(damping)
        require_decay(part["decay"])
        averaging = dataclasses.replace(
            network.averaging, weight=part["weight"], burn_in=part["burn_in"]
        )
        rule = part["damping_rule"]
        network = network.with_options(damping_rule=rule, averaging=averaging)
    except KFACError as error:
        raise StateError(f"settings: {error}") from None
    return network, {"damping": damping, "decay": part["decay"]}


def _damping(value: Any) -> float:
    if type(value) not in (int, float) or not is_finite_number(value) or value < 0:
        raise StateError(
            f"expected `damping` to be a finite number >= 0, got {_short(value)}."
        )
    return float(value)


def _mapping(part: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = part.get(name)
    if not isinstance(found, Mapping):
        raise StateError(f"Expected a mapping {name!r} in the state.")
    return found


def _text(value: Any) -> str | None:
    """Return a description as JSON; None for what is none, as where arrays are."""
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return None


def _require_equal(found: Any, expected: Mapping[str, Any], where: str) -> None:
    """Compare a description entry by entry, and name those that differ."""
    if not isinstance(found, Mapping):
        raise StateError(f"Expected a mapping {where!r} in the state.")
    wanted, came = (
        {key: part.get(key) for key in {**expected, **found}}
        for part in (expected, found)
    )
    for key in [key for key in wanted if _text(wanted[key]) == _text(came[key])]:
        del wanted[key], came[key]
    if not wanted:
        return
    hint = ""
    if all(str(key).endswith("_layout") for key in wanted):
        hint = " The layouts alone differ: load a file with layouts='any'."
    raise StateError(f"expected {where} {_short(wanted)}, got {_short(came)}.{hint}")


def _problem(path: str, expected: str, found: Any) -> StateError:
    return StateError(f"expected {path} to be {expected}, got {found}.")
