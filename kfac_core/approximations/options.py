"""Options of an update, of a refresh, and of the operator that a refresh makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from kfac_core import errors
from kfac_core.array import Array, Check, DType, Namespace, Scalar
from kfac_core.array import namespaces as ns
from kfac_core.array.precision import Precision
from kfac_core.array.structure import structure
from kfac_core.conventions import Conventions
from kfac_core.damping import DampingRule, factored_shifts
from kfac_core.factors.shares import Shares
from kfac_core.layers.example_gradients import require_known_rows
from kfac_core.layers.layer import BlockRows
from kfac_core.layers.rows import Rows
from kfac_core.linalg.factorizations import Factorization, Solving

DampingScaling = Literal["none", "mean_eigenvalue"]
"""Whether a damping is absolute, or relative to the mean eigenvalue of its block."""


@structure(
    static=("conventions", "skip", "check", "max_patch_elements", "deferred", "xp")
)
class UpdateOptions:
    """How one update changes the statistics of a block.

    Parameters
    ----------
    conventions : Conventions
        Scaling of the output gradients.
    decay : float or 0-d array
        Factor on the old statistics, in [0, 1].
    weight : float, 0-d array or None
        Weight of this batch, positive.  None is its number of rows (of examples, for the
        mean number of repeats), so that averages of micro-batches merge exactly.
    skip : frozenset of str
        Factors, ``"input"`` or ``"output"``, to leave unchanged because another block
        computes them.
    check : {"raise", "status"}
        ``"raise"`` raises on failure, and synchronizes with the device; ``"status"`` keeps
        the old statistics and sets their ``status``.
    max_patch_elements : int, optional
        Bound on the number of elements of a convolution's patches.  The batch is
        processed in chunks of examples, with the same result.
    deferred : bool
        Whether the caller reads the flags; a network reads those of all blocks at once.
    overwrite : bool
        Whether the sums of second moments are updated in place where the library can: the
        old statistics are then of no further use, whatever becomes of the update.
    xp : namespace, optional
        Array API namespace of the statistics, for `Approximation.updated`; set by
        `kfac_core.update_block`.
    """

    conventions: Conventions
    decay: Scalar
    weight: Scalar | None = 1.0
    skip: frozenset[str] = frozenset()
    check: Check = "raise"
    max_patch_elements: int | None = None
    deferred: bool = False
    overwrite: bool = False
    xp: Namespace = None

    def shares(
        self,
        rows: BlockRows,
        dtype: object,
        /,
        *,
        per: Literal["row", "example"] = "row",
    ) -> Shares:
        r"""Return the scales and weights of an update with these rows.

        With N examples, R rows that count and the update's weight w, a factor takes
        :math:`\frac wR \sum x x^\top` and :math:`\frac wR c \sum g g^\top` over rows (N
        in place of R over examples), c undoing the loss's reduction; and the mean number
        of positions is S = R / N.

        Parameters
        ----------
        rows : Rows, IdRows or ExampleGradients
            Rows of the update.
        dtype : dtype
            Dtype of the statistics.
        per : {"row", "example"}
            Whether sums run over rows or over examples.

        Returns
        -------
        Shares
            Scales and weights of such sums.
        """
        if self.conventions.reduction == "mean_rows":
            require_known_rows(rows, "mean_rows")
        xp, weight = self.xp, self.weight
        R, N, M = rows.counts(dtype, xp=xp)
        # A chunk is scaled by the counts of its whole batch, so that chunks add up.
        batch_N, batch_R = N, R
        if isinstance(rows, Rows) and rows.batch_examples is not None:
            batch_N, batch_R = rows.batch_examples, rows.batch_rows
        if not isinstance(batch_R, int):
            batch_R = ns.cast(xp, batch_R, dtype)
        outer_product_scale = self.conventions.outer_product_scale(
            examples=batch_N, rows=batch_R, sources=M
        )
        repeats = batch_R / batch_N
        # A fully masked part still counts toward N, and adds no weight.
        # Divide by 1 in place of 0, and multiply by `some` to add nothing.
        some: Scalar = 1.0
        nonzero: Scalar = R
        if not isinstance(R, int):
            some = xp.astype(R > 0, R.dtype)
            nonzero = xp.where(R > 0, R, xp.ones_like(R))
        if weight is None:
            row_scale, row_weight = some, R
            example_scale: Scalar = 1.0
            example_weight: Scalar = N
        else:
            row_weight = example_weight = some * weight
            row_scale, example_scale = row_weight / nonzero, row_weight / N
        if per == "row":
            return Shares(
                row_scale, row_weight, outer_product_scale, repeats, example_weight
            )
        return Shares(
            example_scale, example_weight, outer_product_scale, 1.0, example_weight
        )


@structure(
    static=(
        "rule",
        "damping_scaling",
        "least_shift",
        "debias",
        "keep_matrices",
        "factorizations",
        "solving",
        "precision",
        "check",
    )
)
class RefreshOptions:
    """How a block's operator is made from its statistics.

    Parameters
    ----------
    damping : float or 0-d array
        Damping, finite and >= 0.
    rule : {"factored", "factored_unit_pi", "exact"}
        How the damping is applied: split between the factors, split evenly, or added to
        the block; see `kfac_core.damping`.
    factorizations : tuple of {"inverse", "cholesky", "eigenbasis"}
        Factorizations to prepare now; the rest are prepared when needed
        (``check="raise"`` only).
    check : {"raise", "status"}
        ``"raise"`` raises on failure, and synchronizes with the device; ``"status"`` sets
        the operator's ``status()``.
    debias : bool
        Whether sums are divided by their weights.
    damping_scaling : {"none", "mean_eigenvalue"}
        See `kfac_core.Refreshing`.
    least_shift : float
        The least number that a factored rule adds to a factor.
    keep_matrices : bool
        See `kfac_core.Refreshing`.
    solving : {"inverse", "triangular"}
        Whether a factored block is solved with inverses of its factors, or with their
        Cholesky factors.
    precision : Precision, optional
        Dtypes of computing and applying; by default the dtype of the statistics.
    """

    damping: Scalar
    rule: DampingRule
    factorizations: tuple[Factorization, ...] = ("inverse",)
    check: Check = "raise"
    debias: bool = True
    damping_scaling: DampingScaling = "none"
    least_shift: float = 0.0
    keep_matrices: bool = True
    solving: Solving = "inverse"
    precision: Precision | None = None


class OperatorOptions(NamedTuple):
    """Checked options of `Approximation.operator`, in the dtypes of computing.

    Attributes
    ----------
    damping : float or 0-d array
        Damping ``lam``; an array is of the dtype `compute`.
    rule : {"factored", "factored_unit_pi", "exact"}
        How the damping is applied, where the block supports several ways.
    debias : bool
        Whether sums are divided by their weights.
    factorizations : tuple of str
        Factorizations to prepare now.
    check : {"raise", "status"}
        Whether failures raise, or are reported in the operator's status.
    compute, apply : dtype
        Dtypes of factorizing, and of the operator.
    name : str
        The block's name, for messages.
    xp : namespace
        Array API namespace of the statistics.
    least_shift : float
        The least number that a factored rule adds to a factor.
    keep_matrices : bool
        Whether full factors keep the matrices that their factorizations are of.
    """

    damping: Scalar
    rule: DampingRule
    debias: bool
    factorizations: tuple[Factorization, ...]
    check: Check
    compute: DType
    apply: DType
    name: str
    xp: Namespace
    least_shift: float = 0.0
    keep_matrices: bool = True

    def require_factored(self, what: str, /) -> None:
        """Raise `UnsupportedError` under the exact rule, which moments cannot follow."""
        if self.rule == "exact":
            raise errors.UnsupportedError(
                f"{what} is damped in its moments, and has no exact damping. Use the rule "
                "'factored' or 'factored_unit_pi'."
            )

    @property
    def preparing(self) -> dict[str, Any]:
        """The arguments `factorizations`, `check` and `name` of operators."""
        return {
            "factorizations": self.factorizations,
            "check": self.check,
            "name": self.name,
        }

    def shifts(self, means: Sequence[Array], scale: Array, /) -> list[Array]:
        """Return the shift of each factor's diagonal; zeros under exact damping.

        Parameters
        ----------
        means : sequence of array
            The mean eigenvalues of the factors.
        scale : array
            The number S that the product of the factors is multiplied by.

        Returns
        -------
        list of array
            Shifts by `kfac_core.damping.factored_shifts`.
        """
        if self.rule == "exact":
            return [self.xp.zeros_like(mean) for mean in means]
        return factored_shifts(
            means,
            self.damping,
            scale=scale,
            unit_pi=self.rule == "factored_unit_pi",
            least=self.least_shift,
            xp=self.xp,
        )
