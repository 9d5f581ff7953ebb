"""Random numbers, batches, and the least loss of gray images.

Numbers come from separate streams of one seed, so that no method changes what another sees.
"""

import numpy as np

N_HELD_OUT = 297
STREAMS = ("split", "parameters", "batches", "targets")


def stream(seed, name):
    """Return the generator of one of the `STREAMS` of a seed, at its beginning."""
    return np.random.default_rng([STREAMS.index(name), seed])


def batches(seed, *, n_examples, batch_size, steps):
    """Return the indices of the examples in each batch; each epoch is in a new order."""
    rng = stream(seed, "batches")
    drawn = []
    while len(drawn) < steps:
        order = rng.permutation(n_examples)
        drawn += [
            order[start : start + batch_size]
            for start in range(0, n_examples - batch_size + 1, batch_size)
        ]
    return drawn[:steps]


def pixel_entropy(images):
    """Return the least loss of any Bernoulli model: the mean entropy of an image."""
    gray = images[(images > 0.0) & (images < 1.0)]
    entropies = -gray * np.log(gray) - (1.0 - gray) * np.log(1.0 - gray)
    return float(np.sum(entropies)) / len(images)
