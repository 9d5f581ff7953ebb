"""The blocks of the grid: an approximation, a damping rule, rows, and a reference.

The arrays of a block have scale 1; the grid multiplies them.  Rank r means r examples, and
rank 0 two examples of zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mpmath as mp
import numpy as np

import kfac_core as kc

from ..builders.layers import conv_layer
from . import references
from .references import Curvature, Product, Rows, Series, Side, Tridiagonal

n, m = 5, 3
STEPS = 2
EXACT, FACTORED = ("exact",), ("factored", "factored_unit_pi")
RULES = (*FACTORED, *EXACT)
LARGEST_RANK = 20
GRADED = -1
"""A rank that stands for 20 rows whose directions fall by four orders of magnitude."""

SPECTRA: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    -2: lambda x: x + 1000.0,
    -3: lambda x: np.concatenate([1e5 * x[:1], x[1:]]),
    -4: lambda x: np.concatenate([x[..., :1], x[..., :1] + 1e-4 * x[..., 1:]], axis=-1),
    -5: lambda x: x * np.geomspace(1e5, 1.0, x.shape[-1]),
}
"""Ranks that stand for 20 rows with an offset, an outlier, nearly equal columns, or columns
in different units."""


@dataclass(frozen=True)
class Kind:
    """An approximation of a layer, and its reference.

    Attributes
    ----------
    block : Block
        The block.
    rules : tuple of str
        The damping rules that it has.
    draw : callable
        Takes a generator and a number of examples; returns arrays by name.
    batch : callable
        Takes these arrays on the backend; returns a batch.
    curvature : callable
        Takes these arrays in NumPy; returns the reference.
    by_parts : bool
        Whether the block is applied by parts whose condition counts; see `Damped.parts`.
    by_samples : bool
        Whether the operator is that of the space of samples, of one layer.
    """

    block: kc.Block
    rules: tuple[str, ...]
    draw: Callable[[np.random.Generator, int], dict[str, np.ndarray]]
    batch: Callable[[dict[str, Any]], Any]
    curvature: Callable[[Rows], Curvature]
    by_parts: bool = False
    by_samples: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the block's vectors."""
        shape: tuple[int, int] = self.block.layer.matrix_shape
        return shape


def _dense(in_features: int, out_features: int) -> kc.Dense:
    sizes: Any = {"in_features": in_features, "out_features": out_features}
    return kc.Dense(**sizes, bias=False, weight_layout="io")


def _draw(rng: np.random.Generator, rank: int) -> dict[str, np.ndarray]:
    """Return x and g of one row an example."""
    if rank == GRADED:
        Q = np.linalg.qr(rng.normal(size=(n, n)))[0]
        x = rng.normal(size=(LARGEST_RANK, n)) * np.geomspace(1.0, 1e-4, n) @ Q
        return {"x": x, "g": rng.normal(size=(LARGEST_RANK, m))}
    return {"x": rng.normal(size=(rank, n)), "g": rng.normal(size=(rank, m))}


def _draw_pixels(rng: np.random.Generator, rank: int) -> dict[str, np.ndarray]:
    """Return 3 pixels of 2 channels, and output gradients at 2 positions."""
    return {"x": rng.normal(size=(rank, 3, 2)), "g": rng.normal(size=(rank, 2, 2))}


def _draw_steps(rng: np.random.Generator, rank: int) -> dict[str, np.ndarray]:
    """Return sequences of steps that are correlated."""
    x, g = rng.normal(size=(rank, STEPS, 4)), rng.normal(size=(rank, STEPS, 2))
    for array in (x, g):
        array[:, 1] = 0.6 * array[:, 0] + array[:, 1]
    return {"x": x, "g": g}


_CHAIN = {"first": _dense(3, 2), "second": _dense(2, 2), "third": _dense(2, 1)}


def _draw_chain(rng: np.random.Generator, rank: int) -> dict[str, np.ndarray]:
    """Return x and g of three layers, correlated between neighbors."""
    found = {}
    for k, name in (("x", "in_features"), ("g", "out_features")):
        sizes = [getattr(layer, name) for layer in _CHAIN.values()]
        rows = rng.normal(size=(rank, sizes[0]))
        found[f"{k}0"] = rows
        for i, size in enumerate(sizes[1:], start=1):
            mixed = 0.5 * rows @ rng.normal(size=(rows.shape[1], size))
            rows = mixed + rng.normal(size=(rank, size))
            found[f"{k}{i}"] = rows
    return found


def _batch(rows: dict[str, Any]) -> kc.Batch:
    return kc.Batch(rows["x"], rows["g"])


def _gradient_batch(rows: dict[str, Any]) -> kc.GradientBatch:
    x, g = (kc.to_numpy(rows[name]) for name in ("x", "g"))
    D = kc.asarray(np.einsum("ki,ko->kio", x, g))
    return kc.GradientBatch({"w": D}, batch_size=len(x), sources=len(x))


def _chain_batch(rows: dict[str, Any]) -> dict[str, kc.Batch]:
    return {
        name: kc.Batch(rows[f"x{i}"], rows[f"g{i}"]) for i, name in enumerate(_CHAIN)
    }


ONE = references.diagonal([mp.mpf(1)])


def _kronecker(rows: Rows) -> Product:
    return Product((references.side(rows["x"]), references.side(rows["g"])))


def _mean_squares(rows: np.ndarray) -> Side:
    X = references.exact(rows)
    columns = range(X.cols)
    entries = [mp.fsum(X[k, i] ** 2 for k in range(X.rows)) / X.rows for i in columns]
    return references.diagonal(entries)


def _diagonal_input(rows: Rows) -> Product:
    return Product((_mean_squares(rows["x"]), references.side(rows["g"])))


def _diagonal_output(rows: Rows) -> Product:
    return Product((references.side(rows["x"]), _mean_squares(rows["g"])))


def _examples(rows: Rows) -> Any:
    """Return the gradients of the examples, flattened, as rows."""
    X, G = references.exact(rows["x"]), references.exact(rows["g"])
    found = mp.matrix(X.rows, n * m)
    for k, i, j in itertools.product(range(X.rows), range(n), range(m)):
        found[k, i * m + j] = X[k, i] * G[k, j]
    return found


def _full(rows: Rows) -> Product:
    D = _examples(rows)
    return Product((references.decomposed(references.moment(D, D)), ONE))


def _diagonal(rows: Rows) -> Product:
    D = _examples(rows)
    columns = range(D.cols)
    entries = [mp.fsum(D[k, i] ** 2 for k in range(D.rows)) / D.rows for i in columns]
    return Product((references.diagonal(entries), ONE))


def _identity(rows: Rows) -> Product:
    return Product((references.diagonal([mp.mpf(2)] * (n * m)), ONE))


def _tnt(rows: Rows) -> Product:
    D = _examples(rows)
    first, second = mp.matrix(n, n), mp.matrix(m, m)
    for k in range(D.rows):
        own = mp.matrix(n, m)
        for i, j in itertools.product(range(n), range(m)):
            own[i, j] = D[k, i * m + j]
        first, second = first + own * own.T / D.rows, second + own.T * own / D.rows
    sides = references.decomposed(first), references.decomposed(second)
    trace = mp.fsum(sides[0].w)
    return Product(sides, 1 / trace if trace > 0 else mp.mpf(1))


def _uncorrelated(rows: Rows) -> Product:
    """Return ``A = blockdiag(I_K (x) Sigma, 0) + u u^T`` and G, with S positions."""
    x, g = rows["x"], rows["g"]
    K, c, S = 2, x.shape[-1], g.shape[1]
    X = references.exact(x.reshape(-1, c))
    mean = [mp.fsum(X[k, i] for k in range(X.rows)) / X.rows for i in range(c)]
    centered = mp.matrix(X.rows, c)
    for k, i in itertools.product(range(X.rows), range(c)):
        centered[k, i] = X[k, i] - mean[i]
    covariance = references.moment(centered, centered)
    u = mp.matrix([*mean * K, mp.mpf(1)])
    A = u * u.T
    for k, i, j in itertools.product(range(K), range(c), range(c)):
        A[k * c + i, k * c + j] += covariance[i, j]
    output = references.side(g.reshape(-1, g.shape[-1]))
    return Product((references.decomposed(A), output), mp.mpf(S))


def _series(infinite: bool) -> Callable[[Rows], Series]:
    def made(rows: Rows) -> Series:
        found = []
        for name in ("x", "g"):
            every = rows[name]
            flat = references.exact(every.reshape(-1, every.shape[-1]))
            later, earlier = (
                references.exact(part.reshape(-1, every.shape[-1]))
                for part in (every[:, 1:], every[:, :-1])
            )
            lag_1 = (later.T * earlier) / flat.rows
            found.append((references.moment(flat, flat), lag_1))
        return Series(found[0], found[1], STEPS, infinite)

    return made


def _tridiagonal(rows: Rows) -> Tridiagonal:
    sides: list[dict[tuple[int, int], Any]] = []
    for k in ("x", "g"):
        every = [references.exact(rows[f"{k}{i}"]) for i in range(len(_CHAIN))]
        pairs = [
            (i, j) for i in range(len(every)) for j in (i, i + 1) if j < len(every)
        ]
        sides.append({(i, j): references.moment(every[i], every[j]) for i, j in pairs})
    return Tridiagonal(sides[0], sides[1])


_LAYER = _dense(n, m)
_TENSOR = kc.Parameters(shapes={"w": (n, m)})
_CONV = conv_layer(2, 2, (2,))


def _of_layer(approximation: Any, rules: tuple[str, ...], curvature: Any) -> Kind:
    return Kind(kc.Block(_LAYER, approximation), rules, _draw, _batch, curvature)


def _of_steps(variant: Any, steps: int | None) -> Kind:
    block = kc.Block(_dense(4, 2), kc.Series(variant=variant, steps=steps))
    curvature = _series(variant == "infinite")
    return Kind(block, FACTORED, _draw_steps, _batch, curvature, by_parts=True)


KINDS = {
    "Kronecker": _of_layer(kc.Kronecker(), RULES, _kronecker),
    "Kronecker(input='diagonal')": _of_layer(
        kc.Kronecker(input="diagonal"), RULES, _diagonal_input
    ),
    "Kronecker(output='diagonal')": _of_layer(
        kc.Kronecker(output="diagonal"), RULES, _diagonal_output
    ),
    "Kronecker(input='uncorrelated')": Kind(
        kc.Block(_CONV, kc.Kronecker(input="uncorrelated")),
        RULES,
        _draw_pixels,
        _batch,
        _uncorrelated,
    ),
    "EKFAC": _of_layer(kc.EKFAC(), EXACT, _kronecker),
    "TNT": Kind(kc.Block(_TENSOR, kc.TNT()), RULES, _draw, _gradient_batch, _tnt),
    "Full": _of_layer(kc.Full(), EXACT, _full),
    "SampleCurvature": replace(_of_layer(kc.Full(), EXACT, _full), by_samples=True),
    "Diagonal": _of_layer(kc.Diagonal(), EXACT, _diagonal),
    "ScaledIdentity": _of_layer(kc.ScaledIdentity(scale=2.0), EXACT, _identity),
    "Series('symmetric')": _of_steps("symmetric", STEPS),
    "Series('infinite')": _of_steps("infinite", None),
    "BlockTridiagonal": Kind(
        kc.Block(
            kc.Chain(names=tuple(_CHAIN), layers=tuple(_CHAIN.values())),
            kc.BlockTridiagonal(),
        ),
        FACTORED,
        _draw_chain,
        _chain_batch,
        _tridiagonal,
        by_parts=True,
    ),
}

STORED = ("Kronecker",)
"""Blocks whose stored sums can be read for a reference; see `GRADED`."""


def stored(statistics: Any) -> Product:
    """Return the block of the sums as they are stored."""
    sides = []
    for side in ("input", "output"):
        average = statistics.averages[side]
        sums = kc.to_numpy(average.sum.array).astype(np.float64)
        lower = np.tril(sums) + np.tril(sums, -1).T
        weight = mp.mpf(float(kc.to_numpy(average.weight)))
        sides.append(references.decomposed(references.exact(lower) / weight))
    return Product((sides[0], sides[1]))
