"""A Flax convolutional classifier of the digits, by K-FAC and by Adam, in JAX.

A whole step (forward, backward, statistics, refresh, direction, update) is one program
under ``jax.jit``, for both methods.  Each is tried with three learning rates on the first
seed, and the one with the least training loss at the end is run on all seeds.  The rates
are a factor of ten apart: roundoff can exchange the losses of closer ones.

    python docs/examples/training/jax_digits.py --output docs/jax_digits.png

K-FAC's damping, trust region and refresh interval stand below; no grid was run on them.
"""

import argparse
import math
import sys
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from curves import Curve, best, plot, table
from data import batches, digits

import kfac_core as kc
from kfac_core.steps import kl_clip
from kfac_core_shims.jax import KFAC, Network

BATCH = 128
DAMPING = 0.03
BOUND = 0.01
EVERY = 20
RATES = {"K-FAC": (0.03, 0.3, 3.0), "Adam": (0.001, 0.01, 0.1)}
LOSS = kc.losses.Categorical()


class Classifier(nn.Module):
    """Two convolutions and two dense layers, a few ten thousand parameters."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(16, (3, 3))(x))
        x = nn.relu(nn.Conv(32, (3, 3), strides=2)(x))
        x = nn.relu(nn.Dense(32)(x.reshape(x.shape[0], -1)))
        return nn.Dense(10)(x)


def network(params, x):
    """Return the logits of a batch of images."""
    return Classifier().apply({"params": params}, x[..., None])


def kfac_method(params, x):
    """Return the first state and the step of K-FAC."""
    layers = Network(network, params, x)
    kfac = KFAC(
        layers,
        reduction="sum",
        sources="mean",
        damping=DAMPING,
        decay=0.95,
        refresh_every=5,
        kl_clip=None,  # it is taken below, with the rate of the run
    )
    method = kfac.optax()

    @jax.jit
    def step(params, state, x, y, key, rate):
        logits, pull = layers.vjp(params, x)
        gradients, _ = pull(LOSS.gradient(logits, y) / len(y), reduction="mean")
        spec = kc.losses.noise_spec(LOSS, logits, mode="gradients")
        noise = jax.random.uniform(key, spec.shape)
        captured = pull(kc.losses.vectors(LOSS, logits, mode="gradients", noise=noise))
        updates, state = method.update(gradients, state, params, captured=captured)
        clip = kl_clip(
            gradients, updates, learning_rate=rate, bound=BOUND, check="status"
        )
        rate = rate * clip.scale
        return jax.tree.map(lambda p, u: p - rate * u, params, updates), state

    return method.init, step


def adam_method(params, x):
    """Return the first state and the step of Adam."""
    method = optax.scale_by_adam()

    @jax.jit
    def step(params, state, x, y, key, rate):
        gradients = jax.grad(loss)(params, x, y)
        updates, state = method.update(gradients, state, params)
        return jax.tree.map(lambda p, u: p - rate * u, params, updates), state

    return method.init, step


METHODS = {"K-FAC": kfac_method, "Adam": adam_method}


def loss(params, x, y):
    """Return the mean negative log-likelihood."""
    logits = network(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@jax.jit
def errors(params, x, y):
    """Return the share of images that are taken for another digit."""
    return jnp.mean(jnp.argmax(network(params, x), axis=-1) != y)


def first_params(seed):
    """Return parameters by Flax's own initializers."""
    shape = jax.ShapeDtypeStruct((1, 8, 8, 1), jnp.float32)
    return jax.jit(Classifier().init)(jax.random.key(seed), jnp.zeros(shape.shape))[
        "params"
    ]


def train(name, method, data, *, rate, seed, steps):
    """Return the curve of one run."""
    init, step = method
    params = first_params(seed)
    state, key = init(params), jax.random.key(seed)
    curve, seconds = Curve(f"{name}, learning rate {rate:g}"), 0.0
    measured = jax.jit(loss)
    stream = batches(data.train_inputs, data.train_targets, size=BATCH, seed=seed)
    # What this compiles is not counted.
    step(params, state, *next(stream), key, rate)
    for i in range(steps + 1):
        if i % EVERY == 0 or i == steps:
            value = float(measured(params, data.train_inputs, data.train_targets))
            curve.add(i, seconds, value)
            if not math.isfinite(value):
                break
        if i == steps:
            break
        x, y = next(stream)
        start = time.process_time()
        params, state = step(params, state, x, y, jax.random.fold_in(key, i), rate)
        jax.block_until_ready(params)
        seconds += time.process_time() - start
    curve.test = float(errors(params, data.test_inputs, data.test_targets))
    return curve


def runs(*, steps, seeds):
    """Return the curves of both methods, each with the best of its learning rates."""
    data, finals = digits(), []
    for name, make in METHODS.items():
        method = make(first_params(0), data.train_inputs[:BATCH])
        tried = {}
        for rate in RATES[name]:
            tried[rate] = [train(name, method, data, rate=rate, seed=0, steps=steps)]
            if sys.stderr.isatty():
                shown = tried[rate][0]
                print(f"{shown.name}: {shown.losses[-1]:.4g}", file=sys.stderr)
        rate = best(tried)
        finals += tried[rate]
        finals += [
            train(name, method, data, rate=rate, seed=seed, steps=steps)
            for seed in range(1, seeds)
        ]
    return finals


def main():
    """Run both methods, print the table and draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--output", default="jax_digits.png")
    chosen = parser.parse_args()
    finals = runs(steps=chosen.steps, seeds=chosen.seeds)
    print(table(finals, loss=".1g", error=".2f"))
    plot(finals, chosen.output, title="Digits, Flax convolutional classifier")


if __name__ == "__main__":
    main()
