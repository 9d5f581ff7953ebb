"""Steps of `GaussNewton` on plain derivatives, beside jets written by hand.

``python -m benchmarks.jets`` takes the residuals of Poisson's equation on 900 points, with
a network of two hidden layers of 32 units: with derivatives by ``autograd.grad`` or
``jax.hessian``, and as jets, whose layers see values, slopes and the Laplacian as
positions of one batch.  It prints the relative difference between the first directions,
and the CPU seconds of a step over that with jets.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from jax import numpy as jnp  # noqa: E402
from torch import nn  # noqa: E402

from kfac_core_shims import jax as on_jax  # noqa: E402
from kfac_core_shims import torch as on_torch  # noqa: E402

__all__ = ["main"]

WIDTHS = 2, 32, 32, 1
OPTIONS: dict[str, Any] = {"damping": 1e-4, "momentum": 0.0}
REPEATS = 15

Weights = list[np.ndarray[Any, Any]]
"""Of each layer, the bias as the last row."""


def laplacian(xp: Any, layers: list[Callable[[Any], Any]], x: Any, eye: Any) -> Any:
    """Return the Laplacian by Taylor coefficients, plus 1."""
    N, d = x.shape
    slopes = xp.broadcast_to(eye, (N, d, d))
    jet = xp.concatenate([x[:, None], slopes, xp.zeros_like(x[:, None])], 1)
    # The bias counts in the value alone.
    first = [xp.ones_like(jet[:, :1, :1]), xp.zeros_like(jet[:, 1:, :1])]
    one = xp.concatenate(first, 1)
    for i, layer in enumerate(layers):
        if i > 0:
            value = xp.tanh(jet[:, :1])
            slope, inner = 1.0 - value * value, jet[:, 1:-1]
            bend = -2.0 * value * (inner * inner).sum(1)[:, None]
            parts = [value, slope * inner, slope * (jet[:, -1:] + bend)]
            jet = xp.concatenate(parts, 1)
        jet = layer(xp.concatenate([jet, one], 2))
    return jet[:, -1, 0] + 1.0


class Run:
    """Steps on one kind of residuals: the first direction, and seconds of later steps."""

    def __init__(self, step: Callable[[], Any], numbers: Callable[[], Any]) -> None:
        before = numbers()
        self.step = step
        step()
        self.direction = before - numbers()

    def seconds(self) -> float:
        start = time.process_time()
        self.step()
        return time.process_time() - start


def torch_runs(weights: Weights, points: Any) -> tuple[Run, Run]:
    """Return runs of PyTorch, plain and with jets."""
    plain, jets = nn.ModuleList(), nn.ModuleList()
    for weight in weights:
        n, m = weight.shape
        plain.append(nn.Linear(n - 1, m))
        jets.append(nn.Linear(n, m, bias=False))
        with torch.no_grad():
            both = torch.from_numpy(weight.T)
            plain[-1].weight.copy_(both[:, :-1])
            plain[-1].bias.copy_(both[:, -1])
            jets[-1].weight.copy_(both)
    x = torch.from_numpy(points).requires_grad_()

    def net() -> Any:
        h = x
        for i, layer in enumerate(plain):
            h = layer(torch.tanh(h) if i else h)
        return h

    def by_autograd() -> Any:
        (slope,) = torch.autograd.grad(net().sum(), x, create_graph=True)
        second = [
            torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i]
            for i in (0, 1)
        ]
        return second[0] + second[1] + 1.0

    def by_jets() -> Any:
        return laplacian(torch, list(jets), x.detach(), torch.eye(2))

    def numbers(layers: Any) -> Any:
        parts = []
        for layer in layers:
            both = [layer.weight]
            if layer.bias is not None:
                both.append(layer.bias[:, None])
            parts.append(torch.cat(both, 1).detach().mT.flatten())
        return torch.cat(parts).numpy()

    def run(layers: Any, residuals: Callable[[], Any]) -> Run:
        optimizer = on_torch.GaussNewton(layers, lr=1.0, **OPTIONS)
        return Run(lambda: optimizer.step(residuals), lambda: numbers(layers))

    return run(plain, by_autograd), run(jets, by_jets)


def jax_runs(weights: Weights, points: Any) -> tuple[Run, Run]:
    """Return runs of JAX, plain and with jets."""
    jets = [jnp.asarray(weight) for weight in weights]
    plain = [{"w": weight[:-1], "z": weight[-1]} for weight in jets]
    x = jnp.asarray(points)

    def net(params: Any, x: Any) -> Any:
        for i, layer in enumerate(params):
            x = (jnp.tanh(x) if i else x) @ layer["w"] + layer["z"]
        return x[0]

    def by_hessian(params: Any, x: Any) -> Any:
        second = jax.vmap(jax.hessian(net, 1), (None, 0))(params, x)
        return jnp.trace(second, axis1=1, axis2=2) + 1.0

    def by_jets(params: Any, x: Any) -> Any:
        layers = [lambda h, weight=weight: h @ weight for weight in params]
        return laplacian(jnp, layers, x, jnp.eye(2))

    def run(params: Any, residuals: Callable[..., Any]) -> Run:
        optimizer = on_jax.GaussNewton(residuals, learning_rate=1.0, **OPTIONS)
        carried = [params, optimizer.init(params)]

        def step() -> None:
            carried[:] = optimizer.step(*carried, x)[:2]
            jax.block_until_ready(carried[0])

        def numbers() -> Any:
            return np.concatenate(
                [leaf.ravel() for leaf in jax.tree.leaves(carried[0])]
            )

        return Run(step, numbers)

    return run(plain, by_hessian), run(jets, by_jets)


def main() -> None:
    """Print a line for each framework."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(0)
    weights = [
        rng.uniform(-1.0, 1.0, size=(n + 1, m)) / n**0.5
        for n, m in itertools.pairwise(WIDTHS)
    ]
    points = rng.uniform(size=(900, 2))
    for name, runs in (("PyTorch", torch_runs), ("JAX", jax_runs)):
        plain, jets = runs(weights, points)
        difference = np.linalg.norm(plain.direction - jets.direction)
        difference /= np.linalg.norm(jets.direction)
        pairs = [(plain.seconds(), jets.seconds()) for _ in range(REPEATS)]
        least = [1e3 * min(times) for times in zip(*pairs, strict=True)]
        ratio = statistics.median(first / second for first, second in pairs)
        print(
            f"{name}: directions differ by {difference:.0e}; {least[0]:.1f} ms over "
            f"{least[1]:.1f} ms, median of ratios {ratio:.2f}"
        )


if __name__ == "__main__":
    main()
