"""Options of an update and of an operator."""

from __future__ import annotations

from typing import Any, NamedTuple

from kfac_core.array.backend import Namespace
from kfac_core.array.namespaces import Scalar, cast
from kfac_core.array.status import Check
from kfac_core.conventions import Conventions
from kfac_core.damping import DampingRule
from kfac_core.factors.shares import UpdateShares
from kfac_core.factors.statistics import Statistics
from kfac_core.layers.example_gradients import require_known_rows
from kfac_core.linalg.damped import DampedMatrix
from kfac_core.linalg.factorizations import Factorization

__all__ = ["OperatorOptions", "UpdateOptions"]


class UpdateOptions(NamedTuple):
    """The options of one update of an approximation's statistics.

    Attributes
    ----------
    conventions : Conventions
        How the output gradients are scaled.
    decay : float or 0-d array
        What the old sums are multiplied with.
    weight : float, 0-d array or None
        The weight of this update; None is its number of rows (and of examples, for
        the mean number of repeats), so that averages of micro-batches merge exactly.
    xp : namespace
        Array API namespace of the arrays.
    skip : frozenset of str
        The factors that are left as they are.
    """

    conventions: Conventions
    decay: Scalar
    weight: Scalar | None
    xp: Namespace
    skip: frozenset[str] = frozenset()

    def shares(self, statistics: Statistics, rows: Any, /) -> UpdateShares:
        """Return the scales and weights of an update with these rows.

        Parameters
        ----------
        statistics : Statistics
            For the dtype.
        rows : Rows, IdRows or ExampleGradients
            Rows of the update.

        Returns
        -------
        UpdateShares
            Scales and weights for rows and for examples.
        """
        if self.conventions.reduction == "mean_rows":
            require_known_rows(rows, "mean_rows")
        xp, dtype, weight = self.xp, statistics.dtype, self.weight
        kept, N = rows.kept(dtype, xp=xp), rows.examples
        # The conventions, and the number of repeats, are those of the whole batch that a
        # part (a chunk, or selected rows) is of.
        part_of = getattr(rows, "batch_examples", None)
        whole, all_rows = (N, kept) if part_of is None else (part_of, rows.batch_rows)
        if not isinstance(all_rows, int):
            all_rows = cast(xp, all_rows, dtype)
        scale = self.conventions.outer_product_scale(
            examples=whole, rows=all_rows, sources=rows.sources
        )
        repeats = all_rows / whole
        if isinstance(kept, int):
            some: Scalar = 1.0
            nonzero: Scalar = kept
        else:
            some = xp.astype(kept > 0, kept.dtype)
            nonzero = xp.where(kept > 0, kept, xp.ones_like(kept))
        if weight is None:
            # The examples of a part of which nothing counts are examples all the same.
            return UpdateShares(some, 1.0, kept, N, scale, repeats)
        own = some * weight
        return UpdateShares(own / nonzero, own / N, own, own, scale, repeats)


class OperatorOptions(NamedTuple):
    """The options of `kfac_core.Block.operator`, which documents them.

    Attributes
    ----------
    damping : float or 0-d array
        Damping ``lam``; an array is of the dtype `compute`.
    rule : {"factored", "factored_unit_pi", "exact"}
        How it is applied, where a block leaves a choice.
    least_shift : float
        The least number that a factored rule adds to a factor.
    keep_matrices : bool
        Whether full factors keep the matrices that their factorizations are of.
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
    memo : dict or None
        What operators that share factors have made already, by the identity of the
        average that it was made from; None where no factor is shared.
    xp : namespace
        Array API namespace of the statistics.
    """

    damping: Scalar
    rule: DampingRule
    debias: bool
    factorizations: tuple[Factorization, ...]
    check: Check
    compute: Any
    apply: Any
    name: str
    memo: dict[Any, Any] | None
    xp: Namespace
    least_shift: float = 0.0
    keep_matrices: bool = True

    def kept(self, part: Any, /) -> Any:
        """Return a damped factor as an operator is to keep it.

        Parameters
        ----------
        part : DampedMatrix, DampedDiagonal or DampedRankOne
            Factor with its factorizations.

        Returns
        -------
        DampedMatrix, FactorizedMatrix, DampedDiagonal or DampedRankOne
            Without its matrix, if matrices are not kept.
        """
        if self.keep_matrices or not isinstance(part, DampedMatrix):
            return part
        return part.factorized()
