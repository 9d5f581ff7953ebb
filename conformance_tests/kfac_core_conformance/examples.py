"""Small seeded networks and data for checks; all arrays are read-only.

No two axes have the same length, so that a transposed answer is detected.  Every factor
that is inverted without damping is well conditioned.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from kfac_core_conformance.layer import HostArray, LinearLayer
from kfac_core_conformance.network import Loss, Network
from kfac_core_conformance.problem import Data, Dtype, Problem


def normal(seed: int, *shape: int) -> HostArray:
    """Return standard normal numbers for a seed."""
    return _frozen(np.random.default_rng(seed).normal(size=shape))


def random_network(
    seed: int,
    widths: tuple[int, ...],
    /,
    *,
    bias: bool = True,
    kernel_size: tuple[int, int] | None = None,
    **options: object,
) -> Network:
    """Return a network whose first layer is a convolution where a kernel is given."""
    rng = np.random.default_rng(seed)
    layers = []
    for k, (n, m) in enumerate(itertools.pairwise(widths)):
        kernel = kernel_size if k == 0 else None
        rows = n * (1 if kernel is None else kernel[0] * kernel[1]) + bias
        matrix = _frozen(rng.normal(size=(rows, m)) / np.sqrt(rows))
        layers.append(LinearLayer(matrix=matrix, bias=bias, kernel_size=kernel))
    return dataclasses.replace(Network(layers=tuple(layers)), **options)  # type: ignore[arg-type]


def random_targets(seed: int, loss: Loss, shape: tuple[int, ...], /) -> HostArray:
    """Return normal targets, or for the cross-entropy one-hot ones."""
    rng = np.random.default_rng(seed)
    if loss == "mse":
        return _frozen(rng.normal(size=shape))
    return _frozen(np.eye(shape[-1])[rng.integers(shape[-1], size=shape[:-1])])


def with_problem(
    network: Network, inputs: HostArray, loss: Loss, /, **options: object
) -> Problem:
    """Return a problem of one batch, with targets of the outputs' shape."""
    shape = network.forward(inputs).result.shape
    data = Data(_frozen(inputs), random_targets(len(inputs) + 7, loss, shape))
    fields: dict[str, object] = {"updates": (data,), "estimation": "ggn", **options}
    return Problem(network=network, loss=loss, **fields)  # type: ignore[arg-type]


def in_dtype(problem: Problem, dtype: Dtype, /) -> Problem:
    """Return a problem with every array rounded to a dtype."""
    layers = tuple(
        dataclasses.replace(layer, matrix=_frozen(layer.matrix.astype(dtype)))
        for layer in problem.network.layers
    )
    return dataclasses.replace(
        problem,
        network=dataclasses.replace(problem.network, layers=layers),
        updates=tuple(
            Data(*(_frozen(x.astype(dtype)) for x in data)) for data in problem.updates
        ),
        dtype=dtype,
    )


def _frozen(x: HostArray) -> HostArray:
    """Return an array that a careless adapter cannot write to."""
    x.flags.writeable = False
    return x
