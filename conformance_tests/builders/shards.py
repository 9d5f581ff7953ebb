"""Networks of many approximations, and batches that are cut into shards."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import kfac_core as kc

from .layers import conv_layer, dense_layer
from .tolerances import tolerance

POSITIONS = 4
CONV = conv_layer(2, 3, (2,))


def dense(n: int, m: int, bias: bool = True) -> kc.Dense:
    """Return a dense layer."""
    return dense_layer(n, m, bias=bias)


def every_block() -> dict[str, kc.Block]:
    """Return a block of each approximation that can be divided among processes."""
    embedding = kc.Embedding(num_embeddings=5, features=3, weight_layout="io")
    return {
        "expand": kc.Block(dense(4, 3), kc.Kronecker()),
        "reduced": kc.Block(dense(4, 3), kc.Kronecker(sharing="reduce")),
        "diagonal side": kc.Block(dense(3, 5), kc.Kronecker(output="diagonal")),
        "no bias": kc.Block(dense(3, 2, bias=False), kc.Kronecker()),
        "conv": kc.Block(CONV, kc.Kronecker()),
        "embedding": kc.Block(embedding, kc.Kronecker(input="diagonal")),
        "tnt": kc.Block(dense(4, 2), kc.TNT()),
        "tnt independent": kc.Block(dense(2, 4), kc.TNT(positions="independent")),
        "independent": kc.Block(dense(3, 2), kc.Series(variant="independent")),
        "symmetric": kc.Block(dense(3, 2), kc.Series(variant="symmetric", steps=5)),
        "infinite": kc.Block(dense(3, 2), kc.Series(variant="infinite")),
        "eigen": kc.Block(dense(3, 4), kc.EKFAC(moment_decay=0.8)),
        "diagonal": kc.Block(dense(2, 3), kc.Diagonal()),
        "full": kc.Block(dense(2, 2), kc.Full()),
        "scaled identity": kc.Block(
            kc.Parameters(shapes={"w": (5,)}), kc.ScaledIdentity(scale=2.0)
        ),
        "array": kc.Block(kc.Parameters(shapes={"w": (2, 3)}), kc.TNT()),
    }


def batch_of(rng: np.random.Generator, block: kc.Block, N: int) -> Any:
    """Return NumPy arrays of a batch of N examples, some of whose rows are masked."""
    layer = block.layer
    if layer.kind == "parameters":
        # Each example's gradient; a process has the sum over its examples.
        return {k: rng.normal(size=(N, *s)) for k, s in layer.shapes.items()}
    lengths = rng.integers(1, POSITIONS + 1, size=N)
    mask = np.arange(POSITIONS) < lengths[:, None]
    if layer.kind == "conv":
        x = rng.normal(size=(N, POSITIONS + 1, 2))
        return {"inputs": x, "output_grads": rng.normal(size=(N, POSITIONS, 3))}
    if layer.kind == "embedding":
        x = rng.integers(0, 5, size=(N, POSITIONS))
        m = 3
    else:
        x = rng.normal(size=(N, POSITIONS, layer.in_features)) + 0.3
        m = layer.out_features
    made = {"inputs": x, "output_grads": rng.normal(size=(N, POSITIONS, m)) + 0.2}
    made["mask"] = mask
    return made


def shard(backend: Any, values: dict[str, Any], start: int, stop: int) -> Any:
    """Return the batch of some of the examples."""
    part = {name: x[start:stop] for name, x in values.items()}
    if "inputs" not in values:
        gradients = {name: backend.asarray(x.sum(axis=0)) for name, x in part.items()}
        return kc.GradientBatch(gradients, batch_size=stop - start)
    return kc.Batch(**{name: backend.asarray(x) for name, x in part.items()})


def cuts_of(rng: np.random.Generator, N: int, size: int) -> list[int]:
    """Return where N examples are cut into shards of unequal sizes, some empty."""
    inner = np.sort(rng.integers(0, N + 1, size=size - 1))
    return [0, *inner.tolist(), N]


def gradients_of(
    backend: Any, rng: np.random.Generator, blocks: dict[str, kc.Block]
) -> dict[str, dict[str, Any]]:
    """Return a gradient for each block."""
    return {
        name: {
            parameter: backend.asarray(rng.normal(size=shape))
            for parameter, shape in block.layer.parameter_shapes.items()
        }
        for name, block in blocks.items()
    }


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What is done at each step, and with which batches."""

    batches: list[dict[str, Any]]
    sizes: list[int]
    cuts: list[list[int]]
    refresh_every: int = 2

    def run(
        self, backend: Any, estimator: kc.Estimator, rank: int | None, gradients: Any
    ) -> list[Any]:
        """Return the directions of each step; rank None has all examples."""
        found = []
        has_bases = any(b.approximation.has_bases for b in estimator.blocks.values())
        for step, (batches, N) in enumerate(zip(self.batches, self.sizes, strict=True)):
            start, stop = 0, N
            if rank is not None:
                start, stop = self.cuts[step][rank : rank + 2]
            fed = {}
            if stop > start:
                fed = {n: shard(backend, v, start, stop) for n, v in batches.items()}
            estimator.update(fed)
            if step % self.refresh_every == 0:
                if has_bases and step % (2 * self.refresh_every) == 0:
                    estimator.rebase(moments="kronecker" if step == 0 else "carried")
                estimator.refresh()
            directions = estimator.precondition(gradients)
            found.append(
                {
                    name: {key: backend.to_numpy(x) for key, x in own.items()}
                    for name, own in directions.items()
                }
            )
        return found


def schedule_of(
    rng: np.random.Generator, blocks: dict[str, kc.Block], size: int, steps: int = 5
) -> Schedule:
    """Return batches of several steps, cut for so many ranks."""
    sizes = [int(n) for n in rng.integers(5, 10, size=steps)]
    batches = [{n: batch_of(rng, b, N) for n, b in blocks.items()} for N in sizes]
    return Schedule(batches, sizes, [cuts_of(rng, N, size) for N in sizes])


def largest_difference(found: list[Any], expected: list[Any]) -> tuple[float, str]:
    """Return the largest relative difference of directions, and of which block."""
    worst = (0.0, "")
    for step, (got, want) in enumerate(zip(found, expected, strict=True)):
        assert got.keys() == want.keys()
        for name in want:
            for key, x in want[name].items():
                error = np.linalg.norm(got[name][key] - x) / np.linalg.norm(x)
                if not error <= worst[0]:
                    worst = (float(error), f"{name}/{key} at step {step}")
    return worst


def require_same(
    found: list[list[Any]], expected: list[Any], limit: float | None = None
) -> None:
    """Require the directions of every rank to be the expected ones."""
    limit = tolerance("inverse", "float64") if limit is None else limit
    for rank, directions in enumerate(found):
        error, where = largest_difference(directions, expected)
        assert error <= limit, f"rank {rank}: {where}: {error:.1e}"
