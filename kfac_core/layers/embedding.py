"""The embedding, a dense layer without bias whose inputs are ids.

Conventions.  Ids of shape ``(N, *shared)`` are one id a row, and `Batch.output_grads` has
shape ``((M,) N, *shared, features)``.  A *bag* is a row of k ids whose embeddings are
summed: ids ``(N, k)`` and output gradients ``((M,) N, features)``.  Which of the two is
meant is said when the layer is described.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from kfac_core import constraints
from kfac_core.array import Array
from kfac_core.layers.checks import entering, require_mask, require_output_grads
from kfac_core.layers.dense import Dense, WeightLayout
from kfac_core.layers.id_rows import IdRows
from kfac_core.layers.rows import Batch, counted_rows

Duplicates = Literal["binary", "count"]


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """An embedding's geometry.

    Parameters
    ----------
    num_embeddings, features : int
        The size V of the vocabulary, and the width.
    weight_layout : {"io", "oi"}
        Whether the weight is kept as ``(V, features)`` or transposed.
    bag : bool
        Whether the last axis of the ids is a bag.
    duplicates : {"binary", "count"}
        Whether an id that occurs twice in a bag counts once or twice.

    Raises
    ------
    ShapeError, ConventionError
        For a size below 1, or an unknown option.

    Examples
    --------
    The inputs of a batch are ids, and the input factor is diagonal:

    >>> import numpy as np
    >>> import kfac_core as kc
    >>> layer = kc.Embedding(num_embeddings=100, features=8, weight_layout="io")
    >>> block = kc.Block(layer, kc.Kronecker(input="diagonal"))
    >>> estimator = kc.Estimator({"words": block}, reduction="sum", damping=1e-2)
    >>> ids = np.array([[3, 14], [15, 92]])
    >>> estimator.update({"words": kc.Batch(ids, np.ones((2, 2, 8)))})
    """

    num_embeddings: int
    features: int
    weight_layout: WeightLayout
    bag: bool = False
    duplicates: Duplicates = "binary"

    kind = "embedding"
    groups = 1

    def __post_init__(self) -> None:
        constraints.require_options(
            self,
            num_embeddings=constraints.SIZE,
            features=constraints.SIZE,
            weight_layout=constraints.literal(WeightLayout),
            bag=constraints.FLAG,
            duplicates=constraints.literal(Duplicates),
        )

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The shape ``(V, features)`` of the block's matrix."""
        return self.num_embeddings, self.features

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of the weight, by name."""
        return self._as_dense.parameter_shapes

    def rows(self, batch: Batch, /) -> IdRows:
        """Turn ids and output gradients into rows.

        Parameters
        ----------
        batch : Batch
            Batch of the layer; not modified.

        Returns
        -------
        IdRows
            Rows that hold ids; no one-hot vector is formed.

        Raises
        ------
        DtypeError
            For ids that are not integers, or gradients that are not floats.
        ShapeError, MixedArraysError
            For arrays that do not fit together.
        """
        ids, g, mask, xp = entering(batch, "mask", ids=True)
        lead = tuple(ids.shape[:-1]) if self.bag else tuple(ids.shape)
        kind = "bags of shape (N, k)" if self.bag else "ids of shape (N, ...)"
        shape = ("N", "L") if self.bag else ("N", ...)
        constraints.require_shape("inputs", ids, shape)
        event = (*lead, self.features)
        require_output_grads(batch, event, hint=f"`inputs` are {kind}.")
        examples, positions = lead[0], math.prod(lead[1:])
        g = xp.reshape(g, (batch.sources or 1, examples, positions, self.features))
        if mask is not None:
            mask = require_mask(mask, lead, xp=xp)
            counted = counted_rows(mask, xp=xp)
            g = xp.where(counted[None, :, :, None], g, xp.zeros_like(g))
            # Padding may hold ids out of range; masked rows count for nothing.
            inside = xp.reshape(counted, (*lead, 1) if self.bag else lead)
            ids = xp.where(inside, ids, xp.zeros_like(ids))
        # One-hot rows of length V are not formed; statistics count ids.
        ids = xp.reshape(ids, (examples, -1))
        binary = self.duplicates == "binary"
        return IdRows(ids, g, mask, self.num_embeddings, self.bag, binary)

    def stacked(self, count: int, /) -> None:
        """Return None: equal layers of this kind are not computed as one."""

    def parameters_to_matrix(self, parameters: Mapping[str, Array], /) -> Array:
        """Turn the weight into the block's matrix; as `Dense.parameters_to_matrix`."""
        return self._as_dense.parameters_to_matrix(parameters)

    def matrix_to_parameters(self, matrix: Array, /) -> dict[str, Array]:
        """Turn a block's matrix into the weight; as `Dense.matrix_to_parameters`."""
        return self._as_dense.matrix_to_parameters(matrix)

    @cached_property
    def _as_dense(self) -> Dense:
        return Dense(
            in_features=self.num_embeddings,
            out_features=self.features,
            bias=False,
            weight_layout=self.weight_layout,
        )
