"""A problem: the curvature of a network on data that a check asks for.

The curvature is that of one example, averaged over examples, for every reduction of the
loss: the reduction only determines how a framework scales the vectors that it
backpropagates.

=================  ===================================================================
``estimation``     backpropagated vectors
=================  ===================================================================
``"ggn"``          the columns of a square root of the loss's Hessian; outer products
                   are summed
``"empirical"``    the gradients at the targets
``"labels"``       the gradients at each of M given targets, as if sampled; outer
                   products are averaged
=================  ===================================================================

Several updates form a moving average, ``v <- decay v + C``, ``w <- decay w + 1``, and the
result is ``v / w``.  `parts` are the sizes of the micro-batches of one update; they do not
change the answer.
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
    """The rows of one layer in one update, as a framework provides them.

    Attributes
    ----------
    inputs : numpy.ndarray, shape (N, ..., in)
        Images (N, height, width, channels) for a convolution.
    output_grads : numpy.ndarray, shape (M, N, ..., out)
        Gradients of the loss with the problem's reduction.
    sources : {"sum", "mean"}
        How the outer products of the M vectors are combined.
    """

    inputs: HostArray
    output_grads: HostArray
    sources: Literal["sum", "mean"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """One question; compared and hashed by identity, so that adapters may use it as a key.

    Parameters
    ----------
    network : Network
        The network; each of its layers has a block.
    loss : {"mse", "ce"}
        Half the squared error, or the softmax cross-entropy with one-hot targets.
    updates : tuple of Data
        The updates, in order.
    estimation : {"ggn", "empirical", "labels"}
        The backpropagated vectors: the columns of a square root of the loss's Hessian, the
        gradients at the targets, or those at each of several labels.
    approximation : {"kronecker", "eigen", "tnt", "full", "diagonal"}
        The approximation of each block.
    sharing : {"expand", "reduce"}
        How shared axes are treated; ignored if there are none.
    reduction : {"sum", "mean", "mean_rows"}
        The reduction of the loss that a framework differentiates: over examples, or, for
        ``"mean_rows"``, the mean over examples and output positions.
    decay : float
        The decay of the moving average.
    parts : tuple of int
        The sizes of micro-batches; empty for one batch.
    dtype : {"float64", "float32"}
        The precision of the computation and of all arrays.
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
        """Whether any layer's weights are used more than once for each example."""
        return any(z.ndim > 2 for z in self._forward(self.updates[0]).outputs)

    def output_positions(self, data: Data, /) -> int:
        """Return the number of rows of outputs of an example."""
        return math.prod(self._forward(data).result.shape[1:-1])

    def split(self, data: Data, /) -> list[Data]:
        """Return the micro-batches of an update; the update itself if there are none."""
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
        """Return the rows of each layer, for libraries whose input is rows.

        Parameters
        ----------
        data : Data
            An update, or a part of one.

        Returns
        -------
        list of Rows
            One for each layer.
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
        # Always in float64: the references use this too.
        return self.network.forward(data.inputs.astype(np.float64))
