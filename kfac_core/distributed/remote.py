"""The operator of a block that other ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, get_args

from kfac_core import errors
from kfac_core.array import Array, Check
from kfac_core.array import namespaces as ns
from kfac_core.array.structure import structure
from kfac_core.distributed.placement import RowRange
from kfac_core.linalg.damped import DampedMatrix
from kfac_core.linalg.factorizations import Factorization, Solving
from kfac_core.operators.kronecker import FactoredKronecker
from kfac_core.operators.operator import CurvatureOperator


@structure()
class InverseRows:
    """Computes some rows of ``A^-1 V G^-1 / S``, or of its transpose if G is larger.

    Attributes
    ----------
    rows : array, shape (k, n)
        Rows of the larger inverse.
    other : array, shape (m, m)
        The other inverse.
    scale : array, 0-d
        S.
    """

    rows: Array
    other: Array
    scale: Array

    def multiply(self, vector: Array, /) -> Array:
        """Return k rows of a product; 2 k m (n + m) flops.

        Parameters
        ----------
        vector : array, shape (..., n, m)
            V, or its transpose; see `larger_first`.

        Returns
        -------
        array, shape (..., k, m)
            In the dtype of the inverses.
        """
        xp = ns.own_namespace(self.rows)
        # Rows first: k n m flops and not n m^2 on every rank.
        left = xp.matmul(self.rows, ns.cast(xp, vector, self.rows.dtype))
        return xp.matmul(left, self.other) / self.scale


def has_inverses(operator: CurvatureOperator, /) -> bool:
    """Return whether an operator's inverse products are ``A^-1 V G^-1 / S``."""
    return isinstance(operator, FactoredKronecker) and all(
        isinstance(side, DampedMatrix)
        and side.solving == "inverse"
        and side.inverse is not None
        for side in (operator.input, operator.output)
    )


def rows_of_inverses(operator: Any, ranges: Sequence[RowRange], /) -> list[InverseRows]:
    """Return some rows of the larger inverse, and the other inverse, for each range.

    Parameters
    ----------
    operator : FactoredKronecker
        Operator that `has_inverses`.
    ranges : sequence of RowRange
        Rows of each rank.

    Returns
    -------
    list of InverseRows
        Views of the same two arrays.
    """
    sides = operator.input, operator.output
    A, G = (side.inverse.matrix.full() for side in sides)
    # Rows of the larger inverse are divided: so ranks have the most to share, and each
    # holds the smaller one whole.
    larger, other = (A, G) if A.shape[-1] >= G.shape[-1] else (G, A)
    return [
        InverseRows(larger[rows.start : rows.stop, :], other, operator.scale)
        for rows in ranges
    ]


def larger_first(matrix: Array, /) -> Array:
    """Return a matrix, or its transpose, with at least as many rows as columns."""
    if matrix.shape[-2] >= matrix.shape[-1]:
        return matrix
    return ns.own_namespace(matrix).matrix_transpose(matrix)


@structure(static=("owner", "matrix_shape", "is_divided", "has_failed"))
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
    is_divided : bool
        Whether several ranks compute its directions.
    inverse_rows : InverseRows or None
        What this rank computes them with.
    has_failed : bool
        Whether it stands on its holders for an operator that could not be made, until the
        directions of the step tell the other ranks.
    """

    owner: int
    matrix_shape: tuple[int, int]
    zero: Array
    flags: Array
    is_divided: bool = False
    inverse_rows: InverseRows | None = None
    has_failed: bool = False

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
        # So that a network does not ask a rank to prepare what it does not hold.
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

    def direction_rows(self, vector: Array, start: int, stop: int, /) -> Array:
        """Return this rank's rows of a direction, in the vector's dtype.

        Parameters
        ----------
        vector : array, shape (..., n, m)
            Gradient; see `larger_first`.
        start, stop : int
            Range of the rows.

        Returns
        -------
        array, shape (..., stop - start, m)
            Finite, or this raises as other products do.
        """
        assert self.inverse_rows is not None
        rows = vector[..., start:stop, :]
        xp = ns.own_namespace(rows)
        return self._leave(self.inverse_rows.multiply(vector), rows, xp, divides=True)

    def status(self) -> Array:
        """Return the `Status` flags, 0-d int32; zero without failures."""
        return self.flags

    def _refuse(self, *arguments: object, **options: object) -> NoReturn:
        """Raise `UnsupportedError`, or `FactorizationError` for one that has failed."""
        if self.has_failed:
            raise errors.FactorizationError("A block could not be factorized.")
        raise errors.UnsupportedError(
            f"Rank {self.owner} holds this operator, and this rank does not. Call "
            "`Estimator.precondition` or `Estimator.apply` on all ranks, or pass "
            "`holders='all'` to `Distributed`. `Estimator.state_dict` saves a state "
            "that is divided among processes."
        )

    trace = eigenvalues = to_dense = _refuse
    _logdet = _multiply = _multiply_inverse = _power = _sample = _refuse
    _lower_multiply = _lower_solve = _refuse
