"""The interface of approximations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar

from kfac_core import errors
from kfac_core.approximations.options import OperatorOptions, UpdateOptions
from kfac_core.array import Array, Check, Namespace, Place
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.layer import Layer
from kfac_core.operators.operator import EVERY_PRODUCT, CurvatureOperator

R = TypeVar("R")
"""Rows."""

MomentStart = Literal["kronecker", "carried", "zero"]
"""How EKFAC's second moments start after a change of basis; see `kfac_core.EKFAC`."""

Reduction = Literal["sum", "none"]
"""How statistics of processes are combined; see `Approximation.reduction`."""


class Approximation(ABC, Generic[R]):
    """The statistics that are kept of the rows, and the operator made from them.

    The base class of all approximations.  A subclass is a frozen dataclass without
    arrays, whose fields are its options.  It defines `name`, `initial`, `updated` and
    `operator`; all other members have defaults.  R is the class of rows that `updated`
    takes: those of the layers that `problem_with` accepts.
    """

    name: ClassVar[str]
    """The name of the approximation, for reports and files."""

    unsupported_products: ClassVar[Mapping[str, str]] = EVERY_PRODUCT
    """Unsupported products of its operators, each with the reason."""

    has_bases: ClassVar[bool] = False
    """Whether the statistics hold bases, which a method ``rebased`` recomputes."""

    sums_of_squares: ClassVar[tuple[tuple[str, str], ...]] = ()
    """The averages that are Gram matrices of all rows of an argument, by name.

    ``("input", "inputs")``: if the diagonal of the average ``input`` is finite, so are the
    ``inputs`` of the batch, which then need not be read.  An average of one axis is the
    diagonal itself.  ``"gradients"`` are those of a layer without pairs of
    inputs and output gradients.
    """

    @property
    def reduction(self) -> Reduction:
        """How the statistics of several processes are combined.

        ``"sum"``: sums and weights are added, in common bases where there are any.
        ``"none"`` (the default): they cannot be; `reduction_problem` gives the reason.
        """
        return "none"

    @property
    def reduction_problem(self) -> str:
        """Why ``reduction`` is ``"none"``."""
        return "it does not say how its statistics are reduced; define `reduction`"

    @property
    def stacks(self) -> bool:
        """Whether statistics and operators of equal blocks may be computed as one.

        All arrays then have a leading axis in common, and every formula keeps it.
        """
        return False

    @property
    def reads_patches(self) -> bool:
        """Whether the rows of a convolution are patches, which may be read in chunks."""
        return True

    @property
    def factor_kinds(self) -> Mapping[str, str]:
        """The kind of each factor that another block may take, by side; see `Coupling`.

        Blocks may share a factor where its kind and its size are the same, so that two
        statistics that differ, by a constant too, need different kinds.
        """
        return {}

    @property
    def decays(self) -> Mapping[str, float]:
        """Decays of averages that differ from the decay of updates."""
        return {}

    def factor_shapes(self, layer: Layer, /) -> Mapping[str, tuple[int, int]]:
        """Return the sizes of the full factors that are factorized at a refresh.

        Blocks are placed on processes by them.  Blocks with full factors support both
        methods of solving: their operators have a method ``solved_by``.

        Parameters
        ----------
        layer : Layer
            Layer of the block.

        Returns
        -------
        mapping of str to tuple of int
            For each factor its number of rows, and the number of columns that its inverse
            is multiplied with at each step, for one group of the layer.  Empty (the
            default) if the costs are unknown.
        """
        return {}

    def problem_with(self, layer: Layer, /) -> str | None:
        """Return why a layer is not supported, or None if it is.

        By default every layer is supported, except a chain of several.
        """
        if layer.kind == "chain":
            return "is of one layer; take BlockTridiagonal"
        return None

    @abstractmethod
    def initial(self, layer: Layer, place: Place, /) -> Statistics:
        """Return zero statistics.

        Parameters
        ----------
        layer : Layer
            Layer whose sizes fix those of the statistics.
        place : Place
            Library, device and dtype of the statistics.

        Returns
        -------
        Statistics
            Statistics that are zero throughout.
        """

    def rows(self, layer: Layer, batch: Any, /) -> R:
        """Return the rows of a batch, from which statistics are computed."""
        # `problem_with` has refused layers with rows of another class.
        return layer.rows(batch)  # type: ignore[return-value]

    @abstractmethod
    def updated(
        self, statistics: Statistics, rows: R, layer: Layer, options: UpdateOptions, /
    ) -> Statistics:
        """Return the statistics after one update.

        Parameters
        ----------
        statistics : Statistics
            Old statistics; not modified.
        rows : Rows, or another result of `rows`
            Rows of one batch.  They may hold NaN or infinity; the caller checks
            for that and keeps the old statistics.
        layer : Layer
            Layer that they are of.
        options : UpdateOptions
            Conventions, decay, weight, and which averages another block computes.

        Returns
        -------
        Statistics
            New statistics with the same structure.
        """

    def rebased(
        self,
        statistics: Statistics,
        layer: Layer,
        /,
        *,
        moments: MomentStart,
        check: Check,
        overwrite: bool = False,
    ) -> Statistics:
        """Return the statistics in the eigenbases of their current factors.

        For an approximation that ``has_bases``; others raise `UnsupportedError`.

        Parameters
        ----------
        statistics : Statistics
            Statistics whose factors are kept.
        layer : Layer
            Layer of the block.
        moments : {"kronecker", "carried", "zero"}
            How the second moments start in the new bases.
        check : {"raise", "status"}
            Whether a failed eigendecomposition raises, or sets a flag.
        overwrite : bool
            Whether to work in the memory of the factors.

        Returns
        -------
        Statistics
            Statistics in new bases.
        """
        raise errors.UnsupportedError(
            f"{self.name} has no bases; only EKFAC blocks have bases."
        )

    def squares(self, statistics: Statistics, /, *, xp: Namespace) -> Sequence[Array]:
        """Return squares that the operator will form, which must not overflow.

        Averages of squares are checked without this.  An approximation that keeps rows,
        whose squares are formed at a refresh, returns these squares.

        Parameters
        ----------
        statistics : Statistics
            Statistics after an update.
        xp : namespace
            Array API namespace of the arrays.

        Returns
        -------
        sequence of array
            Arrays of any shape; none by default.
        """
        return ()

    @abstractmethod
    def operator(
        self, statistics: Statistics, layer: Layer, options: OperatorOptions, /
    ) -> CurvatureOperator:
        """Return the curvature operator of the statistics as they are now.

        Parameters
        ----------
        statistics : Statistics
            Statistics of the block; not modified.
        layer : Layer
            Layer of the block.
        options : OperatorOptions
            Damping and its rule, factorizations to prepare, and dtypes.

        Returns
        -------
        CurvatureOperator
            An immutable snapshot.

        Raises
        ------
        NotFiniteError, DampingError, FactorizationError
            If a factorization fails (``check="raise"``).
        """
