"""K-FAC in JAX on several devices, beside one: `shard_map`, `pmap`, `jit` with shardings.

Needs `pip install scikit-learn jax`.  ``--processes`` is the number of virtual devices of
the CPU, which are made in this process.  Shards have unequal numbers of rows: all are
padded to the batch's size, and what is padding is masked.  One device gets the same padded
batch, since an example that is masked counts as an example of no rows.

Inside `shard_map` and `pmap` each device runs the program on its own rows.  `SummedOver`
adds up the statistics of an update over the mapped axis, and `psum` the gradients.  With
arrays that have shardings `jit` divides the program itself, and nothing is added to it.
A refresh has no rows and runs on one device.  Directions before the first one are zero.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys

import numpy as np
from compared import BATCH, STEPS, compared, digits, options, shard

chosen = options(__doc__)
os.environ["XLA_FLAGS"] = (
    # Most of the time is that of compiling, and arrays are small.
    "--xla_backend_optimization_level=0 "
    f"--xla_force_host_platform_device_count={chosen.processes} "
    + os.environ.get("XLA_FLAGS", "")
)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import kfac_core as kc  # noqa: E402
from kfac_core.distributed import SummedOver, connect  # noqa: E402

WIDTHS = (64, 32, 10)
RATE, DAMPING = 0.3, 0.1
DIVIDED, EVERYWHERE = PartitionSpec("shards"), PartitionSpec()
NETWORK = kc.Network(
    {
        f"fc{i}": kc.Block(
            kc.Dense(in_features=n, out_features=m, bias=True, weight_layout="io"),
            kc.Kronecker(),
        )
        for i, (n, m) in enumerate(itertools.pairwise(WIDTHS))
    },
    conventions=kc.Conventions(reduction="sum", sources="sum"),
)


def initial(dtype):
    """Return the weights of a network of two layers."""
    rng = np.random.default_rng(1)
    return {
        f"fc{i}": {
            "weight": jnp.asarray((rng.normal(size=(n, m)) / np.sqrt(n)).astype(dtype)),
            "bias": jnp.zeros(m, dtype),
        }
        for i, (n, m) in enumerate(itertools.pairwise(WIDTHS))
    }


refreshed = jax.jit(functools.partial(NETWORK.refresh, damping=DAMPING, check="status"))


def step(weights, state, images, labels, mask, axis_name=None):
    """Return the weights and the state after one step, and the directions."""
    inputs, x = {}, images
    for name, layer in weights.items():
        inputs[name] = x
        x = x @ layer["weight"] + layer["bias"]
        x = jnp.tanh(x) if name == "fc0" else x
    g = jax.nn.softmax(x) - jax.nn.one_hot(labels, 10, dtype=x.dtype)
    g = jnp.where(mask[:, None], g, 0.0)
    batches, gradients = {}, {}
    for name, layer in reversed(weights.items()):
        x = inputs[name]
        # A row that is masked has no weight, here and in the gradient.
        batches[name] = kc.Batch(x[:, None], g[:, None], mask=mask[:, None])
        gradients[name] = {"weight": x.T @ g / BATCH, "bias": jnp.sum(g, 0) / BATCH}
        g = (g @ layer["weight"].T) * (1.0 - x**2)
    options = {}
    if axis_name is not None:
        gradients = jax.lax.psum(gradients, axis_name)
        # The devices of the axes that this is mapped over.
        options["executor"] = SummedOver(connect("jax"))
    state = NETWORK.update(state, batches, decay=0.95, check="status", **options)
    directions = NETWORK.precondition(state, gradients)
    weights = jax.tree.map(lambda w, d: w - RATE * d, weights, directions)
    return weights, state, directions


def padded(images, labels, number, size):
    """Return the shards of a step, each padded to the batch's size, and their mask."""
    x = np.zeros((size, BATCH, 64), images.dtype)
    y, mask = np.zeros((size, BATCH), int), np.zeros((size, BATCH), bool)
    for rank in range(size):
        rows = shard(number, rank, size)
        n = rows.stop - rows.start
        x[rank, :n], y[rank, :n], mask[rank, :n] = images[rows], labels[rows], True
    return x.reshape(-1, 64), y.reshape(-1), mask.reshape(-1)


def train(program, size, dtype, mesh=None):
    """Return the weights after 20 steps, and the last directions."""

    def place(tree, split):
        """Divide the first axis among the devices, or put all on each."""
        if mesh is None:
            return tree
        return jax.device_put(tree, NamedSharding(mesh, split))

    images, labels = digits(dtype)
    weights = place(initial(dtype), EVERYWHERE)
    like = jnp.zeros((), dtype)
    state = place(NETWORK.initial(like, damping=DAMPING), EVERYWHERE)
    directions = {}
    for number in range(STEPS):
        batch = padded(images, labels, number, size)
        weights, state, directions = program(weights, state, *place(batch, DIVIDED))
        if number % 5 == 0:
            # A refresh has no rows: one device computes it, compiled once for all ways.
            state = place(refreshed(jax.device_get(state)), EVERYWHERE)
            print(f"  step {number + 1} of {STEPS}", flush=True)
    return _named(weights), _named(directions)


def _named(tree):
    return {
        f"{name}.{key}": np.asarray(x)
        for name, arrays in tree.items()
        for key, x in arrays.items()
    }


def main():
    if chosen.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    size = chosen.processes
    mesh = Mesh(np.array(jax.devices()), ("shards",))
    mapped = jax.jit(
        jax.shard_map(
            functools.partial(step, axis_name="shards"),
            mesh=mesh,
            in_specs=(EVERYWHERE, EVERYWHERE, DIVIDED, DIVIDED, DIVIDED),
            out_specs=EVERYWHERE,
            check_vma=False,
        )
    )
    by_device = jax.pmap(
        functools.partial(step, axis_name="shards"),
        axis_name="shards",
        in_axes=(None, None, 0, 0, 0),
    )

    def pmapped(weights, state, *rows):
        shards = [x.reshape(size, BATCH, *x.shape[1:]) for x in rows]
        # Arrays of NumPy, so that every step has the same kind and is compiled once.
        results = by_device(*jax.device_get((weights, state)), *shards)
        # The same on all devices.
        return jax.tree.map(lambda x: np.asarray(x)[0], results)

    # Arrays that are placed as results are, for which a program is not compiled again.
    first = Mesh(np.array(jax.devices()[:1]), ("shards",))
    alone = functools.cache(lambda: train(jax.jit(step), size, chosen.dtype, first))
    ways = {
        "shard_map": lambda: train(mapped, size, chosen.dtype, mesh),
        "pmap": lambda: train(pmapped, size, chosen.dtype),
        "jit with shardings": lambda: train(jax.jit(step), size, chosen.dtype, mesh),
    }
    for name, run in ways.items():
        print(f"{name}, and one device:", flush=True)
        compared(run, alone, rank=0, size=size, dtype=chosen.dtype)
    return 0


if __name__ == "__main__":
    sys.exit(main())
