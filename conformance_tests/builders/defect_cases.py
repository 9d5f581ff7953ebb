"""What the tests of earlier systems' defects have in common: small blocks and batches."""

import kfac_core as kc

from .one_block import learn


def dense_data(rng, N=12, n=4, m=3):
    """Return rows of a dense layer."""
    return rng.normal(size=(N, n)), rng.normal(size=(N, m))


def dense_block(**options):
    """Return a block with bias, 4 inputs and 3 outputs."""
    layer = kc.Dense(in_features=4, out_features=3, bias=True, weight_layout="io")
    return kc.Block(layer, kc.Kronecker(**options))


def fed(block, batch):
    """Return statistics after one update."""
    return learn(block, batch, decay=0.9, weight=1.0)


def conv_batch(backend, rng, out=2, channels=2, **options):
    """Return a batch of 3 images of 4 x 4."""
    x = rng.normal(size=(3, 4, 4, channels))
    g = rng.normal(size=(3, 3, 3, out))
    return x, g, kc.Batch(backend.asarray(x), backend.asarray(g), **options)
