"""One block of every kind, and what it is fed."""

from __future__ import annotations

import kfac_core as kc

DENSE = kc.Dense(in_features=4, out_features=3, bias=False, weight_layout="io")
CONV = kc.Conv(
    in_channels=2,
    out_channels=3,
    kernel_size=(2,),
    padding="valid",
    bias=True,
    weight_layout="spatial_io",
    data_layout="channels_last",
)

PAIRS = {
    "kronecker": (DENSE, kc.Kronecker()),
    "diagonal output": (DENSE, kc.Kronecker(output="diagonal")),
    "uncorrelated": (CONV, kc.Kronecker(input="uncorrelated")),
    "tnt": (DENSE, kc.TNT()),
    "tnt of an array": (kc.Parameters(shapes={"w": (2, 3, 2)}), kc.TNT()),
    "kfoc": (DENSE, kc.KFOC(iterations=2)),
    "eigen": (DENSE, kc.Eigen()),
    "diagonal": (DENSE, kc.Diagonal()),
    "full": (DENSE, kc.Full()),
    "symmetric": (DENSE, kc.Series(variant="symmetric", steps=5)),
    "infinite": (DENSE, kc.Series(variant="infinite")),
    "scaled identity": (
        kc.Parameters(shapes={"w": (5,)}),
        kc.ScaledIdentity(scale=2.0),
    ),
}


def fed(backend, rng, layer):
    """Return a batch of a layer."""
    if layer.kind == "parameters":
        gradients = {
            name: backend.asarray(rng.normal(size=(7, *shape)))
            for name, shape in layer.shapes.items()
        }
        return kc.GradientBatch(gradients, batch_size=6, sources=7)
    n, m = (2, 3) if layer.kind == "conv" else (4, 3)
    x, g = rng.normal(size=(6, 5, n)), rng.normal(size=(6, 5, m))
    if layer.kind == "conv":
        g = g[:, :4]
    return kc.Batch(backend.asarray(x), backend.asarray(g))
