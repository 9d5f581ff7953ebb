"""``kfac-core demo``: this library's optimizers beside Adam, for the same CPU seconds.

Two problems: a deep autoencoder learns scikit-learn's images of digits, and a network
solves Poisson's equation on the unit square by the space of samples.  Every run has the
same CPU time, evaluations and compilation aside.  Adam has the best of three learning
rates; rates fall to zero as a cosine where the framework lets them.  Curves are medians of
three seeds, bands all three.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import kfac_core as kc

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Trainer: TypeAlias = tuple[Callable[[float], Any], Callable[[Any], Any]]
"""A function that trains at some share of the run, and one of its result to the loss."""
Run: TypeAlias = tuple[list[float], list[float]]
"""CPU seconds, and the losses after them."""

SUMMARY = "train with this library's optimizers and with Adam, for equal CPU time"
EXAMPLES = ("kfac-core demo --quick", "KFAC_CORE_BACKEND=torch kfac-core demo")
EXIT_CODES = {
    0: "all methods ran",
    2: "a package is missing, or the backend cannot be used",
}

WIDTHS = (64, 256, 128, 32, 16, 32, 128, 256, 64)
UNITS = 64
BATCH_SIZE = 375
RATES = (0.001, 0.003, 0.01)
"""Learning rates of Adam."""

SEEDS = 3

# Okabe and Ito's colors, which people with any color vision can tell apart.
COLORS = "#009E73", "#E69F00"


def _positive_seconds(text: str, /) -> float:
    """Return a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number < float("inf"):
        message = f"expected seconds > 0, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return number


def add_arguments(parser: argparse.ArgumentParser, /) -> None:
    """Add the options of the demonstration to a parser."""
    parser.add_argument(
        "--seconds",
        type=_positive_seconds,
        help="CPU time of a run (default 2, or 1 with --quick)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="one seed and one learning rate of Adam"
    )
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
    name = kc.array.selected_backend().name
    if name not in _PROBLEMS:
        return _refuse(
            f"runs on {', '.join(_PROBLEMS)}, and KFAC_CORE_BACKEND chose {name}"
        )
    needed = {"sklearn": "demo", "matplotlib": "demo"}
    if name == "jax":
        needed["optax"] = "flax"
    for module, extra in needed.items():
        if importlib.util.find_spec(module) is None:
            hint = f"pip install 'kfac-core[{extra}]' (in a checkout: '.[{extra}]')"
            return _refuse(f"needs {module}: {hint}")
    args.output.mkdir(parents=True, exist_ok=True)
    # NumPy and SciPy have threads that wait in a busy loop; equal time needs one each.
    limits = importlib.import_module("threadpoolctl").threadpool_limits
    seconds = args.seconds or (1.0 if args.quick else 2.0)
    seeds = range(1 if args.quick else SEEDS)
    curves: dict[str, dict[str, list[Run]]] = {}
    with limits(1):
        for problem, (method, start) in _PROBLEMS[name].items():
            train = functools.partial(_trained, start, seconds)
            runs = [train(None, seed) for seed in seeds]
            # The rate of the other seeds is the best of the first one.
            rates = RATES[1:2] if args.quick else RATES
            searched = {rate: train(rate, 0) for rate in rates}
            rate = min(rates, key=lambda rate: searched[rate][1][-1])
            adam = [searched[rate], *(train(rate, seed) for seed in seeds[1:])]
            curves[problem] = {method: runs, f"Adam, rate {rate:g}": adam}
            if not args.json:
                print(_verdict(problem, curves[problem], seconds), flush=True)
    picture = args.output / "kfac_demo.png"
    _draw(curves, picture)
    print(
        json.dumps({"backend": name, "curves": curves}, indent=2)
        if args.json
        else f"Picture: {picture}"
    )
    return 0


def _refuse(message: str) -> int:
    print(f"kfac-core demo: {message}", file=sys.stderr)
    return 2


def _trained(
    start: Callable[..., Trainer], seconds: float, rate: float | None, seed: int
) -> Run:
    """Train for some CPU seconds: Adam with a rate, the other method with None."""
    # Another run's first step loads and compiles what this one's clock leaves out.
    start(rate, seed)[0](0.0)
    train, loss = start(rate, seed)
    spent = 0.0
    times: list[float] = []
    losses: list[float] = []
    while spent < seconds:
        begin = time.process_time()
        trained = train(spent / seconds)
        spent += time.process_time() - begin
        # Losses at most 40 times: where steps are short they take longer than these.
        if not times or spent - times[-1] > seconds / 40 or spent >= seconds:
            times.append(spent)
            losses.append(float(loss(trained)))
    return times, losses


def _images() -> Array:
    from sklearn.datasets import load_digits

    images: Array = load_digits().data.astype(np.float32) / 16.0
    return np.random.default_rng(0).permutation(images)[: 4 * BATCH_SIZE]


def _points(seed: int) -> tuple[Array, Array]:
    """Return points inside of the unit square, and on its edge."""
    rng = np.random.default_rng(seed)
    inside, edge = rng.random((300, 2)), rng.random((80, 2))
    sides = np.arange(80)
    edge[sides, sides % 2] = sides // 2 % 2
    return inside, edge


def _cosine(rate: float, share: float) -> float:
    return 0.5 * rate * (1.0 + math.cos(math.pi * min(share, 1.0)))


# NumPy.


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

    def loss(_: Any) -> Any:
        return np.mean((model.predict(images) - images) ** 2)

    return lambda share: model.partial_fit(images, images), loss


def _poisson_on_numpy(rate: float | None, seed: int) -> Trainer:
    from sklearn.neural_network._stochastic_optimizers import AdamOptimizer

    from kfac_core_shims.numpy import GaussNewton

    inside, edge = _points(seed)
    x = np.concatenate([inside, edge])
    is_inside = (np.arange(len(x)) < len(inside))[:, None]
    force = is_inside[:, 0] * np.sin(math.pi * x).prod(1)
    rng = np.random.default_rng(seed)
    W, b = rng.uniform(-0.7, 0.7, (2, UNITS)), rng.uniform(-0.7, 0.7, UNITS)
    v = rng.uniform(-0.125, 0.125, (UNITS, 1))

    def features() -> Array:
        """Return what v multiplies: the units' Laplacians inside, the units on the edge."""
        h = np.tanh(x @ W + b)
        laplacian = -2 * h * (1 - h * h) * (W * W).sum(0) / (2 * math.pi**2)
        return np.where(is_inside, laplacian, h)

    def residuals() -> Any:
        return (features() @ v)[:, 0] + force

    def batches() -> dict[str, Any]:
        # W is used three times: for the units, and for their derivatives along each axis,
        # where the inputs are a unit vector and the bias adds nothing.
        h = np.tanh(x @ W + b)
        first, per = 1 - h * h, v[:, 0] / (2 * math.pi**2)
        third = first * (6 * h * h - 2) * (W * W).sum(0) * per
        uses = [kc.Batch(x, np.where(is_inside, third, first * v[:, 0]))]
        for axis in range(2):
            g = is_inside * -4 * h * first * W[axis] * per
            along, none = np.zeros_like(x) + np.eye(2)[axis], np.zeros(len(x), bool)
            uses.append(kc.Batch(along, g, bias=none))
        return {"hidden": uses, "out": kc.Batch(features(), np.ones((len(x), 1)))}

    def loss(_: Any) -> Any:
        return 0.5 * np.mean(residuals() ** 2)

    parameters = {"hidden": {"weight": W, "bias": b}, "out": {"weight": v}}
    gauss_newton = GaussNewton(parameters)
    if rate is None:
        return lambda share: gauss_newton.step(batches(), residuals), loss
    adam = AdamOptimizer([W, b, v], rate)

    def train(share: float) -> None:
        adam.learning_rate_init = _cosine(rate, share)
        J = kc.samples.Jacobian.of(gauss_newton.layers, batches())
        g = J.multiply_transposed(residuals() / len(x))
        hidden, out = g["hidden"], g["out"]
        adam.update_params([W, b, v], [hidden["weight"], hidden["bias"], out["weight"]])

    return train, loss


# PyTorch.


def _on_torch(
    optimizer: Any, rate: float, loss: Callable[..., Any], batches: Callable[[], Any]
) -> Callable[[float], None]:
    """Return what trains for the batches of an epoch, with a rate that falls."""

    def train(share: float) -> None:
        optimizer.param_groups[0]["lr"] = _cosine(rate, share)
        for batch in batches():
            optimizer.zero_grad()
            loss(batch).backward()
            optimizer.step()

    return train


def _dense_on_torch(seed: int, *widths: int) -> Any:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    layers = [(torch.nn.Linear(n, m), torch.nn.Tanh()) for n, m in pairwise(widths)]
    return torch.nn.Sequential(*[module for pair in layers for module in pair][:-1])


def _autoencoder_on_torch(rate: float | None, seed: int) -> Trainer:
    import torch

    from kfac_core_shims.torch import KFAC

    model, error = _dense_on_torch(seed, *WIDTHS), torch.nn.MSELoss()
    images = torch.from_numpy(_images())
    if rate is None:
        rate = 0.1
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        kfac = KFAC(model, likelihood=error, lr=optimizer)
        optimizer.register_step_pre_hook(lambda *_: kfac.step())
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)

    def loss(x: Any) -> Any:
        return error(model(x), x)

    def batches() -> Any:
        return images[torch.randperm(len(images))].split(BATCH_SIZE)

    return _on_torch(optimizer, rate, loss, batches), lambda _: loss(images).detach()


def _poisson_on_torch(rate: float | None, seed: int) -> Trainer:
    import torch

    from kfac_core_shims.torch import GaussNewton

    model = _dense_on_torch(seed, 2, UNITS, 1).double()
    inside, edge = map(torch.from_numpy, _points(seed))
    force = torch.sin(math.pi * inside).prod(1)
    inside.requires_grad_()

    def residuals() -> list[Any]:
        [first] = torch.autograd.grad(model(inside).sum(), inside, create_graph=True)
        second = [
            torch.autograd.grad(first[:, i].sum(), inside, create_graph=True)[0][:, i]
            for i in range(2)
        ]
        return [sum(second) / (2 * math.pi**2) + force, model(edge)[:, 0]]

    def loss(*_: Any) -> Any:
        return sum(0.5 * r.square().mean() for r in residuals())

    if rate is None:
        gauss_newton = GaussNewton(model)
        return lambda share: gauss_newton.step(residuals), lambda _: loss().detach()
    adam = torch.optim.Adam(model.parameters(), lr=rate)
    return _on_torch(adam, rate, loss, lambda: [None]), lambda _: loss().detach()


# JAX.  Functions at the top level, and a cache: all runs share one compiled program.


def _on_jax(
    params: Any,
    rate: float | None,
    optimizer: Any,
    loss: Callable[..., Any],
    batches: Callable[[], Any],
) -> Callable[[float], Any]:
    """Return what trains for the batches of an epoch, and returns the parameters."""
    import jax

    adam, adam_step = _adam_on_jax(loss)
    state = (optimizer if rate is None else adam).init(params)

    def train(share: float) -> Any:
        nonlocal params, state
        for batch in batches():
            if rate is None:
                params, state, _ = optimizer.step(params, state, *batch)
            else:
                falling = _cosine(rate, share)
                params, state = adam_step(params, state, falling, *batch)
        return jax.block_until_ready(params)

    return train


@functools.cache
def _adam_on_jax(loss: Callable[..., Any]) -> Any:
    import jax
    import optax

    adam = optax.scale_by_adam()

    def step(params: Any, state: Any, rate: float, *data: Any) -> Any:
        updates, state = adam.update(jax.grad(loss)(params, *data), state)
        return jax.tree.map(lambda p, u: p - rate * u, params, updates), state

    return adam, jax.jit(step)


@functools.cache
def _kfac_on_jax() -> Any:
    from kfac_core_shims.jax import KFACOptimizer

    params = _start_on_jax(0, "float32", *WIDTHS)
    x = _images()[:BATCH_SIZE]
    return KFACOptimizer(_dense_on_jax, params, x, likelihood="gaussian")


@functools.cache
def _gauss_newton_on_jax() -> Any:
    from kfac_core_shims.jax import GaussNewton

    return GaussNewton(_residuals_on_jax)


def _start_on_jax(seed: int, dtype: str, *widths: int) -> Any:
    import jax

    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(seed)
    shapes = list(pairwise(widths))
    weights = [rng.normal(size=(n, m)).astype(dtype) / n**0.5 for n, m in shapes]
    layers = [{"weight": W, "bias": np.zeros(W.shape[1], dtype)} for W in weights]
    return jax.tree.map(jax.numpy.asarray, layers)


def _dense_on_jax(params: Any, x: Any) -> Any:
    import jax

    *hidden, last = params
    for layer in hidden:
        x = jax.numpy.tanh(x @ layer["weight"] + layer["bias"])
    return x @ last["weight"] + last["bias"]


def _error_on_jax(params: Any, x: Any, y: Any, key: Any = None) -> Any:
    return ((_dense_on_jax(params, x) - y) ** 2).mean()


def _autoencoder_on_jax(rate: float | None, seed: int) -> Trainer:
    import jax

    images, rng = _images(), np.random.default_rng(seed)

    def batches() -> Any:
        for x in np.split(rng.permutation(images), len(images) // BATCH_SIZE):
            yield x, x, jax.random.key(int(rng.integers(2**31)))

    params = _start_on_jax(seed, "float32", *WIDTHS)
    train = _on_jax(params, rate, _kfac_on_jax(), _error_on_jax, batches)
    return train, lambda params: _error_on_jax(params, images, images)


def _residuals_on_jax(params: Any, inside: Any, edge: Any) -> list[Any]:
    import jax

    def laplacian(x: Any) -> Any:
        return jax.hessian(lambda x: _dense_on_jax(params, x)[0])(x).trace()

    force = jax.numpy.sin(math.pi * inside).prod(1)
    second = jax.vmap(laplacian)(inside)
    return [second / (2 * math.pi**2) + force, _dense_on_jax(params, edge)[:, 0]]


def _half_squares_on_jax(params: Any, *points: Any) -> Any:
    return sum(0.5 * (r**2).mean() for r in _residuals_on_jax(params, *points))


def _poisson_on_jax(rate: float | None, seed: int) -> Trainer:
    params, points = _start_on_jax(seed, "float64", 2, UNITS, 1), _points(seed)
    loss = _half_squares_on_jax
    train = _on_jax(params, rate, _gauss_newton_on_jax(), loss, lambda: [points])
    return train, lambda params: loss(params, *points)


_PROBLEMS: dict[str, dict[str, tuple[str, Callable[..., Trainer]]]] = {
    "numpy": {
        "autoencoder of digits": ("KFACRegressor", _autoencoder_on_numpy),
        "Poisson's equation": ("GaussNewton", _poisson_on_numpy),
    },
    "torch": {
        "autoencoder of digits": ("KFAC", _autoencoder_on_torch),
        "Poisson's equation": ("GaussNewton", _poisson_on_torch),
    },
    "jax": {
        "autoencoder of digits": ("KFACOptimizer", _autoencoder_on_jax),
        "Poisson's equation": ("GaussNewton", _poisson_on_jax),
    },
}
"""For each backend and problem the method, and the function that starts a run."""


def _verdict(problem: str, curves: dict[str, list[Run]], seconds: float) -> str:
    """Compare the medians after equal CPU seconds, whoever is lower."""
    finals = {name: [run[1][-1] for run in runs] for name, runs in curves.items()}
    medians = {name: statistics.median(losses) for name, losses in finals.items()}
    parts = [
        f"{name} {medians[name]:.2g}, seeds {min(losses):.2g} to {max(losses):.2g}"
        for name, losses in finals.items()
    ]
    lower, higher = sorted(medians, key=medians.__getitem__)
    return (
        f"{problem}, training loss after {seconds:g} CPU seconds: {'; '.join(parts)}. "
        f"{lower} is lower, {medians[higher] / medians[lower]:.3g} times."
    )


def _draw(curves: dict[str, dict[str, list[Run]]], path: Path) -> None:
    """Draw the training losses against CPU seconds, a panel for each problem."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Small, so that its letters stay readable on a telephone.
    size = 3.3 * len(curves), 3.0
    figure: Any = Figure(figsize=size, dpi=180, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(curves))
    for axes, (problem, methods) in zip(panels, curves.items(), strict=True):
        for color, (label, runs) in zip(COLORS, methods.items(), strict=True):
            end = min(times[-1] for times, _ in runs)
            grid = np.linspace(max(times[0] for times, _ in runs), end, 60)
            losses = np.array([np.interp(grid, t, np.log10(y)) for t, y in runs])
            axes.semilogy(grid, 10 ** np.median(losses, 0), color=color, label=label)
            low, high = 10 ** losses.min(0), 10 ** losses.max(0)
            axes.fill_between(grid, low, high, color=color, alpha=0.25, linewidth=0)
        axes.set(title=problem, xlabel="CPU seconds", ylabel="training loss")
        axes.legend(frameon=False)
    figure.savefig(path)
