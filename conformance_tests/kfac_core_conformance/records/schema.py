"""What all parts of a record's document have in common: their base and their types.

Each part is a `msgspec.Struct`, so a field's type states which values it takes.  Integers
are bounded by ``2**53``, so that arithmetic with them is bounded too.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

NAME_PATTERN = r"^[A-Za-z0-9_-]+\Z"
NAME_WORDS = "a name of letters, digits, '_' and '-'"

Shape: TypeAlias = tuple[int, ...]

Name = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]
Size = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Sizes = Annotated[tuple[Size, ...], msgspec.Meta(min_length=1, max_length=32)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON object of a record's document, with the fields that it may have."""

    @classmethod
    def tag(cls) -> str:
        """Return the value of the field that tells this kind of object from others."""
        return str(cls.__struct_config__.tag)
