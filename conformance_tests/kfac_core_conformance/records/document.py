"""The JSON document of a record, as frozen dataclasses.

`parse_document` is the only way in: what it returns has known fields, kinds and
operations, well-formed names and numbers in their ranges, and no combination that
contradicts itself.  What tensors there are and what shapes they have is checked in
`kfac_core_conformance.records.tensors`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

from kfac_core.errors import RecordError
from kfac_core_conformance.records.fields import (
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
    text,
)
from kfac_core_conformance.records.kinds import (
    APPROXIMATIONS,
    DAMPING_RULES,
    LAYERS,
    OPERATIONS,
    fitting,
    needs_damping,
    read_kind,
    require_answerable,
)

__all__ = [
    "FORMAT",
    "VERSION",
    "BlockDescription",
    "CheckDescription",
    "Document",
    "MovingAverage",
    "parse_document",
]

FORMAT = "kfac_core.record"
VERSION = 1

_anything = Field(lambda value, where: value)
_some_number = optional(number(0.0))
_damping_fields: Schema = {
    "damping": Field(_some_number, None),
    "damping_rule": Field(optional(choice(*DAMPING_RULES)), None),
}
_document_fields: Schema = {
    "format": Field(choice(FORMAT)),
    "version": _anything,
    "producer": Field(text, ""),
    "note": Field(text, ""),
    "blocks": Field(mapping),
    "updates": Field(integer(1)),
    "ema": _anything,
    **_damping_fields,
    "checks": Field(items(_anything.read, longest=2**53)),
}
_average_fields: Schema = {
    "decay": Field(number(0.0, 1.0)),
    "weight": Field(number(0.0, above=True)),
    "debias": Field(boolean),
}
_every_check: Schema = {
    "block": Field(name),
    "expected": Field(name),
    "rtol": Field(_some_number, None),
    "atol": Field(number(0.0), 0.0),
    **_damping_fields,
}
_check_table = MappingProxyType(
    {op: {**_every_check, **fields} for op, fields in OPERATIONS.items()}
)


@dataclass(frozen=True)
class BlockDescription:
    """A layer and an approximation, by kind and fields; see `records.kinds`."""

    layer: str
    layer_fields: Mapping[str, Any]
    approximation: str
    approximation_fields: Mapping[str, Any]


@dataclass(frozen=True)
class MovingAverage:
    """The moving average of every statistic."""

    decay: float
    weight: float
    debias: bool


@dataclass(frozen=True)
class CheckDescription:
    """One question and where its answer is.

    Attributes
    ----------
    block, op, expected : str
        The block asked, the operation, and the name of the expected result.
    fields : mapping of str to object
        The operation's own: ``vector``, ``exp``, ``transpose``, ``damped``, ``factor``.
    damping, rule : float or None, str or None
        Those of the check, else of the document; None where neither says.
    rtol : float or None
        None for the default of the expected dtype.
    atol : float
        Absolute.
    """

    block: str
    op: str
    expected: str
    fields: Mapping[str, Any]
    damping: float | None
    rule: str | None
    rtol: float | None
    atol: float

    @property
    def damped(self) -> bool:
        """Whether the answer depends on the damping."""
        return needs_damping(self.op, self.fields)

    @property
    def detail(self) -> str:
        """The operation's own fields but the vector, for a table."""
        shown = {k: v for k, v in self.fields.items() if k != "vector"}
        return ", ".join(f"{k}={_plain(v)}" for k, v in shown.items())


@dataclass(frozen=True)
class Document:
    """Everything that a record says besides its tensors."""

    producer: str
    note: str
    blocks: Mapping[str, BlockDescription]
    updates: int
    average: MovingAverage
    checks: tuple[CheckDescription, ...]

    def checks_by_block(self) -> dict[str, list[int]]:
        """Return the numbers of the checks of each block, in order."""
        numbers: dict[str, list[int]] = {name: [] for name in self.blocks}
        for index, check in enumerate(self.checks):
            numbers[check.block].append(index)
        return numbers


def parse_document(source: str, /) -> Document:
    """Parse the JSON document of a record.

    Parameters
    ----------
    source : str
        The JSON text.

    Returns
    -------
    Document
        Without contradictions in itself.

    Raises
    ------
    RecordError
        Naming the place, what was expected and what was found.
    """
    fields = read_fields(_parse_json(source), "", _document_fields)
    version = fields["version"]
    if isinstance(version, bool) or version != VERSION or not isinstance(version, int):
        raise RecordError(f"version: expected {VERSION}, got {shown(version)}")
    if not fields["blocks"]:
        raise RecordError("blocks: expected at least one block")
    blocks = {
        name(key, "blocks"): _block(value, f"blocks.{key}")
        for key, value in fields["blocks"].items()
    }
    checks = tuple(
        _check(value, f"checks[{i}]", blocks, fields)
        for i, value in enumerate(fields["checks"])
    )
    return Document(
        producer=fields["producer"],
        note=fields["note"],
        blocks=MappingProxyType(blocks),
        updates=fields["updates"],
        average=MovingAverage(**read_fields(fields["ema"], "ema", _average_fields)),
        checks=checks,
    )


def _parse_json(source: str) -> object:
    try:
        return json.loads(
            source, object_pairs_hook=_without_duplicates, parse_constant=_refuse
        )
    except RecursionError:
        raise RecordError(
            "the document is nested too deeply to be JSON of a record"
        ) from None
    except ValueError as error:
        if isinstance(error, RecordError):
            raise
        raise RecordError(f"the document is not JSON: {error}") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise RecordError(
            f"the document has the field {shown(twice)} twice in one object"
        )
    return made


def _refuse(constant: str) -> NoReturn:
    raise RecordError(f"the document holds {constant}, which is not a finite number")


def _block(value: object, where: str) -> BlockDescription:
    fields = read_fields(value, where, {"layer": _anything, "approximation": _anything})
    layer, layer_fields = read_kind(fields["layer"], f"{where}.layer", "kind", LAYERS)
    approximation, own = read_kind(
        fields["approximation"], f"{where}.approximation", "name", APPROXIMATIONS
    )
    own = fitting(layer, approximation, own, where)
    return BlockDescription(
        layer, MappingProxyType(layer_fields), approximation, MappingProxyType(own)
    )


def _check(
    value: object,
    where: str,
    blocks: Mapping[str, BlockDescription],
    document: Mapping[str, Any],
) -> CheckDescription:
    op, fields = read_kind(value, where, "op", _check_table)
    common = {key: fields.pop(key) for key in _every_check}
    block = blocks.get(common["block"])
    if block is None:
        raise RecordError(
            f"{where}.block: expected the name of a block, got {shown(common['block'])}"
        )
    damping, rule = (
        document[key] if common[key] is None else common[key]
        for key in ("damping", "damping_rule")
    )
    variant = block.approximation_fields.get("variant")
    require_answerable(op, fields, block.approximation, variant, rule, where)
    if needs_damping(op, fields) and (damping is None or rule is None):
        raise RecordError(
            f"{where}: {op} needs `damping` and `damping_rule`, in the check or in the "
            "document"
        )
    return CheckDescription(
        common["block"],
        op,
        common["expected"],
        MappingProxyType(fields),
        damping,
        rule,
        common["rtol"],
        common["atol"],
    )


def _plain(value: object) -> str:
    """Return a field's value as JSON has it."""
    return value if isinstance(value, str) else json.dumps(value)
