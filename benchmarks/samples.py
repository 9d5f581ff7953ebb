"""The price of a step of `GaussNewton`, over that of its flops by plain BLAS and LAPACK.

``--memory`` prints the peak of memory instead: of the arrays of the operator and of a
direction on NumPy, and of the process in a step on PyTorch and on JAX, less 1.2 times the
rows, over the ``R^2`` numbers of K.

``python -m benchmarks.samples`` prints, for Poisson's equation on the unit square and for
batches of a regression, CPU seconds of a step of fixed length, and of what no way of taking
it avoids: a forward and a backward pass, the product of all formed derivatives (SYRK) or
those of the layers' rows, whichever is less, and a Cholesky factorization (POTRF).
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.linalg import blas, lapack
from torch import nn

import kfac_core as kc
from benchmarks.memory import MEMORY_ENVIRONMENT, Resident
from kfac_core_shims.torch import GaussNewton

__all__ = ["main"]

REPEATS = 15


def network(*widths: int) -> Any:
    """Return a multilayer perceptron."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for n, m in itertools.pairwise(widths):
        layers += [nn.Linear(n, m), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def poisson() -> tuple[Any, Callable[[], Any], int, list[int]]:
    """Return a network of 32 units, 1,140 residuals, their number, and columns of J."""
    net = network(2, 32, 32, 1).double()
    inside = torch.rand(900, 2, dtype=torch.float64).requires_grad_()
    edge = torch.rand(240, 2, dtype=torch.float64)

    def residuals() -> Any:
        (slope,) = torch.autograd.grad(net(inside).sum(), inside, create_graph=True)
        second = [
            torch.autograd.grad(slope[:, i].sum(), inside, create_graph=True)[0][:, i]
            for i in (0, 1)
        ]
        return second[0] + second[1] + 1.0, 10 * net(edge)[:, 0]

    return net, residuals, 1140, [sum(p.numel() for p in net.parameters())]


def regression() -> tuple[Any, Callable[[], Any], int, list[int]]:
    """Return a network of 64 units, a batch of 256 rows, and the columns of x and g."""
    net = network(10, 64, 64, 1)
    x, y = torch.randn(256, 10), torch.randn(256, 1)
    return net, lambda: net(x) - y, 256, [11, 64, 65, 64, 65, 1]


def passes(residuals: Callable[[], Any], parameters: list[Any]) -> None:
    """Take a forward and a backward pass."""
    terms = residuals()
    terms = [terms] if isinstance(terms, torch.Tensor) else list(terms)
    torch.autograd.grad(sum(term.square().sum() for term in terms), parameters)


def seconds(action: Callable[[], Any]) -> float:
    start = time.process_time()
    action()
    return time.process_time() - start


def line(make: Callable[[], Any]) -> str:
    """Return the figures of a problem, taken in turns."""
    net, residuals, R, columns = make()
    optimizer = GaussNewton(net, lr=1e-3)
    rng = np.random.default_rng(0)
    rows = [np.asfortranarray(rng.normal(size=(R, count))) for count in columns]
    A = blas.dsyrk(1.0, rows[0], lower=1) + R * np.eye(R)
    parameters = list(net.parameters())
    actions: dict[str, Callable[[], Any]] = {
        "step": lambda: optimizer.step(residuals),
        "passes": lambda: passes(residuals, parameters),
        "syrk": lambda: [blas.dsyrk(1.0, x, lower=1) for x in rows],
        # SciPy's zeros above the diagonal take longer than the factorization.
        "potrf": lambda: lapack.dpotrf(A, lower=1, clean=0),
    }
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(REPEATS):
        for name, action in actions.items():
            times[name].append(seconds(action))
    best = {name: 1e3 * min(found) for name, found in times.items()}
    floor = best["passes"] + best["syrk"] + best["potrf"]
    parts = ", ".join(f"{name} {value:.2f}" for name, value in best.items())
    return f"{make.__name__}: {parts} ms; step / floor {best['step'] / floor:.2f}"


WIDTHS = 6, 64, 64, 1


def peak_of_arrays(R: int, positions: int) -> float:
    """Return what NumPy's arrays take beside rows, a fifth of them left out, over R^2."""
    rng = np.random.default_rng(0)
    layers, batches, rows = {}, {}, 0
    for n, m in itertools.pairwise(WIDTHS):
        name = f"{n} to {m}, {len(layers)}"
        layers[name] = kc.Dense(
            in_features=n, out_features=m, bias=False, weight_layout="io"
        )
        x, g = (rng.normal(size=(R, positions, width)) for width in (n, m))
        if positions == 1:
            x, g = x[:, 0], g[:, 0]
        batches[name] = kc.Batch(x, g)
        rows += x.nbytes + g.nbytes
    J, r = kc.samples.Jacobian.of(layers, batches), rng.normal(size=R)
    tracemalloc.start()
    kc.samples.sample_curvature(J, damping=1e-3).direction(r)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (peak - 0.2 * rows) / (8 * R * R)


def peak_of_step(R: int, step: Callable[..., Any], warm: int) -> float:
    """Return what a step takes of the process's memory, over R^2."""
    resident, rng = Resident(), np.random.default_rng(0)
    data = [rng.normal(size=(R, width)) for width in (WIDTHS[0], WIDTHS[-1])]
    for _ in range(2):  # What libraries load, compile and keep is not the step's.
        step(*(part[:warm] for part in data))
    before = resident.settled()
    resident.reset_peak()
    step(*data)
    rows = 8 * R * sum(n + 1 + m for n, m in itertools.pairwise(WIDTHS))
    return (resident.peak() - before - 1.2 * rows) / (8 * R * R)


def torch_step() -> Callable[..., Any]:
    """Return a step of `GaussNewton` on PyTorch, of inputs and targets."""
    net = network(*WIDTHS).double()
    optimizer = GaussNewton(net)

    def step(*data: Any) -> None:
        x, y = map(torch.from_numpy, data)
        optimizer.step(lambda: net(x) - y)

    return step


def jax_step() -> Callable[..., Any]:
    """Return a step of `GaussNewton` on JAX, of inputs and targets."""
    import jax  # Optional: the other figures do without.

    from kfac_core_shims.jax import GaussNewton as OnJax

    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(0)
    params = [rng.normal(size=shape) / 8 for shape in itertools.pairwise(WIDTHS)]

    def residuals(params: Any, x: Any, y: Any) -> Any:
        for i, weight in enumerate(params):
            x = (x if i == 0 else jax.numpy.tanh(x)) @ weight
        return x - y

    optimizer = OnJax(residuals)
    state = optimizer.init(params)

    def step(*data: Any) -> None:
        jax.block_until_ready(optimizer.step(params, state, *data))

    return step


def memory() -> None:
    """Print peaks of memory."""
    for R, positions in itertools.product((1000, 4000), (1, 6)):
        peak = peak_of_arrays(R, positions)
        print(f"NumPy, R = {R}, {positions} positions: {peak:.2f} R^2")
    for R in (1000, 4000):
        peak = peak_of_step(R, torch_step(), 200)
        print(f"PyTorch's process, R = {R}: {peak:.2f} R^2")
    for R in (1000, 4000):
        # A first call of JAX's compiles.
        peak = peak_of_step(R, jax_step(), R)
        print(f"JAX's process, R = {R}: {peak:.2f} R^2")


def main() -> None:
    """Print a line for each problem."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.samples")
    parser.add_argument("--memory", action="store_true")
    torch.set_num_threads(1)
    if not parser.parse_args().memory:
        for make in (poisson, regression):
            print(line(make))
    elif all(name in os.environ for name in MEMORY_ENVIRONMENT):
        memory()
    else:  # The allocator reads these when a process starts.
        environment = {**os.environ, **MEMORY_ENVIRONMENT}
        subprocess.run(
            [sys.executable, "-m", __spec__.name, "--memory"], env=environment
        )


if __name__ == "__main__":
    main()
