"""A block of a record: a layer and an approximation, and the `kfac_core.Block` of it."""

from __future__ import annotations

from typing import Any

import msgspec

import kfac_core
from kfac_core.errors import KFACError, RecordError
from kfac_core_conformance.records.approximations import (
    APPROXIMATIONS,
    AnyApproximation,
    Kronecker,
)
from kfac_core_conformance.records.layers import LAYERS, AnyLayer, Conv, Embedding
from kfac_core_conformance.records.schema import Part


class BlockDescription(Part, frozen=True):
    """A block as the document describes it."""

    layer: AnyLayer
    approximation: AnyApproximation

    def __post_init__(self) -> None:
        """Refuse a pair that the format does not define."""
        known, name = self.layer.approximations, self.approximation.tag()
        if name not in known:
            raise RecordError(
                f"a {self.layer.tag()} layer has no {name} approximation; expected one "
                f"of {', '.join(known)}"
            )
        if not isinstance(self.approximation, Kronecker):
            return
        which, sharing = self.approximation.input, self.approximation.sharing
        if isinstance(self.layer, Embedding):
            if which not in (None, "diagonal") or sharing != "expand":
                raise RecordError(
                    "the input factor of an embedding is diagonal, and its sharing is "
                    f"expand; got {which} and {sharing}"
                )
        elif which == "uncorrelated" and not isinstance(self.layer, Conv):
            raise RecordError(
                "an uncorrelated input factor needs a conv layer, got "
                f"{self.layer.tag()}"
            )

    def is_diagonal(self, factor: str, /) -> bool:
        """Whether ``"input"`` or ``"output"`` names a factor that is kept diagonal."""
        if not isinstance(self.approximation, Kronecker):
            return False
        if factor == "input" and isinstance(self.layer, Embedding):
            return True
        return getattr(self.approximation, factor, None) == "diagonal"

    def build(self, *, bag: bool, positions: int) -> kfac_core.Block:
        """Make the block that is described.

        Parameters
        ----------
        bag : bool
            Whether the ids of an embedding are bags, which only the tensors say.
        positions : int
            The number of shared positions, which only the tensors say too.

        Returns
        -------
        Block
            Without arrays.

        Raises
        ------
        RecordError
            If `kfac_core` refuses the fields.
        """
        fields = msgspec.structs.asdict(self.layer)
        if bag:
            fields["bag"] = True
        options = msgspec.structs.asdict(self.approximation)
        if isinstance(self.approximation, Kronecker):
            options["input"] = options["input"] or (
                "diagonal" if self.is_diagonal("input") else "full"
            )
        if options.get("variant") == "symmetric":
            options["steps"] = positions
        try:
            layer = getattr(kfac_core, type(self.layer).__name__)(**fields)
            approximation = getattr(kfac_core, type(self.approximation).__name__)(
                **options
            )
            return kfac_core.Block(layer, approximation)
        except KFACError as error:
            raise RecordError(f"{self.layer.tag()}: {error}") from None


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
        For any other block.
    """
    kind, approximation = block.layer.kind, block.approximation
    # The format's names are its own: EKFAC is "eigen" there.
    known = {part.__name__: part for part in APPROXIMATIONS.values()}
    part = known.get(type(approximation).__name__)
    if kind not in LAYERS or part is None:
        raise RecordError(
            f"The format has no {approximation.name} block of a {kind} layer. Layers: "
            f"{', '.join(LAYERS)}; approximations: {', '.join(APPROXIMATIONS)}."
        )
    return {
        "layer": _described(LAYERS[kind], block.layer),
        "approximation": _described(part, approximation),
    }


def _described(part: type[Part], source: object) -> Any:
    fields = {name: getattr(source, name) for name in part.__struct_fields__}
    return msgspec.to_builtins(part(**fields))
