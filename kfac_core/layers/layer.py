"""The interface of layers: shapes, rows, and parameters as one matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

from kfac_core.array import Array
from kfac_core.layers.chain import ChainRows
from kfac_core.layers.example_gradients import ExampleGradients
from kfac_core.layers.id_rows import IdRows
from kfac_core.layers.rows import PixelRows, Rows

AnyRows: TypeAlias = Rows | IdRows | ExampleGradients
"""A batch of a layer of any kind, as the statistics are computed from it."""

BlockRows: TypeAlias = AnyRows | PixelRows | ChainRows
"""A batch of a block of any kind."""


class Layer(Protocol):
    """The geometry of one layer; a frozen dataclass without arrays."""

    @property
    def kind(self) -> str:
        """The name of the kind of layer."""

    @property
    def groups(self) -> int:
        """The number of groups whose rows are independent; nearly always 1."""

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The shape ``(in(+1), out)`` of the block's matrix."""

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters, by name, in a framework's layout."""

    # Any: `Batch`, `GradientBatch` or several, as the kind of layer needs.
    def rows(self, batch: Any, /) -> AnyRows | ChainRows:
        """Turn a batch of the class that this kind of layer takes into rows."""

    def stacked(self, count: int, /) -> Layer | None:
        """Return a layer for many equal ones, whose arrays have a leading axis of them.

        None if its functions do not keep a leading axis; equal layers are then computed one
        by one.
        """

    def parameters_to_matrix(self, parameters: Mapping[str, Array], /) -> Array:
        """Turn parameter-shaped arrays into the block's matrix."""

    def matrix_to_parameters(self, matrix: Array, /) -> dict[str, Array]:
        """Turn a block's matrix back into parameter-shaped arrays."""
