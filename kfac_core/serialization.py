"""A network's state as plain dicts and arrays, written and checked here.

Conventions.  A state is a nested dict of strings, numbers, booleans, None and arrays.
A structure is the dict ``{"structure": class name, field: ..., ...}``; only the classes
listed in `_KNOWN` are ever made from one.  Everything is checked before anything is
returned: format and version, the blocks with their layers and approximations, the
conventions, shapes, dtypes, and that no number is NaN or infinite.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_origin, get_type_hints

import array_api_compat
import numpy as np

from kfac_core.array.namespaces import device_of, is_finite_number
from kfac_core.array.structure import is_structure, leaves, static_fields
from kfac_core.block import Block
from kfac_core.damping import DampingRule
from kfac_core.errors import DtypeError, FactorizationError, KFACError, StateError
from kfac_core.factors.average import Average, require_decay, require_weight
from kfac_core.factors.low_rank import LowRankAverage
from kfac_core.factors.product import RunningProduct
from kfac_core.factors.statistics import Statistics
from kfac_core.factors.uncorrelated import ChannelMoments
from kfac_core.factors.window import WindowAverage, WindowSum
from kfac_core.linalg.damped import DampedMatrix
from kfac_core.linalg.factorizations import CholeskyFactor, Eigendecomposition, Inverse
from kfac_core.linalg.kronecker_cholesky import KroneckerCholesky
from kfac_core.linalg.low_rank import LowRankSum
from kfac_core.linalg.low_rank_basis import LowRankBasis
from kfac_core.linalg.rank_one import ShiftedRankOne
from kfac_core.linalg.series_chain import SymmetricChain
from kfac_core.linalg.series_infinite import InfiniteChain
from kfac_core.linalg.shifted import ShiftedMatrix, Solving
from kfac_core.linalg.shifted_diagonal import ShiftedDiagonal
from kfac_core.linalg.symmetric import SymmetricMatrix
from kfac_core.network import BlockState, Network, NetworkState
from kfac_core.operators.dense import DenseOperator
from kfac_core.operators.example_gram import ExampleGramOperator
from kfac_core.operators.kronecker import FactoredKronecker
from kfac_core.operators.low_rank import LowRankOperator
from kfac_core.operators.many_kronecker import ManyKronecker
from kfac_core.operators.operator import CurvatureOperator
from kfac_core.operators.series import SeriesOperator
from kfac_core.operators.spectral import SpectralOperator

__all__ = ["FORMAT", "VERSION", "dump_state", "parse_state"]

FORMAT = "kfac_core.estimator"
VERSION = 1

_KNOWN: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        Average,
        Eigendecomposition,
        DampedMatrix,
        ChannelMoments,
        DenseOperator,
        ExampleGramOperator,
        FactoredKronecker,
        Inverse,
        KroneckerCholesky,
        LowRankAverage,
        LowRankBasis,
        LowRankOperator,
        LowRankSum,
        ManyKronecker,
        RunningProduct,
        Statistics,
        CholeskyFactor,
        SeriesOperator,
        SpectralOperator,
        InfiniteChain,
        SymmetricChain,
        ShiftedDiagonal,
        ShiftedMatrix,
        ShiftedRankOne,
        SymmetricMatrix,
        WindowAverage,
        WindowSum,
    )
}

_STATIC: dict[str, Callable[[Any], bool]] = {
    "whole": lambda value: isinstance(value, bool),
    "definite": lambda value: isinstance(value, bool),
    "solving": lambda value: value in get_args(Solving),
    "vector_shape": lambda value: (
        isinstance(value, tuple)
        and len(value) == 2
        and all(isinstance(length, int) and length > 0 for length in value)
    ),
    "repeats": lambda value: isinstance(value, int) and value > 0,
    "exact": lambda value: isinstance(value, bool),
    "tail": lambda value: value in (0, 1),
}
"""What static fields of structures may be, by name."""

_COUNTS = ("updates", "age", "refreshes", "failures", "basis_age", "moments_missing")
_SMALLEST = {"basis_age": -1}
"""The counts that may be less than zero, before there is anything to count."""


def dump_state(
    network: Network,
    state: NetworkState,
    promises: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a state as plain dicts and copies of its arrays.

    Parameters
    ----------
    network : Network
        The description.
    state : NetworkState
        Everything that changes.
    promises : mapping of str to object
        What must be the same where the state is loaded.
    settings : mapping of str to object
        What is taken over where the state is loaded.

    Returns
    -------
    dict
        As the module's conventions say.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "conventions": dict(promises),
        "settings": {name: _dump(value) for name, value in settings.items()},
        "blocks": {
            name: {
                **_description(network.blocks[name]),
                "statistics": _dump(held.statistics),
                "operator": _dump(held.operator),
                "damping": _dump(held.damping),
                **{field: int(getattr(held, field)) for field in _COUNTS},
            }
            for name, held in state.blocks.items()
        },
    }


def parse_state(
    state: Any, network: Network, promises: Mapping[str, Any]
) -> tuple[NetworkState, dict[str, Any]]:
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
    state : NetworkState
        With counts as integers.
    settings : dict of str to object
        The settings.

    Raises
    ------
    StateError
        Saying what came, what was expected and where.
    """
    blocks = network.blocks
    if not isinstance(state, Mapping):
        raise StateError(f"Expected a state of format {FORMAT!r}.")
    named = state.get("format"), state.get("version")
    if _holds_arrays(named) or named[0] != FORMAT:
        raise StateError(f"Expected a state of format {FORMAT!r}.")
    if named[1] != VERSION:
        raise StateError(
            f"Expected version {VERSION} of {FORMAT!r}, got {state.get('version')!r}. "
            "It was written by another release of kfac_core."
        )
    _require_equal(state, "conventions", dict(promises))
    settings = _settings(_part(state, "settings", "the state"), blocks)
    parts = _part(state, "blocks", "the state")
    if set(parts) != set(blocks):
        raise StateError(
            f"Expected the blocks {sorted(blocks)}, got {sorted(parts)}. Load it into an "
            "estimator with the same blocks; `load_checkpoint` takes other `names`."
        )
    held = {
        name: BlockState(**_block(parts[name], blocks[name], name)) for name in blocks
    }
    return NetworkState(held), settings


def _block(part: Any, block: Block, name: str) -> dict[str, Any]:
    where = f"block {name!r}"
    if not isinstance(part, Mapping):
        raise StateError(f"Expected {where} of the state to be a mapping.")
    for field, expected in _description(block).items():
        found = part.get(field)
        if _holds_arrays(found) or found != expected:
            raise StateError(
                f"{where}: expected {field} {expected}, got {found}."
                f"{_layouts_hint(found, expected)}"
            )
    for field in ("statistics", "operator", "damping"):
        if field not in part:
            raise StateError(f"{where}: expected a field {field!r}, which is missing.")
    fields: dict[str, Any] = {}
    for count in _COUNTS:
        value = part.get(count)
        smallest = _SMALLEST.get(count, 0)
        if type(value) is not int or value < smallest:
            raise StateError(f"{where}: expected a count {count!r}, got {value!r}.")
        fields[count] = value
    statistics = _parse(part.get("statistics"), f"{where}, statistics")
    operator = _parse(part.get("operator"), f"{where}, operator")
    if statistics is not None:
        _check_statistics(statistics, block, where)
    if operator is not None:
        _check_operator(operator, block, where)
    damping = _parse(part.get("damping"), f"{where}, damping")
    if damping is not None:
        _check_damping(damping, where)
    return {
        "statistics": statistics,
        "operator": operator,
        "damping": damping,
        **fields,
    }


def _layouts_hint(found: Any, expected: dict[str, Any]) -> str:
    """Say what to do where layers differ in nothing but how parameters are kept."""
    if not isinstance(found, Mapping) or _holds_arrays(found):
        return ""
    own = {key: expected[key] for key in expected if key.endswith("_layout")}
    fits = own.keys() <= found.keys() and {**found, **own} == expected
    return " The layouts alone differ: load a file with layouts='any'." if fits else ""


def _check_statistics(statistics: Any, block: Block, where: str) -> None:
    # Of any library: only its classes are looked at.
    classes, found = _classes(block.initial(np.zeros(()))), _classes(statistics)
    for path in sorted(classes.keys() | found.keys()):
        if classes.get(path) != found.get(path):
            raise StateError(
                f"{where}: the statistics are of another kind of block: expected "
                f"statistics{path} to be {classes.get(path)}, got {found.get(path)}."
            )
    try:
        like = statistics.any_weight
        xp = array_api_compat.array_namespace(like)
        if not xp.isdtype(like.dtype, "real floating"):
            raise DtypeError(f"expected a real floating dtype, got {like.dtype}.")
        expected = block.initial(like)
    except (KFACError, TypeError, AttributeError) as error:
        raise StateError(
            f"{where}: a weight of the statistics is damaged: {error}"
        ) from None
    _check_leaves(
        statistics, {path: tuple(x.shape) for path, x in leaves(expected)}, where
    )
    dtypes = {path: x.dtype for path, x in leaves(expected)}
    for path, x in leaves(statistics):
        if x.dtype != dtypes[path]:
            raise StateError(
                f"{where}: expected {path} to have dtype {dtypes[path]}, got {x.dtype}."
            )
        if path.endswith(".weight") and not bool(x >= 0):
            raise StateError(f"{where}: {path} is negative.")


def _check_operator(operator: Any, block: Block, where: str) -> None:
    """Check sizes, finiteness, and that every product prepared gives a vector."""
    shape = block.layer.matrix_shape
    try:
        if tuple(operator.shape) != shape:
            raise StateError(
                f"{where}: expected an operator of shape {shape}, got {operator.shape}."
            )
        found = dict(leaves(operator))
        for path, x in found.items():
            _require_finite(x, f"{where}, operator.{path}")
        status = operator.status()
        xp = array_api_compat.array_namespace(status)
        vector = xp.zeros(shape, dtype=xp.float32, device=device_of(status))
        chained = isinstance(operator, SeriesOperator | ManyKronecker)
        prepared = [] if chained else _prepared_products(found)
        prepared = [
            p for p in prepared if p not in block.approximation.unsupported_products
        ]
        probes = [(operator, product) for product in ("multiply", *prepared)]
        if _inverts_at_once(operator, found):
            with contextlib.suppress(
                FactorizationError
            ):  # undamped, and so without one
                probes.append((operator.prepared("inverse"), "multiply_inverse"))
        for probed, product in probes:
            result = getattr(probed, product)(vector)
            if tuple(result.shape) != shape or bool(xp.any(result != 0)):
                raise StateError(f"{where}: the operator's {product} is damaged.")
    except (StateError, MemoryError):
        raise
    except Exception as error:
        # Whatever a damaged operator runs into, the state is what is wrong.
        raise StateError(f"{where}: the operator is damaged: {error}") from error
    sound = isinstance(operator, CurvatureOperator) and status.shape == ()
    if not sound or bool(status != 0):
        raise StateError(f"{where}: the operator is of another kind, or had failed.")


def _classes(value: Any, path: str = "") -> dict[str, str]:
    """Return what each part of statistics is, by its path; arrays are all alike."""
    parts: dict[str, Any] = {}
    found = type(value).__name__
    if isinstance(value, dict):
        parts = value
    elif is_structure(value):
        static = static_fields(value)
        names = (field.name for field in dataclasses.fields(value))
        parts = {name: getattr(value, name) for name in names if name not in static}
    elif array_api_compat.is_array_api_obj(value):
        found = "array"
    below = [_classes(part, f"{path}.{name}") for name, part in parts.items()]
    return {path: found} | {k: v for classes in below for k, v in classes.items()}


def _inverts_at_once(operator: Any, found: Mapping[str, Any]) -> bool:
    """Whether the inverse is there in another form than a factorization named for it."""
    if isinstance(operator, SpectralOperator):
        return operator.spectrum is not None
    return isinstance(operator, SeriesOperator | LowRankOperator)


def _prepared_products(found: Mapping[str, Any]) -> list[str]:
    """Return the products whose factorization is among the arrays of an operator."""
    signs = {
        "multiply_inverse": ".inverse.matrix.",
        "multiply_cholesky": ".positive.lower",
        "multiply_cholesky_inverse": ".lower.columns",
    }
    return [
        product
        for product, sign in signs.items()
        if any(sign in f".{p}" for p in found)
    ]


def _check_leaves(
    value: Any, shapes: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Compare paths, shapes and finiteness; this waits for the arrays' device."""
    found = dict(leaves(value))
    if set(found) != set(shapes):
        raise StateError(
            f"{where}: expected arrays {sorted(shapes)}, got {sorted(found)}."
        )
    for path, x in found.items():
        if tuple(x.shape) != shapes[path]:
            raise StateError(
                f"{where}: expected {path} to have shape {shapes[path]}, got "
                f"{tuple(x.shape)}."
            )
        _require_finite(x, f"{where}, {path}")


def _require_finite(x: Any, where: str) -> None:
    xp = array_api_compat.array_namespace(x)
    if xp.isdtype(x.dtype, "real floating") and not bool(xp.all(xp.isfinite(x))):
        raise StateError(f"{where} holds NaN or infinity.")


def _check_damping(damping: Any, where: str) -> None:
    """Check that a damping is a number, or an array of one; this waits for it."""
    if array_api_compat.is_array_api_obj(damping):
        xp = array_api_compat.array_namespace(damping)
        if damping.shape != () or not xp.isdtype(damping.dtype, "real floating"):
            raise StateError(
                f"{where}: expected one number, got shape {tuple(damping.shape)} and "
                f"dtype {damping.dtype}."
            )
        damping = float(damping)
    if not is_finite_number(damping) or damping < 0:
        raise StateError(
            f"{where}: expected `damping` to be a finite number >= 0, got {damping!r}."
        )


def _settings(part: Mapping[str, Any], blocks: Mapping[str, Block]) -> dict[str, Any]:
    names = ("damping", "damping_rule", "decay", "weight", "burn_in")
    if set(part) != set(names):
        raise StateError(f"Expected the settings {sorted(names)}, got {sorted(part)}.")
    settings = {name: _parse(part[name], f"setting {name!r}") for name in names}
    rule, burn_in, damping = (
        settings[n] for n in ("damping_rule", "burn_in", "damping")
    )
    if not isinstance(rule, str) or rule not in get_args(DampingRule):
        raise StateError(f"Unknown damping rule {rule!r}.")
    for name in ("decay", "weight", "burn_in"):
        if not is_finite_number(settings[name]):
            raise StateError(f"Expected setting {name!r} to be a number.")
    if not isinstance(burn_in, int) or isinstance(burn_in, bool):
        raise StateError(f"Expected setting 'burn_in' to be a count, got {burn_in!r}.")
    try:
        require_decay(settings["decay"])
        require_weight(settings["weight"])
    except KFACError as error:
        raise StateError(str(error)) from None
    if isinstance(damping, dict) and set(damping) != set(blocks):
        raise StateError(
            f"Expected a damping of each of the blocks {sorted(blocks)}, got them of "
            f"{sorted(damping)}."
        )
    for value in damping.values() if isinstance(damping, dict) else (damping,):
        _check_damping(value, "the settings")
    return settings


def _description(block: Block) -> dict[str, Any]:
    layer: Any = block.layer
    approximation: Any = block.approximation
    return {
        "layer": {"kind": layer.kind, **dataclasses.asdict(layer)},
        "approximation": {
            "name": approximation.name,
            **dataclasses.asdict(approximation),
        },
    }


def _dump(value: Any) -> Any:
    """Turn structures into dicts, and copy arrays."""
    if is_structure(value):
        fields = {
            f.name: _dump(getattr(value, f.name)) for f in dataclasses.fields(value)
        }
        return {"structure": type(value).__name__, **fields}
    if isinstance(value, dict):
        return {name: _dump(part) for name, part in value.items()}
    if value is None or isinstance(value, str | int | float | bool | tuple):
        return value
    return _copied(value)


def _parse(value: Any, where: str) -> Any:
    """Turn dicts back into structures of known classes, and copy arrays."""
    # A block of dampings may be called so, too; then no class stands there.
    if isinstance(value, Mapping) and not isinstance(value.get("structure"), str):
        parts = value.items()
        return {str(name): _parse(part, f"{where}.{name}") for name, part in parts}
    if isinstance(value, Mapping):
        cls = _KNOWN.get(str(value.get("structure")))
        if cls is None:
            raise StateError(f"{where}: unknown structure {value.get('structure')!r}.")
        names = {f.name for f in dataclasses.fields(cls)}
        if set(value) - {"structure"} != names:
            raise StateError(
                f"{where}: expected the fields {sorted(names)} of {cls.__name__}, got "
                f"{sorted(set(value) - {'structure'})}."
            )
        made = {name: _parse(value[name], f"{where}.{name}") for name in names}
        for name, classes in _structures_in(cls.__name__).items():
            if not isinstance(made[name], classes):
                raise StateError(
                    f"{where}.{name}: expected {' or '.join(c.__name__ for c in classes)}, "
                    f"got {type(made[name]).__name__}."
                )
        structure = cls(**made)
        for name, static in static_fields(structure).items():
            plain = not _holds_arrays(static)  # an array has no truth to ask for
            if name in _STATIC and not (plain and _STATIC[name](static)):
                raise StateError(f"{where}: {name} cannot be {static!r}.")
        return structure
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, list | tuple) and all(isinstance(v, int) for v in value):
        return tuple(value)  # A list where the state went through a file.
    if not array_api_compat.is_array_api_obj(value):
        raise StateError(f"{where}: expected an array, got {type(value).__name__}.")
    return _copied(value)


@functools.cache
def _structures_in(known: str) -> dict[str, tuple[type[Any], ...]]:
    """Return the fields of a known class that hold structures, and of which classes."""
    found: dict[str, tuple[type[Any], ...]] = {}
    for name, hint in get_type_hints(_KNOWN[known]).items():
        if get_origin(hint) is dict:
            found[name] = (dict,)
        classes = get_args(hint) or (hint,)
        if any(part in _KNOWN.values() for part in classes) and name not in found:
            found[name] = classes
    return found


def _copied(x: Any) -> Any:
    return array_api_compat.array_namespace(x).asarray(x, copy=True)


def _part(state: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    part = state.get(name)
    if not isinstance(part, Mapping):
        raise StateError(f"Expected {where} to hold a mapping {name!r}.")
    return part


def _holds_arrays(value: Any) -> bool:
    """Whether there are arrays in a description, whose ``==`` gives no bool."""
    if isinstance(value, Mapping):
        return any(map(_holds_arrays, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_arrays, value))
    return bool(array_api_compat.is_array_api_obj(value))


def _require_equal(
    state: Mapping[str, Any], name: str, expected: dict[str, Any]
) -> None:
    found = state.get(name)
    if _holds_arrays(found) or found != expected:
        raise StateError(
            f"Expected {name} {expected}, got {found}. A state means something only under "
            "the conventions that it was made with."
        )
