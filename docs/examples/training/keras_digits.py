"""A convolutional classifier in Keras, by K-FAC and by Keras's own Adam.

Needs `pip install -e '.[keras,torch,demo]'`, and runs on Keras's PyTorch backend.  Each
method has the same number of learning rates, a factor of about three apart, and the best
is the one with the least training loss (`curves.best`), measured with a seed of its own.
Both have batches of 128, of the same order, and the same parameters to begin with.
"""

import argparse
import os
import time

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
from curves import Curve, best, plot, table
from data import batches, digits

from kfac_core_shims.keras import KFAC

RATES = {
    "K-FAC": (0.003, 0.01, 0.03, 0.1, 0.3),
    "Adam": (0.001, 0.003, 0.01, 0.03, 0.1),
}


def network(seed):
    """Return two convolutions, a hidden layer, the logits of the classes."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    strided = {"strides": 2, "padding": "same", "activation": "tanh"}
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, **strided),
            layers.Conv2D(16, 3, **strided),
            layers.Flatten(),
            layers.Dense(32, activation="tanh"),
            layers.Dense(10),
        ]
    )


def compiled(model, method, rate):
    """Compile a model, with K-FAC where that is the method."""
    optimizer = keras.optimizers.Adam(rate)
    if method == "K-FAC":
        optimizer = keras.optimizers.SGD(rate, momentum=0.9)
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=keras.backend.backend() == "jax",
    )
    if method == "K-FAC":
        KFAC(model, damping=0.01, kl_clip=None, update_every=2)


def train(method, rate, *, steps, seed):
    """Return the curve of one run."""
    data, curve = digits(), Curve(f"{method} ({rate:g})")
    model = network(seed)
    compiled(model, method, rate)
    stream = batches(data.train_inputs, data.train_targets, size=128, seed=seed)
    seconds = 0.0
    for step in range(steps + 1):
        if step % 10 == 0:
            loss, _ = model.evaluate(
                data.train_inputs[..., None],
                data.train_targets,
                batch_size=1437,
                verbose=0,
            )
            curve.add(step, seconds, loss)
            if step == steps:
                break
        images, labels = next(stream)
        start = time.process_time()
        model.train_on_batch(images[..., None], labels)
        seconds += time.process_time() - start
    _, accuracy = model.evaluate(
        data.test_inputs[..., None], data.test_targets, batch_size=360, verbose=0
    )
    curve.test = 1.0 - accuracy
    return curve


def runs(*, steps, seeds):
    """Return the curves of both methods, each with the best of its learning rates."""
    curves = []
    for method, rates in RATES.items():
        tried = {r: [train(method, r, steps=steps, seed=100)] for r in rates}
        rate = best(tried)
        curves += [train(method, rate, steps=steps, seed=s) for s in range(seeds)]
    return curves


def main():
    """Run both methods, print the table and draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", default="keras_digits.png")
    options = parser.parse_args()
    curves = runs(steps=options.steps, seeds=options.seeds)
    print(table(curves, loss=".2g"))
    plot(curves, options.output, title="Digits, a convolutional network in Keras")


if __name__ == "__main__":
    main()
