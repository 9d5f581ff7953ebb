"""The interface of kinds of factors, and the kinds by name.

A factor is one side of a Kronecker product, kept as a running average of a second
moment of rows.  Factors hold no state: they are descriptions, and their functions take
and return an `Average`.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

from kfac_core.array import Array, Namespace, Place, Scalar
from kfac_core.factors.average import Average
from kfac_core.factors.diagonal import DiagonalFactor
from kfac_core.factors.full import FullFactor
from kfac_core.factors.uncorrelated import UncorrelatedFactor
from kfac_core.layers.conv import Conv
from kfac_core.layers.layer import Layer
from kfac_core.linalg.damped import DampedMatrix
from kfac_core.linalg.diagonal import DampedDiagonal
from kfac_core.linalg.gram import HomogeneousRows
from kfac_core.linalg.rank_one import DampedRankOne

V = TypeVar("V")
"""Value of an average."""

FactorKind = Literal["full", "diagonal", "uncorrelated"]

Damped: TypeAlias = DampedMatrix | DampedDiagonal | DampedRankOne
"""A damped factor of any kind; all kinds have the same products."""

_WITHOUT_OPTIONS: dict[str, Factor[Any]] = {
    "full": FullFactor(),
    "diagonal": DiagonalFactor(),
}


class Factor(Protocol[V]):
    """The functions of one kind of factor.

    ``rows`` have the shape ``(..., R, n)``; V is the class of averages.
    """

    def initial(self, shape: tuple[int, ...], place: Place, /) -> Average:
        """Return a zero average, for rows of n numbers; shape is (..., n)."""

    def updated(
        self,
        average: Average,
        rows: Array | HomogeneousRows,
        decay: Scalar,
        scale: Scalar,
        weight: Scalar,
        /,
        *,
        overwrite: bool = False,
        xp: Namespace,
    ) -> Average:
        """Return the average after ``sum <- decay sum + scale (moment of rows)``.

        Its sum of weights becomes ``decay * (sum of weights) + weight``.  With `overwrite`
        the memory of the old sum may become the new one's.
        """

    def mean_eigenvalue(self, value: V, /) -> Array:
        """Return the trace over the dimension, shape (...)."""

    def damped(
        self, value: V, shift: Scalar, /, *, apply_dtype: object = None
    ) -> Damped:
        """Return the value plus a multiple of the identity; ``prepared`` checks it."""

    def value(
        self, average: Average, /, *, debias: bool, dtype: object, xp: Namespace
    ) -> V:
        """Return the average, or the bare sum, in a dtype, for the functions below."""


def factor_of(kind: FactorKind, layer: Layer, /) -> Factor[Any]:
    """Return a kind of factor, for the inputs or outputs of a layer.

    Parameters
    ----------
    kind : {"full", "diagonal", "uncorrelated"}
        The kind.
    layer : Layer
        Layer; ``"uncorrelated"`` reads the kernel's size and the bias.

    Returns
    -------
    Factor
        Without state.
    """
    if isinstance(layer, Conv) and kind == "uncorrelated":
        return UncorrelatedFactor(math.prod(layer.kernel_size), int(layer.bias))
    return _WITHOUT_OPTIONS[kind]
