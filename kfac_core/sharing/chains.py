"""Chains of consecutive layers with a joint curvature.

Conventions.  ``{"encoder": ("fc1", "fc2", "fc3")}`` joins the blocks of three layers, from
the first to the last, to one block ``encoder``: a `Chain` with `BlockTridiagonal`.  Batches
and gradients are passed by layer, all layers of a chain together; statistics, dampings and
operators belong to the chain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kfac_core import constraints, errors
from kfac_core.approximations.kronecker import Kronecker
from kfac_core.approximations.tridiagonal import BlockTridiagonal
from kfac_core.array import Array
from kfac_core.block import Block, Vector
from kfac_core.layers.chain import Chain


class Chains:
    """The chains of layers in a network.

    Parameters
    ----------
    chains : mapping of str to sequence of str
        The names of the layers of each chain, from the first to the last.
    blocks : mapping of str to Block
        The blocks as they were given, one for each layer.

    Attributes
    ----------
    blocks : dict of str to Block
        The chains, and the blocks that are in none.
    of : dict of str to str
        The chain of each layer that is in one.

    Raises
    ------
    UnknownBlockError
        For an unknown block name.
    ConventionError
        For a chain of fewer than two layers, a layer that is named twice, and a chain with
        the name of a block.
    UnsupportedError
        For a layer that is not dense, or whose block is not ``Kronecker()``.
    """

    def __init__(
        self, chains: Mapping[str, Sequence[str]], blocks: Mapping[str, Block]
    ) -> None:
        self._by_layer = dict(blocks)
        self._layers = {chain: tuple(names) for chain, names in chains.items()}
        self.of: dict[str, str] = {}
        joined: dict[str, Block] = {}
        for chain, names in self._layers.items():
            if chain in blocks:
                raise errors.ConventionError(
                    f"`chains`: {chain!r} is the name of a block, too."
                )
            for name in names:
                self._add(name, chain)
            layers: Any = tuple(blocks[name].layer for name in names)
            joined[chain] = Block(Chain(names=names, layers=layers), BlockTridiagonal())
        self.blocks = {
            n: block for n, block in blocks.items() if n not in self.of
        } | joined

    def batches(self, by_layer: Mapping[str, Any], /) -> dict[str, Any]:
        """Return batches by block, from those by layer.

        Raises
        ------
        UnknownBlockError
            For the name of a chain.
        ConventionError
            If some layers of a chain are passed, and others not.
        """
        grouped = {name: part for name, part in by_layer.items() if name not in self.of}
        for chain, names in self._layers.items():
            if chain in by_layer:
                raise errors.UnknownBlockError(
                    f"{chain!r} is a chain: give batches and gradients by the names of its "
                    f"layers, {list(names)}."
                )
            of_chain = {name: by_layer[name] for name in names if name in by_layer}
            if of_chain:
                hint, kind = (
                    "Give all layers of a chain together.",
                    errors.ConventionError,
                )
                constraints.require_names(chain, of_chain, names, hint, error=kind)
                grouped[chain] = of_chain
        return grouped

    def vectors(self, by_layer: Vector, /) -> dict[str, Mapping[str, Any]]:
        """Return parameter-shaped arrays by block, from those by layer; as `batches`."""
        grouped = self.batches(by_layer)
        for chain in filter(grouped.__contains__, self._layers):
            grouped[chain] = {
                f"{name}/{parameter}": x
                for name, of_layer in grouped[chain].items()
                for parameter, x in of_layer.items()
            }
        return grouped

    def by_layer(
        self, by_block: Mapping[str, dict[str, Any]], /
    ) -> dict[str, dict[str, Array]]:
        """Return parameter-shaped arrays by layer, from those by block."""
        parts = {n: arrays for n, arrays in by_block.items() if n not in self._layers}
        for chain in filter(by_block.__contains__, self._layers):
            for path, x in by_block[chain].items():
                name, _, parameter = path.rpartition("/")
                parts.setdefault(name, {})[parameter] = x
        return parts

    def _add(self, name: str, chain: str) -> None:
        """Record a layer of a chain, or raise."""
        if name not in self._by_layer:
            raise constraints.unknown_block(name, self._by_layer, option="chains")
        if name in self.of:
            raise errors.ConventionError(f"`chains`: {name!r} is named twice.")
        if self._by_layer[name].approximation != Kronecker():
            raise errors.UnsupportedError(
                f"`chains`: expected block {name!r} to be of Kronecker(), got "
                f"{self._by_layer[name].approximation}. A chain keeps the moments of full "
                "factors."
            )
        self.of[name] = chain
