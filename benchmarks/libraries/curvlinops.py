"""curvlinops: the functions behind its hooks, fed rows.

`KFACLinearOperator` computes its statistics in hooks on a network's layers; these hooks
are called here with rows, so that no network runs and nothing is differentiated.  It sums
covariances over the batches of a data set and has no moving average: its statistics are
timed as they are.  To compare answers the average is made by hand around it, once.

Its input factors are divided by one number of examples and its output factors by none,
so rows are scaled beforehand where layers differ.
"""

from __future__ import annotations

import importlib.metadata
import math
from typing import Any

import numpy as np
import torch
from curvlinops import KFACInverseLinearOperator, KFACLinearOperator

from benchmarks.libraries.device import device_events
from benchmarks.libraries.library import AbsentError, Call, Library
from benchmarks.workloads import DAMPING, DECAY, Workload


def make(argument: str, /, *, device: str, threads: int) -> Library:
    """Return the adapter."""
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("PyTorch finds no GPU")
    torch.set_num_threads(threads)
    return _Curvlinops(device)


class _Curvlinops:
    def __init__(self, device: str, /) -> None:
        self._device = device
        self.events = device_events("torch", device)

    def versions(self) -> dict[str, str]:
        version = importlib.metadata.version("curvlinops-for-pytorch")
        return {"curvlinops": version, "torch": torch.__version__}

    def prepare(self, workload: Workload, /) -> None:
        layers = workload.layers
        self._model = torch.nn.ModuleList(
            torch.nn.Linear(layer.inputs, layer.outputs, bias=layer.bias)
            for layer in layers
        ).to(self._device)
        self._parameters = list(self._model.parameters())
        self._examples = layers[0].rows
        self._names = [str(i) for i in range(len(layers))]
        weight = 0.0
        for index in range(workload.batches):
            self._rows = [self._scaled(x, g) for x, g in workload.batch(index)]
            if index == 0:
                self._operator = self._made()
            for factor in self._factors():
                factor.mul_(DECAY)
            self._update(self._operator)
            weight = DECAY * weight + 1.0
        for factor in self._factors():
            factor.div_(weight)
        self._vectors: list[Any] = []
        for i, layer in enumerate(layers):
            V = self._tensor(workload.vector(i))
            parts = (V[:-1].T, V[-1]) if layer.bias else (V.T,)
            self._vectors += [part.contiguous() for part in parts]
        self._shapes = [layer.bias for layer in layers]

    def stage(self, name: str, /) -> Call:
        kind = name.partition("-")[2] or "inverse"
        if kind not in ("inverse", "eigen"):
            raise AbsentError("it inverts or decomposes, a layer at a time")
        if name in ("statistics", "cycle"):
            operator = self._made()
            if name == "statistics":
                return lambda: self._update(operator)
            return lambda: self._cycle(operator)
        exact = kind == "eigen"
        if name.startswith("refresh"):
            return lambda: self._refreshed(self._operator, exact)
        inverse = self._refreshed(self._operator, exact)
        return lambda: inverse @ self._vectors

    def answer(self, stage: str, /) -> list[np.ndarray[Any, Any]]:
        parameters = [x.detach().cpu().numpy() for x in self.stage(stage)()]
        found = []
        for bias in self._shapes:
            weight = parameters.pop(0).T
            rest = [parameters.pop(0)[None, :]] if bias else []
            found.append(np.concatenate([weight, *rest]))
        return found

    def finish(self, result: Any, /) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

    def gemm(self, size: int, /) -> Call:
        raise AbsentError("it is PyTorch's")

    def _made(self) -> Any:
        return KFACLinearOperator(
            self._model,
            torch.nn.MSELoss(reduction="sum"),
            self._parameters,
            [self._rows[0]],
            check_deterministic=False,
            fisher_type="empirical",
            num_per_example_loss_terms=1,
            separate_weight_and_bias=False,
            num_data=self._examples,
        )

    def _update(self, operator: Any) -> Any:
        for name, layer, (x, g) in zip(
            self._names, self._model, self._rows, strict=True
        ):
            operator._hook_accumulate_input_covariance(layer, (x,), name)
            operator._accumulate_gradient_covariance(g, layer, name)
        return operator

    def _refreshed(self, operator: Any, exact: bool) -> Any:
        inverse = KFACInverseLinearOperator(
            operator,
            damping=DAMPING,
            use_heuristic_damping=not exact,
            use_exact_damping=exact,
        )
        for name in self._names:
            inverse._compute_or_get_cached_inverse(name)
        return inverse

    def _cycle(self, operator: Any) -> Any:
        self._update(operator)
        return self._refreshed(operator, False) @ self._vectors

    def _factors(self) -> list[Any]:
        operator = self._operator
        return [
            *operator._input_covariances.values(),
            *operator._gradient_covariances.values(),
        ]

    def _scaled(self, x: Any, g: Any) -> tuple[Any, Any]:
        x_scale = math.sqrt(self._examples / len(x))
        return self._tensor(x) * x_scale, self._tensor(g) / math.sqrt(len(g))

    def _tensor(self, values: Any) -> Any:
        return torch.from_numpy(values).to(self._device)
