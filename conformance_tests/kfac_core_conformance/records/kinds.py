"""What a record may describe: the kinds of layers, approximations and checks.

Three tables of fields, by kind, and the combinations that contradict each other.  The
tables say what the format allows; what of it this version can compute is known in
`kfac_core_conformance.records.description`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kfac_core.errors import RecordError
from kfac_core_conformance.records.fields import (
    REQUIRED,
    Field,
    Schema,
    boolean,
    choice,
    integer,
    items,
    mapping,
    name,
    number,
    optional,
    read_fields,
    shown,
)

__all__ = [
    "APPROXIMATIONS",
    "DAMPING_RULES",
    "LAYERS",
    "OPERATIONS",
    "FACTORS",
    "fitting",
    "needs_damping",
    "read_kind",
    "require_answerable",
]

DAMPING_RULES = ("factored", "factored_unit_pi", "exact")

_size = integer(1)
_sizes = items(_size, shortest=1)
_pair = items(integer(0), shortest=2, longest=2)


def _padding(value: object, where: str) -> Any:
    """Read a rule of padding, or one pair for each spatial axis."""
    if isinstance(value, str):
        return choice("same", "valid")(value, where)
    return items(_pair, shortest=1)(value, where)


def _shapes(value: object, where: str) -> dict[str, tuple[int, ...]]:
    """Read the shapes of named parameters; a shape of no axes is a scalar."""
    found = mapping(value, where)
    if not found:
        raise RecordError(f"{where}: expected at least one parameter")
    shape = items(_size)
    return {name(k, where): shape(v, f"{where}.{k}") for k, v in found.items()}


def _table(**kinds: dict[str, Field]) -> Mapping[str, Schema]:
    return MappingProxyType(kinds)


LAYERS = _table(
    dense={
        "in_features": Field(_size),
        "out_features": Field(_size),
        "bias": Field(boolean),
        "weight_layout": Field(choice("io", "oi")),
    },
    conv={
        "in_channels": Field(_size),
        "out_channels": Field(_size),
        "kernel_size": Field(_sizes),
        "strides": Field(_sizes, None),
        "padding": Field(_padding),
        "dilation": Field(_sizes, None),
        "groups": Field(_size, 1),
        "bias": Field(boolean),
        "weight_layout": Field(choice("spatial_io", "oi_spatial")),
        "data_layout": Field(choice("channels_last", "channels_first")),
    },
    embedding={
        "num_embeddings": Field(_size),
        "features": Field(_size),
        "weight_layout": Field(choice("io", "oi")),
        "duplicates": Field(choice("binary", "count"), "binary"),
    },
    scale_shift={
        "scale_shape": Field(optional(items(_size))),
        "shift_shape": Field(optional(items(_size))),
    },
    parameters={"shapes": Field(_shapes)},
)
"""The fields of each kind of layer, besides ``kind``."""

_sharing = Field(choice("expand", "reduce"), "expand")

APPROXIMATIONS = _table(
    kronecker={
        "input": Field(choice("full", "diagonal", "uncorrelated"), None),
        "output": Field(choice("full", "diagonal"), "full"),
        "sharing": _sharing,
    },
    diagonal={},
    full={},
    tnt={},
    eigen={"sharing": _sharing},
    series={"variant": Field(choice("independent", "symmetric", "infinite"))},
)
"""The fields of each approximation, besides ``name``."""

_vector = {"vector": Field(name)}
_transpose = {"transpose": Field(boolean, False)}

OPERATIONS = _table(
    factor={
        "factor": Field(
            choice("input", "output", "lagged_input", "lagged_output", "block")
        )
    },
    multiply={**_vector, "damped": Field(boolean, True)},
    multiply_inverse=_vector,
    multiply_matpower={**_vector, "exp": Field(number())},
    multiply_cholesky={**_vector, **_transpose},
    multiply_cholesky_inverse={**_vector, **_transpose},
    to_dense={"damped": Field(boolean, False)},
    logdet={},
    trace={},
    eigenvalues={},
    damping_split={},
)
"""The fields of each check, besides those that every check has."""

FACTORS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "kronecker": ("input", "output"),
        "diagonal": ("block",),
        "full": ("block",),
        "tnt": ("input", "output"),
        "eigen": ("input", "output", "block"),
        "series": ("input", "output", "lagged_input", "lagged_output"),
    }
)
"""The statistics of each approximation that a ``factor`` check may ask for."""

_APPROXIMATIONS_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "dense": tuple(APPROXIMATIONS),
        "conv": ("kronecker", "diagonal", "full", "tnt", "eigen"),
        "embedding": ("kronecker", "diagonal", "full"),
        "scale_shift": ("diagonal", "full"),
        "parameters": ("diagonal", "full"),
    }
)
_DAMPED = (
    "multiply_inverse",
    "multiply_matpower",
    "multiply_cholesky",
    "multiply_cholesky_inverse",
    "logdet",
    "damping_split",
)


def read_kind(
    value: object, where: str, key: str, table: Mapping[str, Schema], /
) -> tuple[str, dict[str, Any]]:
    """Read an object whose fields depend on one of them.

    Parameters
    ----------
    value : object
        As JSON gave it.
    where : str
        Where it stands.
    key : str
        The field that names the kind.
    table : mapping of str to Schema
        The other fields, by kind.

    Returns
    -------
    str and dict
        The kind, and the other fields with their defaults.
    """
    found = mapping(value, where)
    kind = found.get(key, REQUIRED)
    if kind is REQUIRED:
        raise RecordError(f"{where}: the field {key!r} is missing")
    if not isinstance(kind, str) or kind not in table:
        raise RecordError(
            f"{where}: unknown {key} {shown(kind)}; expected one of {', '.join(table)}"
        )
    fields = read_fields(found, where, {key: Field(choice(kind)), **table[kind]})
    del fields[key]
    return kind, fields


def fitting(
    layer: str, approximation: str, fields: Mapping[str, Any], where: str, /
) -> dict[str, Any]:
    """Check that a layer takes an approximation; fill in what depends on both.

    Parameters
    ----------
    layer, approximation : str
        The kinds.
    fields : mapping of str to object
        Of the approximation.
    where : str
        Where the block stands.

    Returns
    -------
    dict of str to object
        The fields, with the kind of the input factor where it was left out.

    Raises
    ------
    RecordError
        For a pair that the format has not.
    """
    known = _APPROXIMATIONS_OF[layer]
    if approximation not in known:
        raise RecordError(
            f"{where}: a {layer} layer has no {approximation} approximation; expected "
            f"one of {', '.join(known)}"
        )
    made = dict(fields)
    if approximation != "kronecker":
        return made
    ids = layer == "embedding"
    made["input"] = made["input"] or ("diagonal" if ids else "full")
    if ids and (made["input"] != "diagonal" or made["sharing"] != "expand"):
        raise RecordError(
            f"{where}: the input factor of an embedding is diagonal, and its sharing is "
            f"expand; got {made['input']} and {made['sharing']}"
        )
    if made["input"] == "uncorrelated" and layer != "conv":
        raise RecordError(
            f"{where}: an uncorrelated input factor needs a conv layer, got {layer}"
        )
    return made


def needs_damping(operation: str, fields: Mapping[str, Any], /) -> bool:
    """Whether the answer to a check depends on the damping."""
    return operation in _DAMPED or bool(fields.get("damped", False))


def require_answerable(
    operation: str,
    fields: Mapping[str, Any],
    approximation: str,
    variant: str | None,
    rule: str | None,
    where: str,
    /,
) -> None:
    """Raise `RecordError` where a check asks a block for what it has not.

    Parameters
    ----------
    operation : str
        What is asked.
    fields : mapping of str to object
        Of the check.
    approximation : str
        The kind of approximation of the block.
    variant : str or None
        That of a series.
    rule : str or None
        The damping rule, where one is given.
    where : str
        Where the check stands.
    """
    if operation == "factor" and fields["factor"] not in FACTORS[approximation]:
        raise RecordError(
            f"{where}: a {approximation} block has no factor {fields['factor']!r}; "
            f"expected one of {', '.join(FACTORS[approximation])}"
        )
    if operation == "damping_split" and "output" not in FACTORS[approximation]:
        raise RecordError(
            f"{where}: a {approximation} block does not split its damping"
        )
    if not needs_damping(operation, fields):
        return
    if rule == "exact" and variant in ("symmetric", "infinite"):
        raise RecordError(
            f"{where}: 'exact' is no damping rule for a {variant} series; expected "
            "'factored' or 'factored_unit_pi'"
        )
