"""A step of K-FAC on two devices of one process; prints directions of each as JSON.

Run by `test_jax_devices.py`, since JAX counts its devices once, at start.
"""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

import kfac_core_shims.jax as shim


def main() -> None:
    """Read arrays from standard input, and take the step in both ways."""
    given = {k: np.asarray(v) for k, v in json.load(sys.stdin).items()}
    damping = float(given.pop("damping"))
    x, y, mask = (jnp.asarray(given.pop(name)) for name in ("x", "y", "mask"))
    params = {name: jnp.asarray(value) for name, value in given.items()}

    def function(params, x):
        h = jnp.tanh(x @ params["W"] + params["b"])
        return h.sum(axis=1) @ params["V"]

    # Each device has one half, and the network is that of a half.
    network = shim.Network(function, params, x[:2])
    options = {
        "reduction": "sum",
        "damping": damping,
        "damping_rule": "exact",
        "kl_clip": None,
    }
    kfac = shim.KFAC(network, axis_name="i", **options)

    def step(params, state, x, y, mask, kfac=kfac):
        z, pull = network.vjp(params, x, mask=mask)
        cotangent = jax.nn.softmax(z) - jax.nn.one_hot(y, z.shape[-1])
        gradients, captured = pull(cotangent, reduction="sum")
        gradients = jax.tree.map(lambda g: g / len(x), gradients)
        direction, state = kfac.update(gradients, state, captured=captured)
        return direction, state.is_good()

    state = kfac.init(params)
    halves = [leaf.reshape(2, 2, *leaf.shape[1:]) for leaf in (x, y, mask)]
    mapped = jax.pmap(step, axis_name="i", in_axes=(None, None, 0, 0, 0))
    found = {"pmap": mapped(params, state, *halves)}

    P = jax.sharding.PartitionSpec
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))

    def local(*arguments):
        return jax.tree.map(lambda leaf: leaf[None], step(*arguments))

    specs = P(), P(), P("i"), P("i"), P("i")
    sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("i"))
    found["shard_map"] = jax.jit(sharded)(params, state, x, y, mask)

    # Axes of this mesh are explicit, and arrays of one program have their shardings.
    whole, alone = jax.make_mesh((2,), ("d",)), shim.KFAC(network, **options)
    with jax.set_mesh(whole):
        over = jax.sharding.NamedSharding(whole, P("d"))
        batch = [jax.device_put(leaf, over) for leaf in (x, y, mask)]
        one = jax.jit(lambda *given: step(*given, kfac=alone))(params, state, *batch)
    found["explicit"] = jax.tree.map(lambda leaf: np.stack([np.asarray(leaf)] * 2), one)
    print(json.dumps(jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), found)))


if __name__ == "__main__":
    main()
