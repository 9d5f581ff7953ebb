"""The block of each use of a layer, and the place of its parameters.

Conventions.  A framework that traces a computation records uses of layers one after the
other, and keeps its parameters in a list.  A use has a layer and *slots*, the places of its
parameters in that list: uses with the same layer and slots are one block.
Parameters may have any shape of the right size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, get_args

from kfac_core import constraints, errors
from kfac_core.approximations.approximation import Approximation
from kfac_core.approximations.kronecker import Kronecker
from kfac_core.approximations.second_moment import Full
from kfac_core.array import Array
from kfac_core.array.structure import structure
from kfac_core.block import Block
from kfac_core.conventions import LossReduction, SourceReduction
from kfac_core.layers.layer import Layer
from kfac_core.layers.rows import Batch
from kfac_core.losses.sources import SourceVectors

Use: TypeAlias = tuple[str, Layer, Mapping[str, int]]
"""A name, a layer, and the place of each of its parameters."""


def usual_approximation(name: str, layer: Layer, /) -> Approximation[Any]:
    """Return the default approximation of a layer.

    Parameters
    ----------
    name : str
        Ignored.
    layer : Layer
        Layer of any kind.

    Returns
    -------
    Approximation
        `Kronecker`, for ids with a diagonal input factor; `Full` for normalizations.
    """
    if layer.kind == "scale_shift":
        return Full()
    return Kronecker(input="diagonal" if layer.kind == "embedding" else "full")


@structure(static=("reduction", "sources"))
class Captured:
    """Batches of a network's blocks.

    Attributes
    ----------
    batches : dict of str to Batch or tuple of Batch
        Batches to pass to `Estimator.update`.
    reduction : {"sum", "mean", "mean_rows"}
        The reduction of the loss that the output gradients are of.
    sources : {"sum", "mean"} or None
        How their sources are combined; None for a single one.
    """

    batches: dict[str, Any]
    reduction: LossReduction
    sources: SourceReduction | None


class Wiring:
    """The blocks of a network, from the observed uses of its layers.

    Parameters
    ----------
    uses : sequence of Use
        Uses in the order in which they were observed.
    leaves : mapping of str to tuple of int
        Each parameter's name and shape, in order.
    approximation : callable
        ``(name, layer) -> Approximation``; None leaves that use of a layer out.

    Attributes
    ----------
    blocks : dict of str to Block
        Blocks by name of the first use.

    Raises
    ------
    ConventionError
        For two blocks of one name.
    ShapeError
        For parameters that are not of the layer's sizes.
    UnsupportedError
        For a parameter of two blocks.
    """

    def __init__(
        self,
        uses: Sequence[Use],
        leaves: Mapping[str, tuple[int, ...]],
        /,
        *,
        approximation: Callable[[str, Any], Any] = usual_approximation,
    ) -> None:
        constraints.require_range("approximation", approximation, constraints.FUNCTION)
        self.blocks: dict[str, Block] = {}
        self.slots: dict[str, dict[str, int]] = {}
        self._names: dict[Any, str] = {}
        shapes = list(leaves.values())
        for name, layer, slots in uses:
            _require_sizes(name, layer, {role: shapes[i] for role, i in slots.items()})
            chosen = approximation(name, layer)
            # The same layer with the same parameters is one block, used several times.
            key = _key((name, layer, slots))
            if chosen is None or key in self._names:
                continue
            if name in self.blocks:
                raise errors.ConventionError(
                    f"Two layers with different parameters are called {name!r}."
                )
            self._names[key] = name
            self.slots[name] = dict(slots)
            self.blocks[name] = Block(layer, chosen)
        places = [i for slots in self.slots.values() for i in slots.values()]
        for i, leaf in enumerate(leaves):
            # A gradient of a parameter in two blocks would be preconditioned twice.
            count = places.count(i)
            if count > 1:
                raise errors.UnsupportedError(
                    f"Expected the parameter {leaf} to be in one block, not in {count}. "
                    "Say what its layer is; or leave one of its uses out by "
                    "`approximation`."
                )

    def names(self, uses: Sequence[Use], /) -> list[str | None]:
        """Return the block of each use, None where it is left out.

        Raises
        ------
        ConventionError
            If a block has no use.
        """
        names = [self._names.get(_key(use)) for use in uses]
        unused = [name for name in self.blocks if name not in names]
        if unused:
            raise errors.ConventionError(
                f"The layers {unused} were not used this time."
            )
        return names

    def captured(
        self,
        uses: Sequence[Use],
        recorded: Sequence[tuple[Array, Array | None]],
        grads: Sequence[Array],
        /,
        *,
        reduction: LossReduction | None = None,
        source_vectors: SourceVectors | None = None,
    ) -> Captured:
        """Return the batches of blocks from those of each use.

        Parameters
        ----------
        uses : sequence of Use
            All uses, including those that are left out.
        recorded : sequence of pairs
            The inputs and the mask (or None) of each use.
        grads : sequence of array
            The output gradients of each use; with a first axis of sources if they are of
            `source_vectors`.
        reduction : {"sum", "mean", "mean_rows"}, optional
            The reduction of the loss that was differentiated, without `source_vectors`.
        source_vectors : SourceVectors, optional
            Vectors that were pulled back in place of a loss's gradient.

        Returns
        -------
        Captured
            Results of every block.

        Raises
        ------
        ConventionError
            For an unknown reduction, and where a block has no use.
        """
        # Vectors of a likelihood belong to the summed loss, whatever the caller's loss.
        declared: Any = reduction if source_vectors is None else "sum"
        constraints.require_one_of("reduction", declared, get_args(LossReduction))
        sources = None if source_vectors is None else source_vectors.sources
        by_block: dict[str, Any] = {}
        for name, (x, mask), g in zip(self.names(uses), recorded, grads, strict=True):
            if name is not None:
                by_block[name] = (*by_block.get(name, ()), Batch(x, g, mask, sources))
        batches = {name: b[0] if len(b) == 1 else b for name, b in by_block.items()}
        return Captured(
            batches,
            declared,
            None if source_vectors is None else source_vectors.source_reduction,
        )


def _key(use: Use) -> tuple[Layer, tuple[tuple[str, int], ...]]:
    _, layer, slots = use
    return layer, tuple(sorted(slots.items()))


def _require_sizes(
    name: str, layer: Layer, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    expected = layer.parameter_shapes
    sizes = {role: math.prod(shape) for role, shape in expected.items()}
    # Sizes and not shapes, as frameworks keep kernels of attention in more axes.
    if sizes != {role: math.prod(shape) for role, shape in shapes.items()}:
        raise errors.ShapeError(
            f"Layer {name!r}: expected parameters of the sizes of {dict(expected)}, got "
            f"{dict(shapes)}."
        )
