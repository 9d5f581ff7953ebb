"""What the estimator holds for one block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kfac_core.array.backend import Array
from kfac_core.array.namespaces import Scalar
from kfac_core.factors.statistics import Statistics
from kfac_core.operators.operator import CurvatureOperator

__all__ = ["BlockState"]


@dataclass(frozen=True)
class BlockState:
    """Statistics, the operator last made from them, and counts.

    Attributes
    ----------
    statistics : Statistics or None
        None before the first update.
    operator : CurvatureOperator or None
        None before the first refresh.
    updates : int
        How many updates the statistics have seen.
    age : int
        How many of them came after the operator was made.
    failures : int
        How many refreshes in a row have failed.
    damping : float, 0-d array or None
        The damping that the operator was made with.
    basis_age : int or None
        How many updates came after the bases were taken; None before that, and where
        the approximation has no bases.
    moments_missing : bool
        Whether the bases were taken with no moments, and no update came since.
    marks : mapping of str to array, or None
        Of the statistics that the operator was made from; see
        `kfac_core.execution.movement`.
    mean_gradient : array or None
        The mean gradient of the last batch, as the block's matrix, where the estimator
        was asked to keep it.
    """

    statistics: Statistics | None = None
    operator: CurvatureOperator | None = None
    updates: int = 0
    age: int = 0
    failures: int = 0
    damping: Scalar | None = None
    basis_age: int | None = None
    moments_missing: bool = False
    marks: Mapping[str, Array] | None = None
    mean_gradient: Array | None = None

    def updated(
        self, statistics: Statistics, mean_gradient: Array | None, /
    ) -> BlockState:
        """Return the state after an update.

        Parameters
        ----------
        statistics : Statistics
            As they are now.
        mean_gradient : array or None
            Of the batch.

        Returns
        -------
        BlockState
            With every count one higher.
        """
        return BlockState(
            statistics=statistics,
            operator=self.operator,
            updates=self.updates + 1,
            age=self.age + 1,
            failures=self.failures,
            damping=self.damping,
            basis_age=None if self.basis_age is None else self.basis_age + 1,
            moments_missing=False,
            marks=self.marks,
            mean_gradient=mean_gradient,
        )
