"""The JSON document of a record, and how it is read without trusting it.

`parse_document` is the only way in.  Its result has known fields, kinds and operations,
well-formed names, numbers in their ranges, and no combination that contradicts itself.
Which tensors there are and what shapes they have is checked in
`kfac_core_conformance.records.record`.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import (
    Annotated,
    Any,
    Literal,
    NoReturn,
    get_type_hints,
)

import msgspec

from kfac_core.damping import DampingRule
from kfac_core.errors import RecordError
from kfac_core_conformance.records.approximations import APPROXIMATIONS
from kfac_core_conformance.records.block import BlockDescription
from kfac_core_conformance.records.checks import CHECKS, AnyCheck
from kfac_core_conformance.records.layers import LAYERS
from kfac_core_conformance.records.samples import Samples
from kfac_core_conformance.records.schema import (
    NAME_PATTERN,
    NAME_WORDS,
    Name,
    NonNegative,
    Part,
    Size,
)
from kfac_core_conformance.records.text import one_line, shown

FORMAT = "kfac_core.record"
VERSION = 1


class MovingAverage(Part, frozen=True):
    """The moving average of every statistic."""

    decay: Annotated[float, msgspec.Meta(ge=0, le=1)]
    weight: Annotated[float, msgspec.Meta(gt=0)]
    debias: bool


class Document(Part, frozen=True):
    """Everything that a record says besides its tensors."""

    format: Literal["kfac_core.record"]
    version: Literal[1]
    blocks: Annotated[dict[Name, BlockDescription], msgspec.Meta(min_length=1)]
    updates: Size
    ema: MovingAverage
    checks: tuple[AnyCheck, ...]
    damping: NonNegative | None = None
    damping_rule: DampingRule | None = None
    samples: Samples | None = None
    producer: str = ""
    note: str = ""

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
        Without contradictions in itself, each check with the damping that applies.

    Raises
    ------
    RecordError
        With the place, what was expected and what was found.
    """
    document: Document = _converted(_parse_json(source), Document)
    if not document.checks and document.samples is None:
        raise RecordError("checks: expected at least one, got none")
    checks = []
    for index, check in enumerate(document.checks):
        place = f"checks[{index}]"
        if check.block not in document.blocks:
            raise RecordError(
                f"{place}.block: expected the name of a block, got {shown(check.block)}"
            )
        damping, rule = check.damping, check.damping_rule
        check = msgspec.structs.replace(
            check,
            damping=document.damping if damping is None else damping,
            damping_rule=document.damping_rule if rule is None else rule,
        )
        try:
            check.require_answerable(document.blocks[check.block])
        except RecordError as error:
            raise RecordError(f"{place}: {error}") from None
        checks.append(check)
    return msgspec.structs.replace(document, checks=tuple(checks))


def _parse_json(source: str) -> object:
    """Parse JSON strictly: no field twice, and only finite numbers."""
    try:
        return json.loads(
            source,
            object_pairs_hook=_without_duplicates,
            parse_constant=_refuse,
            parse_float=_finite,
            parse_int=_integer,
        )
    except RecursionError:
        raise RecordError(
            "the document is nested too deeply to be JSON of a record"
        ) from None
    except RecordError:
        raise
    except ValueError as error:
        raise RecordError(f"the document is not JSON: {error}") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise RecordError(
            f"the document has the field {shown(twice)} twice in one object"
        )
    return fields


def _refuse(number: str) -> NoReturn:
    raise RecordError(f"the document holds {number[:40]}, which is not finite")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refuse(digits)


def _integer(digits: str) -> float:
    # Beyond 2**53 no integer is allowed, and a number may be written without a point.
    return int(digits) if len(digits) <= 16 else _finite(digits)


_KINDS: dict[str, dict[str, Any]] = {
    "kind": {**LAYERS},
    "name": {**APPROXIMATIONS},
    "op": {**CHECKS},
}
"""The structs that each tag tells apart."""

_ERROR = re.compile(
    r"(.*?)(?: - at (?:`key` in )?`\$((?:\.\w+|\[\d+\]|\[\.\.\.\])*)`)?", re.DOTALL
)
"""The message and the path of an error of msgspec."""


def _converted(value: Any, part: Any, where: str = "") -> Any:
    """Return a JSON value, found at a place of the document, as a struct."""
    try:
        return msgspec.convert(value, part)
    except UnicodeError:
        raise RecordError("the document has a string that is not Unicode") from None
    except msgspec.ValidationError as error:
        located = _ERROR.fullmatch(str(error))
    assert located is not None
    message, path = located.groups("")
    blocks = _child(value, "blocks")
    # A field's name in the message may look like a path: nothing is trusted to exist.
    if path.startswith(".blocks[...]") and isinstance(blocks, dict):
        # The path does not name the block: each is tried alone.
        for name, block in blocks.items():
            _converted(block, BlockDescription, f"blocks.{name}")
    owner: Any = None
    for step in re.findall(r"\w+", path):
        owner, value = value, _child(value, step)
    reason = message[:1].lower() + message[1:]
    if message.startswith("Expected"):
        reason = f"{reason.partition(', got ')[0]}, got {shown(value)}"
        reason = reason.replace(f"`str` matching regex {NAME_PATTERN!r}", NAME_WORDS)
    elif message.startswith("Invalid"):
        reason += f"; expected one of {_choices(owner, path.rpartition('.')[2])}"
    place = f"{where}{path}".removeprefix(".") or "the document"
    raise RecordError(one_line(f"{place}: {reason}")[:400])


def _child(value: Any, step: str) -> Any:
    """Return what a step of a path leads to; None if it leads nowhere."""
    if isinstance(value, list):
        return value[int(step)] if step.isdecimal() and int(step) < len(value) else None
    return value.get(step) if isinstance(value, dict) else None


def _choices(owner: Any, field: str) -> str:
    """Return the values that a tag, or another field with a choice, may have."""
    if field in _KINDS:
        return ", ".join(_KINDS[field])
    part: Any = Document
    for tag, structs in _KINDS.items():
        named = structs.get(str(owner.get(tag)))
        if named is not None and field in named.__struct_fields__:
            part = named
    literals = re.findall(r"Literal\[(.*?)\]", repr(get_type_hints(part)[field]))
    return ", ".join(literals)
