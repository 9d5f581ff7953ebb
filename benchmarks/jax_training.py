"""A training step on JAX beside kfac-jax's: first call, steps, and peak memory.

Both train one network on one batch by their optimizers with rate, momentum and damping
adapted, statistics at each step and a refresh every five, in processes of their own that
take turns:

    python -m benchmarks.jax_training

The interpreter needs kfac-jax 0.0.8 and a JAX that it works with (0.9.0 is the last known
to); ``--python`` names another.  The first call traces and compiles; a later one may do so
again, and the first six calls are counted as well.  Times are of the clock and of the
processor; medians of the processes are compared.  ``--one-core`` binds the processes to one
core, as a machine with other work on it needs: threads that wait count as busy.
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
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BATCH = 256
DAMPING = 1e-2
NETWORKS = {"mlp": (784, 256, 256, 256, 256, 10), "small": (20, 16, 4)}
METHODS = ("kfac-core", "kfac-jax")


def main() -> None:
    """Run the workers in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--worker", choices=METHODS)
    parser.add_argument("--network", choices=NETWORKS, default="mlp")
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
        print(json.dumps(measured(options.worker, options.network, options.steps)))
        return
    found: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
    for turn in range(options.rounds):
        for method in METHODS if turn % 2 else METHODS[::-1]:
            found[method].append(_of_a_process(method, options))
    if options.output:
        options.output.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(table(found))


def _of_a_process(method: str, options: argparse.Namespace) -> dict[str, Any]:
    folders = (ROOT, ROOT / "backends", ROOT / "shims")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"),
    }
    command = [options.python, "-m", "benchmarks.jax_training", "--worker", method]
    command += ["--network", options.network, "--steps", str(options.steps)]
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
    import jax
    import numpy as np

    rng = np.random.default_rng(0)
    widths = NETWORKS[network]
    params = [
        {
            "w": jax.numpy.asarray(rng.normal(size=(n, m)) / n**0.5, "float32"),
            "b": jax.numpy.zeros(m, "float32"),
        }
        for n, m in itertools.pairwise(widths)
    ]
    x = jax.numpy.asarray(rng.normal(size=(BATCH, widths[0])), "float32")
    y = jax.numpy.asarray(rng.integers(0, widths[-1], size=BATCH))
    make = {"kfac-core": _kfac_core, "kfac-jax": _kfac_jax}[method]
    clock, processor = time.perf_counter(), time.process_time()
    step = make(params, x, y)
    step()
    first = time.perf_counter() - clock, time.process_time() - processor
    # The adaptation of the damping may be a program of its own.
    for _ in range(5):
        step()
    six = time.process_time() - processor
    walls, busy = [], time.process_time()
    loss = 0.0
    for _ in range(steps):
        clock = time.perf_counter()
        loss = step()
        walls.append(time.perf_counter() - clock)
    names = ("jax", "kfac-jax") if method == "kfac-jax" else ("jax",)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "first call, s": first[0],
        "first call, CPU s": first[1],
        "first six calls, CPU s": six,
        "step, ms": 1e3 * statistics.median(walls),
        "step, CPU ms": 1e3 * (time.process_time() - busy) / steps,
        "peak memory, MiB": peak / 1024,
        "loss at the end": loss,
        "versions": {name: version(name) for name in names},
    }


def logits(params: Any, x: Any) -> Any:
    """Return the network's outputs."""
    import jax

    for layer in params[:-1]:
        x = jax.numpy.tanh(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def _kfac_core(params: Any, x: Any, y: Any) -> Callable[[], float]:
    import jax

    import kfac_core as kc
    from kfac_core_backends import jax as adapter
    from kfac_core_shims.jax import kfac_optimizer

    # Where the package is a checkout and not installed, no entry point says so.
    kc.register_backend(adapter)
    optimizer = kfac_optimizer(
        logits, params, x, likelihood="categorical", damping=DAMPING
    )
    held = [params, optimizer.init(params), jax.random.key(0)]

    def step() -> float:
        held[2], key = jax.random.split(held[2])
        held[0], held[1], progress = optimizer.step(held[0], held[1], x, y, key)
        jax.block_until_ready(held[0])
        return float(progress.loss)

    return step


def _kfac_jax(params: Any, x: Any, y: Any) -> Callable[[], float]:
    import jax
    import kfac_jax

    def loss(params: Any, batch: Any) -> Any:
        x, y = batch
        z = logits(params, x)
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
        inverse_update_period=5,
        num_burnin_steps=0,
        estimation_mode="fisher_gradients",
    )
    key = jax.random.key(0)
    held = [params, optimizer.init(params, key, (x, y)), key]

    def step() -> float:
        held[2], key = jax.random.split(held[2])
        held[0], held[1], stats = optimizer.step(held[0], held[1], key, batch=(x, y))
        jax.block_until_ready(held[0])
        return float(stats["loss"])

    return step


if __name__ == "__main__":
    main()
