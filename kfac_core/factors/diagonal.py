"""The diagonal of the second moment of rows, ``E[x * x]``."""

from __future__ import annotations

from dataclasses import dataclass

import array_api_compat

from kfac_core.array import Array, Namespace, Place, Scalar
from kfac_core.array import namespaces as ns
from kfac_core.factors.average import Average
from kfac_core.linalg.diagonal import damped_diagonal
from kfac_core.linalg.gram import HomogeneousRows


@dataclass(frozen=True)
class DiagonalFactor:
    """A factor of n numbers; see `kfac_core.factors.factor.Factor`."""

    damped = staticmethod(damped_diagonal)

    def initial(self, shape: tuple[int, ...], place: Place, /) -> Average:
        """Return a zero average."""
        return Average(place.zeros(*shape), place.zeros())

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
        """Return the average after ``sum <- decay sum + scale sum_i x_i * x_i``."""
        x, ones = rows if isinstance(rows, HomogeneousRows) else (rows, None)
        # The diagonal of the Gram matrix alone, which is all that this factor keeps.
        squares = xp.sum(x * x, axis=-2)
        if ones is not None:
            last = xp.sum(ones * ones, axis=-1)[..., None]
            squares = xp.concat([squares, last], axis=-1)
        return average.plus(squares, decay, scale, weight, overwrite=overwrite)

    def mean_eigenvalue(self, value: Array, /) -> Array:
        """Return ``tr / n``, shape (...)."""
        xp = array_api_compat.array_namespace(value)
        return xp.sum(value, axis=-1) / value.shape[-1]

    def value(
        self, average: Average, /, *, debias: bool, dtype: object, xp: Namespace
    ) -> Array:
        """Return the average in a dtype."""
        return ns.cast(xp, average.value(debias=debias), dtype)
