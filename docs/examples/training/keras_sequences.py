"""Sequences in Keras: embeddings with LSTM, GRU and attention, by K-FAC and by Adam.

Each sequence has 12 ids of four kinds, and the class is the id that it has most of.

    KERAS_BACKEND=torch python docs/examples/training/keras_sequences.py [--quick]
    KERAS_BACKEND=jax python docs/examples/training/keras_sequences.py [--quick]

K-FAC has its defaults, before `SGD(0.1, momentum=0.9)`; Adam has its defaults.
"""

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np

from kfac_core_shims.keras import KFAC

KINDS, LENGTH, WIDTH = 4, 12, 16
layers = keras.layers


def lstm(h):
    """Return the last state of LSTM cells."""
    return layers.LSTM(WIDTH)(h)


def gru(h):
    """Return the last states of GRU cells that read in both directions."""
    return layers.Bidirectional(layers.GRU(WIDTH // 2))(h)


def attention(h):
    """Return the mean over positions of attention with a residual connection."""
    h = layers.LayerNormalization()(h + layers.MultiHeadAttention(2, 8)(h, h))
    return layers.GlobalAveragePooling1D()(h)


def sequences(examples, seed):
    """Return ids, shape (examples, 12), and the most frequent id of each."""
    ids = np.random.default_rng(seed).integers(0, KINDS, size=(examples, LENGTH))
    counts = np.stack([(ids == kind).sum(axis=1) for kind in range(KINDS)], axis=1)
    return ids.astype("int32"), counts.argmax(axis=1)


def train(body, method, *, epochs, examples):
    """Return the test loss before and after training."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((LENGTH,), dtype="int32")
    outputs = layers.Dense(KINDS)(body(layers.Embedding(KINDS, WIDTH)(inputs)))
    model = keras.Model(inputs, outputs)
    kfac = method == "K-FAC"
    model.compile(
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9) if kfac else "adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=keras.backend.backend() == "jax",
    )
    if kfac:
        skipped = KFAC(model).skipped
        assert not skipped, skipped
    test = sequences(512, seed=1)
    before = model.evaluate(*test, batch_size=512, verbose=0)
    model.fit(*sequences(examples, 0), batch_size=64, epochs=epochs, verbose=0)
    return before, model.evaluate(*test, batch_size=512, verbose=0)


def main():
    """Train each network by both methods, and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one epoch")
    epochs = 1 if parser.parse_args().quick else 8
    print(f"{'':10}{'before':>8}{'after':>8}")
    for body in lstm, gru, attention:
        for method in "K-FAC", "Adam":
            before, after = train(body, method, epochs=epochs, examples=1024)
            print(f"{body.__name__:10}{before:8.3f}{after:8.3f}  {method}")


if __name__ == "__main__":
    main()
