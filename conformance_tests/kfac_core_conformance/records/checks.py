"""The checks of a record: one struct for each operation that a block can be asked."""

from __future__ import annotations

import json
from typing import ClassVar, Literal, TypeAlias, get_args

from kfac_core.damping import DampingRule
from kfac_core.errors import RecordError
from kfac_core_conformance.records.approximations import EKFAC, Full, Series
from kfac_core_conformance.records.block import BlockDescription
from kfac_core_conformance.records.schema import Name, NonNegative, Part, Shape

LARGEST_TOLERANCE = 0.1
"""The largest relative tolerance: an answer without one correct digit does not agree.

``rtol |expected| + atol`` may be this part of ``|expected|`` in the Frobenius norm, or,
where zero is expected, of the norm of the check's vector; of 1 without a vector.
"""


class Check(Part, tag_field="op", kw_only=True, frozen=True):
    """One question, and where its answer is.

    Attributes
    ----------
    block, expected : str
        The block asked, and the name of the expected result.
    rtol : float or None
        The relative tolerance; None for the default of the expected dtype.
    atol : float
        The absolute tolerance; see `LARGEST_TOLERANCE` for the largest of both.
    damping, damping_rule : float or None, str or None
        Those of the check; after `parse_document`, else those of the document.
    """

    block: Name
    expected: Name
    rtol: NonNegative | None = None
    atol: NonNegative = 0.0
    damping: NonNegative | None = None
    damping_rule: DampingRule | None = None

    always_damped: ClassVar[bool] = False

    @property
    def needs_damping(self) -> bool:
        """Whether the answer depends on the damping."""
        return self.always_damped or getattr(self, "damped", False)

    @property
    def detail(self) -> str:
        """The operation's own fields other than the vector, for a table."""
        common = {*Check.__struct_fields__, "vector"}
        names = [name for name in self.__struct_fields__ if name not in common]
        return ", ".join(f"{name}={_plain(getattr(self, name))}" for name in names)

    def require_answerable(self, block: BlockDescription, /) -> None:
        """Raise `RecordError` if the block cannot answer, or a damping is missing.

        Parameters
        ----------
        block : BlockDescription
            The block asked.
        """
        if not self.needs_damping:
            return
        if self.damping is None or self.damping_rule is None:
            raise RecordError(
                f"{self.tag()} needs `damping` and `damping_rule`, in the check or in "
                "the document"
            )
        series = block.approximation
        if (
            self.damping_rule == "exact"
            and isinstance(series, Series)
            and series.variant != "independent"
        ):
            raise RecordError(
                f"'exact' is not a damping rule for a series of variant {series.variant}; "
                "expected 'factored' or 'factored_unit_pi'"
            )


class VectorCheck(Check, kw_only=True, frozen=True):
    """A check that takes a vector and answers with one."""

    vector: Name


class Factor(Check, tag="factor", kw_only=True, frozen=True):
    """An averaged statistic."""

    factor: Literal["input", "output", "lagged_input", "lagged_output", "block"]

    def require_answerable(self, block: BlockDescription, /) -> None:
        """Refuse a statistic that the approximation does not keep."""
        known = block.approximation.factors
        if self.factor not in known:
            raise RecordError(
                f"a {block.approximation.tag()} block has no factor {self.factor!r}; "
                f"expected one of {', '.join(known)}"
            )


class Multiply(VectorCheck, tag="multiply", frozen=True):
    """``F v``."""

    damped: bool = True


class MultiplyInverse(VectorCheck, tag="multiply_inverse", frozen=True):
    """The damped inverse times v."""

    always_damped = True


class MultiplyMatpower(VectorCheck, tag="multiply_matpower", kw_only=True, frozen=True):
    """A power of the damped matrix times v."""

    always_damped = True

    exp: float


class MultiplyCholesky(VectorCheck, tag="multiply_cholesky", frozen=True):
    """``L v`` or ``L^T v``, with L the Cholesky factor of the damped matrix."""

    always_damped = True

    transpose: bool = False


class MultiplyCholeskyInverse(
    VectorCheck, tag="multiply_cholesky_inverse", frozen=True
):
    """``L^-1 v`` or ``L^-T v``, with L the Cholesky factor of the damped matrix."""

    always_damped = True

    transpose: bool = False


class ToDense(Check, tag="to_dense", frozen=True):
    """The matrix."""

    damped: bool = False


class Logdet(Check, tag="logdet", frozen=True):
    """The log-determinant of the damped matrix."""

    always_damped = True


class Trace(Check, tag="trace", frozen=True):
    """The trace of the undamped matrix."""


class Eigenvalues(Check, tag="eigenvalues", frozen=True):
    """The eigenvalues of the undamped matrix, ascending."""


class DampingSplit(Check, tag="damping_split", frozen=True):
    """What is added to the diagonals of ``A`` and of ``G``."""

    always_damped = True

    def require_answerable(self, block: BlockDescription, /) -> None:
        """Refuse a block without two factors."""
        if "output" not in block.approximation.factors:
            name = block.approximation.tag()
            raise RecordError(f"a {name} block does not split its damping")
        super().require_answerable(block)


AnyCheck: TypeAlias = (
    Factor
    | Multiply
    | MultiplyInverse
    | MultiplyMatpower
    | MultiplyCholesky
    | MultiplyCholeskyInverse
    | ToDense
    | Logdet
    | Trace
    | Eigenvalues
    | DampingSplit
)

CHECKS: dict[str, type[Check]] = {check.tag(): check for check in get_args(AnyCheck)}
"""The struct of each operation."""


def answer_shape(
    check: Check, block: BlockDescription, matrix: tuple[int, int], groups: int, /
) -> Shape:
    """Return the shape of an answer that is no vector; empty for a scalar.

    Parameters
    ----------
    check : Check
        Any but a `VectorCheck`.
    block : BlockDescription
        The block asked.
    matrix : tuple of int
        The shape ``(in(+1), out)`` of the block's matrix.
    groups : int
        The number of groups of the layer.
    """
    n, m = matrix
    lead = (groups,) if groups > 1 else ()
    if isinstance(check, ToDense):
        return (n * m, n * m)
    if isinstance(check, Eigenvalues):
        return (n * m,)
    if isinstance(check, DampingSplit):
        return (*lead, 2)
    if not isinstance(check, Factor):
        return ()
    if check.factor == "block":
        return _block_statistic(block, n, m, lead)
    size = n if check.factor.endswith("input") else m // groups
    return (*lead, size) if block.is_diagonal(check.factor) else (*lead, size, size)


def _block_statistic(block: BlockDescription, n: int, m: int, lead: Shape) -> Shape:
    if isinstance(block.approximation, Full):
        return (n * m, n * m)
    if not block.layer.is_matrix:
        return (n * m,)
    if isinstance(block.approximation, EKFAC) and lead:
        return (*lead, n, m // lead[0])
    return (n, m)


def _plain(value: object) -> str:
    """Return a field's value as JSON has it."""
    return value if isinstance(value, str) else json.dumps(value)
