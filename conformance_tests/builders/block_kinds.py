"""One block of every kind, and what it is fed."""

from __future__ import annotations

import functools

import kfac_core as kc

from .layers import conv_layer, dense_layer

DENSE = dense_layer(4, 3, bias=False)
CONV = conv_layer(2, 3, (2,))

PAIRS = {
    "kronecker": (DENSE, kc.Kronecker()),
    "diagonal output": (DENSE, kc.Kronecker(output="diagonal")),
    "uncorrelated": (CONV, kc.Kronecker(input="uncorrelated")),
    "tnt": (DENSE, kc.TNT()),
    "tnt of an array": (kc.Parameters(shapes={"w": (2, 3, 2)}), kc.TNT()),
    "eigen": (DENSE, kc.EKFAC()),
    "diagonal": (DENSE, kc.Diagonal()),
    "full": (DENSE, kc.Full()),
    "symmetric": (DENSE, kc.Series(variant="symmetric", steps=5)),
    "infinite": (DENSE, kc.Series(variant="infinite")),
    "scaled identity": (
        kc.Parameters(shapes={"w": (5,)}),
        kc.ScaledIdentity(scale=2.0),
    ),
}


RULES = ("factored", "factored_unit_pi", "exact")

KINDS = [
    (pair, rule)
    for pair, (_, approximation) in PAIRS.items()
    for rule in RULES
    # A series is damped in its moments of lag 0 only.
    if rule != "exact" or not isinstance(approximation, kc.Series)
]
"""The pairs with each rule of damping that they have."""


def network_of(pair, rule):
    """Return a network of one block, called ``"a"``."""
    block = kc.Block(*PAIRS[pair])
    summed = kc.Conventions(reduction="sum", sources="sum")
    return kc.Network({"a": block}, conventions=summed, damping_rule=rule)


def stages_of(network, batch):
    """Return the functions of a state that a network has, which look at no value."""
    check = {"check": "status"}
    stages = [
        functools.partial(_update, network, batch),
        functools.partial(network.refresh, damping=0.3, **check),
    ]
    if network.blocks["a"].approximation.has_bases:
        for moments in ("kronecker", "carried", "zero"):
            stages.append(functools.partial(network.rebase, moments=moments, **check))
    return stages


def _update(network, batch, state):
    return network.update(state, {"a": batch}, decay=0.9, check="status")


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
