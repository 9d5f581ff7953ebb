"""``kfac-core demo``: K-FAC beside Adam on digits, for the same CPU seconds.

A deep autoencoder learns scikit-learn's images of digits by the integration of one
framework: ``KFACRegressor`` beside ``MLPRegressor`` on NumPy, ``KFACOptimizer`` beside
``torch.optim.Adam`` on PyTorch, ``kfac_optimizer`` beside ``optax.adam`` on JAX.  Every run
has one thread and the same CPU time, epochs and not evaluations; Adam is shown at each of
its learning rates; K-FAC has none, and its defaults (with drawn labels on NumPy).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import kfac_core as kc

__all__ = ["EXAMPLES", "EXIT_CODES", "SUMMARY", "add_arguments", "run"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

SUMMARY = "train a deep autoencoder with K-FAC and with Adam, for equal CPU time"
EXAMPLES = (
    "kfac-core demo --quick",
    "KFAC_CORE_BACKEND=torch kfac-core demo --json > demo.json",
)
EXIT_CODES = {
    0: "both methods were run",
    2: "a package is missing, or the backend cannot be used",
}

WIDTHS = (64, 256, 128, 32, 16, 32, 128, 256, 64)
BATCH_SIZE, N_TEST = 375, 297
RATES = (0.001, 0.002, 0.004)
"""Learning rates of Adam."""

# What is imported, and the extra that it is in, by backend.
NEEDS = {
    "numpy": {},
    "torch": {"torch": "torch"},
    "jax": {"jax": "jax", "optax": "flax"},
}
# Okabe and Ito's colors, which people with any color vision can tell apart.
COLORS = {"Adam": "#E69F00", "K-FAC": "#009E73"}


@dataclasses.dataclass
class Run:
    """Squared errors of the training images, summed over pixels, epoch by epoch."""

    method: str
    learning_rate: float | None
    seconds: list[float]
    errors: list[float]
    test_error: float

    @property
    def name(self) -> str:
        """The method, and its learning rate."""
        rate = self.learning_rate
        return self.method if rate is None else f"{self.method} ({rate:g})"

    def reached(self, error: float) -> float | None:
        """Return after how many seconds the error was this low, or None."""
        pairs = zip(self.seconds, self.errors, strict=True)
        return next((seconds for seconds, e in pairs if e <= error), None)


def add_arguments(parser: argparse.ArgumentParser, /) -> None:
    """Add the options of the demonstration to a parser."""
    parser.add_argument(
        "--seconds",
        type=float,
        help="CPU time of a run (default 10, or 2 with --quick)",
    )
    parser.add_argument("--quick", action="store_true", help="shorter runs")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers")
    parser.add_argument(
        "--output", type=Path, default=Path("."), metavar="DIR", help="of the picture"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace, /) -> int:
    """Run the demonstration, and return its exit code."""
    backend = kc.array.selected_backend()
    framework = NEEDS.get(backend.name)
    if framework is None:
        known = ", ".join(NEEDS)
        return _refuse(f"runs on {known}, and KFAC_CORE_BACKEND chose {backend.spec}")
    for module, extra in {"sklearn": "demo", "matplotlib": "demo", **framework}.items():
        if importlib.util.find_spec(module) is None:
            hint = f"pip install 'kfac-core[{extra}]' (in a checkout: '.[{extra}]')"
            return _refuse(f"needs {module}: {hint}")
    args.output.mkdir(parents=True, exist_ok=True)
    from sklearn.datasets import load_digits

    # NumPy and SciPy have threads that wait in a busy loop; equal time needs one each.
    limits = importlib.import_module("threadpoolctl").threadpool_limits
    images = load_digits().data.astype(np.float32) / 16.0
    images = np.random.default_rng(args.seed).permutation(images)
    train, test = images[N_TEST:], images[:N_TEST]
    seconds = args.seconds or (2.0 if args.quick else 10.0)
    start = {"numpy": _on_numpy, "torch": _on_torch, "jax": _on_jax}[backend.name]
    runs = []
    with limits(1):
        for rate in (*RATES[: 1 if args.quick else None], None):
            runs.append(_trained(start, rate, train, test, seconds, args.seed))
            if not args.json:
                last = runs[-1]
                print(
                    f"{last.name}: {len(last.errors)} epochs in {last.seconds[-1]:.1f} CPU "
                    f"seconds, training error {last.errors[-1]:.3f}, test error "
                    f"{last.test_error:.3f}",
                    flush=True,
                )
    picture = args.output / "kfac_demo.png"
    _draw(runs, picture)
    if args.json:
        records = list(map(dataclasses.asdict, runs))
        print(json.dumps({"backend": backend.spec, "runs": records}, indent=2))
    else:
        print(f"{_verdict(runs)}\nPicture: {picture}")
    return 0


def _refuse(message: str) -> int:
    print(f"kfac-core demo: {message}", file=sys.stderr)
    return 2


def _trained(
    start: Callable[..., tuple[Callable[[], None], Callable[[Array], Array]]],
    rate: float | None,
    train: Array,
    test: Array,
    seconds: float,
    seed: int,
) -> Run:
    """Train for so many CPU seconds; a rate is Adam's, None is K-FAC."""
    epoch, reconstruct = start(rate, train, seed)

    def error(images: Array) -> float:
        return float(np.sum((reconstruct(images) - images) ** 2) / len(images))

    spent, times, errors = 0.0, [], []
    while spent < seconds:
        begin = time.process_time()
        epoch()
        spent += time.process_time() - begin
        times.append(spent)
        errors.append(error(train))
    method = "K-FAC" if rate is None else "Adam"
    return Run(method, rate, times, errors, error(test))


def _batches(train: Array, seed: int) -> Iterator[list[Array]]:
    """Yield the batches of each epoch."""
    rng = np.random.default_rng(seed)
    while True:
        yield np.split(rng.permutation(train), len(train) // BATCH_SIZE)


def _on_numpy(rate: float | None, train: Array, seed: int) -> Any:
    from sklearn.neural_network import MLPRegressor

    from kfac_core_shims.sklearn import KFACRegressor

    options: dict[str, Any] = {"hidden_layer_sizes": WIDTHS[1:-1], "activation": "tanh"}
    options |= {"batch_size": BATCH_SIZE, "random_state": np.random.RandomState(seed)}
    if rate is None:
        model = KFACRegressor(fisher="gradients", **options)
    else:
        model = MLPRegressor(learning_rate_init=rate, **options)
    return lambda: model.partial_fit(train, train), model.predict


def _on_torch(rate: float | None, train: Array, seed: int) -> Any:
    import torch

    from kfac_core_shims.torch import KFACOptimizer

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    layers = [(torch.nn.Linear(n, m), torch.nn.Tanh()) for n, m in pairwise(WIDTHS)]
    model = torch.nn.Sequential(*[module for pair in layers for module in pair][:-1])
    optimizer: Any = None
    if rate is None:
        optimizer = KFACOptimizer(model, likelihood="gaussian")
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    batches = _batches(train, seed)

    def loss(x: Any) -> Any:
        optimizer.zero_grad()
        value = 0.5 * (model(x) - x).square().sum(dim=1).mean()
        if value.requires_grad:
            value.backward()
        return value

    def epoch() -> None:
        for x in map(torch.from_numpy, next(batches)):
            optimizer.step(functools.partial(loss, x))

    def reconstruct(x: Array) -> Array:
        with torch.no_grad():
            return np.asarray(model(torch.from_numpy(x)))

    return epoch, reconstruct


def _on_jax(rate: float | None, train: Array, seed: int) -> Any:
    import jax
    import optax

    from kfac_core_shims.jax import kfac_optimizer

    def forward(params: Any, x: Any) -> Any:
        for i, layer in enumerate(params):
            x = (jax.numpy.tanh(x) if i else x) @ layer["weight"] + layer["bias"]
        return x

    def loss(params: Any, x: Any) -> Any:
        return 0.5 * ((forward(params, x) - x) ** 2).sum(axis=1).mean()

    rng = np.random.default_rng(seed)
    params = []
    for n, m in pairwise(WIDTHS):
        weight = rng.uniform(-1, 1, (n, m)) * (6 / (n + m)) ** 0.5
        params.append({"weight": weight.astype("f4"), "bias": np.zeros(m, "f4")})
    params = jax.tree.map(jax.numpy.asarray, params)
    batches = _batches(train, seed)
    if rate is None:
        kfac = kfac_optimizer(
            forward, params, train[:BATCH_SIZE], likelihood="gaussian"
        )
        state = kfac.init(params)
        step = kfac.step
    else:
        adam = optax.adam(rate)
        state = adam.init(params)

        def adam_step(params: Any, state: Any, x: Any, y: Any, key: Any) -> Any:
            changes, state = adam.update(jax.grad(loss)(params, x), state)
            return optax.apply_updates(params, changes), state, None

        step = jax.jit(adam_step)

    current, key = (params, state), jax.random.key(seed)
    # Compiled before the clock starts, on a copy, as a step donates its arguments.
    x = jax.numpy.asarray(train[:BATCH_SIZE])
    step(*jax.tree.map(jax.numpy.copy, current), x, x, key)

    def epoch() -> None:
        nonlocal current, key
        for x in map(jax.numpy.asarray, next(batches)):
            key, used = jax.random.split(key)
            *current, _ = step(*current, x, x, used)
        jax.block_until_ready(current)

    return epoch, lambda x: np.asarray(forward(current[0], x))


def _verdict(runs: list[Run]) -> str:
    """Compare K-FAC with the best Adam in CPU seconds, whoever was faster."""
    *adams, kfac = runs
    adam = min(adams, key=lambda run: min(run.errors))
    lowest = min(adam.errors)
    reached = kfac.reached(lowest)
    if reached is None:
        return f"K-FAC does not reach Adam's lowest training error, {lowest:.3f}."
    return (
        f"K-FAC reaches Adam's lowest training error, {lowest:.3f}, after {reached:.1f} "
        f"CPU seconds, and Adam after {adam.reached(lowest):.1f}."
    )


def _draw(runs: list[Run], path: Path) -> None:
    """Draw the training errors against CPU seconds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(7.0, 4.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for run in runs:
        axes.semilogy(run.seconds, run.errors, color=COLORS[run.method], label=run.name)
    axes.set(xlabel="CPU seconds", ylabel="squared error of a training image")
    axes.legend(frameon=False)
    figure.savefig(path)
