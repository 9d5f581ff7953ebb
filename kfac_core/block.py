"""A block pairs a layer with an approximation.

Conventions.  A block holds no arrays.  The module ``stages`` has the functions of one
block: its update, its refresh and its products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import array_api_compat

from kfac_core import constraints, errors
from kfac_core.approximations.approximation import Approximation
from kfac_core.array import Array, Place
from kfac_core.array import namespaces as ns
from kfac_core.array.backend import load_adapters
from kfac_core.array.precision import Precision
from kfac_core.array.structure import is_structure
from kfac_core.conventions import Conventions
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.chain import Chain
from kfac_core.layers.conv import Conv
from kfac_core.layers.example_gradients import GradientBatch, require_known_rows
from kfac_core.layers.feeding import BatchLike as BatchLike
from kfac_core.layers.id_rows import IdRows
from kfac_core.layers.layer import BlockRows, Layer
from kfac_core.layers.rows import Batch, PixelRows, Rows, join_uses

Vector: TypeAlias = Mapping[str, Mapping[str, Array]]
"""Arrays of the shapes of parameters, by block (or layer) and by parameter."""

_FULL_PRECISION = Precision()

_BATCHES = "a `Batch`, a `GradientBatch` or a sequence of `Batch`"


@dataclass(frozen=True)
class Block:
    """A layer paired with an approximation of its curvature.

    Parameters
    ----------
    layer : Layer
        Geometry of the layer, such as `Dense`: makes rows from batches, and a matrix from
        parameters.
    approximation : Approximation
        Approximation, such as `Kronecker`: which statistics are kept, and which operator
        is made from them.

    Raises
    ------
    UnsupportedError
        If the approximation does not support the layer; the message gives the reason.

    Examples
    --------
    >>> import kfac_core as kc
    >>> layer = kc.Dense(in_features=64, out_features=10, bias=True, weight_layout="io")
    >>> kfac, ekfac = kc.Block(layer, kc.Kronecker()), kc.Block(layer, kc.EKFAC())
    """

    layer: Layer
    approximation: Approximation[Any]

    def __post_init__(self) -> None:
        constraints.require_options(
            self,
            layer=constraints.implementation_of(Layer),
            approximation=constraints.implementation_of(Approximation),
        )
        # A library imported after `kfac_core` has registered no structures yet, and JAX
        # must know them before it traces this block.
        load_adapters()
        problem = self.approximation.problem_with(self.layer)
        if problem is not None:
            raise errors.UnsupportedError(
                f"{type(self.approximation).__name__} for layers of kind "
                f"{self.layer.kind}: {problem}."
            )

    def initial(
        self, like: Array, /, *, precision: Precision = _FULL_PRECISION
    ) -> Statistics:
        """Return zero statistics in an array's library and on its device.

        Parameters
        ----------
        like : array
            Array of the library, such as a layer's inputs; its dtype, widened to
            float32 where it is narrower, is that of the statistics unless `precision`
            says another.
        precision : Precision
            Precision whose storage dtype is used.

        Returns
        -------
        Statistics
            Statistics that are zero throughout.
        """
        xp = ns.namespace_of(like=like)
        ns.require_floating(xp, like, "like")
        dtype = precision.dtype(precision.storage, ns.wide_dtype(xp, like.dtype), xp=xp)
        place = Place(xp, dtype, ns.device_of(like))
        return self.approximation.initial(self.layer, place)

    def first_statistics(
        self,
        batch: BatchLike,
        /,
        *,
        precision: Precision,
        max_patch_elements: int | None,
        name: str,
    ) -> Statistics:
        """Return zero statistics in the library of a first batch, which is validated."""
        try:
            # The first chunk shows the library, device and dtype.
            chunks = self.row_parts(batch, max_patch_elements=max_patch_elements)
            return self.initial(next(iter(chunks)).like, precision=precision)
        except errors.KFACError as error:
            raise type(error)(f"Block {name!r}: {error}") from None

    def rows(self, batch: BatchLike, /) -> BlockRows:
        """Return the rows of a batch, from which statistics are computed.

        Parameters
        ----------
        batch : Batch, GradientBatch or sequence of Batch
            Batch of the layer; not modified.

        Returns
        -------
        Rows, IdRows, PixelRows or ExampleGradients
            Rows in the form that the layer and the approximation use; several uses become
            shared positions.

        Raises
        ------
        ShapeError, DtypeError, MixedArraysError, UnsupportedError
            For arrays of incompatible shape, dtype, library or device.
        """
        if not isinstance(batch, list | tuple):
            # Only a chain of layers has a batch for each of them.
            is_chain = isinstance(batch, dict) and isinstance(self.layer, Chain)
            if not (is_structure(batch) or is_chain):
                constraints.require_kind("batch", batch, Batch, _BATCHES)
            rows: BlockRows = self.approximation.rows(self.layer, batch)
            return rows
        for use in batch:
            constraints.require_kind("batch", use, Batch | GradientBatch, _BATCHES)
        uses = [self.approximation.rows(self.layer, use) for use in batch]
        constraints.require_any("batch", uses)
        if not all(isinstance(use, Rows) for use in uses):
            raise errors.UnsupportedError(
                "Expected several uses of one layer to be batches of rows, of a dense or "
                f"conv layer; got {[type(use).__name__ for use in uses]}. Give a single "
                "batch."
            )
        return join_uses(uses)

    def mean_gradient(self, batch: BatchLike, /, *, conventions: Conventions) -> Array:
        """Return the mean gradient over the examples, summed over sources.

        Parameters
        ----------
        batch : Batch, GradientBatch or sequence of Batch
            Inputs and output gradients of the layer.
        conventions : Conventions
            Scaling of the output gradients.

        Returns
        -------
        array, shape (in(+1), out)
            ``1/N sum_mns x g^T`` for gradients of the summed loss.
        """
        rows = self.rows(batch)
        if isinstance(rows, PixelRows):
            rows = self.layer.rows(batch)
        xp = array_api_compat.array_namespace(rows.like)
        if isinstance(rows, IdRows):
            rows, _ = rows.with_ids_inside(xp=xp)
        require_known_rows(rows, conventions.reduction)
        dtype = ns.wide_dtype(xp, rows.like.dtype)
        R, N, _ = rows.counts(dtype, xp=xp)
        scale = conventions.gradient_scale(examples=N, rows=R)
        # `scale` undoes the caller's reduction, so that the result is the gradient of
        # the mean over examples, whatever loss was differentiated.
        return rows.gradient_sum(dtype, xp=xp) * (scale / N)

    def parameters_to_matrix(self, parameters: Mapping[str, Array], /) -> Array:
        """Turn parameter-shaped arrays into the block's matrix ``(in(+1), out)``."""
        return self.layer.parameters_to_matrix(parameters)

    def matrix_to_parameters(self, matrix: Array, /) -> dict[str, Array]:
        """Turn a block's matrix back into parameter-shaped arrays."""
        ns.namespace_of(matrix=matrix)
        return self.layer.matrix_to_parameters(matrix)

    def stacked(self, count: int, /) -> Block | None:
        """Return a block for many equal blocks, whose arrays have one more leading axis.

        Parameters
        ----------
        count : int
            Number of equal blocks.

        Returns
        -------
        Block or None
            None where layer or approximation keep no leading axes.
        """
        # Both must agree: the layer's functions keep a leading axis, and the statistics
        # are sums that a batched Gram product forms.
        layer = self.layer.stacked(count) if self.approximation.stacks else None
        return None if layer is None else Block(layer, self.approximation)

    def row_parts(
        self, batch: BatchLike, /, *, max_patch_elements: int | None
    ) -> Iterator[Any]:
        """Yield `rows` of a batch, in chunks of examples where a budget is given.

        Parameters
        ----------
        batch : Batch, GradientBatch or sequence of Batch
            Batch of the layer; not modified.
        max_patch_elements : int or None
            Bound on the number of elements of a convolution's patches; ignored without
            patches.

        Yields
        ------
        Rows, IdRows, PixelRows or ExampleGradients
            Rows of each chunk.

        Raises
        ------
        UnsupportedError
            For several uses of a convolution together with a budget.
        """
        layer = self.layer
        has_patches = self.approximation.reads_patches
        if max_patch_elements is None or not (isinstance(layer, Conv) and has_patches):
            yield self.rows(batch)
            return
        one = "a `Batch`, or `max_patch_elements` to be None"
        constraints.require_kind("batch", batch, Batch, one)
        chunks: Batch = batch  # type: ignore[assignment]
        yield from layer.row_chunks(chunks, max_patch_elements=max_patch_elements)
