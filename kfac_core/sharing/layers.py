"""The layers of a network by name, and the blocks that hold their curvature.

Conventions.  A layer has its own block, is a layer of a chain, or is a further use of
another layer's weight.  Batches and vectors are by layer, and tasks are by block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kfac_core import constraints, errors
from kfac_core.array import Array, Scalar
from kfac_core.block import BatchLike, Block, Vector
from kfac_core.damping import require_set_damping
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.feeding import detached
from kfac_core.options import Coupling
from kfac_core.sharing.chains import Chains
from kfac_core.sharing.shared_factors import SharedFactors
from kfac_core.sharing.tied_weights import TiedWeights


class NamedLayers:
    """The layers of a network by name, and the sharing of their blocks.

    Parameters
    ----------
    blocks : mapping of str to Block
        One block for each layer.
    coupling : Coupling
        Shared factors, tied weights and chains.

    Attributes
    ----------
    by_layer : dict of str to Block
        The blocks as they were given.
    has_chains : bool
        Whether some layers are a chain.
    blocks : dict of str to Block
        The chains, and the blocks of layers that are in none.
    factors : SharedFactors
        Factors that blocks take from other blocks.

    Raises
    ------
    ConventionError, UnknownBlockError, UnsupportedError
        For names or blocks that cannot be shared so.
    """

    def __init__(self, blocks: Mapping[str, Block], coupling: Coupling) -> None:
        self.by_layer = dict(blocks)
        self._chains = Chains(coupling.chains, blocks)
        self.has_chains = bool(self._chains.of)
        self.blocks = self._chains.blocks
        self._weights = TiedWeights(coupling.weights, self.blocks)
        self.factors = SharedFactors(coupling.factors, self.blocks)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all blocks, layers of chains and further uses of weights."""
        return (*self.blocks, *self._chains.of, *self._weights.uses)

    def known(self, name: str, /) -> str:
        """Return the name of a block, or raise `UnknownBlockError`."""
        if type(name) is not str:
            constraints.require_kind("name", name, str, "the name of a block")
        if name in self.blocks:
            return name
        # Known names that are not blocks: say which block to name instead.
        if name in self._weights.uses:
            raise errors.UnknownBlockError(
                f"{name!r} uses the weight of block {self._weights.uses[name]!r} "
                "again: pass the gradient there, summed over the uses."
            )
        if name in self._chains.of:
            raise errors.UnknownBlockError(
                f"{name!r} is a layer of the chain {self._chains.of[name]!r}, which has "
                "one damping and one operator: name the chain."
            )
        raise constraints.unknown_block(name, self.blocks)

    def known_names(self, names: Iterable[str], /) -> list[str]:
        """Return the names of blocks, or raise `UnknownBlockError`."""
        constraints.require_range("names", names, constraints.NAMES)
        return [self.known(name) for name in names]

    def block_of(self, name: str, /) -> str:
        """Return the name of a layer's block: its chain, or the layer itself."""
        return self._chains.of.get(name, name)

    def batches(self, batches: Mapping[str, BatchLike], /) -> dict[str, BatchLike]:
        """Return the batches of each block, detached from gradient graphs.

        Parameters
        ----------
        batches : mapping of str to Batch, GradientBatch or sequence of Batch
            Batches by layer.

        Raises
        ------
        ArgumentError
            For anything but a mapping of batches.
        ConventionError
            If only some uses of a weight, or some layers of a chain, are given.
        UnknownBlockError
            For an unknown name.
        """
        # Inline, since a call of a check costs more than the check at each step.
        if type(batches) is not dict:
            _require_mapping("batches", batches)
        if self._weights.uses:
            batches = self._weights.grouped(batches)
        if self._chains.of:
            batches = self._chains.batches(batches)
        by_block: dict[str, BatchLike] = {}
        for name, batch in batches.items():
            if name not in self.blocks:
                self.known(name)
            by_block[name] = detached(batch, name)
        return by_block

    def moments(self, moments: Mapping[str, Any], /) -> dict[str, Any]:
        """Return the statistics of each block; raise for anything else, as `batches`."""
        _require_mapping("statistics", moments, name="moments")
        for name, part in moments.items():
            what = "statistics, as `batch_moments` returns them"
            if not callable(part):
                constraints.require_kind(f"moments[{name!r}]", part, Statistics, what)
        return {self.known(name): part for name, part in moments.items()}

    def vectors(self, vectors: Vector, /) -> Vector:
        """Return parameter-shaped arrays by block, from those by layer; as `batches`."""
        if type(vectors) is not dict:
            _require_mapping("vectors", vectors)
        return self._chains.vectors(vectors) if self._chains.of else vectors

    def products(
        self, products: dict[str, dict[str, Array]], /
    ) -> dict[str, dict[str, Array]]:
        """Return parameter-shaped arrays by layer, from those by block."""
        return self._chains.by_layer(products) if self._chains.of else products

    def require_damping(self, damping: Scalar | Mapping[str, Scalar], /) -> None:
        """Raise `DampingError` for an invalid or missing damping of a block."""
        if not isinstance(damping, Mapping):
            require_set_damping(damping)
            return
        for name, value in damping.items():
            require_set_damping(value, name=f"damping[{self.known(name)!r}]")
        kind = errors.DampingError
        constraints.require_names("damping", damping, self.blocks, error=kind)


def _require_mapping(of: str, value: object, *, name: str | None = None) -> None:
    """Raise `ArgumentError` unless an argument by layer is a mapping."""
    expected = f"a mapping of blocks to {of}"
    constraints.require_kind(name or of, value, Mapping, expected)
