"""Training steps on PyTorch beside kfac-pytorch's, in CPU time, and their memory.

Both precondition the same layers of the same network for SGD, with factors at each step
and inverses every ten, on one thread:

    python -m benchmarks.torch_training --kfac-pytorch FOLDER

FOLDER holds the package ``kfac`` of a checkout of kfac-pytorch.  The methods take turns in
one process, ten steps at a time, of which one inverts; the least CPU time of many turns
counts.  Memory is the peak of a process of each method's own, above that of SGD alone.

kfac-pytorch's factors are of the loss's own gradients, which is ``fisher="empirical"``;
``"gradients"``, the default of `KFAC`, goes back through the network once more.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.memory import MEMORY_ENVIRONMENT, Resident
from benchmarks.threads import environment

ROOT = Path(__file__).parents[1]
INTERVAL = 10
DAMPING, DECAY, RATE = 1e-2, 0.95, 1e-3
NETWORKS = ("mlp", "convolutions", "gpt")

LINEAR = ("Embedding", "LayerNorm")
"""What is skipped where only layers count that kfac-pytorch covers."""

METHODS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "kfac-pytorch, inverse": {"compute_method": "inverse"},
    "kfac-core": {"skip": LINEAR, "fisher": "empirical"},
    "kfac-core, all layers": {"fisher": "empirical"},
    "kfac-core, gradients": {"skip": LINEAR, "fisher": "gradients"},
    "kfac-core, all, gradients": {"fisher": "gradients"},
    "kfac-pytorch, eigen": {"compute_method": "eigen"},
    "kfac-core, exact": {
        "skip": LINEAR,
        "fisher": "empirical",
        "damping_rule": "exact",
    },
    "kfac-core, exact, gradients": {
        "skip": LINEAR,
        "fisher": "gradients",
        "damping_rule": "exact",
    },
}


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--kfac-pytorch", type=Path, help="folder of the package `kfac`"
    )
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--worker", choices=("time", "memory"))
    parser.add_argument(
        "--output", type=Path, help="where to write the results as JSON"
    )
    options = parser.parse_args()
    if options.kfac_pytorch is not None:
        sys.path.insert(0, str(options.kfac_pytorch))
    peer = options.kfac_pytorch is not None or importlib.util.find_spec("kfac")
    methods = [m for m in options.methods if peer or not m.startswith("kfac-pytorch")]
    if options.worker == "time":
        print(json.dumps(step_times(options.networks[0], methods, options.turns)))
        return
    if options.worker == "memory":
        print(json.dumps(peak_memory(options.networks[0], methods[0])))
        return
    found: dict[str, Any] = {}
    for network in options.networks:
        own = [m for m in methods if network == "gpt" or ", all" not in m]
        seconds = _of_a_process("time", network, own, options)
        memory = {}
        if not options.no_memory:
            memory = {m: _of_a_process("memory", network, [m], options) for m in own}
        found[network] = {"seconds": seconds, "bytes": memory}
        print(table(network, seconds, memory))
    if options.output:
        options.output.write_text(json.dumps(found, indent=1), encoding="utf-8")


def table(network: str, seconds: dict[str, float], memory: dict[str, int]) -> str:
    """Return the figures of a network as a table.

    Parameters
    ----------
    network : str
        One of `NETWORKS`.
    seconds : dict of str to float
        CPU time of a step, by method.
    memory : dict of str to int
        Peak memory in bytes, by method; may be empty.

    Returns
    -------
    str
        Lines of Markdown.
    """
    lines = [
        f"| {network} | ms a step | beside kfac-pytorch | MiB above SGD |",
        "| --- | --- | --- | --- |",
    ]
    for method, own in seconds.items():
        eigen = "exact" in method or "eigen" in method
        other = seconds.get(f"kfac-pytorch, {'eigen' if eigen else 'inverse'}")
        ratio = "" if other is None else f"{own / other:.2f}"
        above = ""
        if "sgd" in memory:
            above = f"{(memory[method] - memory['sgd']) / 2**20:.1f}"
        lines.append(f"| {method} | {1e3 * own:.2f} | {ratio} | {above} |")
    return "\n".join([*lines, ""])


def step_times(network: str, methods: list[str], turns: int) -> dict[str, float]:
    """Train by each method in turns, and return the CPU seconds of a step.

    Parameters
    ----------
    network : str
        One of `NETWORKS`.
    methods : list of str
        Some of `METHODS`.
    turns : int
        How many times each method takes ten steps.

    Returns
    -------
    dict of str to float
        The least mean of ten steps.
    """
    steps = {method: training(network, method) for method in methods}
    least = dict.fromkeys(methods, float("inf"))
    for turn in range(turns + 1):
        for method in methods if turn % 2 else methods[::-1]:
            step = steps[method]
            start = time.process_time()
            for _ in range(INTERVAL):
                step()
            taken = (time.process_time() - start) / INTERVAL
            # In the first turn statistics begin and kernels are chosen.
            if turn:
                least[method] = min(least[method], taken)
    return least


def peak_memory(network: str, method: str) -> int:
    """Train, and return the process's peak memory in bytes, with all libraries loaded.

    Parameters
    ----------
    network : str
        One of `NETWORKS`.
    method : str
        One of `METHODS`.

    Returns
    -------
    int
        Peak over two refreshes.
    """
    # Modules that one step of each imports are not counted as what training takes.
    importlib.import_module("kfac_core_shims.torch")
    for loading in METHODS:
        try:
            training("mlp", loading, small=True)()
        except ImportError:
            continue
    memory = Resident()
    memory.settled()
    memory.reset_peak()
    step = training(network, method)
    for _ in range(2 * INTERVAL + 1):
        step()
    return memory.peak()


def training(network: str, method: str, *, small: bool = False) -> Callable[[], None]:
    """Return a training step of a network by a method.

    Parameters
    ----------
    network : str
        One of `NETWORKS`.
    method : str
        One of `METHODS`.
    small : bool
        Whether the network is only a few numbers, to load what a step needs.

    Returns
    -------
    callable
        Takes one step.
    """
    import torch
    from torch.nn import functional

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if small:
        model: Any = torch.nn.Linear(3, 2)
        x, y = torch.randn(4, 3), torch.zeros(4, dtype=torch.int64)
    else:
        model, x, y = problem(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    kfac = preconditioner(model, method)

    def step() -> None:
        optimizer.zero_grad()
        z = model(x)
        loss = functional.cross_entropy(z.flatten(0, -2), y.flatten())
        loss.backward()
        if kfac is not None:
            kfac.step()
        optimizer.step()

    return step


def preconditioner(model: Any, method: str) -> Any:
    """Return the preconditioner of a method; None for SGD.

    Parameters
    ----------
    model : torch.nn.Module
        The model.
    method : str
        One of `METHODS`.

    Returns
    -------
    object
        With a method ``step``.
    """
    chosen = dict(METHODS[method])
    if method == "sgd":
        return None
    if method.startswith("kfac-pytorch"):
        from kfac.preconditioner import KFACPreconditioner

        return KFACPreconditioner(
            model,
            factor_update_steps=1,
            inv_update_steps=INTERVAL,
            damping=DAMPING,
            factor_decay=DECAY,
            lr=RATE,
            **chosen,
        )
    from kfac_core_shims.torch import KFAC

    classes = {type(module).__name__ for module in model.modules()}
    skipped = [name for name in chosen.pop("skip", ()) if name in classes]
    with warnings.catch_warnings():
        # What is skipped is said by a warning.
        warnings.simplefilter("ignore")
        return KFAC(
            model,
            likelihood="categorical",
            damping=DAMPING,
            decay=DECAY,
            update_every=1,
            refresh_every=INTERVAL,
            lr=RATE,
            skip_layers=skipped,
            **chosen,
        )


def problem(network: str) -> tuple[Any, Any, Any]:
    """Return a network, inputs and labels.

    Parameters
    ----------
    network : {"mlp", "convolutions", "gpt"}
        784-512-512-10 with 128 examples; three convolutions of 3x16x16 with 64; a GPT of
        width 64 with two layers, 16 sequences of 32.

    Returns
    -------
    tuple
        Model, inputs, labels.
    """
    import torch
    from torch import nn

    if network == "mlp":
        model: Any = nn.Sequential(
            nn.Linear(784, 512),
            nn.ReLU(),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, 10),
        )
        return model, torch.randn(128, 784), torch.randint(10, (128,))
    if network == "convolutions":
        model = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2048, 10),
        )
        return model, torch.randn(64, 3, 16, 16), torch.randint(10, (64,))
    shape = 16, 32
    return small_gpt(), torch.randint(64, shape), torch.randint(64, shape)


def small_gpt(width: int = 64, depth: int = 2, heads: int = 4) -> Any:
    """Return a decoder of 64 tokens, without dropout.

    Parameters
    ----------
    width, depth, heads : int
        Sizes.

    Returns
    -------
    torch.nn.Module
        Takes ids of shape (N, T), and returns logits.
    """
    import torch
    from torch import nn
    from torch.nn import functional

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = (
                nn.Linear(width, 4 * width),
                nn.Linear(4 * width, width),
            )

        def forward(self, x: Any) -> Any:
            parts = self.qkv(self.first(x)).chunk(3, -1)
            q, k, v = (z.unflatten(-1, (heads, -1)).transpose(1, 2) for z in parts)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(-2))
            return x + self.down(functional.gelu(self.up(self.second(x))))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(64, width)
            self.places = nn.Embedding(32, width)
            self.layers = nn.Sequential(*(Layer() for _ in range(depth)))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, 64, bias=False)

        def forward(self, ids: Any) -> Any:
            x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
            return self.head(self.norm(self.layers(x)))

    return Gpt()


def _of_a_process(
    worker: str, network: str, methods: list[str], options: argparse.Namespace
) -> Any:
    folders = (ROOT, ROOT / "backends", ROOT / "shims")
    variables = os.environ | environment(1, device="cpu")
    variables["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    if worker == "memory":
        variables |= MEMORY_ENVIRONMENT
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.torch_training"]
    command += [
        "--worker",
        worker,
        "--networks",
        network,
        "--turns",
        str(options.turns),
    ]
    if options.kfac_pytorch is not None:
        command += ["--kfac-pytorch", str(options.kfac_pytorch.resolve())]
    done = subprocess.run(
        [*command, "--methods", *methods],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{network}, {methods} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
