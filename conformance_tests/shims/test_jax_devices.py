"""Two devices of JAX, in a process of its own, against the dense matrix of all rows."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from ..builders.programs import run_python

pytest.importorskip("jax")

PROGRAM = Path(__file__).with_name("jax_devices_program.py")
LAMBDA = 0.1


def test_two_devices_take_the_step_of_one(rng):
    """Each way to map, with masks that leave the devices unequal numbers of rows."""
    N, T, D, H, C = 4, 3, 2, 3, 2
    shapes = {"W": (D, H), "b": (H,), "V": (H, C)}
    params = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    x = rng.normal(size=(N, T, D))
    y = np.array([0, 1, 1, 0])
    mask = np.arange(T) < np.array([1, 2, 3, 3])[:, None]
    x = x * mask[..., None]
    given = params | {"x": x, "y": y, "mask": mask, "damping": LAMBDA}

    environment = os.environ | {
        "JAX_ENABLE_X64": "1",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2 "
        "--xla_backend_optimization_level=0",
    }
    done = run_python(
        PROGRAM,
        input=json.dumps(given, default=lambda array: array.tolist()),
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)

    h = np.tanh(x @ params["W"] + params["b"])
    p = np.exp(h.sum(1) @ params["V"])
    e = p / p.sum(1, keepdims=True) - np.eye(C)[y]
    g = (e @ params["V"].T)[:, None] * (1 - h**2)
    gradient = {
        "W": np.einsum("ntd,nth->dh", x, g) / N,
        "b": g.sum((0, 1)) / N,
        "V": h.sum(1).T @ e / N,
    }
    rows = np.concatenate([x, np.ones((N, T, 1))], axis=2)[mask]
    R, g = mask.sum(), g[mask]
    # Rows that count share a weight: R/N of them an example.
    expected = {
        "V": solved(np.kron(*moments(h.sum(1), e)), gradient["V"]),
        "Wb": solved(
            R / N * np.kron(rows.T @ rows / R, g.T @ g / R),
            np.concatenate([gradient["W"], gradient["b"][None]]),
        ),
    }
    assert set(found) == {"pmap", "shard_map", "explicit"}
    for way, (direction, good) in found.items():
        assert all(good), way
        for device in range(2):
            one = {k: np.asarray(v)[device] for k, v in direction.items()}
            both = np.concatenate([one["W"], one["b"][None]])
            np.testing.assert_allclose(both, expected["Wb"], rtol=1e-8, err_msg=way)
            np.testing.assert_allclose(one["V"], expected["V"], rtol=1e-8, err_msg=way)


def moments(x, g):
    """Return the two second moments of rows."""
    return x.T @ x / len(x), g.T @ g / len(x)


def solved(F, V):
    """Return ``(F + LAMBDA I)^-1`` times a matrix, row-major."""
    return np.linalg.solve(F + LAMBDA * np.eye(V.size), V.ravel()).reshape(V.shape)
