"""Options of an update and of an operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kfac_core.array.backend import Namespace
from kfac_core.array.namespaces import Scalar
from kfac_core.array.status import Check
from kfac_core.conventions import Conventions
from kfac_core.damping import DampingRule
from kfac_core.factors.shares import UpdateShares, update_shares
from kfac_core.factors.statistics import Statistics
from kfac_core.linalg.shifted import Factorization

__all__ = ["OperatorOptions", "UpdateOptions"]


@dataclass(frozen=True, kw_only=True)
class UpdateOptions:
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
    skip : frozenset of str
        The factors that are left as they are.
    xp : namespace
        Array API namespace of the arrays.
    """

    conventions: Conventions
    decay: Scalar
    weight: Scalar | None
    skip: frozenset[str] = frozenset()
    xp: Namespace

    def shares(self, statistics: Statistics, rows: Any, /) -> UpdateShares:
        """Return the shares of the update with these rows; see `update_shares`."""
        return update_shares(
            statistics,
            rows,
            conventions=self.conventions,
            weight=self.weight,
            xp=self.xp,
        )


@dataclass(frozen=True, kw_only=True)
class OperatorOptions:
    """The options of `kfac_core.Block.operator`, which documents them.

    Attributes
    ----------
    damping : float or 0-d array
        Damping ``lam``; an array is of the dtype `compute`.
    rule : {"factored", "factored_unit_pi", "exact"}
        How it is applied, where a block leaves a choice.
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
    memo : dict
        What operators that share factors have made already, by the identity of the
        average that it was made from.
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
    memo: dict[Any, Any]
    xp: Namespace
