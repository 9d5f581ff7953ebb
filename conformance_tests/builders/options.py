"""Good options of every public class and function that has some.

Tests replace one of them by what it cannot be, and the fuzzer some of them by anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

import kfac_core as kc
from kfac_core.losses import Gaussian, SquaredError
from kfac_core.stages import plain

from .layers import conv_layer, dense_layer

DENSE = dense_layer(4, 3)
BLOCK = kc.Block(DENSE, kc.Kronecker())
# A good instance of each class of options.
OPTIONS: dict[type, Any] = {
    kc.Dense: DENSE,
    kc.Conv: conv_layer(2, 4, (2,), padding=((0, 1),)),
    kc.Embedding: kc.Embedding(num_embeddings=5, features=2, weight_layout="io"),
    kc.ScaleShift: kc.ScaleShift(scale_shape=(2,), shift_shape=None),
    kc.Parameters: kc.Parameters(shapes={"w": (2, 3)}),
    kc.Chain: kc.Chain(names=("a", "b"), layers=(DENSE, DENSE)),
    kc.Kronecker: kc.Kronecker(),
    kc.EKFAC: kc.EKFAC(),
    kc.Diagonal: kc.Diagonal(),
    kc.Full: kc.Full(),
    kc.TNT: kc.TNT(),
    kc.ScaledIdentity: kc.ScaledIdentity(scale=1.0),
    kc.Series: kc.Series(variant="symmetric", steps=3),
    kc.BlockTridiagonal: kc.BlockTridiagonal(),
    kc.Averaging: kc.Averaging(),
    kc.Refreshing: kc.Refreshing(),
    kc.Coupling: kc.Coupling(),
    kc.Execution: kc.Execution(),
    kc.Precision: kc.Precision(),
    kc.Conventions: kc.Conventions(reduction="sum", sources="sum"),
    kc.Block: kc.Block(DENSE, kc.Kronecker()),
    SquaredError: SquaredError(scale=1.0),
    Gaussian: Gaussian(variance=1.0),
}
Z = np.ones((3, 2))
VECTOR: dict[str, dict[str, Any]] = {"fc": {"weight": np.ones((2, 2))}}
LOSS = kc.losses.Categorical()
# Functions of options, and good ones.
FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "Estimator": (
        lambda **o: kc.Estimator({"fc": BLOCK}, **o),
        {
            "damping": 0.1,
            "decay": 0.9,
            "damping_rule": "factored",
            "reduction": "sum",
            "sources": "sum",
            "mode": None,
            "averaging": kc.Averaging(),
            "refreshing": kc.Refreshing(),
            "coupling": kc.Coupling(),
            "precision": kc.Precision(),
            "execution": kc.Execution(),
        },
    ),
    "levenberg_marquardt": (
        lambda damping, **o: kc.levenberg_marquardt(damping, o.pop("ratio", 1.0), **o),
        {"damping": 1.0, "decay": 0.5, "minimum": 0.0},
    ),
    "kl_clip": (
        lambda **o: kc.steps.kl_clip(VECTOR, VECTOR, **o),
        {"learning_rate": 0.1, "bound": 1.0, "check": "raise"},
    ),
    "decay_decoupled": (
        lambda **o: kc.steps.decay_decoupled(VECTOR, VECTOR, weight_decay=0.1, **o),
        {"learning_rate": 0.1},
    ),
    "gamma_candidates": (
        lambda gamma, **o: kc.steps.gamma_candidates(gamma, **o),
        {"gamma": 1.0, "factor": 0.5, "minimum": 0.1},
    ),
    "noise_spec": (
        lambda loss, **o: kc.losses.noise_spec(loss, Z, **o),
        {"loss": LOSS, "mode": "gradients", "samples": 1},
    ),
    "vectors": (
        lambda **o: kc.losses.vectors(LOSS, Z, **o),
        {"mode": "exact", "weight": 1.0, "positions": "together"},
    ),
    "drawn_vectors": (
        lambda **o: kc.losses.drawn_vectors(LOSS, Z, **o),
        {"mode": "gradients", "seed": 0, "shared": True, "samples": 1},
    ),
    "inverse_root": (
        lambda **o: kc.roots.inverse_root(np.eye(2), damping=0.1, **o),
        {"degree": 2, "check": "raise"},
    ),
    "block_posterior": (
        lambda **o: kc.posterior.block_posterior(
            kc.operators.kronecker_operator(np.eye(2), np.eye(2), damping=0.1), **o
        ),
        {"examples": 1, "prior_precision": 1.0},
    ),
    "spectral_blocks": (
        lambda **o: kc.posterior.spectral_blocks({}, {}, **o),
        {"debias": True, "precision": kc.Precision(), "check": "raise"},
    ),
    "run_ranks": (
        lambda size, **o: kc.distributed.run_ranks(size, lambda c: c.rank, **o),
        {"size": 1, "timeout": 9.0},
    ),
    "Threaded": (kc.execution.Threaded, {"workers": 1, "inner": plain}),
    "Stacked": (kc.execution.Stacked, {"fewest": 2, "inner": plain}),
}
FUNCTIONS |= {
    cls.__name__: (
        cls,
        {f.name: getattr(good, f.name) for f in dataclasses.fields(cls) if f.init},
    )
    for cls, good in OPTIONS.items()
}
