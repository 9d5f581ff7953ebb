"""``kfac-core demo``: this library's optimizers beside Adam, for the same CPU seconds.

Two problems: a deep autoencoder learns scikit-learn's images of digits, and a network
solves Poisson's equation on the unit square.  On PyTorch, the default where it is
installed, ``KFAC`` and ``GaussNewton`` train them; on NumPy ``KFACRegressor`` trains the
autoencoder.  Every run has one thread and the same CPU time, evaluations aside.  Adam has
the best of three learning rates; rates fall to zero as a cosine where the framework lets
them.  Curves are medians of three seeds, bands all three.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import kfac_core as kc

__all__ = ["EXAMPLES", "EXIT_CODES", "SUMMARY", "add_arguments", "run"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Trainer: TypeAlias = tuple[Callable[[float], None], Callable[[], float]]
"""A function that trains at some share of the run, and one that returns the loss."""

SUMMARY = "train with this library's optimizers and with Adam, for equal CPU time"
EXAMPLES = (
    "kfac-core demo --quick",
    "KFAC_CORE_BACKEND=numpy kfac-core demo --json > demo.json",
)
EXIT_CODES = {
    0: "all methods ran",
    2: "a package is missing, or the backend cannot be used",
}

WIDTHS = (64, 256, 128, 32, 16, 32, 128, 256, 64)
BATCH_SIZE = 375
RATES = (0.001, 0.003, 0.01)
"""Learning rates of Adam."""

SEEDS = 3

BACKENDS = "numpy", "torch"
# Okabe and Ito's colors, which people with any color vision can tell apart.
COLORS = "#009E73", "#E69F00"


@dataclasses.dataclass
class Run:
    """Losses of one run, by CPU seconds."""

    problem: str
    method: str
    learning_rate: float | None
    seed: int
    seconds: list[float]
    losses: list[float]


def add_arguments(parser: argparse.ArgumentParser, /) -> None:
    """Add the options of the demonstration to a parser."""
    parser.add_argument(
        "--seconds", type=float, help="CPU time of a run (default 4, or 1 with --quick)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one seed and one learning rate of Adam"
    )
    parser.add_argument("--seed", type=int, default=0, help="the first of the seeds")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("."),
        metavar="DIR",
        help="folder of the picture",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace, /) -> int:
    """Run the demonstration, and return its exit code."""
    name = "torch" if importlib.util.find_spec("torch") else "numpy"
    if os.environ.get("KFAC_CORE_BACKEND"):
        name = kc.array.selected_backend().name
    if name not in BACKENDS:
        return _refuse(
            f"runs on {', '.join(BACKENDS)}, and KFAC_CORE_BACKEND chose {name}"
        )
    for module in ("sklearn", "matplotlib"):
        if importlib.util.find_spec(module) is None:
            hint = "pip install 'kfac-core[demo]' (in a checkout: '.[demo]')"
            return _refuse(f"needs {module}: {hint}")
    args.output.mkdir(parents=True, exist_ok=True)
    # NumPy and SciPy have threads that wait in a busy loop; equal time needs one each.
    limits = importlib.import_module("threadpoolctl").threadpool_limits
    seconds = args.seconds or (1.0 if args.quick else 4.0)
    seeds = range(args.seed, args.seed + (1 if args.quick else SEEDS))
    rates = RATES[1:2] if args.quick else RATES
    runs: list[Run] = []
    with limits(1):
        for problem, (method, start) in _problems(name).items():
            train = functools.partial(_trained, problem, start, seconds)
            runs += [train(method, None, seed) for seed in seeds]
            # The rate of the other seeds is the best of the first one.
            searched = [train("Adam", rate, seeds[0]) for rate in rates]
            best = min(searched, key=lambda run: run.losses[-1])
            adams = [best]
            adams += [train("Adam", best.learning_rate, seed) for seed in seeds[1:]]
            runs += adams
            if not args.json:
                print(_verdict(runs, problem, method, seconds), flush=True)
    picture = args.output / "kfac_demo.png"
    _draw(runs, picture)
    if args.json:
        records = list(map(dataclasses.asdict, runs))
        print(json.dumps({"backend": name, "runs": records}, indent=2))
    else:
        print(f"Picture: {picture}")
    return 0


def _refuse(message: str) -> int:
    print(f"kfac-core demo: {message}", file=sys.stderr)
    return 2


def _problems(backend: str) -> dict[str, tuple[str, Callable[..., Trainer]]]:
    """Return the method and the function that starts a run, for each problem."""
    if backend == "torch":
        return {
            "autoencoder of digits": ("KFAC", _autoencoder_on_torch),
            "Poisson's equation": ("GaussNewton", _poisson_on_torch),
        }
    return {"autoencoder of digits": ("KFACRegressor", _autoencoder_on_numpy)}


def _trained(
    problem: str,
    start: Callable[..., Trainer],
    seconds: float,
    method: str,
    rate: float | None,
    seed: int,
) -> Run:
    """Train for some CPU seconds: Adam with a rate, the other method with None."""
    train, loss = start(rate, seed)
    spent = 0.0
    times: list[float] = []
    losses: list[float] = []
    while spent < seconds:
        begin = time.process_time()
        train(spent / seconds)
        spent += time.process_time() - begin
        # Losses at most 40 times: where steps are short they take longer than these.
        if not times or spent - times[-1] > seconds / 40 or spent >= seconds:
            times.append(spent)
            losses.append(loss())
    return Run(problem, method, rate, seed, times, losses)


def _images() -> Array:
    from sklearn.datasets import load_digits

    images: Array = load_digits().data.astype(np.float32) / 16.0
    return np.random.default_rng(0).permutation(images)[: 4 * BATCH_SIZE]


def _cosine(optimizer: Any, rate: float, share: float) -> None:
    """Set the rate of an optimizer of PyTorch."""
    for group in optimizer.param_groups:
        group["lr"] = 0.5 * rate * (1.0 + math.cos(math.pi * min(share, 1.0)))


def _autoencoder_on_numpy(rate: float | None, seed: int) -> Trainer:
    from sklearn.neural_network import MLPRegressor

    from kfac_core_shims.sklearn import KFACRegressor

    options: dict[str, Any] = {"hidden_layer_sizes": WIDTHS[1:-1], "activation": "tanh"}
    options |= {"batch_size": BATCH_SIZE, "random_state": np.random.RandomState(seed)}
    images = _images()
    if rate is None:
        model = KFACRegressor(fisher="gradients", **options)
    else:
        model = MLPRegressor(learning_rate_init=rate, **options)

    def loss() -> float:
        return float(np.mean((model.predict(images) - images) ** 2))

    return lambda share: model.partial_fit(images, images), loss


def _dense_on_torch(*widths: int) -> Any:
    import torch

    layers = [(torch.nn.Linear(n, m), torch.nn.Tanh()) for n, m in pairwise(widths)]
    return torch.nn.Sequential(*[module for pair in layers for module in pair][:-1])


def _autoencoder_on_torch(rate: float | None, seed: int) -> Trainer:
    import torch

    from kfac_core_shims.torch import KFAC

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model, error = _dense_on_torch(*WIDTHS), torch.nn.MSELoss()
    images = torch.from_numpy(_images())
    kfac = None
    if rate is None:
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        kfac = KFAC(model, likelihood=error, lr=optimizer)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)

    def train(share: float) -> None:
        _cosine(optimizer, rate or 0.1, share)
        for rows in torch.randperm(len(images)).split(BATCH_SIZE):
            optimizer.zero_grad()
            error(model(images[rows]), images[rows]).backward()
            if kfac is not None:
                kfac.step()
            optimizer.step()

    def loss() -> float:
        with torch.no_grad():
            return float(error(model(images), images))

    return train, loss


def _poisson_on_torch(rate: float | None, seed: int) -> Trainer:
    import torch

    from kfac_core_shims.torch import GaussNewton

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = _dense_on_torch(2, 32, 32, 1).double()
    inside = torch.rand(300, 2, dtype=torch.float64, requires_grad=True)
    edge = torch.rand(80, 2, dtype=torch.float64)
    edge[torch.arange(80), torch.arange(80) % 2] = (torch.arange(80) // 2 % 2).double()
    wanted = torch.sin(math.pi * inside.detach()).prod(1)

    def residuals() -> list[Any]:
        [first] = torch.autograd.grad(model(inside).sum(), inside, create_graph=True)
        second = [
            torch.autograd.grad(first[:, i].sum(), inside, create_graph=True)[0][:, i]
            for i in range(2)
        ]
        return [sum(second) / (2 * math.pi**2) + wanted, model(edge)[:, 0]]

    def half_squares() -> Any:
        return sum(0.5 * r.square().mean() for r in residuals())

    if rate is None:
        gauss_newton = GaussNewton(model)
        return lambda share: gauss_newton.step(residuals), lambda: half_squares().item()
    adam = torch.optim.Adam(model.parameters(), lr=rate)

    def train(share: float) -> None:
        _cosine(adam, rate, share)
        adam.zero_grad()
        half_squares().backward()
        adam.step()

    return train, lambda: half_squares().item()


def _verdict(runs: list[Run], problem: str, method: str, seconds: float) -> str:
    """Compare the medians after equal CPU seconds, whoever is lower."""
    parts, medians = [], []
    for name in (method, "Adam"):
        group = [r for r in runs if (r.problem, r.method) == (problem, name)]
        finals = [r.losses[-1] for r in group]
        medians.append(statistics.median(finals))
        rate = group[0].learning_rate
        of_rate = "" if rate is None else f" (learning rate {rate:g})"
        spread = f"{min(finals):.2g} to {max(finals):.2g}"
        parts.append(f"{name}{of_rate} {medians[-1]:.2g}, seeds {spread}")
    ours, adam = medians
    lower, ratio = (method, adam / ours) if ours < adam else ("Adam", ours / adam)
    return (
        f"{problem}, training loss after {seconds:g} CPU seconds: {'; '.join(parts)}. "
        f"{lower} is lower, {ratio:.3g} times."
    )


def _draw(runs: list[Run], path: Path) -> None:
    """Draw the training losses against CPU seconds, a panel for each problem."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    problems = list(dict.fromkeys(run.problem for run in runs))
    # Small, so that its letters stay readable on a telephone.
    size = 3.3 * len(problems), 3.0
    figure: Any = Figure(figsize=size, dpi=180, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(problems), squeeze=False)[0]
    for axes, problem in zip(panels, problems, strict=True):
        of_problem = [run for run in runs if run.problem == problem]
        methods = dict.fromkeys(run.method for run in of_problem)
        for color, method in zip(COLORS, methods, strict=True):
            group = [run for run in of_problem if run.method == method]
            end = min(run.seconds[-1] for run in group)
            grid = np.linspace(max(run.seconds[0] for run in group), end, 60)
            curves = np.array(
                [np.interp(grid, r.seconds, np.log10(r.losses)) for r in group]
            )
            rate = group[0].learning_rate
            label = method if rate is None else f"{method}, rate {rate:g}"
            axes.semilogy(grid, 10 ** np.median(curves, 0), color=color, label=label)
            low, high = 10 ** curves.min(0), 10 ** curves.max(0)
            axes.fill_between(grid, low, high, color=color, alpha=0.25, linewidth=0)
        axes.set(title=problem, xlabel="CPU seconds", ylabel="training loss")
        axes.legend(frameon=False)
    figure.savefig(path)
