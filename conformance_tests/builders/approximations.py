"""Every approximation of a layer with the dense float64 matrix that it must be.

Conventions.  A batch on the host has inputs x (N, S, n), output gradients g (M, N, S, m)
and perhaps a mask (N, S) that keeps the first steps of each example.  `Case.moments` sums
its statistics up by loops; they are averaged over batches, one by one.  `Case.dense` makes
the matrix of averaged statistics, flattened row-major, damped or not.  Nothing here calls
the library but to describe the block and to place the batch.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kfac_core as kc

from . import chain_reference, reference, series_reference

N, S, M, n, m = 7, 3, 2, 3, 2
RULES = ("factored", "factored_unit_pi", "exact")
FACTORED = RULES[:2]

Stats = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Rows:
    """What a layer saw, on the host."""

    x: Any
    g: Any
    mask: Any = None

    def part(self, examples: slice) -> Rows:
        """Return some of the examples."""
        mask = None if self.mask is None else self.mask[examples]
        if isinstance(self.x, list):
            x, g = [x[examples] for x in self.x], [g[:, examples] for g in self.g]
            return Rows(x, g, mask)
        return Rows(self.x[examples], self.g[:, examples], mask)

    def scaled(self, factor: float) -> Rows:
        """Return the same with the output gradients multiplied."""
        if isinstance(self.g, list):
            return Rows(self.x, [factor * g for g in self.g], self.mask)
        return Rows(self.x, factor * self.g, self.mask)

    def spoiled(self) -> Rows:
        """Return the same with NaN where the mask leaves rows out."""
        if isinstance(self.x, list):
            x = [np.where(self.mask[:, None], x, np.nan) for x in self.x]
            g = [np.where(self.mask[:, None], g, np.nan) for g in self.g]
            return Rows(x, g, self.mask)
        keep = self.mask[..., None]
        return Rows(
            np.where(keep, self.x, np.nan), np.where(keep, self.g, np.nan), self.mask
        )


def drawn(rng: np.random.Generator, masked: bool) -> Rows:
    """Return a batch whose neighboring positions, and whose x and g, are correlated."""
    x = series_reference.sequences(rng, (N, S, n), correlation=0.8)
    g = [series_reference.sequences(rng, (N, S, m), correlation=0.8) for _ in range(M)]
    mask = np.arange(S) < rng.integers(1, S + 1, size=N)[:, None] if masked else None
    return Rows(x, np.stack(g) * (1.0 + x[..., :1] ** 2), mask)


def placed(backend: Any, dtype: str, rows: Rows) -> kc.Batch:
    """Return a batch on the backend."""
    mask = None if rows.mask is None else backend.asarray(rows.mask)
    x, g = backend.asarray(rows.x, dtype), backend.asarray(rows.g, dtype)
    return kc.Batch(x, g, mask, sources=len(rows.g))


@dataclasses.dataclass(frozen=True)
class Case:
    """A block and its dense reference."""

    layer: kc.Layer
    approximation: kc.Approximation
    moments: Callable[[Rows], Stats]
    dense: Callable[[Stats, float, str], np.ndarray]
    rules: tuple[str, ...] = RULES
    refused: tuple[str, ...] = ()
    """The functions that have no structure."""
    condition: float = 1.0
    """What `assert_close` scales the bound of products by."""
    drawn: Callable[[np.random.Generator, bool], Rows] = drawn
    placed: Callable[[Any, str, Rows], Any] = placed
    start: Callable[[Case, Any, str], Any] | None = None
    """What makes the statistics before the first update, where they are not empty."""
    of_a_network: bool = True

    @property
    def block(self) -> kc.Block:
        return kc.Block(self.layer, self.approximation)

    def initial(self, backend: Any, dtype: str) -> Any:
        """Return the statistics before the first update."""
        if self.start is not None:
            return self.start(self, backend, dtype)
        return self.block.initial(backend.asarray(0.0, dtype))

    def mean(self, batches: list[Stats], shares: list[float]) -> Stats:
        """Return the weighted mean of statistics."""
        pairs = list(zip(batches, shares, strict=True))
        return {
            key: sum(share * batch[key] for batch, share in pairs) / sum(shares)
            for key in batches[0]
        }


DENSE = kc.Dense(in_features=n, out_features=m, bias=True, weight_layout="io")
BARE = kc.Dense(in_features=n, out_features=m, bias=False, weight_layout="io")


def _gradients(rows: Rows) -> np.ndarray:
    """Return the gradient of each example and source, (M N, n + 1, m)."""
    listed = reference.rows_of(rows.x, rows.g, bias=True, mask=rows.mask)
    return np.stack(
        [
            sum((np.outer(x, gs[j]) for x, gs in example), np.zeros((n + 1, m)))
            for example in listed
            for j in range(len(rows.g))
        ]
    )


def _exact(rows: Rows) -> Stats:
    D = _gradients(rows).reshape(-1, (n + 1) * m)
    return {"F": sum(np.outer(d, d) for d in D) / len(rows.x)}


def _shifted(F: np.ndarray, damping: float) -> np.ndarray:
    return F + damping * np.eye(len(F))


def _factors(rows: Rows, *, sharing: str = "expand", bias: bool = True) -> Stats:
    A, G, repeats = reference.kronecker_factors(
        rows.x, rows.g, bias=bias, mask=rows.mask, sharing=sharing
    )
    return {"A": A, "G": G, "S": repeats}


def _product(stats: Stats, damping: float, rule: str, diagonal: str = "") -> np.ndarray:
    A, G = (
        np.diag(np.diag(stats[key])) if key in diagonal else stats[key] for key in "AG"
    )
    return reference.damped_block(A, G, stats["S"], damping=damping, rule=rule)


def _tnt(rows: Rows) -> Stats:
    D = _gradients(rows)
    A, G = sum(d @ d.T for d in D), sum(d.T @ d for d in D)
    return {"0": A / len(rows.x), "1": G / len(rows.x)}


def _tensor(stats: Stats, damping: float, rule: str) -> np.ndarray:
    """Return the product of any number of factors over a power of their trace."""
    factors = list(stats.values())
    k, scale = len(factors), np.trace(factors[0]) ** (1.0 - len(factors))
    if rule == "exact" or damping == 0:
        return _shifted(scale * functools.reduce(np.kron, factors), damping)
    means = np.array([np.trace(F) / len(F) for F in factors])
    shares = means / math.prod(means) ** (1 / k) if rule == "factored" else np.ones(k)
    shifts = shares * (damping / scale) ** (1 / k)
    damped = [_shifted(F, s) for F, s in zip(factors, shifts, strict=True)]
    return scale * functools.reduce(np.kron, damped)


def _input_moment(rows: Rows) -> Stats:
    listed = reference.rows_of(rows.x, rows.g, bias=True, mask=rows.mask)
    total = sum(np.outer(x, x) for example in listed for x, _ in example)
    return {"A": total / len(rows.x)}


def _steps(rows: Rows) -> Stats:
    mask = np.ones((len(rows.x), S), bool) if rows.mask is None else rows.mask
    stats = series_reference.moments(rows.x, rows.g, bias=False, mask=mask)
    lengths = np.bincount(mask.sum(axis=1), minlength=S + 1) / len(mask)
    return stats | {"lengths": lengths}


def _series(stats: Stats, damping: float, rule: str, *, variant: str) -> np.ndarray:
    a, g = series_reference.shifts(
        stats["A0"],
        stats["G0"],
        stats["S"],
        damping=damping,
        unit_pi=rule == "factored_unit_pi",
    )
    damped = stats | {"A0": _shifted(stats["A0"], a), "G0": _shifted(stats["G0"], g)}
    if variant == "infinite":
        return series_reference.infinite_block(damped)
    return sum(
        share * series_reference.symmetric_block(damped, [length])
        for length, share in enumerate(stats["lengths"])
        if share > 0
    )


def _drawn_chain(rng: np.random.Generator, masked: bool) -> Rows:
    xs, gs = chain_reference.draw(rng)
    mask = np.arange(chain_reference.N) % 3 > 0 if masked else None
    return Rows(xs, gs, mask)


def _placed_chain(backend: Any, dtype: str, rows: Rows) -> dict[str, kc.Batch]:
    return chain_reference.fed(backend, rows.x, rows.g, dtype, [rows.mask, None, None])


def _neighbors(rows: Rows) -> Stats:
    keep = None if rows.mask is None else np.flatnonzero(rows.mask)
    A, G, repeats = chain_reference.moments_of(rows.x, rows.g, keep)
    named = {("A", *key): value for key, value in A.items()}
    return named | {("G", *key): value for key, value in G.items()} | {"S": repeats}


def _tridiagonal(stats: Stats, damping: float, rule: str) -> np.ndarray:
    A, G = (
        {(i, j): stats[side, i, j] for i, j in itertools.product(range(3), range(3))}
        for side in "AG"
    )
    damped = chain_reference.damped_moments(A, G, stats["S"], damping, rule)
    return chain_reference.tridiagonal_matrix(*damped, stats["S"])


SAMPLE = drawn(np.random.default_rng(5), False)
"""The batch that EKFAC's bases are of."""


def _in_bases(case: Case, backend: Any, dtype: str) -> Any:
    """Return EKFAC's statistics with the bases of a batch, and without moments."""
    options = kc.UpdateOptions(
        conventions=kc.Conventions(reduction="sum", sources="sum"), decay=0.0
    )
    start = case.block.initial(backend.asarray(0.0, dtype))
    batch = placed(backend, dtype, SAMPLE)
    statistics = kc.update_block(case.block, start, batch, options)
    return kc.rebase_block(case.block, statistics, "zero", "raise")


def _corrected(stats: Stats, damping: float, rule: str) -> np.ndarray:
    sample = _factors(SAMPLE)
    Q = np.kron(*(np.linalg.eigh(sample[key])[1] for key in "AG"))
    return _shifted((Q * np.diag(Q.T @ stats["F"] @ Q)) @ Q.T, damping)


EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def example_module(name: str) -> Any:
    """Return a module of the documentation, loaded once: a structure registers once."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _series_case(variant: str, **options: Any) -> Case:
    return Case(
        BARE,
        kc.Series(variant=variant, **options),
        _steps,
        functools.partial(_series, variant=variant),
        rules=FACTORED,
        refused=("spectral",),
    )


CASES = {
    "kronecker": Case(DENSE, kc.Kronecker(), _factors, _product),
    "reduced": Case(
        DENSE,
        kc.Kronecker(sharing="reduce"),
        functools.partial(_factors, sharing="reduce"),
        _product,
    ),
    "diagonal input": Case(
        DENSE,
        kc.Kronecker(input="diagonal"),
        _factors,
        functools.partial(_product, diagonal="A"),
    ),
    "diagonal output": Case(
        DENSE,
        kc.Kronecker(output="diagonal"),
        _factors,
        functools.partial(_product, diagonal="G"),
    ),
    "tnt": Case(DENSE, kc.TNT(), _tnt, _tensor),
    "eigen": Case(
        DENSE, kc.EKFAC(), _exact, _corrected, start=_in_bases, of_a_network=False
    ),
    "diagonal": Case(
        DENSE,
        kc.Diagonal(),
        _exact,
        lambda stats, damping, _: _shifted(np.diag(np.diag(stats["F"])), damping),
    ),
    "full": Case(
        DENSE,
        kc.Full(),
        _exact,
        lambda stats, damping, _: _shifted(stats["F"], damping),
    ),
    "symmetric": _series_case("symmetric", steps=S),
    "infinite": _series_case("infinite"),
    "chain": Case(
        chain_reference.chain_of(chain_reference.LAYERS).layer,
        kc.BlockTridiagonal(),
        _neighbors,
        _tridiagonal,
        rules=FACTORED,
        refused=("powers", "cholesky", "eigenvalues", "undamped", "spectral"),
        condition=10.0,
        drawn=_drawn_chain,
        placed=_placed_chain,
        of_a_network=False,
    ),
}
if EXAMPLES.is_dir():
    CASES["identity gradients"] = Case(
        DENSE,
        example_module("identity_gradients").IdentityGradients(),
        _input_moment,
        lambda stats, damping, _: np.kron(_shifted(stats["A"], damping), np.eye(m)),
    )
