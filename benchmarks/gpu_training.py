"""Whole training steps on a GPU: their time, memory, launches and synchronizations.

    python -m benchmarks.gpu_training --device cuda --seconds 100 --output FILE

Networks are GPT-2 small (8 sequences of 512) and ResNet-50 (64 images of 224 x 224), under
``autocast`` in bfloat16, and an MLP of 2,048 rows in float32.  Each case trains on one
batch, and has a limit of time; ``--output`` is written after each.  Times are of the
device's events: the first step, the mean of steps 20 to 39, medians of an ordinary step
and of one that is due to update and refresh, and the mean of both at the later interval of
the default schedule.  Launches and synchronizations are counted in one step of each kind.
``--device cpu --tiny`` runs small copies on the host.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import importlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import kfac_core as kc
from benchmarks.libraries.device import counted
from kfac_core_shims.torch import KFAC, SOAP, GaussNewton

ROOT = Path(__file__).parents[1]
STEPS = 40
PERIODS = {"kfac": 60, "soap": 20}
"""Steps between refreshes that the defaults come to."""
COUNTS = ("launches", "synchronizations")


@dataclass
class Problem:
    """A network with the loss of one batch.

    Attributes
    ----------
    model : torch.nn.Module
        The network.
    loss : callable
        Returns the loss of a module that computes the same as `model`.
    residuals : callable or None
        Residuals, where the loss is half their squares' mean.
    """

    model: Any
    loss: Callable[[Any], Any]
    residuals: Callable[[], Any] | None = None


class Bottleneck(nn.Module):
    """A block of ResNet-50."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(inputs, width, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(width, 4 * width, 1),
        )
        self.short = nn.Sequential()
        if stride > 1 or inputs != 4 * width:
            self.short = nn.Sequential(*_convolution(inputs, 4 * width, 1, stride))

    def forward(self, x: Any) -> Any:
        """Return the block's outputs."""
        # In place, as torchvision's.
        y = self.body(x)
        y += self.short(x)
        return functional.relu(y, inplace=True)


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> list[Any]:
    convolution = nn.Conv2d(
        inputs, outputs, size, stride, padding=size // 2, bias=False
    )
    return [convolution, nn.BatchNorm2d(outputs)]


def resnet(width: int, depths: tuple[int, ...], classes: int) -> Any:
    """Return a ResNet of bottlenecks; ResNet-50 is ``(64, (3, 4, 6, 3), 1000)``."""
    layers = [*_convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for i, depth in enumerate(depths):
        for k in range(depth):
            stride = 2 if i and not k else 1
            layers.append(Bottleneck(inputs, width << i, stride))
            inputs = 4 * (width << i)
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)
    )


def resnet50(device: str, tiny: bool) -> Problem:
    """Return ResNet-50, that of torchvision where it is installed."""
    if tiny:
        model, batch, size = resnet(8, (1, 1), 10), 4, 32
    else:
        batch, size = 64, 224
        try:
            from torchvision.models import resnet50 as of_torchvision

            model = of_torchvision()
        except ImportError:
            model = resnet(64, (3, 4, 6, 3), 1000)
    model = model.to(device, memory_format=torch.channels_last)
    x = torch.randn(batch, 3, size, size, device=device)
    x = x.to(memory_format=torch.channels_last)
    y = torch.randint(10, (batch,), device=device)

    def loss(called: Any) -> Any:
        with torch.autocast(device, torch.bfloat16):
            return functional.cross_entropy(called(x), y)

    return Problem(model, loss)


def gpt2(device: str, tiny: bool) -> Problem:
    """Return GPT-2 small, from its configuration."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 97} if tiny else {}
    config = GPT2Config(**sizes)
    model = GPT2LMHeadModel(config).to(device)
    shape = (2, 16) if tiny else (8, 512)
    ids = torch.randint(config.vocab_size, shape, device=device)

    def loss(called: Any) -> Any:
        with torch.autocast(device, torch.bfloat16):
            return called(input_ids=ids, labels=ids, use_cache=False).loss

    return Problem(model, loss)


def mlp(device: str, tiny: bool) -> Problem:
    """Return a regression of a function of three numbers, by four layers of 256."""
    width, rows = (16, 64) if tiny else (256, 2048)
    sizes = [3, *[width] * 4, 1]
    layers: list[Any] = []
    for n, m in itertools.pairwise(sizes):
        layers += [nn.Linear(n, m), nn.Tanh()]
    model = nn.Sequential(*layers[:-1]).to(device)
    x = torch.rand(rows, 3, device=device)
    y = torch.sin(6 * x).prod(1, keepdim=True)
    return Problem(
        model,
        lambda called: 0.5 * (called(x) - y).square().mean(),
        lambda: model(x) - y,
    )


NETWORKS = {"gpt2": gpt2, "resnet50": resnet50, "mlp": mlp}


def adamw(parameters: Any) -> Any:
    """Return AdamW as one program for all parameters."""
    return torch.optim.AdamW(parameters, lr=3e-4, fused=True)


def sgd(parameters: Any) -> Any:
    """Return the optimizer of the quick start beside `KFAC`."""
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.9, nesterov=True)


class Trainer:
    """Training steps of a network by one method.

    Parameters
    ----------
    network, method : str
        One of `NETWORKS`; ``"adamw"``, ``"muon"``, ``"soap"``, ``"gauss-newton"``,
        ``"kfac"`` or ``"kfac-pytorch"``.
    options : argparse.Namespace
        Of the command line.
    compiled : bool
        Whether the network is compiled.
    **settings
        Other options of `KFAC`.
    """

    def __init__(
        self,
        network: str,
        method: str,
        options: argparse.Namespace,
        *,
        compiled: bool = False,
        **settings: Any,
    ) -> None:
        torch.manual_seed(0)
        with torch.device(options.device):
            problem = NETWORKS[network](options.device, options.tiny)
        self.taken, self.problem = 0, problem
        if method == "kfac-pytorch":
            _linear_in_place(problem.model)
            # It takes views of weights' gradients.
            problem.model.to(memory_format=torch.contiguous_format)
        self.called = torch.compile(problem.model) if compiled else problem.model
        parameters = [*problem.model.parameters()]
        self.kfac: Any = None
        self.optimizers: list[Any] = []
        self.due: Callable[[int], bool] = lambda step: False
        if method == "adamw":
            self.optimizers = [adamw(parameters)]
        elif method == "muon":
            matrices = [
                p
                for name, p in problem.model.named_parameters()
                if p.ndim == 2 and "wte" not in name and "wpe" not in name
            ]
            those = set(matrices)
            others = [p for p in parameters if p not in those]
            self.optimizers = [torch.optim.Muon(matrices, lr=1e-3), adamw(others)]
        elif method == "soap":
            self.optimizers = [SOAP(self.called)]
            self.due = lambda step: step < 3 or (step + 1) % 10 == 0
        elif method == "gauss-newton":
            self.optimizers = [GaussNewton(problem.model)]
        else:
            self.optimizers = [sgd(parameters)]
            self.due = lambda step: step % 20 == 0
            if method == "kfac":
                likelihood = "gaussian" if problem.residuals else "categorical"
                self.kfac = KFAC(
                    self.called,
                    lr=self.optimizers[0],
                    likelihood=likelihood,
                    **settings,
                )
            else:
                self.kfac = _peer(problem.model)
        self.is_gauss_newton = method == "gauss-newton"

    def step(self) -> Any:
        """Take a step; return the loss before it, on its device."""
        self.taken += 1
        if self.is_gauss_newton:
            return self.optimizers[0].step(self.problem.residuals)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self.problem.loss(self.called)
        loss.backward()
        if self.kfac is not None:
            self.kfac.step()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()


def _linear_in_place(model: Any) -> None:
    """Replace GPT-2's Conv1D, which kfac-pytorch does not cover, by linear layers."""
    for module in [*model.modules()]:
        for name, child in [*module.named_children()]:
            if type(child).__name__ == "Conv1D":
                linear = nn.Linear(*child.weight.shape, device=child.weight.device)
                linear.load_state_dict({"weight": child.weight.mT, "bias": child.bias})
                setattr(module, name, linear)


def _peer(model: Any) -> Any:
    """Return kfac-pytorch's preconditioner, with our first intervals."""
    from kfac.preconditioner import KFACPreconditioner

    return KFACPreconditioner(
        model,
        factor_update_steps=20,
        inv_update_steps=20,
        damping=0.02,
        lr=1.0,
        compute_method="inverse",
        factor_dtype=torch.float32,
        # A vocabulary is too wide for a full factor.
        skip_layers=["lm_head"],
    )


class Clock:
    """Marks of the device's stream, and of the host."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._events: list[Any] = []
        self._host: list[float] = []

    def mark(self) -> None:
        """Mark the end of a step."""
        if self._device == "cuda":
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()
        self._host.append(time.perf_counter())

    def milliseconds(self) -> tuple[list[float], list[float]]:
        """Return the times between marks, of the device and of the host."""
        synchronize(self._device)
        host = [1e3 * (b - a) for a, b in itertools.pairwise(self._host)]
        if self._device != "cuda":
            return host, host
        events = itertools.pairwise(self._events)
        return [a.elapsed_time(b) for a, b in events], host


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def measured(trainer: Trainer, options: argparse.Namespace, period: int) -> Any:
    """Train, and return the times, the memory and the losses of steps."""
    is_cuda = options.device == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    clock, losses = Clock(options.device), []
    clock.mark()
    count = 22 if options.tiny else STEPS
    for _ in range(count):
        losses.append(trainer.step())
        clock.mark()
    device, host = clock.milliseconds()
    ordinary = [i for i in range(3, count) if not trainer.due(i)]
    due = [i for i in range(3, count) if trainer.due(i)]
    median = statistics.median
    result: dict[str, Any] = {
        "first_ms": device[0],
        "period_ms": statistics.fmean(device[-20:]),
        "ordinary_ms": median(device[i] for i in ordinary),
        "host_ms": median(host[i] for i in ordinary),
        "losses": [float(losses[0]), float(losses[-1])],
    }
    result["steady_ms"] = result["ordinary_ms"]
    if due:
        result["due_ms"] = median(device[i] for i in due)
        further = result["due_ms"] - result["ordinary_ms"]
        result["steady_ms"] += further / period
    if is_cuda:
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if due:
            result["due"] = inspected(trainer, is_due=True)
        result["ordinary"] = inspected(trainer, is_due=False)
    return result


def inspected(trainer: Trainer, *, is_due: bool) -> dict[str, Any]:
    """Take the next step of a kind; return its launches, and where it synchronized."""
    while trainer.due(trainer.taken) != is_due:
        trainer.step()
    torch.cuda.synchronize()
    with synchronizing_places() as places:
        counts = counted(torch, trainer.step, lambda _: None)
    # The profiler synchronizes with the device when it ends.
    nothing = counted(torch, lambda: None, lambda _: None)
    counts = {name: counts[name] - nothing[name] for name in counts}
    return {**counts, "places": dict(places.most_common(8))}


@contextlib.contextmanager
def synchronizing_places() -> Iterator[Counter[str]]:
    """Count the places of this tree that make the host wait for the device."""
    places: Counter[str] = Counter()

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchroniz" not in str(message):
            return
        frames = traceback.extract_stack()[:-1]
        own = [
            f"{Path(f.filename).relative_to(ROOT)}:{f.lineno} {f.name}"
            for f in frames
            if f.filename.startswith(str(ROOT)) and "gpu_training" not in f.filename
        ]
        # The step's own function, and the innermost call.
        places[own[-1] if own else f"{frames[-1].filename}:{frames[-1].lineno}"] += 1

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(before)


def trained(network: str, method: str, **settings: Any) -> Callable[[Any], Any]:
    """Return a case that trains a network by a method."""

    def case(options: argparse.Namespace) -> Any:
        trainer = Trainer(network, method, options, **settings)
        return measured(trainer, options, PERIODS.get(method[:4], 20))

    return case


def core_graph(options: argparse.Namespace) -> Any:
    """Capture an update, a refresh and products of the library's own functions."""
    place: Any = {"device": options.device}
    layer = kc.Dense(in_features=512, out_features=512, bias=True, weight_layout="oi")
    blocks = {f"fc{i}": kc.Block(layer, kc.Kronecker()) for i in range(8)}
    network = kc.Network(
        blocks, conventions=kc.Conventions(reduction="mean", sources="sum")
    )
    batches = {
        name: kc.Batch(torch.randn(64, 512, **place), torch.randn(64, 512, **place))
        for name in blocks
    }
    gradients = {
        name: {
            "weight": torch.randn(512, 512, **place),
            "bias": torch.randn(512, **place),
        }
        for name in blocks
    }
    start = network.initial(torch.zeros((), **place), damping=0.1)

    def step() -> list[Any]:
        state = network.update(start, batches, decay=0.95, check="status")
        state = network.refresh(state, damping=0.1, check="status")
        directions = network.precondition(state, gradients)
        return [x for parts in directions.values() for x in parts.values()]

    return captured(step)


def beside(options: argparse.Namespace) -> Any:
    """Time products, and a refresh after them and beside them in a thread."""
    n = 32 if options.tiny else 2048
    place: Any = {"device": options.device}
    layer = kc.Dense(in_features=n, out_features=n, bias=False, weight_layout="oi")
    blocks = {f"fc{i}": kc.Block(layer, kc.Kronecker()) for i in range(4)}
    estimator = kc.Estimator(blocks, reduction="mean", damping=0.1)
    gradients = {name: {"weight": torch.randn(n, n, **place)} for name in blocks}

    def update() -> None:
        for _ in range(2):
            estimator.update(
                {
                    name: kc.Batch(torch.randn(n, n, **place), g["weight"])
                    for name, g in gradients.items()
                }
            )

    def products() -> None:
        for _ in range(20):
            estimator.precondition(gradients)

    def in_turn() -> None:
        estimator.refresh()
        products()

    def in_background() -> None:
        refresh = estimator.start_refresh()
        products()
        refresh.install()

    update()
    estimator.refresh()
    update()
    result: dict[str, Any] = {}
    directions = []
    for name, call in (
        ("ordinary_ms", products),
        ("due_ms", in_turn),
        ("period_ms", in_background),
    ):
        call()
        synchronize(options.device)
        start = time.perf_counter()
        for _ in range(3):
            call()
        synchronize(options.device)
        result[name] = (time.perf_counter() - start) / 3e-3
        directions.append(estimator.precondition(gradients)["fc0"]["weight"])
    difference = (directions[2] - directions[1]).norm() / directions[1].norm()
    return {**result, "relative_difference": float(difference)}


def whole_graph(options: argparse.Namespace) -> Any:
    """Capture a step of the network with directions of `KFAC`'s estimator."""
    trainer = Trainer("resnet50", "kfac", options)
    trainer.step()
    kfac, optimizer = trainer.kfac, sgd(trainer.problem.model.parameters())
    optimizer.param_groups[0]["lr"] = 1e-4

    def step() -> list[Any]:
        optimizer.zero_grad()
        trainer.problem.loss(trainer.called).backward()
        gradients = {name: site.gradients() for name, site in kfac.sites.items()}
        for name, direction in kfac.estimator.precondition(gradients).items():
            kfac.sites[name].write(direction)
        optimizer.step()
        return [p.detach().clone() for p in trainer.problem.model.parameters()]

    # Between two steps with statistics nothing is observed.
    kfac.steps = 1
    return captured(step, state=[trainer.problem.model, optimizer])


def step_graph(method: str) -> Callable[[Any], Any]:
    """Return a case that captures a step as the optimizers take it."""

    def case(options: argparse.Namespace) -> Any:
        trainer = Trainer("mlp", method, options)
        for _ in range(4):
            trainer.step()
        parameters = trainer.problem.model.parameters

        def step() -> list[Any]:
            trainer.step()
            return [p.detach().clone() for p in parameters()]

        return captured(step, state=[trainer.problem.model, *trainer.optimizers])

    return case


def captured(step: Callable[[], list[Any]], state: Any = ()) -> dict[str, Any]:
    """Capture a step as a CUDA graph; compare replays with the step itself."""
    torch.backends.cuda.preferred_linalg_library("cusolver")
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    # A capture computes nothing, so that this is the state before the first replay.
    before = [copy.deepcopy(x.state_dict()) for x in state]
    graph.replay()
    results = [x.clone() for x in replayed]
    clock = Clock("cuda")
    for _ in range(6):
        clock.mark()
        graph.replay()
    clock.mark()
    replays, _ = clock.milliseconds()
    for x, values in zip(state, before, strict=True):
        x.load_state_dict(values)
    expected = step()
    clock = Clock("cuda")
    for _ in range(6):
        clock.mark()
        step()
    clock.mark()
    eager, _ = clock.milliseconds()
    errors = [
        float((a - b).norm() / b.norm().clamp(min=1e-30))
        for a, b in zip(results, expected, strict=True)
    ]
    return {
        "graph_ms": statistics.median(replays),
        "ordinary_ms": statistics.median(eager),
        "relative_difference": max(errors),
    }


def processes(backend: str) -> Callable[[Any], Any]:
    """Return a case of two processes on one device."""

    def case(options: argparse.Namespace) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks.gpu_training"]
            command += ["--device", options.device, "--backend", backend]
            command += ["--store", f"{folder}/store", "--worker"]
            files = [Path(folder, f"{rank}.txt") for rank in range(2)]
            workers = []
            for rank, file in enumerate(files):
                with file.open("w") as output:
                    whole = [*command, str(rank)]
                    kept: Any = {"stdout": output, "stderr": subprocess.STDOUT}
                    workers.append(subprocess.Popen(whole, cwd=ROOT, **kept))
            end = time.monotonic() + 25
            codes: list[Any] = [None]
            while None in codes and not any(codes) and time.monotonic() < end:
                time.sleep(0.2)
                codes = [worker.poll() for worker in workers]
            for worker in workers:
                worker.kill()
            texts = [file.read_text() for file in files]
        if codes != [0, 0]:
            lines = [x for text in texts for x in text.splitlines() if "rror" in x]
            raise RuntimeError(f"{codes}: " + " / ".join(lines[-3:]))
        return json.loads(texts[0].splitlines()[-1])

    return case


def on_a_rank(options: argparse.Namespace) -> None:
    """Train beside another process, and print a step's time and the ranks' difference."""
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    distributed.init_process_group(
        options.backend,
        init_method=f"file://{options.store}",
        rank=options.worker,
        world_size=2,
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10))
    model = DistributedDataParallel(model.to(options.device))
    optimizer = sgd(model.parameters())
    kfac = KFAC(model, lr=optimizer)
    torch.manual_seed(options.worker)
    x = torch.randn(64, 256, device=options.device)
    y = torch.randint(10, (64,), device=options.device)
    clock = Clock(options.device)
    for _ in range(10):
        clock.mark()
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        kfac.step()
        optimizer.step()
    clock.mark()
    weight = next(model.parameters()).detach().clone()
    own = weight.clone()
    distributed.all_reduce(weight)
    difference = float((weight / 2 - own).norm() / own.norm())
    milliseconds = statistics.median(clock.milliseconds()[0])
    print(json.dumps({"ordinary_ms": milliseconds, "relative_difference": difference}))
    distributed.destroy_process_group()


LAGGING: Any = {"refresh_lag": 10, "update_every": 20, "refresh_every": 20}
CASES: dict[str, tuple[float, Callable[[Any], Any]]] = {
    "gpt2 adamw": (15, trained("gpt2", "adamw")),
    "gpt2 kfac": (25, trained("gpt2", "kfac")),
    "gpt2 soap": (25, trained("gpt2", "soap")),
    "resnet50 adamw": (15, trained("resnet50", "adamw")),
    "resnet50 kfac": (25, trained("resnet50", "kfac")),
    "resnet50 soap": (25, trained("resnet50", "soap")),
    "mlp adamw": (10, trained("mlp", "adamw")),
    "mlp gauss-newton": (20, trained("mlp", "gauss-newton")),
    "mlp kfac": (10, trained("mlp", "kfac")),
    "gpt2 muon": (15, trained("gpt2", "muon")),
    "graph of the core": (15, core_graph),
    "products, a refresh after, beside": (10, beside),
    "gpt2 kfac refreshed beside": (20, trained("gpt2", "kfac", **LAGGING)),
    "gpt2 kfac overlap": (20, trained("gpt2", "kfac", overlap=True)),
    "resnet50 kfac-pytorch": (25, trained("resnet50", "kfac-pytorch")),
    "graph of a network and directions": (20, whole_graph),
    "gpt2 kfac-pytorch": (25, trained("gpt2", "kfac-pytorch")),
    "gloo": (30, processes("gloo")),
    "nccl": (30, processes("nccl")),
    "compiled gpt2 adamw": (60, trained("gpt2", "adamw", compiled=True)),
    "compiled gpt2 kfac": (60, trained("gpt2", "kfac", compiled=True)),
    "compiled gpt2 soap": (60, trained("gpt2", "soap", compiled=True)),
    "graph of soap.step": (15, step_graph("soap")),
    "graph of kfac.step": (15, step_graph("kfac")),
}
ON_CUDA = ("graph", "nccl")


def run(case: Callable[[Any], Any], options: Any, limit: float) -> dict[str, Any]:
    """Run a case for so many seconds at most; return its figures or its error."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"stopped after {limit:.0f} s")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit)
    start = time.monotonic()
    try:
        result = case(options)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"[-600:]}
        frames = traceback.extract_tb(error.__traceback__)
        result["at"] = [f"{f.filename}:{f.lineno} {f.name}" for f in frames[-4:]]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    result["seconds"] = time.monotonic() - start
    gc.collect()
    if options.device == "cuda":
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()
    return result


COLUMNS = ("first_ms", "period_ms", "ordinary_ms", "due_ms", "steady_ms", "host_ms")


def row(name: str, result: dict[str, Any]) -> str:
    """Return a line of the table."""
    if "error" in result:
        return f"{name:34s} {result['error'].splitlines()[-1][:160]}"
    cells = [f"{result[k]:8.1f}" if k in result else " " * 8 for k in COLUMNS]
    if "peak_gib" in result:
        cells.append(f"{result['peak_gib']:6.2f}")
    if "losses" in result:
        cells.append("{:8.3g}{:8.3g}".format(*result["losses"]))
    for kind in ("ordinary", "due"):
        if kind in result:
            numbers = (result[kind][k] for k in COUNTS)
            cells.append("{:6d}/{:d}".format(*numbers))
    for key in ("graph_ms", "relative_difference"):
        if key in result:
            cells.append(f" {key} {result[key]:.3g}")
    return f"{name:34s}" + "".join(cells)


def main() -> None:
    """Run the cases, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of cases' names")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--output", type=Path)
    for name in ("--store", "--backend"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if "torch" not in kc.array.backend.backend_names():
        # This tree is on the path and not installed.
        backend = importlib.import_module("kfac_core_backends.torch")
        kc.array.backend.register_backend(backend)
    if options.worker is not None:
        on_a_rank(options)
        return
    end = time.monotonic() + options.seconds
    results: dict[str, Any] = {"torch": torch.__version__}
    if options.device == "cuda":
        results["device"] = torch.cuda.get_device_name()
    table = []
    for name, (limit, case) in CASES.items():
        is_wanted = any(part in name for part in options.only)
        if options.device == "cpu" and name.startswith(ON_CUDA):
            continue
        left = end - time.monotonic()
        if not is_wanted or left < 3:
            continue
        results[name] = run(case, options, min(limit, left))
        table.append(row(name, results[name]))
        print(table[-1], flush=True)
        if options.output:
            options.output.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print("\n" + " " * 34 + "".join(f"{key[:-3]:>8s}" for key in COLUMNS), end="")
    print("   GiB  loss: first, last  launches/synchronizations: ordinary, due")
    print("\n".join(table))
    for name, result in results.items():
        if isinstance(result, dict):
            for kind in ("ordinary", "due"):
                places = result.get(kind, {}).get("places")
                if places:
                    shown = "; ".join(f"{n} x {place}" for place, n in places.items())
                    print(f"{name}, {kind}: {shown[:700]}")
            if "at" in result:
                print(f"{name}: {result['at'][-3:]}")
    sys.stdout.flush()
    # Compilers' own processes and threads may outlive the measurements.
    os._exit(0)


if __name__ == "__main__":
    main()
