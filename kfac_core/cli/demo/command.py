"""The command ``kfac-core demo``: its options, and one run for each learning rate."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import kfac_core as kc
from kfac_core.cli.demo.network import WIDTHS, Pass, Vector, initial_parameters
from kfac_core.cli.demo.optimizers import KFAC, Adam, NesterovSGD, Optimizer
from kfac_core.cli.demo.results import Images, Run, best, draw, print_results
from kfac_core.cli.options import add_json, not_negative, positive
from kfac_core.cli.screen import Progress, complain, print_json
from kfac_core.steps import linear_combination

__all__ = [
    "EXAMPLES",
    "EXIT_CODES",
    "SUMMARY",
    "add_arguments",
    "load_digits",
    "run",
    "train",
]

SUMMARY = "train a deep autoencoder with K-FAC, SGD and Adam"
EXAMPLES = (
    "kfac-core demo --quick",
    "KFAC_CORE_BACKEND=torch kfac-core demo --json > demo.json",
)
EXIT_CODES = {
    0: "all methods were run",
    2: "a package is missing, or the backend cannot be used",
}

STEPS, QUICK_STEPS = 300, 60
BATCH_SIZE = 375  # A quarter of the 1,500 training images.
N_TEST = 297
EVALUATE_EVERY = 5
# The same number for each method, a factor of two apart.  1 is the natural end of
# K-FAC's: the whole way to the minimum of the quadratic model.
LEARNING_RATES = {
    "SGD": (0.01, 0.02, 0.04, 0.08),
    "Adam": (0.002, 0.004, 0.008, 0.016),
    "K-FAC": (0.125, 0.25, 0.5, 1.0),
}
# What is imported, and the package that it is in.
REQUIREMENTS = {"sklearn": "scikit-learn", "rich": "rich", "matplotlib": "matplotlib"}


def add_arguments(parser: argparse.ArgumentParser, /) -> None:
    """Add the options of the demonstration to a parser."""
    parser.add_argument(
        "--steps",
        type=positive,
        help=f"steps of a run (default {STEPS}, or {QUICK_STEPS} with --quick)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer steps, and two learning rates a method instead of four",
    )
    parser.add_argument(
        "--seed",
        type=not_negative,
        default=0,
        help="decides everything that is random (default 0)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("."),
        metavar="DIR",
        help="folder of the picture (default: the current one)",
    )
    add_json(parser)


def run(args: argparse.Namespace, /) -> int:
    """Run the demonstration, and return its exit code."""
    missing = [
        package
        for module, package in REQUIREMENTS.items()
        if importlib.util.find_spec(module) is None
    ]
    if missing:
        names = ", ".join(missing)
        return complain(
            "demo",
            f"needs {names}: pip install 'kfac-core[demo]' "
            "(in a checkout: pip install '.[demo]')",
        )
    # A folder or a backend that cannot be used is an error now, not after minutes.
    args.output.mkdir(parents=True, exist_ok=True)
    backend = kc.array.selected_backend()
    kc.enable_float64()

    train_images, test_images = load_digits(args.seed)
    steps = args.steps or (QUICK_STEPS if args.quick else STEPS)
    if not args.json:
        widths = "-".join(map(str, WIDTHS))
        print(f"Autoencoder {widths}, {steps} steps on batches of {BATCH_SIZE} digits.")
        print(f"Backend {backend.spec} ({backend.reason}).", flush=True)
    runs: dict[str, list[Run]] = {method: [] for method in LEARNING_RATES}
    plan = [
        (method, rate)
        for method, rates in LEARNING_RATES.items()
        for rate in (rates[1::2] if args.quick else rates)
    ]
    # NumPy, SciPy and PyTorch each have threads that wait in a busy loop.  On two cores
    # steps that alternate between them are up to three times slower than on one.
    # scikit-learn depends on threadpoolctl, so it is there.
    limits = importlib.import_module("threadpoolctl").threadpool_limits
    with limits(1), Progress(steps * len(plan)) as progress:
        for method, rate in plan:
            name = f"{method}, learning rate {rate:g}"
            progress.begin(name)
            found = train(
                method,
                train_images,
                test_images,
                learning_rate=rate,
                steps=steps,
                seed=args.seed,
                advance=progress.advance,
            )
            runs[method].append(found)
            if not args.json:
                outcome = f"loss {found.losses[-1]:.2f} at step {found.steps[-1]}"
                with progress.paused():
                    print(f"  {name}: {outcome}, {found.seconds[-1]:.1f} s", flush=True)

    picture = args.output / "kfac_demo.png"
    draw(runs, picture, train=train_images, test=test_images)
    if args.json:
        fields = [dataclasses.asdict(r) for tried in runs.values() for r in tried]
        for record in fields:
            del record["reconstructions"]
        chosen = {method: best(tried).learning_rate for method, tried in runs.items()}
        print_json(
            {
                "backend": backend.spec,
                "seed": args.seed,
                "best_learning_rates": chosen,
                "runs": fields,
                "picture": str(picture),
            }
        )
    else:
        print_results(runs)
        print(f"Picture: {picture}")
    return 0


def load_digits(seed: int, /) -> tuple[Images, Images]:
    """Return digits to train on and to test, ``(n, 64)`` between 0 and 1."""
    from sklearn import datasets, model_selection

    images = datasets.load_digits().data / 16.0
    split = model_selection.train_test_split
    train_images, test_images = split(images, test_size=N_TEST, random_state=seed)
    return train_images, test_images


def train(
    method: str,
    train_images: Images,
    test_images: Images,
    /,
    *,
    learning_rate: float,
    steps: int,
    seed: int,
    advance: Callable[[int], None] = lambda steps: None,
) -> Run:
    """Train on the selected backend, to the last step or until a loss is not finite.

    Every method starts from the same parameters and sees the same batches.  The loss
    over all training images is evaluated every few steps, and on no method's time.
    """
    parameters = initial_parameters(np.random.default_rng([seed, 0]))
    optimizer = _optimizer(method, parameters, learning_rate, seed)
    rng = np.random.default_rng([seed, 1])
    batches: list[Images] = []
    all_images = kc.asarray(train_images)
    run = Run(method, learning_rate)
    seconds = 0.0
    for step in range(steps + 1):
        if step % EVALUATE_EVERY == 0 or step == steps:
            advance(step - run.steps[-1] if run.steps else 0)
            run.steps.append(step)
            run.seconds.append(seconds)
            run.losses.append(Pass(parameters, all_images).loss())
            if not math.isfinite(run.losses[-1]):
                advance(steps - step)
                break
        if step == steps:
            break
        if not batches:
            order = rng.permutation(len(train_images))
            batches = list(train_images[order].reshape(-1, BATCH_SIZE, 64))
        batch = kc.asarray(batches.pop())
        start = time.perf_counter()
        change = optimizer.change(Pass(parameters, batch))
        parameters = linear_combination([1.0, 1.0], [parameters, change])
        # Reading a number synchronizes with a device that computes asynchronously.
        float(parameters["fc1"]["bias"][0])
        seconds += time.perf_counter() - start
    run.reconstructions = kc.to_numpy(Pass(parameters, kc.asarray(test_images)).pixels)
    squared = (run.reconstructions - test_images) ** 2
    run.test_error = float(np.mean(np.sum(squared, axis=1)))
    return run


def _optimizer(
    method: str, parameters: Vector, learning_rate: float, seed: int
) -> Optimizer:
    if method == "SGD":
        return NesterovSGD(parameters, learning_rate=learning_rate)
    if method == "Adam":
        return Adam(parameters, learning_rate=learning_rate)
    rng = np.random.default_rng([seed, 2])
    return KFAC(parameters, learning_rate=learning_rate, rng=rng)
