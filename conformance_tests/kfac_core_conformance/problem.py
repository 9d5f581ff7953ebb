"""A problem: which curvature of which network on which data is asked for.

Conventions.  The curvature is that of one example, averaged over examples, whatever the
reduction of the loss is: the reduction says what a framework differentiates, and so what
the vectors are multiplied by that it propagates back.

=================  ===================================================================
``estimation``     what is propagated back
=================  ===================================================================
``"ggn"``          the columns of a square root of the loss's Hessian; outer products
                   are summed
``"empirical"``    the gradients at the targets
``"labels"``       the gradients at each of M given targets, as if these had been drawn;
                   outer products are averaged
=================  ===================================================================

Several updates make a moving average, ``v <- decay v + C``, ``w <- decay w + 1``, and what
is used is ``v / w``.  `parts` are the sizes of the micro-batches in which one update is to
be fed, and change no answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from kfac_core_conformance.layer import HostArray
from kfac_core_conformance.network import (
    Forward,
    Loss,
    Network,
    hessian_columns,
    loss_gradient,
)

__all__ = [
    "Approximation",
    "Data",
    "Dtype",
    "Estimation",
    "Problem",
    "Reduction",
    "Rows",
    "Sharing",
]

Approximation = Literal["kronecker", "eigen", "tnt", "full", "diagonal"]
Dtype = Literal["float64", "float32"]
Estimation = Literal["ggn", "empirical", "labels"]
Reduction = Literal["sum", "mean", "mean_rows"]
Sharing = Literal["expand", "reduce"]


class Data(NamedTuple):
    """One update: inputs (N, ..., in), and targets (N, ..., C); labels (M, N, ..., C)."""

    inputs: HostArray
    targets: HostArray


class Rows(NamedTuple):
    """What one layer sees in one update, as a framework hands it over.

    Attributes
    ----------
    inputs : numpy.ndarray, shape (N, ..., in)
        Images (N, height, width, channels) for a convolution.
    output_grads : numpy.ndarray, shape (M, N, ..., out)
        Of the loss with the problem's reduction.
    sources : {"sum", "mean"}
        What is made of the outer products of the M.
    """

    inputs: HostArray
    output_grads: HostArray
    sources: Literal["sum", "mean"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """One question; compared and hashed by identity, so that adapters may cache by it.

    Parameters
    ----------
    network : Network
        Whose layers each have a block.
    loss : {"mse", "ce"}
        See `kfac_core_conformance.network`.
    updates : tuple of Data
        In order.
    estimation : {"ggn", "empirical", "labels"}
        See the module's table.
    approximation : {"kronecker", "eigen", "tnt", "full", "diagonal"}
        Of each block.
    sharing : {"expand", "reduce"}
        How shared axes are treated; of no meaning without.
    reduction : {"sum", "mean", "mean_rows"}
        Of the loss that a framework differentiates: over examples, or, for the last,
        the mean over examples and output positions.
    decay : float
        Of the moving average.
    parts : tuple of int
        Sizes of micro-batches; empty for a whole batch.
    dtype : {"float64", "float32"}
        In which to compute; that of the arrays.
    """

    network: Network
    loss: Loss
    updates: tuple[Data, ...]
    estimation: Estimation
    approximation: Approximation = "kronecker"
    sharing: Sharing = "expand"
    reduction: Reduction = "sum"
    decay: float = 1.0
    parts: tuple[int, ...] = ()
    dtype: Dtype = "float64"

    @property
    def shared(self) -> bool:
        """Whether any layer's weights are used more than once an example."""
        return any(z.ndim > 2 for z in self._forward(self.updates[0]).outputs)

    def output_positions(self, data: Data, /) -> int:
        """Return how many rows of outputs an example has."""
        return math.prod(self._forward(data).result.shape[1:-1])

    def split(self, data: Data, /) -> list[Data]:
        """Return an update in its micro-batches; itself where it has none."""
        if not self.parts:
            return [data]
        ends = np.cumsum(self.parts)[:-1]
        axis = 1 if self.estimation == "labels" else 0
        return [
            Data(x, t)
            for x, t in zip(
                np.split(data.inputs, ends),
                np.split(data.targets, ends, axis=axis),
                strict=True,
            )
        ]

    def rows(self, data: Data, /) -> list[Rows]:
        """Return what each layer sees, for libraries that are fed rows.

        Parameters
        ----------
        data : Data
            An update, or a part of one.

        Returns
        -------
        list of Rows
            One a layer.
        """
        outputs = self._forward(data).result
        divisor = {
            "sum": 1,
            "mean": len(outputs),
            "mean_rows": math.prod(outputs.shape[:-1]),
        }[self.reduction]
        sources: Literal["sum", "mean"] = (
            "mean" if self.estimation == "labels" else "sum"
        )
        return [
            Rows(x.astype(self.dtype), (g / divisor).astype(self.dtype), sources)
            for x, _, g in self.summed_rows(data)
        ]

    def summed_rows(
        self, data: Data, /
    ) -> Iterator[tuple[HostArray, HostArray, HostArray]]:
        """Yield each layer's inputs, the same unfolded, and g of the summed loss."""
        seen = self._forward(data)
        if self.estimation == "ggn":
            vectors = hessian_columns(self.loss, seen.result)
        elif self.estimation == "empirical":
            vectors = loss_gradient(self.loss, seen.result, data.targets)[None]
        else:
            vectors = np.stack(
                [loss_gradient(self.loss, seen.result, t) for t in data.targets]
            )
        grads = self.network.backward(vectors, seen)
        yield from zip(seen.inputs, seen.unfolded, grads, strict=True)

    def _forward(self, data: Data) -> Forward:
        # In float64 whatever the arrays are: references are made of this too.
        return self.network.forward(data.inputs.astype(np.float64))
