"""Dtypes of storing, factorizing and applying.

Three separate choices, none of them hidden.  *Storage* is the dtype of the running
sums: float32 or wider, whatever the data are.  *Computing* is the dtype in which a
damped factor is factorized.  *Applying* is the dtype in which the snapshot is kept and
multiplied; a product is returned in the dtype of the vector that was given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kfac_core import constraints
from kfac_core.array.types import DType, Namespace

FloatName = Literal["float32", "float64"]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The three dtypes, by name.

    Parameters
    ----------
    storage : {"float32", "float64"} or None
        Dtype of the statistics; None is the dtype of the first batch, or float32 where that
        is narrower.
    compute : {"float32", "float64"} or None
        Dtype of the factorizations; None is the storage dtype.
    apply : {"float32", "float64"} or None
        Dtype of the snapshot; None is the storage dtype.

    Raises
    ------
    ConventionError
        For any other name; half precision is refused, since a factor rounded to it is
        no longer positive semidefinite.

    Examples
    --------
    Statistics kept and factorized in float64, products in float32:

    >>> import kfac_core as kc
    >>> precision = kc.Precision(storage="float64", compute="float64", apply="float32")
    """

    storage: FloatName | None = None
    compute: FloatName | None = None
    apply: FloatName | None = None

    def __post_init__(self) -> None:
        name = constraints.one_of(*get_args(FloatName), None)
        constraints.require_options(self, storage=name, compute=name, apply=name)

    def dtypes(self, storage: DType, /, *, xp: Namespace) -> tuple[DType, DType]:
        """Return the library's dtypes of computing and of applying."""
        compute = storage if self.compute is None else getattr(xp, self.compute)
        return compute, storage if self.apply is None else getattr(xp, self.apply)

    def dtype(
        self, name: FloatName | None, fallback: DType, /, *, xp: Namespace
    ) -> DType:
        """Return the library's dtype of a name, or the fallback for None."""
        return fallback if name is None else getattr(xp, name)
