"""A running Kronecker product: two factors that are fitted together, with one weight.

Conventions.  ``A (x) G`` stands for a weighted *sum*, as in `Average`, and its value is
that over the weight.  A has Frobenius norm 1 and G carries the scale.  The two have one
weight, since factors of different moments cannot be combined.
"""

from __future__ import annotations

from typing import NoReturn

import array_api_compat

from kfac_core import errors
from kfac_core.array import Array, Scalar
from kfac_core.array.structure import structure


@structure()
class RunningProduct:
    """The fitted product of all updates, in the place of an `Average`.

    Attributes
    ----------
    input : array, shape (..., n, n)
        Factor A.
    output : array, shape (..., m, m)
        Factor G.
    change : array, shape (...)
        The residual check of the last fit; see `kfac_core.linalg.kronecker_fit`.
    weight : array, 0-d
        The sum of weights.
    """

    input: Array
    output: Array
    change: Array
    weight: Array

    def value(self, *, debias: bool) -> dict[str, Array]:
        """Return the factors, by side, with the scale split evenly: ``|A| = |G|``.

        Their product is the average, or the bare sum where `debias` is false.
        """
        xp = array_api_compat.array_namespace(self.weight)
        weight = xp.ones_like(self.weight)
        if debias:
            weight = xp.where(self.weight > 0, self.weight, weight)
        root = xp.sqrt(self.singular_value() / weight)[..., None, None]
        unit = xp.where(root > 0, root, xp.ones_like(root))
        # `input` has unit norm; the root gives both sides the same norm, as pi and
        # damping expect.
        return {"input": self.input * root, "output": self.output / (unit * weight)}

    def singular_value(self) -> Array:
        """Return the Frobenius norm of the sum, shape (...)."""
        xp = array_api_compat.array_namespace(self.weight)
        # Scale first, since squares of a small or large sum leave the range of float32.
        largest = xp.max(xp.abs(self.output), axis=(-2, -1), keepdims=True)
        unit = xp.where(largest > 0, largest, xp.ones_like(largest))
        norm = xp.linalg.vector_norm(self.output / unit, axis=(-2, -1))
        return norm * largest[..., 0, 0]

    def decayed(self, decay: Scalar, weight: Array, /) -> Array:
        """Return the weight after an update."""
        return self.weight * decay + weight

    def merged(self, other: RunningProduct, /) -> NoReturn:
        """Raise `UnsupportedError`: a best product cannot be merged from parts."""
        raise errors.UnsupportedError(
            "KFOC fits a product to a whole batch, and the best product for a sum does "
            "not follow from the best products for its parts. Feed whole batches to "
            "`update`, without `max_patch_elements`, `moments` and `merge`."
        )

    def absorbed(
        self,
        other: RunningProduct,
        /,
        *,
        decay: Scalar,
        weight: Scalar | None,
        total: float | None = None,
    ) -> NoReturn:
        """Raise `UnsupportedError`; see `merged`."""
        self.merged(other)
