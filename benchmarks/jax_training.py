"""A training step on JAX beside kfac-jax's: first call, steps, and peak memory.

Both train a network on one batch by their optimizers with rate, momentum and damping
adapted, statistics at each step and a refresh every five, in processes of their own that
take turns:

    python -m benchmarks.jax_training [--networks mlp autoencoder conv]

``autoencoder`` and ``conv`` are the networks of kfac-jax's own examples, on drawn numbers
in the place of MNIST's: 784-1000-500-250-30 and back with the Bernoulli likelihood, and
two convolutions with two dense layers.

The interpreter needs kfac-jax 0.0.8 and a JAX that it works with (0.9.0 is the last known
to); ``--python`` names another.  The first call traces and compiles; a later one may do so
again, and the first six calls are counted as well.  A step is the mean over the five of a
period of the median of each: one of them refreshes, and one adapts the damping.  Times are
of the clock and of the processor; medians of the processes are compared.  ``--one-core``
binds the processes to one core, as a machine with other work on it needs: threads that wait
count as busy.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DAMPING = 1e-2
PERIOD = 5
METHODS = ("kfac-core", "kfac-jax")


@dataclass(frozen=True)
class Problem:
    """A network with its first parameters, and a batch.

    Attributes
    ----------
    function : callable
        ``(params, inputs) -> outputs``.
    params, inputs, targets : pytree, array, array
        First parameters, and the batch.
    likelihood : {"categorical", "bernoulli"}
        Likelihood of one row of outputs.
    """

    function: Callable[[Any, Any], Any]
    params: Any
    inputs: Any
    targets: Any
    likelihood: str


def perceptron(
    widths: tuple[int, ...], *, batch: int, likelihood: str = "categorical"
) -> Problem:
    """Return dense layers with tanh between them."""
    import jax
    import numpy as np

    rng = np.random.default_rng(0)
    params = [dense(rng, n, m) for n, m in itertools.pairwise(widths)]

    def function(params: Any, x: Any) -> Any:
        for layer in params[:-1]:
            x = jax.numpy.tanh(x @ layer["w"] + layer["b"])
        return x @ params[-1]["w"] + params[-1]["b"]

    if likelihood == "bernoulli":
        x = jax.numpy.asarray(rng.uniform(size=(batch, widths[0])) ** 4, "float32")
        return Problem(function, params, x, x, likelihood)
    x = jax.numpy.asarray(rng.normal(size=(batch, widths[0])), "float32")
    y = jax.numpy.asarray(rng.integers(0, widths[-1], size=batch))
    return Problem(function, params, x, y, likelihood)


def convolutions(*, batch: int) -> Problem:
    """Return the convolutional classifier of kfac-jax's example."""
    import jax
    import numpy as np

    rng = np.random.default_rng(0)
    kernels = [
        {
            "w": jax.numpy.asarray(
                rng.normal(size=(5, 5, n, m)) / (25 * n) ** 0.5
            ).astype("float32"),
            "b": jax.numpy.zeros(m, "float32"),
        }
        for n, m in ((1, 2), (2, 4))
    ]
    params = {"conv": kernels, "dense": [dense(rng, 196, 32), dense(rng, 32, 10)]}
    layout = ("NHWC", "HWIO", "NHWC")

    def function(params: Any, x: Any) -> Any:
        for layer in params["conv"]:
            y = jax.lax.conv_general_dilated(
                x, layer["w"], (1, 1), "SAME", dimension_numbers=layout
            )
            y = jax.nn.relu(y + layer["b"])
            window = (1, 2, 2, 1)
            x = jax.lax.reduce_window(
                y, -jax.numpy.inf, jax.lax.max, window, window, "SAME"
            )
        hidden, out = params["dense"]
        h = jax.nn.relu(x.reshape(len(x), -1) @ hidden["w"] + hidden["b"])
        return h @ out["w"] + out["b"]

    x = jax.numpy.asarray(rng.uniform(size=(batch, 28, 28, 1)), "float32")
    y = jax.numpy.asarray(rng.integers(0, 10, size=batch))
    return Problem(function, params, x, y, "categorical")


def dense(rng: Any, n: int, m: int) -> dict[str, Any]:
    """Return the parameters of a dense layer."""
    import jax

    weight = jax.numpy.asarray(rng.normal(size=(n, m)) / n**0.5, "float32")
    return {"w": weight, "b": jax.numpy.zeros(m, "float32")}


ENCODER = (784, 1000, 500, 250, 30)
NETWORKS: dict[str, Callable[[], Problem]] = {
    "mlp": partial(perceptron, (784, 256, 256, 256, 256, 10), batch=256),
    "autoencoder": partial(
        perceptron, (*ENCODER, *ENCODER[-2::-1]), batch=512, likelihood="bernoulli"
    ),
    "conv": partial(convolutions, batch=256),
    "small": partial(perceptron, (20, 16, 4), batch=256),
}


def main() -> None:
    """Run the workers in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--worker", choices=METHODS)
    parser.add_argument(
        "--networks",
        nargs="+",
        choices=NETWORKS,
        default=["mlp", "autoencoder", "conv"],
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--one-core", action="store_true", help="on Linux only")
    parser.add_argument(
        "--output", type=Path, help="where to write the results as JSON"
    )
    options = parser.parse_args()
    if options.one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if options.worker:
        (network,) = options.networks
        print(json.dumps(measured(options.worker, network, options.steps)))
        return
    everything = {}
    for network in options.networks:
        found: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
        for turn in range(options.rounds):
            for method in METHODS if turn % 2 else METHODS[::-1]:
                found[method].append(_of_a_process(method, network, options))
        everything[network] = found
        print(f"{network}\n\n{table(found)}\n", flush=True)
    if options.output:
        options.output.write_text(json.dumps(everything, indent=1), encoding="utf-8")


def _of_a_process(
    method: str, network: str, options: argparse.Namespace
) -> dict[str, Any]:
    folders = (ROOT, ROOT / "backends", ROOT / "shims")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"),
    }
    command = [options.python, "-m", "benchmarks.jax_training", "--worker", method]
    command += ["--networks", network, "--steps", str(options.steps)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{method} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return the medians as a table, and ours over theirs."""
    lines = ["| | " + " | ".join(METHODS) + " | ratio |", "| --- | --- | --- | --- |"]
    numbers = [name for name, x in found[METHODS[0]][0].items() if isinstance(x, float)]
    for name in numbers:
        ours, theirs = (
            statistics.median(run[name] for run in found[method]) for method in METHODS
        )
        lines.append(f"| {name} | {ours:.4g} | {theirs:.4g} | {ours / theirs:.2f} |")
    versions = [found[method][0]["versions"] for method in METHODS]
    return "\n".join([*lines, *map(str, versions)])


def measured(method: str, network: str, steps: int) -> dict[str, Any]:
    """Train, and return what it took."""
    problem = NETWORKS[network]()
    make = {"kfac-core": _kfac_core, "kfac-jax": _kfac_jax}[method]
    clock, processor = time.perf_counter(), time.process_time()
    step = make(problem)
    step()
    first = time.perf_counter() - clock, time.process_time() - processor
    # The adaptation of the damping may be a program of its own.
    for _ in range(5):
        step()
    six = time.process_time() - processor
    walls: list[float] = []
    busy: list[float] = []
    loss = 0.0
    for _ in range(steps):
        clock, processor = time.perf_counter(), time.process_time()
        loss = step()
        busy.append(1e3 * (time.process_time() - processor))
        walls.append(1e3 * (time.perf_counter() - clock))
    names = ("jax", "kfac-jax") if method == "kfac-jax" else ("jax",)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "first call, s": first[0],
        "first call, CPU s": first[1],
        "first six calls, CPU s": six,
        "step, ms": _of_a_period(walls),
        "step, CPU ms": _of_a_period(busy),
        "peak memory, MiB": peak / 1024,
        "loss at the end": loss,
        "versions": {name: version(name) for name in names},
    }


def _of_a_period(times: list[float]) -> float:
    """Return the mean over the steps of a period of the median of each."""
    medians = [statistics.median(times[i::PERIOD]) for i in range(PERIOD)]
    return statistics.fmean(medians)


def _kfac_core(problem: Problem) -> Callable[[], float]:
    import jax

    import kfac_core as kc
    from kfac_core_backends import jax as adapter
    from kfac_core_shims.jax import KFACOptimizer

    # Where the package is a checkout and not installed, no entry point says so.
    kc.register_backend(adapter)
    x, y = problem.inputs, problem.targets
    optimizer = KFACOptimizer(
        problem.function,
        problem.params,
        x,
        likelihood=problem.likelihood,
        damping=DAMPING,
        # kfac-jax's schedule, whatever the defaults are.
        update_every=1,
        refresh_every=PERIOD,
    )
    held = [problem.params, optimizer.init(problem.params), jax.random.key(0)]

    def step() -> float:
        held[2], key = jax.random.split(held[2])
        held[0], held[1], progress = optimizer.step(held[0], held[1], x, y, key)
        jax.block_until_ready(held[0])
        return float(progress.loss)

    return step


def _kfac_jax(problem: Problem) -> Callable[[], float]:
    import jax
    import kfac_jax

    def loss(params: Any, batch: Any) -> Any:
        x, y = batch
        z = problem.function(params, x)
        if problem.likelihood == "bernoulli":
            kfac_jax.register_sigmoid_cross_entropy_loss(z, y)
            return (jax.nn.softplus(z) - y * z).sum(axis=1).mean()
        kfac_jax.register_softmax_cross_entropy_loss(z, y)
        chosen = jax.numpy.take_along_axis(jax.nn.log_softmax(z), y[:, None], axis=1)
        return -chosen.mean()

    optimizer = kfac_jax.Optimizer(
        value_and_grad_func=jax.value_and_grad(loss),
        l2_reg=0.0,
        use_adaptive_learning_rate=True,
        use_adaptive_momentum=True,
        use_adaptive_damping=True,
        initial_damping=DAMPING,
        inverse_update_period=PERIOD,
        num_burnin_steps=0,
        estimation_mode="fisher_gradients",
    )
    key, batch = jax.random.key(0), (problem.inputs, problem.targets)
    held = [problem.params, optimizer.init(problem.params, key, batch), key]

    def step() -> float:
        held[2], key = jax.random.split(held[2])
        held[0], held[1], stats = optimizer.step(held[0], held[1], key, batch=batch)
        jax.block_until_ready(held[0])
        return float(stats["loss"])

    return step


if __name__ == "__main__":
    main()
