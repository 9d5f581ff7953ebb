"""One small block of every kind, with batches and gradients, on any backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import kfac_core as kc

from ..builders.layers import conv_layer, dense_layer

N, S = 4, 3
DENSE = dense_layer(3, 2)
PLAIN = kc.Dense(in_features=3, out_features=2, bias=False, weight_layout="oi")
CONV = conv_layer(2, 2, (2,))
EMBEDDING = kc.Embedding(num_embeddings=5, features=2, weight_layout="io")
ARRAY = kc.Parameters(shapes={"w": (2, 3, 2)})
SCALE = kc.ScaleShift(scale_shape=(3,), shift_shape=(3,))

CASES: dict[str, tuple[Any, Any, str]] = {
    "kronecker": (DENSE, kc.Kronecker(), "factored"),
    "kronecker unit": (PLAIN, kc.Kronecker(), "factored_unit_pi"),
    "kronecker exact": (DENSE, kc.Kronecker(), "exact"),
    "kronecker reduced": (DENSE, kc.Kronecker(sharing="reduce"), "factored"),
    "kronecker diagonal": (DENSE, kc.Kronecker(input="diagonal"), "factored"),
    "kronecker conv": (CONV, kc.Kronecker(), "factored"),
    "uncorrelated": (CONV, kc.Kronecker(input="uncorrelated"), "factored"),
    "embedding": (EMBEDDING, kc.Kronecker(input="diagonal"), "factored"),
    "eigen": (DENSE, kc.EKFAC(), "exact"),
    "eigen decay": (DENSE, kc.EKFAC(moment_decay=0.5), "exact"),
    "diagonal": (DENSE, kc.Diagonal(), "factored"),
    "full": (DENSE, kc.Full(), "exact"),
    "scale": (SCALE, kc.Full(), "exact"),
    "tnt": (DENSE, kc.TNT(), "factored"),
    "tnt of an array": (ARRAY, kc.TNT(), "factored"),
    "symmetric": (PLAIN, kc.Series(variant="symmetric", steps=S), "factored"),
    "infinite": (PLAIN, kc.Series(variant="infinite"), "factored"),
    "infinite alone": (PLAIN, kc.Series(variant="infinite"), "factored"),
    "identity": (ARRAY, kc.ScaledIdentity(scale=2.0), "factored"),
    "chain": (DENSE, kc.Kronecker(), "factored"),
}
"""Layer, approximation and rule of damping, by name."""

Place = Callable[[np.ndarray[Any, Any]], Any]


def made(case: str, /, **options: Any) -> kc.Estimator:
    """Return an estimator of one block, ``"a"``, that has seen nothing."""
    layer, approximation, rule = CASES[case]
    settings: dict[str, Any] = {"damping": 0.3, "decay": 0.8, "reduction": "sum"}
    settings |= {"damping_rule": rule} | options
    block = kc.Block(layer, approximation)
    if case != "chain":
        return kc.Estimator({"a": block}, **settings)
    first = dense_layer(3, 3)
    blocks = {"fc1": kc.Block(first, approximation), "fc2": block}
    return kc.Estimator(
        blocks, **settings, coupling=kc.Coupling(chains={"a": ("fc1", "fc2")})
    )


def batch_of(case: str, seed: int, /, place: Place = np.asarray) -> dict[str, Any]:
    """Return the batches of an update."""
    rng = np.random.default_rng(seed)
    layer = CASES[case][0]
    if case == "chain":
        sizes = {"fc1": (3, 3), "fc2": (3, 2)}
        return {
            name: kc.Batch(
                place(rng.normal(size=(N, n))), place(rng.normal(size=(N, m)))
            )
            for name, (n, m) in sizes.items()
        }
    if layer is ARRAY:
        values = place(rng.normal(size=(N, 2, 3, 2)))
        return {"a": kc.GradientBatch({"w": values}, batch_size=N, sources=N)}
    if layer is SCALE:
        x, g = rng.normal(size=(N, 3)), rng.normal(size=(N, 3))
    elif layer is EMBEDDING:
        return {
            "a": kc.Batch(
                place(rng.integers(0, 5, size=(N, S))),
                place(rng.normal(size=(N, S, 2))),
            )
        }
    elif layer is CONV:
        x, g = rng.normal(size=(N, S, 2)), rng.normal(size=(N, S - 1, 2))
    else:
        positions = () if case == "infinite alone" else (S,)
        x = rng.normal(size=(N, *positions, 3))
        g = rng.normal(size=(N, *positions, 2))
    return {"a": kc.Batch(place(x), place(g))}


def gradient_of(case: str, /, place: Place = np.asarray) -> dict[str, Any]:
    """Return gradients of the block's parameters, or of those of its layers."""
    if case == "chain":
        shapes = {
            "fc1": {"weight": (3, 3), "bias": (3,)},
            "fc2": {"weight": (3, 2), "bias": (2,)},
        }
    else:
        shapes = {"a": CASES[case][0].parameter_shapes}
    rng = np.random.default_rng(11)
    return {
        name: {key: place(rng.normal(size=shape)) for key, shape in own.items()}
        for name, own in shapes.items()
    }
