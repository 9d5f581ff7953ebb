"""What is computed: lists of layers, and the rows that they see.

Conventions.  All layers are dense, with ``y = x W + b``; a convolution stands here as
the dense layer of its patches, so that extracting them is nobody's time.  The rows are
drawn from seeds, a batch and a layer at a time, so that every process makes the same
ones: independent normal numbers, of which the scale falls off over the coordinates, which
gives the factors a spread of eigenvalues and a condition that float32 can bear.  Those of
the workload "activations" are of a network's passes instead, behind whose bottleneck
factors have few eigenvalues above roundoff.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.stages import (
    CORE_STAGES,
    EIGEN_STAGES,
    GPU_STAGES,
    LOOPED_STAGES,
    MAIN_STAGES,
    OPTIMIZER_STAGES,
)

DAMPING = 1e-3
DECAY = 0.95

Matrix = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Layer:
    """A dense layer, and how many rows it sees in a batch."""

    inputs: int
    outputs: int
    bias: bool
    rows: int

    @property
    def shape(self) -> tuple[int, int]:
        """The shape ``(in(+1), out)`` of the layer's matrix."""
        return self.inputs + int(self.bias), self.outputs


@dataclass(frozen=True)
class Workload:
    """Layers, and what is timed on them.

    Attributes
    ----------
    name : str
        What it is asked for by.
    layers : tuple of Layer
        Of one network.
    stages : tuple of str
        What is timed.
    batches : int
        How many batches the statistics hold before anything is timed.
    sweep : str
        The axis that it is a point of (``"width"``, ``"rows"``, ``"layers"``), or ``""``.
    size : int
        Where on that axis.
    memory : bool
        Whether peak memory is measured too.
    passes : bool
        Whether the rows are activations and gradients of the layers in a chain, with tanh
        between them and a label drawn for each of the outputs.
    compared : bool
        Whether answers are compared with a dense float64 reference, on the host.
    """

    name: str
    layers: tuple[Layer, ...]
    stages: tuple[str, ...]
    batches: int = 2
    sweep: str = ""
    size: int = 0
    memory: bool = False
    passes: bool = False
    compared: bool = True

    @property
    def factor_bytes(self) -> int:
        """The bytes of all factors, both triangles, in float32."""
        return 4 * sum(n * n + m * m for n, m in (x.shape for x in self.layers))

    def batch(self, index: int, /) -> Iterator[tuple[Matrix, Matrix]]:
        """Yield each layer's rows ``(x, g)`` of a batch."""
        for i in range(len(self.layers)):
            yield self.rows(index, i)

    def rows(self, index: int, layer: int, /) -> tuple[Matrix, Matrix]:
        """Return one layer's rows ``(x, g)`` of a batch."""
        if self.passes:
            return _rows_of_passes(self.layers, index)[layer]
        of = self.layers[layer]
        x = _normal((1, index, layer, 0), (of.rows, of.inputs))
        g = _normal((1, index, layer, 1), (of.rows, of.outputs))
        return x, 0.1 * g

    def vector(self, layer: int, /) -> Matrix:
        """Return the gradient to be preconditioned, shape ``(in(+1), out)``."""
        generator = np.random.default_rng((2, layer))
        return generator.standard_normal(self.layers[layer].shape, dtype=np.float32)

    def to_plain(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_plain(plain: dict[str, Any], /) -> Workload:
        """Return what `to_plain` wrote."""
        layers = tuple(Layer(**layer) for layer in plain["layers"])
        return Workload(**{**plain, "layers": layers, "stages": tuple(plain["stages"])})


def residuals(rows: int, /) -> Matrix:
    """Return a residual for each row, for stages in the space of samples."""
    return np.random.default_rng(5).standard_normal(rows, dtype=np.float32)


def _normal(seed: tuple[int, ...], shape: tuple[int, int]) -> Matrix:
    scale = 0.05 + np.sqrt(1.0 / np.arange(1, shape[1] + 1, dtype=np.float32))
    x = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    x *= scale
    return x


@functools.lru_cache(maxsize=1)
def _rows_of_passes(
    layers: tuple[Layer, ...], index: int
) -> list[tuple[Matrix, Matrix]]:
    """Return the rows of a chain of layers, from a pass forward and one back."""
    normal = np.random.default_rng(3).standard_normal
    weights = [normal((x.inputs, x.outputs)) / x.inputs**0.5 for x in layers]
    # Few numbers decide each example, as they do with images.
    latent = normal((16, layers[0].inputs)) / 4.0
    generator = np.random.default_rng((4, index))
    x = _sigmoid(generator.standard_normal((layers[0].rows, 16)) @ latent) ** 4
    inputs = [x]
    for weight in weights[:-1]:
        inputs.append(np.tanh(inputs[-1] @ weight))
    p = _sigmoid(inputs[-1] @ weights[-1])
    gradients = [p - (generator.uniform(size=p.shape) < p)]
    for weight, y in zip(weights[:0:-1], inputs[:0:-1], strict=True):
        gradients.append((gradients[-1] @ weight.T) * (1.0 - y * y))
    pairs = zip(inputs, reversed(gradients), strict=True)
    return [(x.astype(np.float32), g.astype(np.float32)) for x, g in pairs]


def _sigmoid(z: Matrix) -> Matrix:
    return 1.0 / (1.0 + np.exp(-z))


def _chain(widths: Sequence[int], rows: int) -> tuple[Layer, ...]:
    return tuple(Layer(n, m, True, rows) for n, m in itertools.pairwise(widths))


def _square(width: int, count: int, rows: int) -> tuple[Layer, ...]:
    return (Layer(width, width, False, rows),) * count


def _resnet50(images: int, most_rows: int) -> tuple[Layer, ...]:
    """Return the 53 convolutions of a ResNet-50 as dense layers of their patches."""

    def conv(channels: int, out: int, kernel: int, side: int) -> Layer:
        rows = min(images * side * side, most_rows)
        return Layer(channels * kernel * kernel, out, False, rows)

    layers = [conv(3, 64, 7, 112)]
    channels = 64
    for width, blocks, side in ((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7)):
        for block in range(blocks):
            layers += [conv(channels, width, 1, side), conv(width, width, 3, side)]
            layers += [conv(width, 4 * width, 1, side)]
            if block == 0:
                layers += [conv(channels, 4 * width, 1, side)]
            channels = 4 * width
    return tuple(layers)


def _encoder(width: int, layers: int, rows: int) -> tuple[Layer, ...]:
    """Return a transformer's layers, with one product for queries, keys and values."""
    sizes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
    return tuple(Layer(n, m, True, rows) for n, m in sizes) * layers


AUTOENCODER = (784, 1000, 500, 250, 30, 250, 500, 1000, 784)
ALL = MAIN_STAGES + EIGEN_STAGES + OPTIMIZER_STAGES + GPU_STAGES
WORKLOADS = (
    Workload("autoencoder", _chain(AUTOENCODER, 512), ALL, batches=3, memory=True),
    Workload(
        "activations",
        _chain(AUTOENCODER, 512),
        CORE_STAGES + EIGEN_STAGES + OPTIMIZER_STAGES,
        passes=True,
    ),
    Workload(
        "transformer",
        tuple(
            Layer(n, m, True, 2048) for n, m in ((768, 768), (768, 3072), (3072, 768))
        ),
        ALL,
        memory=True,
    ),
    Workload("200 of 1", _square(1, 200, 1), CORE_STAGES),
    Workload("200 of 16", _square(16, 200, 256), CORE_STAGES + LOOPED_STAGES),
    Workload("200 of 64", _square(64, 200, 256), CORE_STAGES + LOOPED_STAGES),
    Workload("resnet50", _resnet50(32, 1024), MAIN_STAGES),
    Workload("wide", (Layer(4096, 4096, True, 2048),), MAIN_STAGES),
    Workload("one by one", (Layer(1, 1, False, 1),), MAIN_STAGES),
)
SWEEPS = (
    *(
        Workload(f"width {n}", _square(n, 1, 2048), CORE_STAGES[:-1], 2, "width", n)
        for n in (512, 724, 1024, 1448, 2048, 2896)
    ),
    *(
        Workload(f"rows {r}", _square(1024, 1, r), ("statistics",), 2, "rows", r)
        for r in (512, 1024, 2048, 4096, 8192)
    ),
    *(
        Workload(f"layers {k}", _square(128, k, 256), CORE_STAGES[:-1], 2, "layers", k)
        for k in (4, 8, 16, 32, 64)
    ),
)
LARGE = (
    Workload(
        "wide 8192", (Layer(8192, 8192, True, 2048),), MAIN_STAGES, compared=False
    ),
    Workload(
        *("bert-large", _encoder(1024, 24, 1024), CORE_STAGES),
        batches=1,
        compared=False,
    ),
    Workload(
        *("one billion", _encoder(2048, 16, 512), CORE_STAGES),
        batches=1,
        compared=False,
    ),
)
QUICK = (
    Workload("small autoencoder", _chain((64, 96, 32, 8, 32, 96, 64), 128), ALL),
    Workload("32 of 16", _square(16, 32, 32), CORE_STAGES + LOOPED_STAGES),
    Workload("one by one", (Layer(1, 1, False, 1),), CORE_STAGES),
    *(
        Workload(f"width {n}", _square(n, 1, 256), CORE_STAGES[:-1], 2, "width", n)
        for n in (128, 256, 512)
    ),
)
GROUPS = {"quick": QUICK, "all": WORKLOADS + SWEEPS, "sweeps": SWEEPS, "large": LARGE}


def chosen_workloads(names: Sequence[str], /) -> tuple[Workload, ...]:
    """Return workloads by name, or by the name of a group.

    Parameters
    ----------
    names : sequence of str
        Names, or ``"all"``, ``"quick"``, ``"sweeps"``, ``"large"``.

    Returns
    -------
    tuple of Workload
        In the order asked for.

    Raises
    ------
    ValueError
        For an unknown name, with those that there are.
    """
    known = {w.name: (w,) for w in (*QUICK, *SWEEPS, *WORKLOADS, *LARGE)} | GROUPS
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no workload {unknown[0]!r}; there are {', '.join(known)}")
    found: dict[str, Workload] = {}
    for name in names:
        found |= {w.name: w for w in known[name]}
    return tuple(found.values())
