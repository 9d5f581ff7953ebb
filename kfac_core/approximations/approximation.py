"""What every approximation offers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from kfac_core.approximations.options import OperatorOptions, UpdateOptions
from kfac_core.array.backend import Namespace
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.layer import Layer
from kfac_core.operators.operator import CurvatureOperator

__all__ = ["Approximation"]


class Approximation(Protocol):
    """Which statistics of the rows are kept, and which operator they make.

    A frozen dataclass without arrays, whose fields are its options.
    """

    @property
    def name(self) -> str:
        """The name of the approximation."""

    @property
    def unsupported_products(self) -> Mapping[str, str]:
        """The products that its operators do not have, each with the reason."""

    def problem_with(self, layer: Layer, /) -> str | None:
        """Say why it does not go together with a layer; None where it does."""

    def initial(
        self, layer: Layer, /, *, dtype: Any, device: Any, xp: Namespace
    ) -> Statistics:
        """Return the statistics of nothing, of a dtype and on a device."""

    def rows(self, layer: Layer, batch: Any, /) -> Any:
        """Return what the layer saw in the form that the statistics are made of."""

    def updated(
        self, statistics: Statistics, rows: Any, layer: Layer, options: UpdateOptions, /
    ) -> Statistics:
        """Return the statistics after one update; see `Kronecker.updated`."""

    def operator(
        self, statistics: Statistics, layer: Layer, options: OperatorOptions, /
    ) -> CurvatureOperator:
        """Make the curvature operator from the statistics, at this moment."""
