"""What every approximation offers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from kfac_core.approximations.options import OperatorOptions, UpdateOptions
from kfac_core.array.backend import Namespace
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.layer import Layer
from kfac_core.operators.operator import EVERY_PRODUCT, CurvatureOperator

__all__ = ["Approximation"]


class Approximation(Protocol):
    """Which statistics of the rows are kept, and which operator they make.

    A frozen dataclass without arrays, whose fields are its options, and whose bases are
    this class: what it does not say of itself has the values here.
    """

    name: ClassVar[str]
    """The name of the approximation."""

    unsupported_products: ClassVar[Mapping[str, str]] = EVERY_PRODUCT
    """The products that its operators do not have, each with the reason."""

    has_bases: ClassVar[bool] = False
    """Whether the statistics hold bases, which a method ``rebased`` recomputes."""

    sums_of_squares: ClassVar[tuple[tuple[str, str], ...]] = ()
    """The averages that are Gram matrices of all rows of an argument, by name.

    ``("input", "inputs")`` says that where the diagonal of the average ``input`` is finite,
    so were the ``inputs`` of the batch, which then need not be read for it.
    """

    @property
    def stacks(self) -> bool:
        """Whether statistics and operators of equal blocks may be computed as one.

        All arrays then have a leading axis in common, and every formula keeps it.
        """
        return False

    @property
    def factor_kinds(self) -> Mapping[str, str]:
        """The kind of each factor that another block may take, by side; see `Sharing`."""
        return {}

    @property
    def has_full_factors(self) -> bool:
        """Whether the block is one Kronecker product of two full matrices.

        Then `kfac_core.execution.costs` knows what its stages cost.
        """
        return False

    @property
    def decays(self) -> Mapping[str, float]:
        """The averages that decay in a way of their own."""
        return {}

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
