"""The operator of a block that other ranks hold."""

from __future__ import annotations

from typing import Any, NoReturn, get_args

from kfac_core import errors
from kfac_core.array import Array, Check
from kfac_core.array.structure import structure
from kfac_core.linalg.factorizations import Factorization, Solving
from kfac_core.operators.operator import CurvatureOperator

__all__ = ["RemoteOperator"]


@structure(static=("owner", "matrix_shape"))
class RemoteOperator(CurvatureOperator):
    """Stands for an operator that this rank does not hold.

    `kfac_core.Estimator.precondition` and `kfac_core.Estimator.apply`, called on all ranks,
    return its products on every rank.  Its own products raise `UnsupportedError`.

    Attributes
    ----------
    owner : int
        Rank that factorized it.
    matrix_shape : tuple of int
        Shape of its vectors.
    zero : array, 0-d
        Array of the operator's library, device and dtype.
    flags : array of int32, 0-d
        Status of the operator.
    """

    owner: int
    matrix_shape: tuple[int, int]
    zero: Array
    flags: Array

    @property
    def vector_shape(self) -> tuple[int, int]:
        """The shape ``(in(+1), out)`` of the vectors."""
        return self.matrix_shape

    @property
    def like(self) -> Array:
        """An array of the operator's library, device and dtype."""
        return self.zero

    @property
    def factorizations(self) -> frozenset[Factorization]:
        """All: they are prepared where the operator is."""
        return frozenset(get_args(Factorization))

    def prepared(
        self,
        *factorizations: Factorization,
        check: Check = "raise",
        name: str = "block",
    ) -> RemoteOperator:
        """Return this operator: its holders prepare it."""
        return self

    def solved_by(self, solving: Solving, /) -> RemoteOperator:
        """Return this operator: its holders solve with it."""
        return self

    def status(self) -> Array:
        """Return the `Status` flags, 0-d int32; zero without failures."""
        return self.flags

    def _refuse(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise `UnsupportedError`."""
        raise errors.UnsupportedError(
            f"This operator is held by rank {self.owner} and not by this one. Call "
            "`Estimator.precondition` or `Estimator.apply` on all ranks, or give "
            "`holders='all'` to `Distributed`. A state that other processes divided is "
            "saved by `Estimator.state_dict`."
        )

    trace = eigenvalues = to_dense = _refuse
    _logdet = _multiply = _multiply_inverse = _power = _sample = _refuse
    _lower_multiply = _lower_solve = _refuse
