"""From a description to a `kfac_core.Block`, and back.

Two tables name the class for each kind; the fields of the record are the classes' own.
A kind that the table has but the installed library lacks is `RecordError`: the format
is older than what is built from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import kfac_core
from kfac_core.errors import KFACError, RecordError
from kfac_core_conformance.records.document import BlockDescription
from kfac_core_conformance.records.kinds import APPROXIMATIONS, LAYERS

__all__ = ["APPROXIMATION_CLASSES", "LAYER_CLASSES", "block_of", "describe"]

LAYER_CLASSES: Mapping[str, str] = MappingProxyType(
    {
        "dense": "Dense",
        "conv": "Conv",
        "embedding": "Embedding",
        "scale_shift": "ScaleShift",
        "parameters": "Parameters",
    }
)
"""The class of `kfac_core` for each kind of layer."""

APPROXIMATION_CLASSES: Mapping[str, str] = MappingProxyType(
    {
        "kronecker": "Kronecker",
        "diagonal": "Diagonal",
        "full": "Full",
        "tnt": "TNT",
        "eigen": "Eigen",
        "series": "Series",
    }
)
"""The class of `kfac_core` for each approximation."""


def block_of(
    description: BlockDescription, /, *, bag: bool, positions: int
) -> kfac_core.Block:
    """Make the block that a description means.

    Parameters
    ----------
    description : BlockDescription
        As `kfac_core_conformance.records.document` read it.
    bag : bool
        Whether the ids of an embedding are bags, which only the tensors say.
    positions : int
        S, which only they say too.

    Returns
    -------
    Block
        With no arrays in it.

    Raises
    ------
    RecordError
        For a kind that this version of the library has not, or fields that contradict
        each other.
    """
    fields = dict(description.layer_fields)
    if bag:
        fields["bag"] = True
    layer = _made(LAYER_CLASSES[description.layer], description.layer, fields)
    name = APPROXIMATION_CLASSES[description.approximation]
    own = dict(description.approximation_fields)
    if own.get("variant") == "symmetric":
        own["steps"] = positions
    approximation = _made(name, description.approximation, own)
    try:
        return kfac_core.Block(layer, approximation)
    except KFACError as error:
        raise RecordError(str(error)) from None


def describe(block: kfac_core.Block, /) -> dict[str, Any]:
    """Describe a block as the JSON document has it.

    Parameters
    ----------
    block : Block
        Of a layer and an approximation that the format knows.

    Returns
    -------
    dict
        Of ``layer`` and ``approximation``, with plain values.

    Raises
    ------
    RecordError
        For any other.
    """
    layer, approximation = block.layer, block.approximation
    kind, name = layer.kind, approximation.name
    if kind not in LAYERS or name not in APPROXIMATIONS:
        raise RecordError(
            f"The format has no {name} block of a {kind} layer. Layers: "
            f"{', '.join(LAYERS)}; approximations: {', '.join(APPROXIMATIONS)}."
        )
    return {
        "layer": {"kind": kind, **_plain_fields(layer, LAYERS[kind])},
        "approximation": {
            "name": name,
            **_plain_fields(approximation, APPROXIMATIONS[name]),
        },
    }


def _made(cls: str, kind: str, fields: dict[str, Any]) -> Any:
    made = getattr(kfac_core, cls, None)
    if made is None:
        raise RecordError(f"{kind!r} is not supported yet by this version of kfac_core")
    try:
        return made(**fields)
    except KFACError as error:
        raise RecordError(f"{kind}: {error}") from None


def _plain_fields(described: object, names: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: _plain(getattr(described, name)) for name in names}
    # What is None was left out, except where null is a value of its own.
    optional = {"scale_shape", "shift_shape"}
    return {k: v for k, v in fields.items() if v is not None or k in optional}


def _plain(value: Any) -> Any:
    """Return a value with lists for tuples and dicts for mappings."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value
