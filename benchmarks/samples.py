"""The price of a step of `GaussNewton`, over that of its flops by plain BLAS and LAPACK.

``python -m benchmarks.samples`` prints, for Poisson's equation on the unit square and for
batches of a regression, CPU seconds of a step of fixed length, and of what no way of taking
it avoids: a forward and a backward pass, the products of all formed derivatives (SYRK) or
of the layers' Gram matrices, whichever is less, and a Cholesky factorization (POTRF).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.linalg import blas, lapack
from torch import nn

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


def poisson() -> tuple[Any, Callable[[], Any], int, int]:
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

    return net, residuals, 1140, sum(p.numel() for p in net.parameters())


def regression() -> tuple[Any, Callable[[], Any], int, int]:
    """Return a network of 64 units and a batch of 256 rows; Grams have 258 columns."""
    net = network(10, 64, 64, 1)
    x, y = torch.randn(256, 10), torch.randn(256, 1)
    return net, lambda: net(x) - y, 256, 11 + 64 + 65 + 64 + 65 + 1


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
    D = np.asfortranarray(np.random.default_rng(0).normal(size=(R, columns)))
    A = blas.dsyrk(1.0, D, lower=1) + R * np.eye(R)
    parameters = list(net.parameters())
    actions: dict[str, Callable[[], Any]] = {
        "step": lambda: optimizer.step(residuals),
        "passes": lambda: passes(residuals, parameters),
        "syrk": lambda: blas.dsyrk(1.0, D, lower=1),
        "potrf": lambda: lapack.dpotrf(A, lower=1),
    }
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(REPEATS):
        for name, action in actions.items():
            times[name].append(seconds(action))
    best = {name: 1e3 * min(found) for name, found in times.items()}
    floor = best["passes"] + best["syrk"] + best["potrf"]
    parts = ", ".join(f"{name} {value:.2f}" for name, value in best.items())
    return f"{make.__name__}: {parts} ms; step / floor {best['step'] / floor:.2f}"


def main() -> None:
    """Print a line for each problem."""
    torch.set_num_threads(1)
    for make in (poisson, regression):
        print(line(make))


if __name__ == "__main__":
    main()
