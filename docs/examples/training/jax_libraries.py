"""One network as a module of Flax linen, NNX, Equinox and Haiku, trained by K-FAC in JAX.

No layer is marked: they are found in what JAX traces.  Libraries that are not installed are
left out.

    python docs/examples/training/jax_libraries.py [--modules linen nnx equinox haiku]
"""

import argparse
import importlib.util
import sys

import jax
import jax.numpy as jnp
from data import batches, digits

from kfac_core_shims.jax import KFACOptimizer

BATCH = 128


def linen(x):
    """Return parameters and a function of a module of Flax linen."""
    from flax import linen as nn

    model = nn.Sequential([nn.Dense(64), nn.tanh, nn.LayerNorm(), nn.Dense(10)])
    return model.init(jax.random.key(0), x), model.apply


def nnx(x):
    """Return parameters and a function of a module of NNX."""
    from flax import nnx

    rngs = nnx.Rngs(0)
    layers = (
        nnx.Linear(x.shape[1], 64, rngs=rngs),
        nnx.tanh,
        nnx.LayerNorm(64, rngs=rngs),
        nnx.Linear(64, 10, rngs=rngs),
    )
    graph, params = nnx.split(nnx.Sequential(*layers))
    return params, lambda params, x: nnx.merge(graph, params)(x)


def equinox(x):
    """Return parameters and a function of a module of Equinox, of one example."""
    import equinox as eqx

    first, last = jax.random.split(jax.random.key(0))
    layers = [
        eqx.nn.Linear(x.shape[1], 64, key=first),
        eqx.nn.Lambda(jnp.tanh),
        eqx.nn.LayerNorm(64),
        eqx.nn.Linear(64, 10, key=last),
    ]
    params, static = eqx.partition(eqx.nn.Sequential(layers), eqx.is_array)
    return params, lambda params, x: jax.vmap(eqx.combine(params, static))(x)


def haiku(x):
    """Return parameters and a function of modules of Haiku."""
    import haiku as hk

    def network(x):
        hidden = hk.LayerNorm(-1, True, True)(jnp.tanh(hk.Linear(64)(x)))
        return hk.Linear(10)(hidden)

    model = hk.without_apply_rng(hk.transform(network))
    return model.init(jax.random.key(0), x), model.apply


MODULES = {
    "linen": ("flax", linen),
    "nnx": ("flax", nnx),
    "equinox": ("equinox", equinox),
    "haiku": ("haiku", haiku),
}


def trained(make, data, steps):
    """Return the loss of the last batch."""
    inputs = data.train_inputs.reshape(len(data.train_inputs), -1)
    params, function = make(jnp.asarray(inputs[:BATCH]))
    optimizer = KFACOptimizer(
        function, params, inputs[:BATCH], likelihood="categorical"
    )
    state, key = optimizer.init(params), jax.random.key(1)
    stream = batches(inputs, data.train_targets, size=BATCH, seed=0)
    for i in range(steps):
        batch = *next(stream), jax.random.fold_in(key, i)
        params, state, progress = optimizer.step(params, state, *batch)
    return float(progress.loss)


def main():
    """Train each module, and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--modules", nargs="+", choices=MODULES, default=[*MODULES])
    chosen, data = parser.parse_args(), digits()
    for name in chosen.modules:
        library, make = MODULES[name]
        if not importlib.util.find_spec(library):
            print(f"{library} is not installed", file=sys.stderr)
            continue
        print(f"{name}: {trained(make, data, chosen.steps):.4f}")


if __name__ == "__main__":
    main()
